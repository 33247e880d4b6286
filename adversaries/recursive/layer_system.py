"""The constraints on one layer's input, with each row weighted by its accuracy.

The values of a layer's output and the slope of the loss there are known, each up to an error. If
the activation's derivative is a function of its output, they give the layer's z and dL/dz, and
hence constraints on its input (`constraints`).

References:
    Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
    https://arxiv.org/abs/2010.07733
    Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
    through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
    https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..spaces import NotApplicable
from .activations import Activation
from .constraints import (
    Convolution,
    GradientFactor,
    WeightFactor,
    band_size,
    conjugate_gradients,
    count,
    gradient_matrix,
    weight_matrix,
)
from .layer_chain import Layer

Use = Literal["both", "blocks", "either"]
"""How weight and gradient constraints are used. `both`: solved together, with each row weighted by
its accuracy. `blocks`: solved together, with both blocks weighted equally. `either`: gradient
constraints where they suffice, weight constraints elsewhere."""

IDENTITY = Activation("identity", torch.ones_like, lambda x: x)
_PIXELS = 4096
"""Largest number of pixels of a channel for which K is factored."""
_BAND = 2.5e8
"""Largest number of floats in the band of W^T W."""
_WORK = 1e11
"""Largest number of multiplications to factor W^T W if K is already factored."""
_DENSE = 2000
"""Largest number of unknowns for which a system is stored as a dense matrix."""
_ITERATIONS = 300
"""Largest number of iterations of conjugate gradients."""
_SUBSPACE = 3
"""Number of iterations that find the weakest directions of a matrix."""
FINAL, PASSING = 1e-10, 1e-14
"""Relative accuracy of the example, and of intermediate values."""
_TINY = 1e-300


@dataclass(frozen=True)
class Known:
    """What is known about a layer's output, which is the next layer's input.

    Attributes:
        values: Outputs of the activation, flat.
        slopes: dL/dvalues, flat.
        deviation: Standard deviation of the values: one for each, or one for all.
    """

    values: Tensor
    slopes: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class Gradients:
    """The gradients of some layers, and their accuracy.

    Attributes:
        values: Gradients by parameter name, in double precision.
        precision: Relative rounding error of an entry.
        noise: Standard deviation of an entry in addition to rounding.
    """

    values: Mapping[str, Tensor]
    precision: float
    noise: float = 0.0

    def of(self, layer: Layer, name: str) -> Tensor:
        """Return the gradient of one of a layer's parameters."""
        return self.values[layer.parameter(name)]


def slope_of(layer: Layer, known: Known, gradients: Gradients) -> Tensor:
    """Return A'(z). If an output may be on either side of a kink, dL/db decides.

    A filter's bias gradient is the sum of its slopes. If the sum does not match, the outputs whose
    other side makes up the difference are on that side.
    """
    activation = layer.activation or IDENTITY
    least = 4 * known.deviation + 1e-12 * known.values.abs().max()
    values = known.values.where(known.values > least, 0.0) if activation.partial else known.values
    slope = activation.slope(values)
    if not activation.kinked or layer.bias is None:
        return slope
    filters = len(layer.weight)
    swing = activation.slope(torch.ones(1)) - activation.slope(-torch.ones(1))
    turned = torch.where(slope == 1, -swing.to(slope), swing.to(slope)) * known.slopes
    unsure = known.values.abs() < 1000 * (least + gradients.precision * _size(known.values))
    turned = turned.where(unsure, torch.inf).view(filters, -1)
    made = (known.slopes * slope).view(filters, -1)
    missing = gradients.of(layer, "bias") - made.sum(1)
    visible = 100 * gradients.precision * made.abs().sum(1) + 4 * gradients.noise
    slope = slope.view(filters, -1).clone()
    for row in (missing.abs() > visible).nonzero().flatten().tolist():
        places = _making_up(turned[row], missing[row])
        slope[row, places] += torch.where(slope[row, places] == 1, -swing, swing).to(slope)
    return slope.flatten()


