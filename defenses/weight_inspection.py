"""Inspection of received weights: refuse a model that training is unlikely to produce."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .base import Defense, Refused

TOLERANCE = 1e-3
"""Tolerance within which rows count as parallel, as zero, or as a single entry."""

ALIGNED = 0.95
"""Rows are aligned above this |cosine|. Parallel rows with noise of a fifth still reach it."""

LEAST_INPUTS = 8
"""Rows with fewer inputs are not compared: two rows of one input are always parallel."""

LEAST_BIASES = 16
"""With fewer distinct biases, even random ones may be as regular as quantiles."""

_BLOCK = 1024  # rows that are compared with all others at once


class LayerStatistics(NamedTuple):
    """Statistics of the weights of one linear or convolutional layer. Each output has one row.

    Attributes:
        parallel: Share of pairs of non-zero rows with |cosine| > 1 - 1e-3.
        aligned: The same with |cosine| > 0.95.
        zeroed: Share of rows with a norm below 1e-3 of the largest.
        direct: Share of other rows with all but 1e-3 of their squared norm in a single entry.
        scale: Root mean square of the weights, in units of 1 / sqrt(inputs of a row).
        irregularity: Distance of the sorted biases from a grid of quantiles, see `irregularity`;
            infinite if there are too few.
    """

    parallel: float
    aligned: float
    zeroed: float
    direct: float
    scale: float
    irregularity: float


@dataclass
class WeightInspection(Defense):
    """Refuse an architecture that was not agreed, and weights that are statistically improbable.

    This is our reading of [1], which describes light client-side detectors that look for
    statistically improbable structures in the received weights. As in [2], the client refuses a
    module that the agreed model does not have, or that has other options or shapes. It then tests
    each linear and convolutional layer:

    - The shares of parallel, aligned and zeroed rows, and of rows with a single entry, must not
      exceed thresholds.
    - The weights must have a usual scale.
    - The biases must not be too evenly placed.

    Attacks that isolate examples give all rows one direction and set biases at quantiles of the
    projection on it. They let convolutions pass their inputs on, and switch off what they do not
    need. The test uses only the names, types and shapes of `agreed`, because a client has not seen
    the weights that an honest server would send.

    The thresholds aim at false alarms on at most 1 % of honest models. They were calibrated on 176
    models, untrained to trained (`benchmarks/inspection.py calibrate`). These had no parallel,
    aligned, zeroed or direct row, scales from 0.54 to 7.2 and irregularities from 0.34. All of 110
    other models, with other seeds, were accepted. Normally distributed biases are the worst case.
    They fall below the threshold in 3 of 10,000 layers of 16 outputs, and less often in wider ones.

    Two things break it: noise on crafted weights, if the attack tolerates it, and weights that are
    trained to leak rather than set by hand. The client may refuse initialisations other than those
    of He, Glorot and LeCun for their scale, and a pruned model for its zeros.

    Attributes:
        parallel: Largest share of parallel pairs of rows.
        aligned: Largest share of aligned pairs of rows.
        zeroed: Largest share of zeroed rows.
        direct: Largest share of rows with a single entry.
        scale: Factor by which weights may be larger or smaller than 1 / sqrt(inputs of a row).
        irregularity: Smallest irregularity of the biases.

    References:
        [1] Carletti, Foggia, Mazzocca, Parrella, Vento. "On the Detectability of Active Gradient
            Inversion Attacks in Federated Learning." 2025. https://arxiv.org/abs/2511.10502
        [2] Wang, Li. "Hear No Evil: Detecting Gradient Leakage by Malicious Servers in Federated
            Learning." 2025. https://arxiv.org/abs/2506.20651
    """

    parallel: float = 0.0
    aligned: float = 0.01
    zeroed: float = 0.0
    direct: float = 0.0
    scale: float = 10.0
    irregularity: float = 0.28

    def __post_init__(self) -> None:
        for name in ("parallel", "aligned", "zeroed", "direct"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not self.scale >= 1:
            raise ValueError(f"scale must be at least 1, got {self.scale}")
        if not self.irregularity >= 0:
            raise ValueError(f"irregularity must not be negative, got {self.irregularity}")

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Refuse a model with a different architecture or with improbable weights."""
        check_architecture(model, agreed)
        for name, found in inspect(model):
            reason = self._suspicion(found)
            if reason is not None:
                raise Refused(f"layer {name!r}: {reason}")
        return model

    def _suspicion(self, found: LayerStatistics) -> str | None:
        """Return what is improbable about a layer; None if nothing is."""
        if found.zeroed > self.zeroed:
            return f"{found.zeroed:.2%} of its rows are zero"
        if found.direct > self.direct:
            return f"{found.direct:.2%} of its rows have a single entry"
        if found.parallel > self.parallel:
            return f"{found.parallel:.2%} of its pairs of rows are parallel"
        if found.aligned > self.aligned:
            return f"{found.aligned:.2%} of its pairs of rows are aligned"
        if not 1 / self.scale <= found.scale <= self.scale:
            return f"its weights are {found.scale:.2g} times as large as usual"
        if found.irregularity < self.irregularity:
            return f"its biases are placed like quantiles ({found.irregularity:.2g})"
        return None


