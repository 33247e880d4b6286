"""Rounds of federated training under a defense, with server and clients in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Generator, nn

from leakfrontier.defenses import Batch, Update

from ..foundations.examples import Data
from .averaging import Averaging
from .client import Client
from .clients import Answer, Clients, Memory


class Watched(NamedTuple):
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


@dataclass
class Federation:
    """A server, its clients and their data.

    In each round, clients train on their examples under their own copy of the defense. The server
    steps along the mean of what it sees. The protocol decides on a client's examples of a round,
    the version of its model, the number of uploads per step, and their weights. A client may refuse
    the model at once or after it sees its batch. It is then left out of the round. If clients
    refuse together, they are left out together.

    Attributes:
        client: The template of all clients. Its model is the global one, after the defense's
            `on_model`, and is trained in place. Each client gets a copy of its defense.
        shares: The private examples of each client.
        clients_per_round: Clients sampled per round.
        batch_size: Examples that a client draws for a FedSGD update.
        server: `sgd` or `adam`.
        lr: The server's learning rate.
        watch: Called with everything that the server sees, before the model changes.
        memories: What each client remembers from earlier rounds. Default: all clients are new.
        rounds_of: Number of rounds in which each client has taken part so far.
        refused: How often clients have refused so far.
    """

    client: Client
    shares: Sequence[Data]
    clients_per_round: int
    batch_size: int = 32
    server: str = "adam"
    lr: float = 0.01
    watch: Callable[[Watched], None] | None = None
    memories: Sequence[Memory] = ()
    rounds_of: list[int] = field(init=False, repr=False)
    refused: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        total = len(self.shares)
        self.rounds_of = [0] * total
        self._clients = Clients(self.client, self.shares, [self.batch_size] * total)
        self._clients.remember(dict(enumerate(self.memories)))
        self._server = Averaging(
            self.client.model,
            self.client.protocol,
            total,
            self.clients_per_round,
            self.server,
            self.lr,
        )

    @property
    def model(self) -> nn.Module:
        """Return the global model."""
        return self.client.model

    def round(self, rng: Generator) -> None:
        """Train one round: invite clients, collect what they release, step."""
        invited = self._server.invite(rng)
        sent = self._server.sent(invited)
        answer = self._clients.answer(invited, sent, self.model)
        self.refused += answer.refused
        for index in (index for one in answer.seen for index in one.clients):
            self.rounds_of[index] += 1
        if self.watch is not None:
            for one in self._watched(answer, sent):
                self.watch(one)
        self._server.step(invited, answer.seen)

    def _watched(self, answer: Answer, sent: Mapping[int, nn.Module]) -> Iterator[Watched]:
        for seen in answer.seen:
            alone = len(seen.updates) == len(seen.clients)
            groups = [(index,) for index in seen.clients] if alone else [seen.clients]
            for group, update in zip(groups, seen.updates, strict=True):
                shares = (self.shares[index].at(answer.secrets[index].rows) for index in group)
                yield Watched(group, tuple(sent[index] for index in group), tuple(shares), update)

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
