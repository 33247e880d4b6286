"""R-CONV++: convolutions inverted analytically, from gradients and from weights."""

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
"""Part of a vector, or of a gradient, that need not be explained."""
_OUTSIDE = 0.1
"""Part of an example that may lie outside of the data's range."""
_OFF, _MOVE = 1e-7, 1e-10
"""Relative errors of vectors: of what is one example up to rounding, and to see what they do."""
_LABELLINGS = 16
"""Most ways to give labels to examples that were found without one."""


@dataclass(frozen=True)
class RCONV(Adversary):
    """Read the example off the gradients of convolutions, layer by layer [1].

    **One example** (Algorithms 1 and 2). The first linear layer gives away its input, dL/dW over
    dL/db, and the slope of the loss there, W^T dL/db. Behind an activation whose derivative is a
    function of its output, also a ReLU, the slope is that of the convolution before, whose weight
    gradient is then a linear system in its input: gradient constraints. Where these are too few,
    as in early layers with large maps, outputs that can be inverted add weight constraints. By
    default both are solved together, each row by how well it is known; `constraints="either"`
    takes one kind per layer, as published. An upload in single precision is enough.

    **A batch** (Algorithm 3). A row of the last layer's dL/dW over dL/db is a mean of what its
    examples gave, dominated by one of them for most classes. Each goes back through the
    convolutions by weight constraints alone. Unlike the paper, rows are taken for an example only
    if its own gradient explains them, and found ones are subtracted, which leaves others alone in
    their rows (`softmax_head`). Those that are never alone are told apart by the gradient of the
    last convolution (`mixed_rows`). Where all were found, gradients correct what weights lose
    (`weak_directions`).

    Attributes:
        constraints: `both` kinds together, or `either` one of them for a layer.
        separation: What is done about mixed rows of a batch: nothing if `rows` are taken as they
            are, as in the paper; `peeling` of the last layer; or also the last convolution,
            `bilinear`.

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
            raise NotApplicable("of a batch, a linear layer gives examples if it gives the logits")
        return self._batch(observation, layers, rng)

    def _batch(
        self, observation: Observation, layers: Sequence[Layer], rng: Generator
    ) -> Reconstruction:
        """Return the examples of a batch; those with a confidence of 1 are single ones."""
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
        if not certain.any():  # mixtures go back as well as examples do
            residuals = dict.fromkeys(residuals, 1.0)
        inputs = values.view(-1, *observation.space.shape).nan_to_num(0.0, 0.0, 0.0)
        inputs = observation.space.clamp(inputs).to(observation.update[head.parameter("weight")])
        return Reconstruction(inputs, confidence=certain.to(inputs), residuals=residuals)


def _pixels(inverses: Sequence[WeightInverse], values: Tensor) -> Tensor:
    """Return the examples for what the last activation gave, by weights."""
    for inverse in reversed(inverses):
        values, _ = inverse(values)
    return values


def _loss_of_digits(inverses: Sequence[WeightInverse], values: Tensor) -> Tensor:
    """Return how far examples would move, if values had relative errors of 1."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(values.shape, generator=rng, dtype=values.dtype)
    moved = _pixels(inverses, values * (1 + _MOVE * noise)) - _pixels(inverses, values)
    lost: Tensor = moved.norm(dim=1) / _MOVE
    return lost


def _of_images(gradients: Gradients, layer: Layer) -> Tensor:
    """Return dL/dW of a convolution, one over time as of images with a height of 1."""
    gradient = gradients.of(layer, "weight")
    return gradient if gradient.ndim == 4 else gradient.unsqueeze(2)


def _back(
    inverses: Sequence[WeightInverse],
    gradients: Sequence[Tensor],
    values: Tensor,
    slopes: Tensor | None,
    told: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """Go back through convolutions, last to first; return inputs, and a residual of each layer.

    Args:
        inverses: The way back through each layer by its weights.
        gradients: dL/dW of each, summed over the batch.
        values: What the last one's activation gave, by example.
        slopes: dL/dvalues, if the examples are the whole batch: gradients then correct what weights
            give.
        told: What the last layer was given for the last examples, if it is known.
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
    """Return what the last convolution's activation gave for all examples, and inputs of some.

    The last ones are those that the head left mixed, if any, whose inputs come along.

    Args:
        head: The last layer's gradient, less what was found.
        last: The way back through the last convolution.
        gradient: Its dL/dW, summed over the batch.
        examples: How many the batch has.
        rng: Source of starts.
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
    """Return dL/dvalues of examples with one label."""
    return head.slopes(values, torch.full((len(values),), label)) @ head.weight
