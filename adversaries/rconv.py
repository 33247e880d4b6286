"""R-CONV++: convolutions inverted analytically, from gradients and from weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Generator

from .base import Adversary, Observation, Reconstruction
from .layer_chain import Layer, chain
from .layer_system import Use, WeightInverse
from .recursion import gradients_of, invert, on_cpu
from .softmax_head import Head, separate
from .spaces import NotApplicable


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
    their rows (`softmax_head`).

    Attributes:
        constraints: `both` kinds together, or `either` one of them for a layer.
        separation: What is done about mixed rows of a batch: nothing if `rows` are taken as they
            are, as in the paper; or `peeling`.

    References:
        [1] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy
            Vulnerabilities through Analytical Gradient Inversion Attacks." Computing 107:156,
            2025. https://doi.org/10.1007/s00607-025-01508-w
    """

    cost: ClassVar[int] = 3  # exact, but its systems take as long as a search

    constraints: Use = "both"
    separation: Literal["rows", "peeling"] = "peeling"

    def __post_init__(self) -> None:
        if self.constraints not in ("both", "either"):
            raise ValueError(f"constraints must be 'both' or 'either', got {self.constraints!r}")
        if self.separation not in ("rows", "peeling"):
            raise ValueError(f"separation must be 'rows' or 'peeling', got {self.separation!r}")

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
        return self._batch(observation, layers)

    def _batch(self, observation: Observation, layers: Sequence[Layer]) -> Reconstruction:
        """Return the examples of a batch; those with a confidence of 1 are single ones."""
        head, inverses = layers[-1], [WeightInverse(layer) for layer in layers[:-1]]
        gradients = gradients_of(observation, layers)
        assert head.bias is not None
        last = inverses[-1] if inverses and inverses[-1].redundant else None
        batch = Head(
            head.weight.detach().double(),
            head.bias.detach().double(),
            observation.batch_size * gradients.of(head, "weight"),
            observation.batch_size * gradients.of(head, "bias"),
            observation.loss,
            gradients.precision,
            None if last is None else lambda vectors: last(vectors)[1],
        )
        values, certain = separate(batch, observation.batch_size, peel=self.separation == "peeling")
        if not len(values):
            raise NotApplicable("the gradient of the last layer is zero")
        residuals: dict[str, float] = {}
        for inverse in reversed(inverses):
            values, rest = inverse(values)
            residuals[inverse.layer.name] = float(rest[certain].max()) if certain.any() else 1.0
        inputs = values.view(-1, *observation.space.shape).nan_to_num(0.0, 0.0, 0.0)
        inputs = observation.space.clamp(inputs).to(observation.update[head.parameter("weight")])
        return Reconstruction(inputs, confidence=certain.to(inputs), residuals=residuals)
