"""The effect of a clipping norm on gradients: how many it clips, and how much noise it brings.

The noise is proportional to the clipping norm C. The signal is the mean of the clipped gradients.
It grows more slowly than C, and stops growing when no gradient is clipped. So a smaller norm gives
less noise relative to the signal, as long as the clipped gradients keep their direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from leakfrontier.defenses import trainable

from ..foundations.statistics import Interval
from ..world.scenario import World

SAMPLE, FEWEST, BLOCK = 256, 16, 32
"""Number of public examples, minimal number of batches (if the data has so many), and batches
per block."""


@dataclass(frozen=True)
class Clipped:
    """The effect of clipping at one model.

    Attributes:
        share: Share of gradients that are clipped.
        noise_over_signal: Norm of the noise in a round's mean update, divided by the norm of the
            mean clipped gradient. None if the latter is too small to estimate.
    """

    share: float
    noise_over_signal: float | None


@dataclass(frozen=True)
class ClippingPoint:
    """One clipping norm, with all else as recommended.

    Attributes:
        max_norm: C.
        first: Its effect at the initial model.
        last: Its effect at the trained model.
        accuracy: Accuracy with it, after all rounds.
    """

    max_norm: float
    first: Clipped
    last: Clipped
    accuracy: Interval

    def document(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return {name: getattr(value, "__dict__", value) for name, value in vars(self).items()}


def gradient_norms(world: World, model: nn.Module, batch_size: int = 1) -> Tensor:
    """Return the gradient norms of batches of public examples."""
    return torch.cat([block.norm(dim=1) for block in _gradients(world, model, batch_size)])


def clipped(
    world: World,
    model: nn.Module,
    max_norms: Sequence[float],
    update_noise: float,
    batch_size: int = 1,
) -> list[Clipped]:
    """Return the effect of each clipping norm on the gradients of public batches.

    Args:
        world: The scenario.
        model: The model.
        max_norms: Clipping norms.
        update_noise: Standard deviation of the noise per entry of the mean update, divided by C.
        batch_size: Examples per clipped gradient.
    """
    count, sums, squares = 0, [torch.zeros(())] * len(max_norms), [0.0] * len(max_norms)
    cut = [0] * len(max_norms)
    for block in _gradients(world, model, batch_size):
        norms = block.norm(dim=1)
        count += len(norms)
        for place, most in enumerate(max_norms):
            factors = (most / norms.clamp(min=1e-12)).clamp(max=1)
            sums[place] = sums[place] + factors @ block
            squares[place] += float((factors * norms).square().sum())
            cut[place] += int((norms > most).sum())
    found = []
    for most, total, square, above in zip(max_norms, sums, squares, cut, strict=True):
        # Subtract the variance of the sample mean: its squared norm is biased by it.
        signal = (float(total.square().sum()) - square) / max(1, count * (count - 1))
        noise = update_noise * most * math.sqrt(total.numel())
        ratio = noise / math.sqrt(signal) if signal > 0 else None
        found.append(Clipped(above / count, ratio))
    return found


def _gradients(world: World, model: nn.Module, batch_size: int) -> Iterator[Tensor]:
    """Yield gradients of batches of public examples, one per row, in blocks."""
    parameters = {name: value.detach() for name, value in trainable(model).items()}
    most = max(1, len(world.test.targets) // batch_size)
    batches = min(most, max(FEWEST, SAMPLE // batch_size))
    rows = torch.arange(batches * batch_size).remainder(len(world.test.targets))
    inputs, targets = (part[rows].unflatten(0, (batches, batch_size)) for part in world.test)

    def objective(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return world.modality.loss(functional_call(model, parameters, (inputs,)), targets)

    each = vmap(grad(objective), in_dims=(None, 0, 0))
    for some in zip(inputs.split(BLOCK), targets.split(BLOCK), strict=True):
        found = each(parameters, *some)
        yield torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1)
