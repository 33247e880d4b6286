"""Activations whose derivative is a function of their output, and how to go back through them.

References:
    Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
    through Analytical Gradient Inversion Attacks." Computing 107:156, 2025, Table 1.
    https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SMALLEST = 1e-14
"""Distance from the ends of an activation's range within which an inverse would be infinite."""


@dataclass(frozen=True)
class Activation:
    """An activation A whose derivative is a function of its output x = A(z).

    Attributes:
        name: Its name.
        slope: Maps x to A'(z).
        inverse: Maps x to z. If `partial`, this holds only where x is positive.
        partial: Whether outputs that are not positive give only a bound on z.
        curvature: Maps x to |A''(z) / A'(z)^2|: how much an error of x changes the logarithm of
            the slope.
        kinked: Whether the slope has one value for negative and another for positive outputs.
    """

    name: str
    slope: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor] = torch.zeros_like
    partial: bool = False
    kinked: bool = False


def _sigmoid() -> Activation:
    def inside(x: Tensor) -> Tensor:
        return x.clamp(_SMALLEST, 1 - _SMALLEST)

    return Activation(
        "sigmoid",
        lambda x: inside(x) * (1 - inside(x)),
        lambda x: torch.logit(inside(x)),
        lambda x: (1 - 2 * x).abs() / (inside(x) * (1 - inside(x))),
    )


def _tanh() -> Activation:
    def inside(x: Tensor) -> Tensor:
        return x.clamp(_SMALLEST - 1, 1 - _SMALLEST)

    return Activation(
        "tanh",
        lambda x: 1 - inside(x).square(),
        lambda x: torch.atanh(inside(x)),
        lambda x: 2 * x.abs() / (1 - inside(x).square()),
    )


def _arctan() -> Activation:
    def inside(x: Tensor) -> Tensor:
        return x.clamp(_SMALLEST - math.pi / 2, math.pi / 2 - _SMALLEST)

    return Activation(
        "arctan",
        lambda x: inside(x).cos().square(),
        lambda x: torch.tan(inside(x)),
        lambda x: 2 * torch.tan(inside(x)).abs(),
    )


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    def inside(x: Tensor) -> Tensor:
        return x.clamp(min=_SMALLEST)

    return Activation(
        "softplus",
        lambda x: -torch.expm1(-beta * inside(x)),
        lambda x: inside(x) + torch.log(-torch.expm1(-beta * inside(x))) / beta,
        lambda x: beta * torch.exp(-beta * inside(x)) / -torch.expm1(-beta * inside(x)),
    )


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Activation:
    if not negative_slope > 0:
        return replace(_relu(), name="leaky_relu with slope 0")
    return Activation(
        "leaky_relu",
        lambda x: torch.ones_like(x).where(x >= 0, negative_slope),
        lambda x: torch.where(x < 0, x / negative_slope, x),
        kinked=True,
    )


def _elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Activation:
    def inside(x: Tensor) -> Tensor:
        return x.clamp(min=_SMALLEST - alpha)

    return Activation(
        "elu",
        lambda x: torch.where(x < 0, inside(x) + alpha, 1.0),
        lambda x: torch.where(x < 0, torch.log1p(inside(x).clamp(max=0) / alpha), x),
        lambda x: torch.where(x < 0, 1 / (inside(x) + alpha), 0.0),
    )


def _relu(inplace: bool = False) -> Activation:
    return Activation("relu", lambda x: (x > 0).to(x), lambda x: x, partial=True, kinked=True)


ACTIVATIONS: dict[str, Callable[..., Activation]] = {
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "atan": _arctan,
    "arctan": _arctan,
    "softplus": _softplus,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "relu": _relu,
}
"""Activations that an attack can go back through, by the name of torch's function. Each is called
with the options of that function."""