def _making_up(changes: Tensor, missing: Tensor) -> list[int]:
    """Return one or two places whose changes add up to `missing`, or no place.

    Args:
        changes: The change at each place; infinite where no change is possible.
        missing: The sum that the changes should have.
    """
    places = changes.isfinite().nonzero().flatten()[:200]
    single = (changes[places] - missing).abs()
    if len(places) and single.min() < 0.01 * missing.abs():
        return [int(places[single.argmin()])]
    if len(places) < 2:
        return []
    first, second = torch.triu_indices(len(places), len(places), 1)
    pairs = (changes[places[first]] + changes[places[second]] - missing).abs()
    best = pairs.argmin()
    close = pairs[best] < 0.001 * missing.abs()
    return [int(places[first[best]]), int(places[second[best]])] if close else []


class System:
    """The constraints on one convolution's input, each row divided by its deviation."""

    def __init__(self, layer: Layer, known: Known, gradients: Gradients, accuracy: float) -> None:
        if layer.groups > 1:
            raise NotApplicable(f"layer {layer.name!r} is a grouped convolution")
        self.layer, self.convolution, self.accuracy = layer, Convolution(layer), accuracy
        activation = layer.activation or IDENTITY
        shape, values = (1, *layer.output_shape), known.values
        deviation = known.deviation.expand_as(values)
        slope = slope_of(layer, known, gradients)
        self.slopes = (known.slopes * slope).view(shape)
        self.gradient = gradients.of(layer, "weight")
        if self.gradient.ndim == 3:
            self.gradient = self.gradient.unsqueeze(2)
        changes = activation.curvature(values) * deviation
        self.gradient_weights = self._gradient_weights(gradients, changes.view(shape))
        outputs = activation.inverse(values)
        precision = gradients.precision * (outputs.abs() + _size(outputs))
        weights = slope / (deviation + slope * precision).clamp(min=_TINY)
        weights = weights.where(outputs.isfinite(), 0.0)
        bias = 0.0 if layer.bias is None else layer.bias.detach().double().view(-1, 1, 1)
        self.outputs = outputs.nan_to_num(0.0, 0.0, 0.0).view(shape) - bias
        self.weights = weights.view(shape)
        self.counts = replace(count(layer), weight=int((weights > 0).sum()))

    def _gradient_weights(self, gradients: Gradients, changes: Tensor) -> Tensor:
        """Return the weight of each filter's rows; errors of k are relative to the gradient."""
        sizes = self.gradient.flatten(1).square().mean(1).sqrt()
        norms = self.slopes.flatten(2).norm(dim=2)[0]
        relative = (self.slopes * changes).flatten(2).norm(dim=2)[0] / norms.clamp(min=_TINY)
        errors = (sizes * (gradients.precision + relative)).square() + gradients.noise**2
        weights = torch.where(norms > 0, 1 / errors.sqrt().clamp(min=_TINY), 0.0)
        return weights.view(-1, 1, 1, 1)

    def balance(self) -> None:
        """Weight all rows of a block equally, and both blocks equally."""
        size = float((self.slopes.square().sum() / self.slopes.numel()).sqrt())
        self.weights = (self.weights > 0).to(self.weights) / self.convolution.weight.norm()
        self.gradient_weights = torch.full_like(self.gradient_weights, 1 / max(size, _TINY))
        self.gradient_weights /= math.sqrt(self.slopes[0, 0].numel())
        self.scale = float(self._values().norm().clamp(min=_TINY)) * self.accuracy
        self.weights /= self.scale
        self.gradient_weights /= self.scale

    def solve(self, use: Use) -> tuple[Tensor, str, Tensor]:
        """Return the input, the kind of constraints that was used, and its deviations."""
        counts, layer = self.counts, self.layer
        if not counts.enough:
            raise NotApplicable(
                f"layer {layer.name!r} has too few constraints: {counts.weight} by its outputs "
                f"and {counts.gradient} by its gradient ({counts.gradient_rank} of them can be "
                f"independent), for {counts.unknowns} unknowns"
            )
        by_gradient = self._gradient_factor()
        if by_gradient is not None:
            inputs = by_gradient.solve(self._gradient_values()).reshape(1, *layer.input_shape)
            deviations = by_gradient.deviations.repeat(layer.input_shape[0])
            helps = self._information() * by_gradient.deviation**2 > 1
            if use == "either" or (use == "both" and not helps):
                return inputs, "gradient", deviations
        size, reach = band_size(layer)
        cheap = by_gradient is None or size * reach**2 < _WORK
        by_weight = self._weight_factor() if cheap else None
        if by_weight is not None and (
            by_gradient is None or by_weight.deviation < by_gradient.deviation
        ):
            both = use != "either"
            start = by_weight.precondition(self.convolution.back(self.weights**2 * self.outputs))
            inputs = self._refined(by_weight, start, use_gradient=both)
            deviation = torch.tensor(by_weight.deviation, dtype=torch.float64)
            return inputs, "both" if both else "weight", deviation
        if by_gradient is not None:
            return self._refined(by_gradient, inputs), "both", deviations
        return self._without_factor()

    def residual(self, inputs: Tensor, used: str) -> float:
        """Return the part of the constraints' norm that the input does not explain."""
        values = self._values(weight=used != "gradient", gradient=used != "weight")
        made = self._apply(inputs, weight=used != "gradient", gradient=used != "weight")
        return float((made - values).norm() / values.norm().clamp(min=_TINY))

    def _gradient_factor(self) -> GradientFactor | None:
        pixels = math.prod(self.layer.input_shape[1:])
        rows = self.gradient[:, 0].numel()
        if rows < pixels or pixels > _PIXELS:
            return None
        matrix = gradient_matrix(self.layer, self.slopes[0])
        weights = self.gradient_weights.expand(-1, 1, *self.gradient.shape[2:]).reshape(-1, 1)
        return GradientFactor.of(matrix * weights)

    def _gradient_values(self) -> Tensor:
        """Return the right-hand sides of the gradient constraints, one column per channel."""
        values = self.gradient * self.gradient_weights
        return values.permute(0, 2, 3, 1).flatten(0, 2)

    def _weight_factor(self) -> WeightFactor | None:
        size, reach = band_size(self.layer)
        if not self.counts.by_weight or size * reach > _BAND:
            return None
        return WeightFactor.of(self.convolution, self.weights[0])

    def _information(self) -> float:
        """Return the mean of the diagonal of W^T D^2 W."""
        powers = self.convolution.weight.square().sum((1, 2, 3)).view(1, -1, 1, 1)
        return float((self.weights.square() * powers).sum()) / self.counts.unknowns

    def _apply(self, inputs: Tensor, *, weight: bool = True, gradient: bool = True) -> Tensor:
        rows = []
        if weight:
            rows.append((self.weights * self.convolution.outputs(inputs)).flatten(1))
        if gradient:
            made = self.convolution.weight_gradient(inputs, self.slopes)
            rows.append((self.gradient_weights * made).reshape(1, -1))
        return torch.cat(rows, 1)

    def _values(self, *, weight: bool = True, gradient: bool = True) -> Tensor:
        rows = [(self.weights * self.outputs).flatten(1)] if weight else []
        if gradient:
            rows.append((self.gradient_weights * self.gradient).reshape(1, -1))
        return torch.cat(rows, 1)

    def _adjoint(self, rows: Tensor, *, weight: bool = True, gradient: bool = True) -> Tensor:
        first = self.weights.numel() if weight else 0
        total = rows.new_zeros(1, *self.layer.input_shape)
        if weight:
            total = self.convolution.back(
                self.weights * rows[:, :first].reshape(self.weights.shape)
            )
        if gradient:
            weighted = self.gradient_weights * rows[0, first:].reshape(self.gradient.shape)
            total = total + self.convolution.weight_gradient_back(weighted, self.slopes)
        return total

    def _refined(
        self, factor: GradientFactor | WeightFactor, start: Tensor, *, use_gradient: bool = True
    ) -> Tensor:
        return conjugate_gradients(
            lambda x: self._apply(x, gradient=use_gradient),
            lambda r: self._adjoint(r, gradient=use_gradient),
            self._values(gradient=use_gradient),
            factor.precondition,
            start,
            _ITERATIONS,
            self.accuracy,
        )

    def _without_factor(self) -> tuple[Tensor, str, Tensor]:
        """Return the input if neither kind of constraints suffices alone."""
        start = torch.zeros(1, *self.layer.input_shape, dtype=torch.float64)
        unknowns = start.numel()
        if unknowns > _DENSE:
            diagonal = self._information()
            inputs = conjugate_gradients(
                self._apply, self._adjoint, self._values(), lambda s: s / diagonal, start, 1000
            )
            return inputs, "both", torch.tensor(1.0, dtype=torch.float64)
        unit = torch.eye(unknowns, dtype=torch.float64).view(-1, *start.shape)
        matrix = torch.stack([self._apply(one)[0] for one in unit], dim=1)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((values > 1e-13 * values[0]).sum())
        if rank < unknowns:
            raise NotApplicable(
                f"the constraints of layer {self.layer.name!r} have rank {rank} for {unknowns} "
                "unknowns"
            )
        inputs = right.T @ ((left.T @ self._values()[0]) / values)
        deviations = (right / values.unsqueeze(1)).norm(dim=0)
        return inputs.view_as(start), "both", deviations


