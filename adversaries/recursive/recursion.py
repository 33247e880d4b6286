"""The way back through a model, from the input of a linear layer to the example.

This module holds the common parts of R-GAP and R-CONV. The values of a layer's output and the
slope of the loss there are known, each up to an error. If the activation's derivative is a
function of its output, they give the layer's z and dL/dz, and hence constraints on its input
(`constraints`). Errors are carried along: rows of a system are divided by their standard
deviations. The residual of a layer tells whether its system is consistent. If it is not, the
recursion broke there.

References:
    [1] Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
        https://arxiv.org/abs/2010.07733
    [2] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
        through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
        https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar

import torch
from torch import Generator, Tensor

from ..base import Observation, Reconstruction
from ..spaces import NotApplicable
from .layer_chain import Layer
from .layer_system import FINAL, PASSING, Gradients, Known, System, Use, slope_of

SPARE = 1e-3
"""Accuracy of a solution, relative to the uncertainty of the values that it is computed from."""


@dataclass(frozen=True)
class Step:
    """How a layer's input was found.

    Attributes:
        layer: The layer's name.
        constraints: The constraints that were used: `weight`, `gradient` or `both`.
        residual: Part of the constraints' norm that the input does not explain.
        deviation: Estimated standard deviation of an entry of the input.
    """

    layer: str
    constraints: str
    residual: float
    deviation: float


def gradients_of(observation: Observation, layers: Sequence[Layer]) -> Gradients:
    """Return the gradients of an upload. The sum of several clients counts as one batch.

    Raises:
        NotApplicable: If the upload is not a gradient at one set of weights, or lacks a layer.
    """
    if any(model is not observation.models[0] for model in observation.models):
        raise NotApplicable("the server sees only a sum over clients with different models")
    if observation.local_steps > 1:
        raise NotApplicable("several local steps: the update is not a gradient at known weights")
    names = [layer.parameter("weight") for layer in layers]
    names += [layer.parameter("bias") for layer in layers if layer.bias is not None]
    missing = [name for name in names if name not in observation.update]
    if missing:
        raise NotApplicable(f"{missing[0]!r} is frozen, so the update does not contain it")
    values = {name: observation.as_gradient(name).double() for name in names}
    return Gradients(values, torch.finfo(observation.update[names[0]].dtype).eps)


def start(layer: Layer, gradients: Gradients) -> tuple[Known, float] | None:
    """Return the input of a linear layer with a bias [2, Eq. 6 and 9], and the noise.

    All rows of dL/dW are multiples of the input, with the factors dL/db. The rest is noise.

    Returns:
        The input, and the standard deviation of a gradient's entries. None if dL/db is zero.
    """
    weight, bias = gradients.of(layer, "weight"), gradients.of(layer, "bias")
    power = bias.square().sum()
    if not power > 0 or not weight.isfinite().all() or not power.isfinite():
        return None
    values = bias @ weight / power
    rest = weight - torch.outer(bias, values)
    degrees = max(1, (len(bias) - 1) * len(values))
    noise = float((rest.square().sum() / degrees).sqrt())
    rounding = gradients.precision * float(values.square().mean().sqrt())
    slopes = bias @ layer.weight.detach().double()
    deviation = torch.tensor(noise / math.sqrt(float(power)) + rounding, dtype=torch.float64)
    return Known(values, slopes, deviation), noise


def back(
    layers: Sequence[Layer], known: Known, gradients: Gradients, use: Use = "both"
) -> tuple[Tensor, tuple[Step, ...]]:
    """Go back through layers, last to first; return the first layer's input and all steps.

    Args:
        layers: Layers in the order in which they run.
        known: What is known about the last layer's output.
        gradients: The gradients of the layers.
        use: Which constraints to use.

    Raises:
        NotApplicable: If a layer has too few constraints.
    """
    steps: list[Step] = []
    for layer in reversed(layers):
        if layer.is_linear:
            known, step = _linear(layer, known, gradients)
        else:
            final = max(FINAL, 0.1 * gradients.precision)
            accuracy = max(final if layer is layers[0] else PASSING, SPARE * _uncertainty(known))
            known, step = _convolution(layer, known, gradients, use, accuracy)
        steps.append(step)
    return known.values, tuple(reversed(steps))


Attack = TypeVar("Attack")
Reconstruct = Callable[[Attack, Observation, Generator], Reconstruction]


def on_cpu(reconstruct: Reconstruct[Attack]) -> Reconstruct[Attack]:
    """Return an attack that runs on the CPU, whatever the device of the upload.

    Its systems are small and in double precision. LAPACK's routines for bands solve them.
    """

    @wraps(reconstruct)
    def attack(self: Attack, observation: Observation, rng: Generator) -> Reconstruction:
        device = next(iter(observation.update.values())).device
        if device.type == "cpu":
            return reconstruct(self, observation, rng)
        here = replace(
            observation,
            models=tuple(copy.deepcopy(model).cpu() for model in observation.models),
            update={name: value.cpu() for name, value in observation.update.items()},
            targets=None if observation.targets is None else observation.targets.cpu(),
        )
        with torch.device("cpu"):
            found = reconstruct(self, here, rng)
        return replace(found, inputs=found.inputs.to(device))

    return attack


def invert(observation: Observation, layers: Sequence[Layer], use: Use = "both") -> Reconstruction:
    """Return the one example behind an upload, from the input of a linear layer with a bias.

    Args:
        observation: The upload.
        layers: The layers up to that linear layer.
        use: Which constraints to use.
    """
    gradients = gradients_of(observation, layers)
    begun = start(layers[-1], gradients)
    like = observation.update[layers[-1].parameter("weight")]
    shape = (1, *observation.space.shape)
    if begun is None:
        return Reconstruction(torch.zeros(shape).to(like), confidence=torch.zeros(1))
    known, noise = begun
    return explained(observation, layers[:-1], known, replace(gradients, noise=noise), use)


def explained(
    observation: Observation,
    layers: Sequence[Layer],
    known: Known,
    gradients: Gradients,
    use: Use,
    *,
    clamp: bool = True,
) -> Reconstruction:
    """Return the example, given what is known about the output of the last layer."""
    values, steps = back(layers, known, gradients, use)
    inputs = values.reshape(1, *observation.space.shape).nan_to_num(0.0, 0.0, 0.0)
    residuals = {step.layer: step.residual for step in steps}
    worst = max(residuals.values(), default=0.0)
    like = observation.update[next(iter(observation.update))]
    return Reconstruction(
        (observation.space.clamp(inputs) if clamp else inputs).to(like),
        confidence=torch.tensor([max(0.0, 1 - worst) if math.isfinite(worst) else 0.0]),
        residuals=residuals,
    )


def _uncertainty(known: Known) -> float:
    """Return the deviation of the known values, relative to their size."""
    deviation = known.deviation.square().mean().sqrt()
    return float(deviation / known.values.square().mean().sqrt().clamp(min=1e-300))


def _linear(layer: Layer, known: Known, gradients: Gradients) -> tuple[Known, Step]:
    """Return the input of a linear layer, from dL/dW = k x^T."""
    slopes = known.slopes * slope_of(layer, known, gradients)
    gradient, power = gradients.of(layer, "weight"), slopes.square().sum()
    if not power > 0:
        raise NotApplicable(f"the gradient vanishes at layer {layer.name!r}")
    values = slopes @ gradient / power
    rest = gradient - torch.outer(slopes, values)
    degrees = max(1, (len(slopes) - 1) * len(values))
    deviation = (rest.square().sum() / degrees / power).sqrt()
    deviation = deviation + gradients.precision * values.square().mean().sqrt()
    step = Step(layer.name, "gradient", float(rest.norm() / gradient.norm()), float(deviation))
    return Known(values, slopes @ layer.weight.detach().double(), deviation), step


def _convolution(
    layer: Layer, known: Known, gradients: Gradients, use: Use, accuracy: float
) -> tuple[Known, Step]:
    system = System(layer, known, gradients, accuracy)
    if use == "blocks":
        system.balance()
    inputs, used, deviation = system.solve(use)
    residual = system.residual(inputs, used)
    slopes = system.convolution.back(system.slopes)
    step = Step(layer.name, used, residual, float(deviation.square().mean().sqrt()))
    return Known(inputs.flatten(), slopes.flatten(), deviation), step
