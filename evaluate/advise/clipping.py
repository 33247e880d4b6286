"""What a clipping norm does to the gradients of a model: how many it cuts, what noise it brings.

Noise is in proportion to the clipping norm C; what it hides, the mean of the clipped gradients,
grows more slowly than C and not at all once nothing is cut. Hence small norms are the less noisy,
as long as the cut gradients still point where they should.
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
"""Public examples whose gradients are looked at; the fewest batches, where there are as many; and
how many of them at once."""


@dataclass(frozen=True)
class Clipped:
    """What clipping does at one model.

    Attributes:
        share: Share of gradients that are cut.
        noise_over_signal: Norm of the noise of a round's mean update over that of the mean of all
            clipped gradients; None where that is too small to be seen in a sample.
    """

    share: float
    noise_over_signal: float | None


@dataclass(frozen=True)
class ClippingPoint:
    """One clipping norm, everything else as recommended.

    Attributes:
        max_norm: C.
        first: What it does at the initial model.
        last: What it does at the trained one.
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
    """Return the norms of gradients of batches of public examples."""
    return torch.cat([block.norm(dim=1) for block in _gradients(world, model, batch_size)])


def clipped(
    world: World,
    model: nn.Module,
    max_norms: Sequence[float],
    update_noise: float,
    batch_size: int = 1,
) -> list[Clipped]:
    """Return what each of some clipping norms does to the gradients of public batches.

    Args:
        world: The scenario.
        model: The model.
        max_norms: Clipping norms.
        update_noise: Standard deviation of the noise in an entry of the mean update, over C.
        batch_size: Examples behind what is clipped.
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
        # The mean of a sample is too long by its own variance, which is taken off.
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
