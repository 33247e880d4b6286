"""Federated training of one arm: clients here, their server in a clean process."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import trainable

from ..client.clients import Answer, Clients, Invited, Memory
from ..engines.clean import CleanProcess, clean_process
from ..foundations.by_value import carried
from ..foundations.messages import packed, unpacked
from ..foundations.rows import UtilityRow
from ..world.enrolment import Attackable
from .trained_scenes import Restored
from .training_server import Order, TrainingServer
from .upload_log import Hidden, SecretLog

MOST_KEPT = 64
"""Clients whose memory at the end of training is returned."""


@dataclass
class TrainingClients:
    """The clients of one arm during training.

    Attributes:
        clients: The clients.
        rows: The training examples of each client.
        model: The agreed model. It holds the weights that the server sent last.
        order: What the server is told.
        rounds_of: Number of rounds in which each client has taken part so far.
        refused: How often clients have refused so far.
    """

    clients: Clients
    rows: Sequence[Tensor]
    model: nn.Module
    order: Order
    rounds_of: dict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)
    refused: int = field(default=0, init=False)
    _invitations: Counter[int] = field(default_factory=Counter, init=False)
    _done: int = field(default=0, init=False)
    _hidden: dict[tuple[int, int], Hidden] = field(default_factory=dict, init=False)
    _attackable: dict[int, list[Attackable]] = field(default_factory=dict, init=False)
    _server: CleanProcess = field(init=False)

    def run(self, rounds: int) -> None:
        """Train for some rounds."""
        protocol, self._server = self.clients.client.protocol, clean_process()
        self._server.new(TrainingServer, self.order, carried((self.model, protocol)))
        versions: deque[nn.Module] = deque(maxlen=protocol.max_staleness)
        for number in range(1, rounds + 1):
            self._done = number
            invited = self._invited()
            sent = {
                index: versions[-age] if age else self.model
                for index, age in zip(invited.clients, invited.ages, strict=True)
            }
            memories = self._memories(invited)  # in every round: attacked rounds are like others
            answer = self.clients.answer(invited, sent, self.model)
            self.refused += answer.refused
            if number in self.order.logged:
                self._keep(number, answer, memories)
            for index in (index for one in answer.seen for index in one.clients):
                self.rounds_of[index] += 1
            self._invitations.update(invited.clients)
            self._server.call("step", _message(answer))
            if versions.maxlen:
                versions.append(copy.deepcopy(self.model))

    def write(self, seen: Path, hidden: Path, attacked: Sequence[Attackable]) -> None:
        """Write the logs of attacked uploads.

        Args:
            seen: The file of what the server saw. The server writes it.
            hidden: The file of what it did not see.
            attacked: The attacked uploads.
        """
        rounds = {one.round for one in attacked}
        SecretLog.write(hidden, {k: one for k, one in self._hidden.items() if k[0] in rounds})
        chosen = [(one.round, one.client) for one in attacked]
        self._server.call("write", packed({}, [str(seen), chosen]))

    def utility(self) -> tuple[UtilityRow, ...]:
        """Return the utility along training."""
        _, rows = unpacked(self._server.call("utility"))
        return tuple(UtilityRow(*row) for row in rows)

    def attackable(self, rounds: Sequence[int]) -> list[Attackable]:
        """Return the uploads of some rounds."""
        return [one for number in rounds for one in self._attackable.get(number, [])]

    def end(self) -> Restored:
        """Return the clients after the last round, those with the longest history first.

        Raises:
            ValueError: If what they remember cannot be saved.
        """
        first, *others = sorted(self.rounds_of, key=lambda one: -self.rounds_of[one])[:MOST_KEPT]
        memories = self.clients.memories([first, *others])
        size = self.clients.batch_sizes[first]
        alone = self.clients.client.protocol.uploads_gradient
        rows = self.rows[first][:size] if alone else self.rows[first]
        return Restored(self._done + 1, self.model, tuple(memories.values()), rows)

    def _invited(self) -> Invited:
        """Return the clients of the next round, and take the weights that the server sends."""
        tensors, about = unpacked(self._server.call("invite"))
        rng = Generator()
        rng.set_state(tensors.pop("/rng"))
        with torch.no_grad():
            for name, value in trainable(self.model).items():
                value.copy_(tensors[name])
        return Invited(tuple(about["clients"]), tuple(about["ages"]), rng)

    def _memories(self, invited: Invited) -> Mapping[int, Memory | str]:
        try:
            return self.clients.memories(invited.clients)
        except ValueError as error:  # only active attacks need it
            return dict.fromkeys(invited.clients, str(error))

    def _keep(self, number: int, answer: Answer, memories: Mapping[int, Memory | str]) -> None:
        """Keep what the server does not see of a round whose uploads may be attacked."""
        uploads = []
        for index in (index for one in answer.seen for index in one.clients):
            secret = answer.secrets[index]
            rows = self.rows[index][secret.rows]
            self._hidden[number, index] = Hidden(rows, secret.trained_on, memories[index])
            share, gradient = len(self.rows[index]), self.clients.client.protocol.uploads_gradient
            uploads.append(
                Attackable(
                    number,
                    index,
                    size=self.clients.batch_sizes[index] if gradient else share,
                    share=share,
                    has_history=self._invitations[index] > 0,
                    empty=not len(rows),
                )
            )
        self._attackable[number] = uploads


def _message(answer: Answer) -> bytes:
    """Return the uploads of a round as bytes. They hold nothing else of the clients."""
    updates = [update for one in answer.seen for update in one.updates]
    tensors = {
        name: torch.stack([update[name].detach() for update in updates])
        for name in (updates[0] if updates else ())
    }
    seen = [[one.clients, len(one.updates)] for one in answer.seen]
    return packed(tensors, {"seen": seen, "refused": answer.refused})