def check_architecture(model: nn.Module, agreed: nn.Module) -> None:
    """Raise `Refused` if a model differs from the agreed one in more than its values."""
    sent, expected = _architecture(model), _architecture(agreed)
    for name in [*expected, *sent]:
        if sent.get(name) != expected.get(name):
            raise Refused(
                f"another architecture: {name or 'the model'} is {sent.get(name, 'missing')}, "
                f"and not {expected.get(name, 'there')} as agreed"
            )
    if list(sent) != list(expected):
        raise Refused("another architecture: its modules are in another order")


def inspect(model: nn.Module) -> Iterator[tuple[str, LayerStatistics]]:
    """Yield the statistics of the linear and convolutional layers of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            bias = None if module.bias is None else module.bias.detach()
            yield name, layer_statistics(module.weight.detach(), bias)


def layer_statistics(weight: Tensor, bias: Tensor | None) -> LayerStatistics:
    """Return the statistics of one layer's weights and biases."""
    rows = weight.flatten(1)
    inputs = rows.shape[1]
    norms = rows.norm(dim=1)
    alive = norms > TOLERANCE * norms.max()
    directed = inputs >= LEAST_INPUTS
    parallel, aligned = _aligned(rows[alive] / norms[alive, None]) if directed else (0.0, 0.0)
    return LayerStatistics(
        parallel=parallel,
        aligned=aligned,
        zeroed=float((~alive).float().mean()),
        direct=_direct(rows[alive], norms[alive]) if directed else 0.0,
        scale=float(rows.square().mean().sqrt()) * inputs**0.5,
        irregularity=float("inf") if bias is None else irregularity(bias),
    )


def irregularity(values: Tensor) -> float:
    """Return how far values are from quantiles of a normal or log-normal distribution.

    The result is sqrt(K) times the Kolmogorov-Smirnov distance between K distinct values and a
    normal distribution with their median and quartiles. If all values have one sign, the distance
    of their logarithms counts if it is smaller. For random values, the result does not vanish,
    however well the distribution fits, because a sample fluctuates by about 1 / sqrt(K). Quantiles
    are at a distance of 1 / K. They fit too well to be random.
    """
    distinct = values.double().unique()
    if len(distinct) < LEAST_BIASES:
        return float("inf")
    found = _distance_from_normal(distinct)
    if bool((distinct > 0).all() | (distinct < 0).all()):
        found = min(found, _distance_from_normal(distinct.abs().log().sort().values))
    return found * math.sqrt(len(distinct))


def _distance_from_normal(ascending: Tensor) -> float:
    low, middle, high = ascending.quantile(ascending.new_tensor([0.25, 0.5, 0.75]))
    quartile = 0.6744897501960817  # of the standard normal distribution
    expected = torch.special.ndtr((ascending - middle) * (2 * quartile) / (high - low))
    count = len(ascending)
    reached = torch.arange(count + 1, dtype=ascending.dtype, device=ascending.device) / count
    return float(torch.maximum(reached[1:] - expected, expected - reached[:-1]).max())


def _aligned(units: Tensor) -> tuple[float, float]:
    """Return the shares of pairs of unit vectors that are parallel and aligned."""
    count = len(units)
    if count < 2:
        return 0.0, 0.0
    parallel = aligned = -count  # each is parallel to itself
    for block in units.split(_BLOCK):
        cosines = (block @ units.T).abs()
        parallel += int((cosines > 1 - TOLERANCE).sum())
        aligned += int((cosines > ALIGNED).sum())
    pairs = count * (count - 1)
    return parallel / pairs, aligned / pairs


def _direct(rows: Tensor, norms: Tensor) -> float:
    """Return the share of rows with nearly all of their squared norm in a single entry."""
    if not len(rows):
        return 0.0
    largest = rows.abs().amax(dim=1)
    return float((largest.square() > (1 - TOLERANCE) * norms.square()).float().mean())


def _architecture(model: nn.Module) -> dict[str, str]:
    """Return the types, options and shapes that make up a model, by their names."""
    modules = {
        name: f"{type(module).__module__}.{type(module).__qualname__}({module.extra_repr()})"
        for name, module in model.named_modules()
    }
    shapes = {name: f"of shape {tuple(v.shape)}" for name, v in model.state_dict().items()}
    return modules | shapes
