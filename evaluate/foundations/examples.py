"""Examples that are stored compactly. They become model inputs when they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from leakfrontier.defenses import Batch

_AT_ONCE = 1000
"""Number of examples that are converted at once."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled examples, for example 8-bit pixels and how they become model inputs.

    A full dataset of floats would need four times the memory in every process.

    Attributes:
        stored: The stored values, stacked along the first axis.
        targets: The labels.
        steps: The functions from stored values to inputs, in their order. Each treats examples
            independently.
    """

    stored: Tensor
    targets: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    @property
    def inputs(self) -> Tensor:
        """Return all inputs. This needs their full memory."""
        return self._decoded(self.stored)

    def at(self, rows: Tensor | slice) -> Batch:
        """Return some of the examples."""
        if isinstance(rows, slice):
            return Batch(self._decoded(self.stored[rows]), self.targets[rows])
        found = self._decoded(self.stored[rows.flatten()])
        return Batch(found.reshape(*rows.shape, *found.shape[1:]), self.targets[rows])

    def part(self, rows: Tensor) -> Examples:
        """Return some of the examples, stored alike."""
        return replace(self, stored=self.stored[rows], targets=self.targets[rows])

    def then(self, step: Callable[[Tensor], Tensor]) -> Examples:
        """Return the same examples with one more step to their inputs."""
        return replace(self, steps=(*self.steps, step))

    def to(self, device: torch.device) -> Examples:
        """Return the same examples on a device."""
        return replace(self, stored=self.stored.to(device), targets=self.targets.to(device))

    def _decoded(self, stored: Tensor) -> Tensor:
        if not self.steps or len(stored) <= _AT_ONCE:
            return self._converted(stored)
        parts = (self._converted(part) for part in stored.split(_AT_ONCE))
        first = next(parts)
        whole, end = first.new_empty(len(stored), *first.shape[1:]), 0
        for part in chain([first], parts):  # intermediate values exist only for one part
            whole[end : end + len(part)] = part
            end += len(part)
        return whole

    def _converted(self, stored: Tensor) -> Tensor:
        for step in self.steps:
            stored = step(stored)
        return stored


Data = Batch | Examples
"""Labelled examples in either form."""


def from_bytes(pixels: Tensor) -> Tensor:
    """Return 8-bit values as floats in [0, 1]."""
    return pixels.contiguous().float().div_(255)
