"""R-CONV++: invert convolutions analytically, from gradients and from weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from ..spaces import NotApplicable
from .layer_chain import Layer, chain
from .layer_system import IDENTITY, Gradients, Use, WeightInverse
from .mixed_rows import STARTS, Group, tell_apart
from .recursion import gradients_of, invert, on_cpu
from .softmax_head import Head, separate
from .weak_directions import corrected

_EXPLAINED = 1e-6
"""Largest unexplained part of a vector, or of a gradient."""
_OUTSIDE = 0.1
"""Largest part of an example outside the range of the data."""
_OFF, _MOVE = 1e-7, 1e-10
"""Relative errors of vectors: rounding of a single example, and a probe of their effect."""
_LABELLINGS = 16
"""Largest number of label assignments to try for examples without a label."""


@dataclass(frozen=True)
class RCONV(Adversary):
    """Read the example off the gradients of convolutions, layer by layer [1].

    **One example** (Algorithms 1 and 2). The first linear layer reveals its input, dL/dW divided
    by dL/db, and the slope of the loss there, W^T dL/db. The activation before it must have a
    derivative that is a function of its output, such as a ReLU. The slope at the previous
    convolution is then known, and the convolution's weight gradient is a linear system in its
    input: gradient constraints. Early layers with large maps have too few of these. There,
    invertible outputs add weight constraints. By default both kinds are solved together, and each
    row is weighted by its accuracy. `constraints="either"` takes one kind per layer, as published.
    An upload in single precision suffices.

    **A batch** (Algorithm 3). A row of the last layer's dL/dW divided by dL/db is a mean over
    examples; for most classes, one example dominates it. Each mean goes back through the
    convolutions by weight constraints alone. This attack differs from the paper in three ways. It
    accepts a row as an example only if the example's own gradient explains the row. It subtracts
    found examples, which leaves others alone in their rows (`softmax_head`). Examples that are
    never alone are separated by the gradient of the last convolution (`mixed_rows`). If all
    examples are found, gradients correct the digits that weights lose (`weak_directions`).

    Attributes:
        constraints: `both` kinds of constraints together, or `either` kind per layer.
        separation: How mixed rows of a batch are treated. `rows` takes them unchanged, as in the
            paper. `peeling` subtracts examples from the last layer. `bilinear` uses the last
            convolution as well.

    References:
        [1] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy
            Vulnerabilities through Analytical Gradient Inversion Attacks." Computing 107:156,
            2025. https://doi.org/10.1007/s00607-025-01508-w
    """

    cost: ClassVar[int] = 3  # exact, but its systems take as long as a search

    constraints: Use = "both"
    separation: Literal["rows", "peeling", "bilinear"] = "bilinear"

    def __post_init__(self) -> None:
        if self.constraints not in ("both", "either"):
            raise ValueError(f"constraints must be 'both' or 'either', got {self.constraints!r}")
        if self.separation not in ("rows", "peeling", "bilinear"):
            raise ValueError(
                f"separation must be 'rows', 'peeling' or 'bilinear', got {self.separation!r}"
            )

    @on_cpu
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the examples, with the residual of each layer."""
        layers = chain(observation.model, observation.space)
        first = next(place for place, layer in enumerate(layers) if layer.is_linear)
        if layers[first].bias is None:
            raise NotApplicable(
                f"layer {layers[first].name!r}, the first linear one, has no bias to divide by"
            )
        if observation.batch_size == 1:
            return invert(observation, layers[: first + 1], self.constraints)
        if len(layers) > first + 1 or layers[first].activation is not None:
            raise NotApplicable("for a batch, the first linear layer must return the logits")
        return self._batch(observation, layers, rng)

    def _batch(
        self, observation: Observation, layers: Sequence[Layer], rng: Generator
    ) -> Reconstruction:
        """Return the examples of a batch. Confidence 1 means a single example, not a mixture."""
        head, inverses = layers[-1], [WeightInverse(layer) for layer in layers[:-1]]
        gradients, peel = gradients_of(observation, layers), self.separation != "rows"
        accuracy = max(_EXPLAINED, 1e4 * gradients.precision)
        assert head.bias is not None

        def possible(vectors: Tensor) -> Tensor:
            """Return which vectors lie in the last convolution's range, or come from pixels."""
            if inverses[-1].redundant:
                return inverses[-1](vectors)[1] < accuracy
            pixels = _pixels(inverses, vectors).view(-1, *observation.space.shape)
            outside = (pixels - observation.space.clamp(pixels)).flatten(1).norm(dim=1)
            sizes = pixels.flatten(1).norm(dim=1)
            errors = _OFF * _loss_of_digits(inverses, vectors)
            inside: Tensor = outside < torch.maximum(_OUTSIDE * sizes, errors)
            return inside

        batch = Head(
            head.weight.detach().double(),
            head.bias.detach().double(),
            observation.batch_size * gradients.of(head, "weight"),
            observation.batch_size * gradients.of(head, "bias"),
            observation.loss,
            gradients.precision,
            possible if inverses else None,
        )
        values, certain = separate(batch, observation.batch_size, peel=peel)
        told = None
        if self.separation == "bilinear" and inverses and len(batch.found) < observation.batch_size:
            gradient = observation.batch_size * _of_images(gradients, layers[-2])
            more = _told_apart(batch, inverses[-1], gradient, observation.batch_size, rng)
            if more is not None:
                values, told = more
                certain = torch.ones(len(values), dtype=torch.bool)
        if not len(values):
            raise NotApplicable("the gradient of the last layer is zero")
        slopes = batch.explained_by(values, accuracy) if peel and certain.all() else None
        values, residuals = _back(
            inverses,
            [observation.batch_size * _of_images(gradients, layer) for layer in layers[:-1]],
            values,
            None if slopes is None else slopes @ batch.weight,
            told,
        )
        if not certain.any():  # mixtures go back without a residual, just like examples
            residuals = dict.fromkeys(residuals, 1.0)
        inputs = values.view(-1, *observation.space.shape).nan_to_num(0.0, 0.0, 0.0)
        inputs = observation.space.clamp(inputs).to(observation.update[head.parameter("weight")])
        return Reconstruction(inputs, confidence=certain.to(inputs), residuals=residuals)


