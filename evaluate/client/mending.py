"""Repairs of a defense's replay, so that it does not cripple attacks that know the defense.

The harness replaces secret draws by their mean or averages over them. It never redraws them as if
they were known. It uses a straight-through gradient for rounding. If a stack of guesses gives
different results, it replays guesses one at a time. It replaces a replay that does not tell the
truth from other examples. `examination` decides what a defense needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from leakfrontier.defenses import Batch, Defense, Loss, Update

Draws = Literal["given", "expected", "averaged"]
DRAWS: tuple[Draws, ...] = get_args(Draws)

AVERAGED = 8
"""Number of replays to average over, if draws cannot be replaced by their mean."""


@dataclass(frozen=True)
class Mending:
    """How a repaired replay differs from the defense's own.

    Attributes:
        draws: What happens to secret randomness: it is redrawn, replaced by its mean, or averaged.
        straight_through: Whether its slope is that of the undefended client.
        one_by_one: Whether guesses are replayed one at a time.
        undefended: Whether an undefended client replaces the defense's replay.
        guarded: Whether the defense itself replaces its `unguarded` client.
        no_likelihood: Whether its `log_likelihood` is ignored.
    """

    draws: Draws = "given"
    straight_through: bool = False
    one_by_one: bool = False
    undefended: bool = False
    guarded: bool = False
    no_likelihood: bool = False


AS_GIVEN = Mending()


@dataclass
class Expected(Defense):
    """A defense whose draws from `rng` are replaced by their means. Public randomness is unchanged.

    Attributes:
        inner: The defense.
    """

    inner: Defense

    def expect(self, batch_size: int) -> None:
        """Pass the nominal batch size to the defense."""
        self.inner.expect(batch_size)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return the defense's batch."""
        with ExpectedDraws(rng):
            return self.inner.on_batch(batch, rng)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the defense's gradient."""
        with ExpectedDraws(rng):
            return self.inner.gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the defense's upload."""
        with ExpectedDraws(rng):
            return self.inner.on_update(update, rng)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return what the defense shows of a round."""
        with ExpectedDraws(rng):
            return self.inner.on_round(updates, rng)


class ExpectedDraws(TorchFunctionMode):
    """Replaces torch's draws from a secret generator, or from the global one, by their means.

    A Laplace variable, made of a uniform or of two exponential ones, becomes 0. A mask becomes its
    probability. Permutations and integers are drawn as usual, because they have no mean.
    """

    def __init__(self, secret: Generator) -> None:
        super().__init__()
        self._secret = secret

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Return the mean of a draw; pass other calls through."""
        options = dict(kwargs or {})
        mean_of = _MEANS.get(function)
        if mean_of is None or options.get("generator") not in (None, self._secret):
            return function(*args, **options)
        options.pop("generator", None)
        return mean_of(*args, **options)


def _normal(
    center: float | Tensor, std: float | Tensor = 1.0, size: Sequence[int] | None = None
) -> Tensor:
    shape = torch.as_tensor(std) if size is None else torch.empty(size)
    return torch.zeros_like(shape) + center


_MEANS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.randn: torch.zeros,
    torch.randn_like: torch.zeros_like,
    torch.normal: _normal,
    torch.rand: lambda *size, **options: torch.zeros(*size, **options) + 0.5,
    torch.rand_like: lambda like, **options: torch.zeros_like(like, **options) + 0.5,
    torch.bernoulli: lambda p: p.clone(),
    Tensor.normal_: lambda x, mean=0.0, std=1.0: x.fill_(mean),
    Tensor.uniform_: lambda x, low=0.0, high=1.0: x.fill_((low + high) / 2),
    Tensor.exponential_: lambda x, rate=1.0: x.fill_(1 / rate),
    Tensor.bernoulli_: lambda x, p=0.5: x.copy_(torch.as_tensor(p)),
}


def mean(updates: Sequence[Update]) -> Update:
    """Return the mean of some updates."""
    if len(updates) == 1:
        return updates[0]
    return {name: torch.stack([u[name] for u in updates]).mean(dim=0) for name in updates[0]}


def straight_through(values: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> Update:
    """Return the values of one update with the slope of another."""
    return {name: slopes[name] + (value - slopes[name]).detach() for name, value in values.items()}


def refuse_stack(inputs: Tensor) -> None:
    """Raise if a function is being vectorised, so that guesses are replayed one at a time."""
    if torch._C._functorch.is_batchedtensor(inputs):
        raise RuntimeError("batched replay differs from single replay: replay one guess at a time")
