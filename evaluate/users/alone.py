"""Run users' code without our frames on the stack, so that it cannot tell who calls it.

A defense that looked at its callers could upload something else while it is attacked. A greenlet
has a stack of its own, in the same thread: torch's modes, graphs and transforms stay in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from greenlet import greenlet
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Defense, Loss, Update

P = ParamSpec("P")
R = TypeVar("R")


def alone(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Return what a function returns. It sees none of the frames that led to its call."""
    call = greenlet(function)
    call.gr_context = copy_context()
    result: R = call.switch(*args, **options)
    return result


def fresh(defense: Defense) -> Defense:
    """Return a copy of a defense without the state of its rounds."""
    return alone(replace, defense)


@dataclass
class Alone(Defense):
    """A defense whose hooks run alone.

    Attributes:
        inner: The defense that does the work.
    """

    inner: Defense

    @property
    def cohort(self) -> int:
        """Return the cohort of the defense."""
        return self.inner.cohort

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Return the model that the defense trains on."""
        return alone(self.inner.on_receive, model, agreed)

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Yield the defense's batches, which are all drawn at once."""

        def drawn() -> list[Tensor]:
            return [*self.inner.batches(examples, batch_size, epochs, rng)]

        yield from alone(drawn)

    def expect(self, batch_size: int) -> None:
        """Pass the nominal batch size to the defense."""
        alone(self.inner.expect, batch_size)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return the defense's batch."""
        return alone(self.inner.on_batch, batch, rng)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the defense's gradient."""
        return alone(self.inner.gradient, model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the defense's upload."""
        return alone(self.inner.on_update, update, rng)

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Pass the models to the defense."""
        alone(self.inner.on_cohort, models)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return what the defense shows of a round."""
        return alone(self.inner.on_round, updates, rng)

    def unguarded(self) -> Defense:
        """Return the defense that refuses no batch."""
        return Alone(alone(self.inner.unguarded))

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the defense's replay."""
        return Alone(alone(self.inner.replay, observed))

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return the defense's log-likelihood."""
        return alone(self.inner.log_likelihood, observed, expected, batch_size)
