"""Clients of a round side by side, so that their gradients can be computed together.

Every client runs in a greenlet of its own. Where it needs a gradient that is a sum over examples,
it waits until all others have come as far. Then `grouped` computes the sums of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from leakfrontier.defenses import Batch, Loss, Refused, Update, batch_gradient, trainable
from leakfrontier.defenses.per_example import ClippedGradient, architecture

from ..foundations.seeds import global_states, set_global_states
from ..users.copies import copied
from .grouped import grouped_sums, stacked_sums

R = TypeVar("R")

ALIKE = 1e-3
"""Larger relative differences between two ways to compute a gradient are not rounding errors."""


@dataclass(frozen=True)
class Asked:
    """A sum of per-example gradients that a client needs.

    Attributes:
        model: The architecture.
        loss: Mean loss of a batch.
        weights: The client's weights.
        batch: The examples.
        clipped: How each example's gradient is clipped; None if it is not.
    """

    model: nn.Module
    loss: Loss
    weights: Mapping[str, Tensor]
    batch: Batch
    clipped: ClippedGradient | None


def summed(asked: Asked) -> Update | None:
    """Return a sum of per-example gradients; None if the client must compute it alone."""
    task = getcurrent()
    if not isinstance(task, _Task):
        return None
    total: Update | None = task.parent.switch(asked)
    return total


def side_by_side(tasks: Sequence[Callable[[], R]]) -> list[R | Refused]:
    """Run tasks side by side, and return their results or refusals.

    Each task has its own state of torch's global generators.
    """
    before = global_states()
    running = [_Task(task) for task in tasks]
    try:
        waiting = {task: task.proceed() for task in running}
        while asked := {task: one for task, one in waiting.items() if one is not None}:
            sums = _sums([*asked.values()])
            waiting = {task: task.proceed(one) for task, one in zip(asked, sums, strict=True)}
    finally:
        for task in running:
            task.end()
        set_global_states(before)
    return [task.result for task in running]


class _Task(greenlet):  # type: ignore[misc] # greenlet is untyped
    """A task that may wait for a sum of gradients."""

    result: Any

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(run)
        self.gr_context = copy_context()
        self._states: list[Tensor] | None = None

    def proceed(self, *given: Update | None) -> Asked | None:
        """Go on with what the task waits for. Return what it needs next; None if it has ended."""
        if self._states is not None:
            set_global_states(self._states)
        try:
            found = self.switch(*given)
        except Refused as refusal:
            self.result = refusal
            return None
        if self.dead:
            self.result = found
            return None
        self._states = global_states()
        asked: Asked = found
        return asked

    def end(self) -> None:
        """Leave a task that waits, because another one failed."""
        if self and not self.dead:
            self.throw(GreenletExit)


def _sums(asked: Sequence[Asked]) -> list[Update | None]:
    """Return the sum that each client needs; None if it must compute it alone."""
    groups: dict[object, list[int]] = defaultdict(list)
    for place, one in enumerate(asked):
        clipped = one.clipped and (one.clipped.max_grad_norm, one.clipped.clipping)
        groups[id(one.model), one.loss, clipped].append(place)
    found: dict[int, Update] = {}
    for places in groups.values():
        layout = layout_of(asked[places[0]])
        if layout is not None:
            sums = _same_model([asked[place] for place in places], layout)
            found |= zip(places, sums, strict=True)
    return [found.get(place) for place in range(len(asked))]


def _same_model(asked: Sequence[Asked], layout: torch.memory_format) -> list[Update]:
    """Return the sums of clients that have the same architecture and clip alike."""
    first = asked[0]
    model, loss = first.model, first.loss
    factors = None if first.clipped is None else first.clipped.factors
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, one in enumerate(asked):
        groups[tuple(value.data_ptr() for value in one.weights.values())].append(place)
    batches = [one.batch for one in asked]
    if len(groups) > 1 and factors is None and not _convolves(model):
        return stacked_sums(model, loss, [one.weights for one in asked], batches)
    found: dict[int, Update] = {}
    for places in groups.values():
        weights, several = asked[places[0]].weights, [batches[place] for place in places]
        sums = grouped_sums(model, loss, weights, several, factors, layout=layout)
        found |= zip(places, sums, strict=True)
    return [found[place] for place in range(len(asked))]


_LAYOUTS: dict[object, torch.memory_format | None] = {}


def layout_of(asked: Asked) -> torch.memory_format | None:
    """Return the memory format in which clients are computed together; None if they cannot be.

    The sums of two clients must equal those that each of them computes alone. Otherwise the model
    mixes examples, draws random numbers, or uses its parameters in an unknown way.
    """
    model, shape = asked.model, asked.batch.inputs.shape[1:]
    key = architecture(model), (*trainable(model),), shape, asked.loss
    if key not in _LAYOUTS:
        _LAYOUTS[key] = _layout(asked)
    return _LAYOUTS[key]


def _layout(asked: Asked) -> torch.memory_format | None:
    """Return the fastest memory format in which sums are right; None if there is none."""
    model = copied(asked.model)
    weights = {name: value.detach() for name, value in trainable(model).items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        batches = [_some(asked.batch, size) for size in (2, 3)]
        for layout in (torch.channels_last, torch.contiguous_format):
            if layout is torch.channels_last and not _convolves(model):
                continue
            try:
                sums = grouped_sums(model, asked.loss, weights, batches, layout=layout)
                stacked = stacked_sums(model, asked.loss, [weights] * 2, batches)
                alone = [batch_gradient(model, asked.loss, batch) for batch in batches]
            except Exception:  # users' models may fail in any way: alone, they show how
                continue
            sizes = [len(batch.inputs) for batch in batches] * 2
            if all(map(_alike, [*sums, *stacked], alone * 2, sizes)):
                return layout
    return None


def _some(like: Batch, size: int) -> Batch:
    """Return random inputs. Tokens are taken from a batch."""
    rows = torch.arange(size) % max(1, len(like.inputs))
    inputs = like.inputs.new_zeros((size, *like.inputs.shape[1:]))
    if inputs.is_floating_point():
        inputs = torch.randn(inputs.shape).to(inputs)
    elif len(like.inputs):
        inputs = like.inputs[rows]
    targets = like.targets[rows] if len(like.targets) else like.targets.new_zeros(size)
    return Batch(inputs, targets)


def _alike(total: Update, mean: Update, size: int) -> bool:
    exact = {name: size * value.detach() for name, value in mean.items()}
    gap = sum(float((total[name] - value).square().sum()) for name, value in exact.items())
    whole = sum(float(value.square().sum()) for value in exact.values())
    return gap <= ALIKE**2 * whole


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())
