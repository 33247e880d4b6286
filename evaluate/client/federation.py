"""Rounds of federated training under a defense, which measure utility."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Refused, Update, trainable

from ..foundations.seeds import fork
from ..users.contract import Checked
from .client import Client, shown

SERVER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
"""How the server applies the mean update: plain averaging, or FedAdam (Reddi et al. 2021)."""


class Seen(NamedTuple):
    """An upload that the server sees, and what is behind it.

    Attributes:
        owners: Numbers of the clients behind it: one, or all whose sum it is.
        models: The model that the server sent to each of them.
        shares: The examples that each of them used.
        update: The upload.
    """

    owners: tuple[int, ...]
    models: tuple[nn.Module, ...]
    shares: tuple[Batch, ...]
    update: Update


class _Upload(NamedTuple):
    """A client's update of one round, with the model and the examples behind it, and its weight."""

    owner: int
    sent: nn.Module
    share: Batch
    client: Client
    update: Update
    weight: float


@dataclass
class Federation:
    """A server, its clients and their data.

    In each round, clients train on their examples under their own copy of the defense. The server
    steps along the mean of what it sees. The protocol decides on a client's examples of a round,
    the version of its model, the number of uploads per step, and their weights. A client may refuse
    the model at once or after it sees its batch. It is then left out of the round. If clients
    refuse together, there is no round.

    If the server sees uploads only together, they are added up in groups of the defense's `cohort`.
    So an upload in training is like the one that is attacked.

    Rounds and clients have their own generators. However many numbers a defense draws, the
    participants, their examples and the order of these stay the same.

    Attributes:
        client: The template of all clients. Its model is the global one, after the defense's
            `on_model`, and is trained in place. Each client gets a copy of its defense.
        shares: The private examples of each client.
        clients_per_round: Clients sampled per round.
        batch_size: Examples that a client draws for a FedSGD update.
        server: `sgd` or `adam`.
        lr: The server's learning rate.
        watch: Called with everything that the server sees, before the model changes.
        rounds_of: Number of rounds in which each client has taken part so far.
        refused: How often clients have refused the model so far.
    """

    client: Client
    shares: Sequence[Batch]
    clients_per_round: int
    batch_size: int = 32
    server: str = "adam"
    lr: float = 0.01
    watch: Callable[[Seen], None] | None = None
    rounds_of: list[int] = field(init=False, repr=False)
    refused: int = field(default=0, init=False, repr=False)
    _defenses: list[Checked] = field(init=False, repr=False)
    _epochs: dict[int, Iterator[Tensor]] = field(default_factory=dict, init=False, repr=False)
    _versions: list[nn.Module] = field(default_factory=list, init=False, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.uploads <= len(self.shares):
            raise ValueError(
                f"a round must have from 1 to {len(self.shares)} clients, got {self.uploads}"
            )
        if self.server not in SERVER_OPTIMIZERS:
            raise ValueError(f"server must be one of {[*SERVER_OPTIMIZERS]}, got {self.server!r}")
        self.rounds_of = [0] * len(self.shares)
        self._defenses = [Checked(replace(self.client.defense)) for _ in self.shares]
        parameters = trainable(self.model).values()
        self._optimizer = SERVER_OPTIMIZERS[self.server](parameters, lr=self.lr)

    @property
    def model(self) -> nn.Module:
        """Return the global model."""
        return self.client.model

    @property
    def uploads(self) -> int:
        """Return the number of uploads in a step of the server."""
        return self.client.protocol.uploads(self.clients_per_round)

    def round(self, rng: Generator) -> None:
        """Train one round: sample clients, collect what they release, step."""
        protocol, older, rng = self.client.protocol, len(self._versions), fork(rng)
        chosen = torch.randperm(len(self.shares), generator=rng)[: self.uploads].tolist()
        stale = [protocol.staleness(older, rng) for _ in chosen]
        shares = [self._local_examples(index, fork(rng)) for index in chosen]
        clients = [self._received(*pair) for pair in zip(chosen, stale, strict=True)]
        rngs = [fork(rng) for _ in chosen]
        uploads = [self._uploaded(*one) for one in zip(clients, shares, rngs, strict=True)]
        taking_part = [
            _Upload(index, self._sent(age), share, client, update, protocol.weight(age))
            for index, share, client, update, age in zip(
                chosen, shares, clients, uploads, stale, strict=True
            )
            if client is not None and update is not None
        ]
        self._remember()
        if not taking_part:
            return
        seen = [one for one in map(partial(self._seen, rng), self._groups(taking_part)) if one]
        if seen:
            updates, weights = zip(*seen, strict=True)
            self._step(
                [update for several in updates for update in several],
                [weight for several in weights for weight in several],
            )

    def _groups(self, taking_part: Sequence[_Upload]) -> list[Sequence[_Upload]]:
        """Return groups of the size of the defense's cohort. The last one includes the rest."""
        size, total = self.client.defense.cohort, len(taking_part)
        starts = [*range(0, total - size + 1, size)] if size > 1 else []
        ends = [*starts[1:], total]
        return [taking_part[start:end] for start, end in zip(starts or [0], ends, strict=True)]

    def _seen(
        self, rng: Generator, group: Sequence[_Upload]
    ) -> tuple[list[Update], list[float]] | None:
        """Return what the server sees of a group, and each upload's weight; None if refused."""
        try:
            updates = shown([one.client for one in group], [one.update for one in group], rng)
        except Refused:
            self.refused += len(group)
            return None
        for one in group:
            self.rounds_of[one.owner] += 1
        if self.watch is not None:
            parts = [[one] for one in group] if len(updates) == len(group) else [group]
            for part, update in zip(parts, updates, strict=True):
                owners, models, shares, *_ = zip(*part, strict=True)
                self.watch(Seen(owners, models, shares, update))
        return updates, [one.weight for one in group]

    def train(
        self,
        rounds: int,
        rng: Generator,
        *,
        at: Iterable[int] = (),
        on_checkpoint: Callable[[int, nn.Module], None],
    ) -> None:
        """Train for some rounds; call `on_checkpoint` at those in `at` (0 is the initial model)."""
        wanted = set(at)
        for done in range(rounds + 1):
            if done in wanted:
                on_checkpoint(done, self.model)
            if done < rounds:
                self.round(rng)

    def _local_examples(self, client: int, rng: Generator) -> Batch:
        """Return a client's examples of this round."""
        share = self.shares[client]
        drawn = self.client.protocol.drawn(
            len(share.inputs), lambda: iter([self._next_batch(client, rng)])
        )
        return share.at(drawn)

    def _next_batch(self, client: int, rng: Generator) -> Tensor:
        """Return the next batch of a client's epoch, however many rounds an epoch takes.

        With shuffled epochs, each example is then in one batch of an epoch.
        """
        rows = next(self._epochs.get(client, iter(())), None)
        if rows is None:
            size = len(self.shares[client].inputs)
            epoch = self._defenses[client].batches(size, self.batch_size, 1, rng)
            self._epochs[client], rows = epoch, next(epoch)
        return rows

    def _sent(self, staleness: int) -> nn.Module:
        """Return the version of the model that the server sent."""
        return self._versions[-staleness] if staleness else self.model

    def _received(self, index: int, staleness: int) -> Client | None:
        """Return a client with its version of the model; None if it refuses the model."""
        defense = self._defenses[index]
        try:
            received = defense.on_receive(self._sent(staleness), self.model)
        except Refused:
            self.refused += 1
            return None
        return replace(self.client, model=received, defense=defense)

    def _uploaded(self, client: Client | None, share: Batch, rng: Generator) -> Update | None:
        """Return a client's update; None if it refused the model or refuses its batch."""
        if client is None:
            return None
        try:
            return client.upload(share, rng)
        except Refused:
            self.refused += 1
            return None

    def _remember(self) -> None:
        """Keep the versions of the model that clients may still have."""
        if oldest := self.client.protocol.max_staleness:
            self._versions = [*self._versions, copy.deepcopy(self.model)][-oldest:]

    def _step(self, updates: Sequence[Update], weights: Sequence[float]) -> None:
        """Step along the mean of what the server sees."""
        clients = len(weights)
        if len(updates) < clients and len(set(weights)) > 1:
            raise ValueError(
                "uploads have different weights by their age, but the server sees only their sum: "
                "set exponent: 0 in the protocol, or use a defense that does not aggregate"
            )
        for name, parameter in trainable(self.model).items():
            parts = [
                weight * update[name] for weight, update in zip(weights, updates, strict=False)
            ]
            total = torch.stack(parts).sum(dim=0)
            parameter.grad = self.client.protocol.descent(total / clients)
        self._optimizer.step()
