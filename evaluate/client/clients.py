"""The clients of a federation: their examples, their defenses, and what these remember.

`Clients.answer` is the only way to their uploads. Training calls it round after round. A malicious
server calls it for a saved round, with other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Refused, Update

from ..foundations.examples import Data
from ..foundations.seeds import fork, global_draws
from ..users.alone import fresh
from ..users.contract import Checked
from ..users.state import restored, saved
from .client import Client, shown


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
    """

    client: Client
    shares: Sequence[Data]
    batch_sizes: Sequence[int]
    _defenses: list[Checked] = field(init=False, repr=False)
    _epochs: dict[int, list[Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._defenses = [Checked(fresh(self.client.defense)) for _ in self.shares]

    def memories(self, clients: Sequence[int]) -> dict[int, Memory]:
        """Return what some clients remember."""
        return {
            index: Memory(saved(self._defenses[index].inner), tuple(self._epochs.get(index, ())))
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
        taking_part: list[_Uploaded] = []
        secrets: dict[int, Secrets] = {}
        refused, reason = 0, ""
        for index, drawing, own, together in zip(invited.clients, *rngs, strict=True):
            if index not in sent:
                continue
            rows = self._rows(index, drawing)
            try:
                client, update = self._upload(index, rows, sent[index], agreed, own)
            except Refused as refusal:
                refused, reason = refused + 1, str(refusal)
                continue
            taking_part.append(_Uploaded(index, client, update, together))
            seen_last = self._defenses[index].trained_on or self.shares[index].at(rows)
            secrets[index] = Secrets(rows, seen_last, client.model)
        seen = []
        for group in self._groups(taking_part):
            try:
                seen.append(_shown(group))
            except Refused as refusal:
                refused, reason = refused + len(group), str(refusal)
        return Answer(seen, refused, secrets, reason)

    def _rows(self, index: int, rng: Generator) -> Tensor:
        """Return which of its examples a client uses in this round."""
        examples = len(self.shares[index].targets)
        return self.client.protocol.drawn(examples, lambda: iter([self._next(index, rng)]))

    def _next(self, index: int, rng: Generator) -> Tensor:
        """Return the next batch of a client's epoch, however many rounds an epoch takes.

        With shuffled epochs, each example is then in one batch of an epoch.
        """
        if not self._epochs.get(index):
            size = len(self.shares[index].targets)
            drawn = self._defenses[index].batches(size, self.batch_sizes[index], 1, rng)
            self._epochs[index] = [*drawn]
        return self._epochs[index].pop(0)

    def _upload(
        self, index: int, rows: Tensor, sent: nn.Module, agreed: nn.Module, rng: Generator
    ) -> tuple[Client, Update]:
        """Return a client with its version of the model, and its update."""
        defense, share = self._defenses[index], self.shares[index].at(rows)
        client = replace(self.client, model=defense.on_receive(sent, agreed), defense=defense)
        defense.begin(share)
        with global_draws(rng):
            return client, client.upload(share, rng)

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


def _shown(group: Sequence[_Uploaded]) -> Seen:
    clients, updates = [one.client for one in group], [one.update for one in group]
    return Seen(tuple(one.index for one in group), shown(clients, updates, group[0].rng))
