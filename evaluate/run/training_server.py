"""The server of a training, in a process without the defense's objects.

It sees what clients release, as bytes. It aggregates, evaluates and logs these bytes alone.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from leakfrontier.defenses import Batch, Update, trainable

from ..client.averaging import Averaging
from ..client.clients import Seen
from ..foundations.devices import on_device
from ..foundations.messages import packed, unpacked
from ..foundations.seeds import generator
from ..world.scenario import Scenario, load_world
from .upload_log import Logged, UploadLog

EARLIER = 3
"""Earlier uploads of a client that are logged with an attacked one."""

MOST_ENTRIES = 2**26
"""Entries of all uploads that are kept to be logged as earlier ones: 256 MB."""


@dataclass(frozen=True)
class Order:
    """What the server of a training is told.

    Attributes:
        scenario: The scenario.
        draws: The values that seed the rounds.
        weights: How much the upload of each client counts.
        lr: The server's learning rate.
        evaluated: The rounds after which to evaluate the model.
        saved: The files of models to save, by round.
        logged: The rounds whose uploads may be attacked.
        invited: Number of clients that are invited to these rounds.
        tuning: Whether to evaluate on the validation examples instead of the test examples.
    """

    scenario: Scenario
    draws: tuple[object, ...]
    weights: tuple[float, ...]
    lr: float
    evaluated: frozenset[int]
    saved: Mapping[int, Path]
    logged: frozenset[int]
    invited: int
    tuning: bool = False


class TrainingServer:
    """The server of a federation. Its methods take and return bytes.

    Args:
        order: What it is told.
        agreed: The agreed model, untrained, and the protocol (see `by_value.carried`).
    """

    def __init__(self, order: Order, agreed: bytes) -> None:
        training, (model, protocol) = order.scenario.training, pickle.loads(agreed)
        with on_device(order.scenario.device):
            self._world = load_world(order.scenario)
        self._order = order
        self._averaging = Averaging(
            model.to(self._world.device),
            protocol,
            len(order.weights),
            training.participants,
            training.server,
            order.lr,
            training.momentum,
            training.schedule,
            training.rounds,
            order.weights,
        )
        self._rng = generator("training", *order.draws)
        self._round = self._refused = 0
        self._utility: list[list[float]] = []
        self._log = _Log()
        self._reach()

    def invite(self, _: bytes) -> bytes:
        """Return the clients of the next round, and the weights that they receive."""
        more = self._order.invited if self._round + 1 in self._order.logged else None
        self._invited = self._averaging.invite(self._rng, more)
        about = {"clients": self._invited.clients, "ages": self._invited.ages}
        draws = {"/rng": self._invited.rng.get_state()}
        return packed({**trainable(self._averaging.model), **draws}, about)

    def step(self, content: bytes) -> bytes:
        """Step along the mean of the uploads of a round."""
        tensors, about = unpacked(content)
        updates = self._updates(tensors, sum(count for _, count in about["seen"]))
        seen = [
            Seen(tuple(clients), [next(updates) for _ in range(count)])
            for clients, count in about["seen"]
        ]
        self._round += 1
        self._refused += about["refused"]
        sent = self._averaging.sent(self._invited)
        self._log.add(self._round, sent, seen, logged=self._round in self._order.logged)
        self._averaging.step(self._invited, seen)
        self._reach()
        return b""

    def write(self, content: bytes) -> bytes:
        """Write the log of some uploads, given by round and client."""
        _, (path, chosen) = unpacked(content)
        self._log.write(Path(path), [(number, client) for number, client in chosen])
        return b""

    def utility(self, _: bytes) -> bytes:
        """Return the utility along training."""
        return packed({}, self._utility)

    @property
    def _evaluated_on(self) -> Batch:
        if not self._order.tuning:
            return self._world.test
        if self._world.validation is None:
            raise ValueError("tuning needs validation examples: raise validation above 0")
        return self._world.validation

    def _updates(self, tensors: Update, count: int) -> Iterator[Update]:
        """Yield the uploads of a round, which arrive as one tensor for each parameter."""
        named = trainable(self._averaging.model)
        values = {name: tensors[name].to(value.device) for name, value in named.items() if count}
        for place in range(count):
            yield {name: value[place] for name, value in values.items()}

    def _reach(self) -> None:
        """Save and evaluate the model that some rounds have reached."""
        model = self._averaging.model
        if self._round in self._order.saved:
            _save(model, self._order.saved[self._round])
        if self._round in self._order.evaluated:
            with on_device(self._order.scenario.device):
                utility = self._world.modality.evaluate(model, self._evaluated_on)
            self._utility.append([self._round, *utility, self._refused])


class _Log:
    """The uploads that may be attacked, with the uploads of the same clients before them."""

    def __init__(self) -> None:
        self._last: dict[int, deque[Logged]] = defaultdict(lambda: deque(maxlen=EARLIER))
        self._kept: dict[tuple[int, int], list[Logged]] = {}

    def add(
        self, number: int, sent: Mapping[int, nn.Module], seen: Sequence[Seen], *, logged: bool
    ) -> None:
        """Add what the server saw of a round."""
        weights = {model: _copy(trainable(model)) for model in {*sent.values()}}
        for one in seen:
            together = len(one.updates) < len(one.clients)
            for place, client in enumerate(one.clients):
                upload = Logged(
                    number,
                    one.clients if together else (client,),
                    weights[sent[client]],
                    one.updates[0 if together else place],
                )
                if logged:
                    self._kept[number, client] = [upload, *reversed(self._last[client])]
                if _fits(upload.update, len(self._last)):
                    self._last[client].append(upload)

    def write(self, path: Path, chosen: Sequence[tuple[int, int]]) -> None:
        """Write the log of some uploads, given by round and client."""
        UploadLog.write(path, [(key[1], self._kept[key]) for key in chosen])


def _fits(update: Update, clients: int) -> bool:
    entries = sum(value.numel() for value in update.values())
    return clients * EARLIER * entries <= MOST_ENTRIES


def _copy(values: Update) -> Update:
    return {name: value.detach().clone() for name, value in values.items()}


def _save(model: nn.Module, path: Path) -> None:
    """Write a model in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    save_model(model, str(unfinished))  # it handles tied weights
    unfinished.replace(path)
