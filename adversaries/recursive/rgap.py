"""R-GAP: the recursive gradient attack, which works without a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from ..spaces import InputSpace, NotApplicable
from .layer_chain import Layer, chain
from .layer_system import Gradients, Known, Use
from .recursion import back, explained, gradients_of, invert, on_cpu

_SCALES = 4000
"""Number of scales at which the scalar equation is evaluated."""


@dataclass(frozen=True)
class RGAP(Adversary):
    """Go back through a network by weight and gradient constraints, layer by layer [1].

    Without a bias, the last layer's gradient k x^T gives k and x up to a scale. A scalar equation
    fixes the scale: the slope of the loss at the logits W x must be k. The attack does not need the
    label. With a wrong label, x has the wrong sign, and the constraints of the layer before
    contradict each other. If there are several roots, they differ in the scale of the example. The
    attack keeps the root whose pixels lie in range. The paper solves the equation for one logit
    and the logistic loss. Here it is solved for the observation's own loss and any number of
    classes. With a bias, dL/db is the scale.

    Each layer's input is the least-squares solution of both kinds of constraints. The two blocks
    count equally (`balance="blocks"`), or each row is weighted by its accuracy (`"rows"`). Outputs
    are inverted at every layer, so the attack does not work with ReLUs.

    Attributes:
        balance: How the two kinds of constraints are weighted.

    References:
        [1] Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
            https://arxiv.org/abs/2010.07733
    """

    cost: ClassVar[int] = 3  # exact, but its systems take as long as a search

    balance: Literal["blocks", "rows"] = "blocks"

    def __post_init__(self) -> None:
        if self.balance not in ("blocks", "rows"):
            raise ValueError(f"balance must be 'blocks' or 'rows', got {self.balance!r}")

    @on_cpu
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the example, with the residual of each layer."""
        layers = chain(observation.model, observation.space)
        if observation.batch_size > 1:
            raise NotApplicable("for a batch, the attack would find only a mean of the examples")
        for layer in layers[:-1]:
            if layer.activation is not None and layer.activation.partial:
                raise NotApplicable(
                    f"the activation of layer {layer.name!r}, {layer.activation.name}, has no "
                    "inverse"
                )
        use: Use = "blocks" if self.balance == "blocks" else "both"
        first = next((i for i, layer in enumerate(layers) if _has_bias(layer)), None)
        if first is not None:
            return invert(observation, layers[: first + 1], use)
        if layers[-1].activation is not None:
            raise NotApplicable("without a bias, the recursion starts from logits, not activations")
        gradients = gradients_of(observation, layers)
        starts = _starts(observation, layers[-1], gradients.of(layers[-1], "weight"))
        if not starts:
            raise NotApplicable("no scale of the last layer's gradient fits the loss")
        if len(layers) > 1:
            misfits = [_misfit(layers[-2], known, gradients) for known in starts]
            best = max(10 * min(misfits), 1e-6)
            starts = [k for k, misfit in zip(starts, misfits, strict=True) if misfit <= best]
        guesses = [
            explained(observation, layers[:-1], known, gradients, use, clamp=False)
            for known in starts
        ]
        chosen = min(guesses, key=lambda guess: _implausible(observation.space, guess.inputs))
        return replace(chosen, inputs=observation.space.clamp(chosen.inputs))


def _has_bias(layer: Layer) -> bool:
    return layer.is_linear and layer.bias is not None


def _misfit(layer: Layer, known: Known, gradients: Gradients) -> float:
    """Return how strongly the weight and gradient constraints of a layer disagree."""
    _, (step,) = back([layer], known, gradients, "blocks")
    return step.residual


def _implausible(space: InputSpace, inputs: Tensor) -> tuple[bool, float]:
    """Return a sort key: inputs in the range of the data first, then those with the largest norm.

    A network without biases is homogeneous, so roots differ only by the scale of the example.
    """
    outside = float((inputs - space.clamp(inputs)).norm() / inputs.norm().clamp(min=1e-30))
    return outside > 0.05, outside if outside > 0.05 else -float(inputs.norm())


def _starts(observation: Observation, head: Layer, gradient: Tensor) -> list[Known]:
    """Return possible inputs of the last layer, one for each root of the scalar equation.

    dL/dW = k x^T is u v^T with k = t u and x = v / t. The scale t is such that the slope of the
    loss at W v / t is t u.
    """
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    if not values[0] > 0:
        return []
    direction, features = left[:, 0], values[0] * right[0]
    weight = head.weight.detach().double()
    logits = weight @ features
    labels = observation.targets
    if labels is None:
        labels = torch.arange(max(2, observation.space.classes))
    size = gradient.norm()
    grid = torch.logspace(-8, 4, _SCALES, dtype=torch.float64)
    found = []
    for label in labels:
        for sign in (1.0, -1.0):
            scales = sign * grid
            errors = _mismatch(observation, logits, direction, scales, label)
            inner = (errors[1:-1] < errors[:-2]) & (errors[1:-1] <= errors[2:])
            inner &= errors[1:-1] < 0.2
            for place in (inner.nonzero().flatten() + 1).tolist():
                scale, error = _refined(
                    observation, logits, direction, scales[place - 1 : place + 2], label
                )
                if error < 1e-3:
                    found.append((error, scale))
    deviation = torch.finfo(observation.update[head.parameter("weight")].dtype).eps * size
    chosen = sorted(found)[:4]
    return [
        Known(features / t, t * direction @ weight, (deviation / abs(t)).clamp(min=1e-15))
        for _, t in chosen
    ]


def _mismatch(
    observation: Observation, logits: Tensor, direction: Tensor, scales: Tensor, label: Tensor
) -> Tensor:
    """Return the relative distance between the slope of the loss and t u, for many t."""
    outputs = (logits / scales.unsqueeze(1)).requires_grad_()
    labels = label.expand(len(scales))
    total = observation.loss(outputs, labels) * len(scales)  # the loss is a mean
    (slopes,) = torch.autograd.grad(total, outputs)
    expected = scales.unsqueeze(1) * direction
    errors: Tensor = (slopes - expected).norm(dim=1) / expected.norm(dim=1)
    return errors.nan_to_num(torch.inf)


def _refined(
    observation: Observation, logits: Tensor, direction: Tensor, bracket: Tensor, label: Tensor
) -> tuple[float, float]:
    """Return the best t of a bracket, found by narrowing it, and its error."""
    low, high = float(bracket[0]), float(bracket[-1])
    for _ in range(12):
        scales = torch.linspace(low, high, 41, dtype=torch.float64)
        errors = _mismatch(observation, logits, direction, scales, label)
        best = int(errors.argmin())
        low, high = (float(scales[min(max(best + step, 0), 40)]) for step in (-1, 1))
    return float(scales[best]), float(errors[best])
