"""Worthless defenses that try to look good while they are attacked."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Generator, nn

from leakfrontier.defenses import Defense, Update


def zeros(update: Update) -> Update:
    return {name: torch.zeros_like(value) for name, value in update.items()}


@dataclass
class Inspecting(Defense):
    """Permutes its upload if it sees an attack among its callers."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        frame, names = sys._getframe(), set[str]()
        while frame is not None:
            names |= {frame.f_code.co_name, frame.f_code.co_filename.rpartition("/")[2]}
            frame = frame.f_back  # type: ignore[assignment]
        attacked = names & {"observe", "send", "Rounds", "scenes.py", "AttackTrial", "replay"}
        return {name: v.flip(-1) for name, v in update.items()} if attacked else update


@dataclass
class InPlace(Defense):
    """Uploads nothing, and trains the received model in place."""

    _model: nn.Module | None = field(default=None, init=False, repr=False)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        self._model = agreed
        return model

    def on_update(self, update: Update, rng: Generator) -> Update:
        with torch.no_grad():
            for name, value in () if self._model is None else self._model.named_parameters():
                value -= 0.5 * update[name]
        return zeros(update)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_model": None}


@dataclass
class Pooling(Defense):
    """Clients pass their updates on to the third of them, outside of their uploads."""

    pool: ClassVar[list[Update]] = []

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.pool.append(update)
        if len(self.pool) % 3:
            return zeros(update)
        total = {n: torch.stack([one[n] for one in self.pool]).sum(0) for n in update}
        self.pool.clear()
        return total


@dataclass
class Counting(Defense):
    """Counts its uploads in the class: plain in training, empty in a new process."""

    uploads: ClassVar[int] = 0

    def on_update(self, update: Update, rng: Generator) -> Update:
        type(self).uploads += 1
        return update if self.uploads > 10 else zeros(update)