class WeightInverse:
    """Computes a convolution's inputs from its outputs by weight constraints; factored once.

    Raises:
        NotApplicable: If its outputs do not determine its inputs.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.convolution = layer, Convolution(layer)
        self.activation, counts = layer.activation or IDENTITY, count(layer)
        if self.activation.partial:
            raise NotApplicable(
                f"the activation of layer {layer.name!r}, {self.activation.name}, has no inverse: "
                "a batch is recovered by weight constraints alone"
            )
        if layer.groups > 1 or not counts.by_weight:
            raise NotApplicable(
                f"a batch is recovered by weight constraints alone, and layer {layer.name!r} has "
                f"{counts.weight} of them for {counts.unknowns} unknowns"
            )
        self.redundant = counts.weight > counts.unknowns

    @cached_property
    def _lu(self) -> tuple[Tensor, Tensor] | None:
        if self.redundant or math.prod(self.layer.input_shape) > _PIXELS:
            return None
        factors, pivots = torch.linalg.lu_factor(weight_matrix(self.layer))
        return factors, pivots

    @cached_property
    def _factor(self) -> WeightFactor:
        size, reach = band_size(self.layer)
        ones = torch.ones(self.layer.output_shape, dtype=torch.float64)
        factor = WeightFactor.of(self.convolution, ones) if size * reach <= _BAND else None
        if factor is None:
            raise NotApplicable(
                f"the weights of layer {self.layer.name!r} are singular or too many to factor"
            )
        return factor

    def weak(self, count: int) -> Tensor | None:
        """Return the input directions, as rows, that W weakens most; None if W is not square."""
        if self._lu is None or count < 1:
            return None
        rng = torch.Generator().manual_seed(0)
        size = len(self._lu[0])
        found = torch.randn(size, min(count, size), generator=rng, dtype=torch.float64)
        for _ in range(_SUBSPACE):
            found, _ = torch.linalg.qr(found)
            found = torch.linalg.lu_solve(*self._lu, found, adjoint=True)
            found = torch.linalg.lu_solve(*self._lu, found)
        basis: Tensor = torch.linalg.qr(found)[0]
        return basis.T

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs behind outputs of the activation, and their residuals; both flat."""
        bias = self.layer.bias
        shift = 0.0 if bias is None else bias.detach().double().view(-1, 1, 1)
        outputs = self.activation.inverse(values.view(-1, *self.layer.output_shape)) - shift
        if self._lu is not None:
            solved: Tensor = torch.linalg.lu_solve(*self._lu, outputs.flatten(1).T)
            inputs = solved.T.reshape(-1, *self.layer.input_shape)
        else:
            inputs = conjugate_gradients(
                lambda x: self.convolution.outputs(x).flatten(1),
                lambda rows: self.convolution.back(rows.reshape(outputs.shape)),
                outputs.flatten(1),
                self._factor.precondition,
                self._factor.precondition(self.convolution.back(outputs)),
                5,
                PASSING,
            )
        rest = (self.convolution.outputs(inputs) - outputs).flatten(1).norm(dim=1)
        return inputs.flatten(1), rest / outputs.flatten(1).norm(dim=1).clamp(min=_TINY)


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0