def _pixels(inverses: Sequence[WeightInverse], values: Tensor) -> Tensor:
    """Return the examples behind outputs of the last activation, by weights."""
    for inverse in reversed(inverses):
        values, _ = inverse(values)
    return values


def _loss_of_digits(inverses: Sequence[WeightInverse], values: Tensor) -> Tensor:
    """Return how far examples would move if values had relative errors of 1."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(values.shape, generator=rng, dtype=values.dtype)
    moved = _pixels(inverses, values * (1 + _MOVE * noise)) - _pixels(inverses, values)
    lost: Tensor = moved.norm(dim=1) / _MOVE
    return lost


def _of_images(gradients: Gradients, layer: Layer) -> Tensor:
    """Return dL/dW of a convolution; one over time is treated as images of height 1."""
    gradient = gradients.of(layer, "weight")
    return gradient if gradient.ndim == 4 else gradient.unsqueeze(2)


def _back(
    inverses: Sequence[WeightInverse],
    gradients: Sequence[Tensor],
    values: Tensor,
    slopes: Tensor | None,
    told: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """Go back through convolutions, last to first; return inputs and a residual per layer.

    Args:
        inverses: The way back through each layer by its weights.
        gradients: dL/dW of each layer, summed over the batch.
        values: Outputs of the last activation, by example.
        slopes: dL/dvalues, if the examples are the whole batch. Gradients then correct the result
            of the weights.
        told: Inputs of the last layer for the last examples, if they are known.
    """
    residuals: dict[str, float] = {}
    for inverse, gradient in zip(reversed(inverses), reversed(gradients), strict=True):
        layer = inverse.layer
        inputs, rest = inverse(values)
        residual = float(rest.max())
        if told is not None:
            inputs[len(inputs) - len(told) :] = told
        if slopes is not None:
            slopes = slopes * inverse.activation.slope(values)
            slopes = slopes.view(-1, *layer.output_shape)
            inputs, residual = corrected(inverse, inputs, slopes, gradient)
            slopes = inverse.convolution.back(slopes).flatten(1)
        values, told, residuals[layer.name] = inputs, None, residual
    return values, residuals


def _told_apart(
    head: Head, last: WeightInverse, gradient: Tensor, examples: int, rng: Generator
) -> tuple[Tensor, Tensor | None] | None:
    """Return outputs of the last convolution's activation for all examples, and some inputs.

    The last examples are those that the head left mixed, if any. Their inputs are returned too.

    Args:
        head: The last layer's gradient, minus the examples that were found.
        last: The way back through the last convolution.
        gradient: Its dL/dW, summed over the batch.
        examples: Number of examples in the batch.
        rng: Source of random starts.
    """
    layer, activation = last.layer, last.activation or IDENTITY
    labels = head.classes_left()
    unknown = sum(label < 0 for label in head.labels)
    ways = []
    for given in islice(product(labels, repeat=unknown), _LABELLINGS):
        known = head.labelled(given)
        separate(known, examples)
        if mixed := known.mixed(examples - len(known.found)):
            ways.append((known, mixed))
        elif len(known.found) == examples:
            return known.found, None
    for known, mixed in ways:
        rest = gradient
        if len(known.found):
            inputs, _ = last(known.found)
            slopes = known.slopes(known.found, torch.tensor(known.labels)) @ known.weight
            slopes = (slopes * activation.slope(known.found)).view(-1, *layer.output_shape)
            inputs = inputs.view(-1, *layer.input_shape)
            rest = gradient - last.convolution.weight_gradient(inputs, slopes)
        groups = [
            Group(count, total, partial(_slopes, known, label)) for label, count, total in mixed
        ]
        starts = -(-STARTS // len(ways))
        found = tell_apart(layer, rest, groups, head.precision, rng, starts)
        if found is not None:
            return torch.cat([known.found, found[0]]), found[1]
    return None


def _slopes(head: Head, label: int, values: Tensor) -> Tensor:
    """Return dL/dvalues of examples that share one label."""
    return head.slopes(values, torch.full((len(values),), label)) @ head.weight
