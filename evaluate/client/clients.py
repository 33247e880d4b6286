"""The clients of a federation: their examples, their defenses, and what these remember.

`Clients.answer` is the only way to their uploads. Training calls it round after round. A malicious
server calls it for a saved round, with other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Refused, Update

from ..foundations.examples import Data, Examples
from ..foundations.seeds import fork, global_draws
from ..users.alone import fresh
from ..users.contract import Checked
from ..users.state import restored, saved
from .client import Client, shown
from .side_by_side import side_by_side


@dataclass(frozen=True)
class Invited:
    """The clients that a server invites to a round.

    Attributes:
        clients: Their numbers.
        ages: The age of the model that each of them has, in versions.
        rng: Source of the clients' randomness.
    """

    clients: tuple[int, ...]
    ages: tuple[int, ...]
    rng: Generator


@dataclass(frozen=True)
class Seen:
    """What the server sees of clients that it sees together.

    Attributes:
        clients: Their numbers.
        updates: One update for each of them, or one for all.
    """

    clients: tuple[int, ...]
    updates: list[Update]


@dataclass(frozen=True)
class Secrets:
    """What the server does not see of a client's upload.

    Attributes:
        rows: The rows of the client's share that it trained on.
        trained_on: What its last local step saw of each of them.
        model: The model that it trained on.
    """

    rows: Tensor
    trained_on: Batch
    model: nn.Module


@dataclass(frozen=True)
class Answer:
    """The uploads of a round.

    Attributes:
        seen: What the server sees.
        refused: How many clients refused the model or their batch, or refused together.
        secrets: What it does not see, by client.
        reason: Why clients refused; an empty text if none did.
    """

    seen: list[Seen]
    refused: int
    secrets: dict[int, Secrets]
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """What a client remembers from the rounds before.

    Attributes:
        defense: Its defense, as bytes (see `state`).
        epoch: The batches that are left of its epoch.
    """

    defense: bytes
    epoch: tuple[Tensor, ...]


@dataclass(frozen=True)
class Shares(Sequence[Data]):
    """The private examples of each client, made when they are needed.

    Attributes:
        examples: The examples of all clients.
        rows: Which of them each client has.
    """

    examples: Data
    rows: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Data: ...
    @overload
    def __getitem__(self, place: slice) -> Shares: ...
    def __getitem__(self, place: int | slice) -> Data | Shares:
        """Return the examples of a client, or of several."""
        rows = self.rows[place]
        if not isinstance(rows, Tensor):
            return Shares(self.examples, rows)
        if isinstance(self.examples, Examples):
            return self.examples.part(rows)
        return self.examples.at(rows)


@dataclass
class Clients:
    """The clients' side of a federation.

    If the server sees uploads only together, they are added up in groups of the defense's `cohort`.
    Rounds, clients and groups have their own generators. However many numbers a defense draws, the
    examples of the others and their order stay the same.

    Attributes:
        client: The template of all clients. Each client gets a copy of its defense.
        shares: The private examples of each client.
        batch_sizes: Examples that each client draws for a FedSGD update.
        weights: How much the upload of each client counts. Default: all the same. If the server
            sees uploads only together, clients multiply them by these before.
    """

    client: Client
    shares: Sequence[Data]
    batch_sizes: Sequence[int]
    weights: Sequence[float] | None = None
    _defenses: dict[int, Checked] = field(default_factory=dict, init=False, repr=False)
    _epochs: dict[int, list[Tensor]] = field(default_factory=dict, init=False, repr=False)

    def _defense(self, index: int) -> Checked:
        if index not in self._defenses:
            self._defenses[index] = Checked(fresh(self.client.defense))
        return self._defenses[index]

    def memories(self, clients: Sequence[int]) -> dict[int, Memory]:
        """Return what some clients remember."""
        return {
            index: Memory(saved(self._defense(index).inner), tuple(self._epochs.get(index, ())))
            for index in clients
        }

    def remember(self, memories: Mapping[int, Memory]) -> None:
        """Give clients back what they remembered before a round."""
        for index, memory in memories.items():
            self._defenses[index] = Checked(restored(memory.defense, self.client.defense))
            self._epochs[index] = [*memory.epoch]

    def answer(
        self,
        invited: Invited,
        sent: Mapping[int, nn.Module],
        agreed: nn.Module,
    ) -> Answer:
        """Return the uploads of a round.

        Args:
            invited: The clients of the round.
            sent: The model that each client received, by client. Clients that are absent here
                take no part. The others draw the same numbers as if all took part.
            agreed: A model of the agreed architecture.
        """
        rng = invited.rng
        rngs = [[fork(rng) for _ in invited.clients] for _ in range(3)]
        present = [one for one in zip(invited.clients, *rngs, strict=True) if one[0] in sent]
        rows = {index: self._rows(index, drawing) for index, drawing, _, _ in present}
        shares = {index: self.shares[index].at(rows[index]) for index in rows}
        answers = side_by_side(
            [
                partial(self._upload, index, shares[index], sent[index], agreed, own)
                for index, _, own, _ in present
            ]
        )
        taking_part: list[_Uploaded] = []
        secrets: dict[int, Secrets] = {}
        refused, reason = 0, ""
        for (index, _, _, together), answer in zip(present, answers, strict=True):
            if isinstance(answer, Refused):
                refused, reason = refused + 1, str(answer)
                continue
            client, update = answer
            taking_part.append(_Uploaded(index, client, update, together))
            seen_last = self._defense(index).trained_on or shares[index]
            secrets[index] = Secrets(rows[index], seen_last, client.model)
        seen = []
        for group in self._groups(taking_part):
            try:
                seen.append(self._shown(group))
            except Refused as refusal:
                refused, reason = refused + len(group), str(refusal)
        return Answer(seen, refused, secrets, reason)

    def _rows(self, index: int, rng: Generator) -> Tensor:
        """Return which of its examples a client uses in this round."""
        size = _size(self.shares, index)
        return self.client.protocol.drawn(size, lambda: iter([self._next(index, size, rng)]))

    def _next(self, index: int, size: int, rng: Generator) -> Tensor:
        """Return the next batch of a client's epoch, however many rounds an epoch takes.

        With shuffled epochs, each example is then in one batch of an epoch.
        """
        if not self._epochs.get(index):
            drawn = self._defense(index).batches(size, self.batch_sizes[index], 1, rng)
            self._epochs[index] = [*drawn]
        return self._epochs[index].pop(0)

    def _upload(
        self, index: int, share: Batch, sent: nn.Module, agreed: nn.Module, rng: Generator
    ) -> tuple[Client, Update]:
        """Return a client with its version of the model, and its update."""
        defense = self._defense(index)
        client = replace(self.client, model=defense.on_receive(sent, agreed), defense=defense)
        defense.begin(share)
        with global_draws(rng):
            return client, client.upload(share, rng)

    def _shown(self, group: Sequence[_Uploaded]) -> Seen:
        """Return what the server sees of a group.

        Uploads of unequal weights are scaled, so that their sum is the weighted one.
        """
        members = tuple(one.index for one in group)
        mean = mean_weight(self.weights, members)
        updates = [one.update for one in group]
        if self.weights is not None and len(members) > 1:
            updates = [
                {name: value * (self.weights[index] / mean) for name, value in update.items()}
                for index, update in zip(members, updates, strict=True)
            ]
        return Seen(members, shown([one.client for one in group], updates, group[0].rng))

    def _groups(self, taking_part: Sequence[_Uploaded]) -> list[Sequence[_Uploaded]]:
        """Return groups of the size of the defense's cohort. The last one includes the rest."""
        size, total = self.client.defense.cohort, len(taking_part)
        if not total:
            return []
        starts = [*range(0, total - size + 1, size)] or [0]
        return [
            taking_part[start:end] for start, end in zip(starts, [*starts[1:], total], strict=True)
        ]


@dataclass(frozen=True)
class _Uploaded:
    """A client's update of one round, and the generator of its group if it is the first."""

    index: int
    client: Client
    update: Update
    rng: Generator


def _size(shares: Sequence[Data], index: int) -> int:
    return len(shares.rows[index] if isinstance(shares, Shares) else shares[index].targets)


def mean_weight(weights: Sequence[float] | None, clients: Sequence[int]) -> float:
    """Return the mean weight of clients that the server sees together."""
    return 1.0 if weights is None else sum(weights[index] for index in clients) / len(clients)
