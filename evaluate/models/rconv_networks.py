"""The networks of R-CONV++ and R-GAP, by name.

The papers' figure gives kernels, filters and strides of LeNet, LeNet-x and CNN6. The others follow
the authors' code if there is any. We had to make these choices:

- LeNet-ex appears only in a figure, without numbers in the text: "an extended version of LeNet
  with an increased number of filters". Algorithm 3 inverts every convolution by weight constraints,
  so no layer may have fewer outputs than inputs. At 32 x 32 and with LeNet's strides, this needs at
  least 12, 48, 48 and 48 filters. We use this minimum.
- CNN6-x follows the authors' code (convolutions of 5 x 5 with 12, 16, 3, 3, 3 and 3 filters). The
  paper's caption says that the last layer of CNN6 has 3 filters instead of 128.
- As in the authors' code, the first two activations are leaky ReLUs with a slope of 0.2, whatever
  the later ones are, unless `early` says otherwise. All parameters are drawn from U(-0.5, 0.5).

References:
    Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
    through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
    https://doi.org/10.1007/s00607-025-01508-w
    Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
    https://arxiv.org/abs/2010.07733
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import InputSpace


class ArcTan(nn.Module):
    """The inverse tangent, for which torch has no module."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return atan(x)."""
        return torch.atan(inputs)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "arctan": ArcTan,
    "softplus": nn.Softplus,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
}
"""The activations of these networks."""


def lenet_rconv(
    space: InputSpace, activation: str = "sigmoid", early: str = "leaky_relu"
) -> nn.Module:
    """Return LeNet: four convolutions with 12, 16, 12 and 12 filters."""
    return _network(space, ((12, 2), (16, 2), (12, 1), (12, 1)), activation, early)


def lenet_x(space: InputSpace, activation: str = "sigmoid", early: str = "leaky_relu") -> nn.Module:
    """Return LeNet-x, with fewer filters: 12, 16, 3 and 3."""
    return _network(space, ((12, 2), (16, 2), (3, 1), (3, 1)), activation, early)


def lenet_relu(space: InputSpace, activation: str = "relu", early: str = "relu") -> nn.Module:
    """Return LeNet-x with enough filters for ReLUs everywhere: 77, 22, 3 and 3."""
    return _network(space, ((77, 2), (22, 2), (3, 1), (3, 1)), activation, early)


def lenet_ex(
    space: InputSpace, activation: str = "leaky_relu", early: str = "leaky_relu"
) -> nn.Module:
    """Return LeNet-ex, with more filters: 12, 48, 48 and 48."""
    return _network(space, ((12, 2), (48, 2), (48, 1), (48, 1)), activation, early)


def cnn6_x(space: InputSpace, activation: str = "relu", early: str = "leaky_relu") -> nn.Module:
    """Return CNN6-x: six convolutions with 12, 16, 3, 3, 3 and 3 filters."""
    return _network(space, ((12, 2), (16, 2), (3, 1), (3, 1), (3, 1), (3, 1)), activation, early)


def cnn6(space: InputSpace, activation: str = "leaky_relu", bias: bool = False) -> nn.Module:
    """Return CNN6, the network of R-GAP, at torch's own initialisation.

    Its published task is binary, with one logit: `classes` of the space is 1.
    """
    _check(activation)
    channels, height, width = space.shape
    layers: list[nn.Module] = []
    for filters, kernel, stride, padding in (
        *((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1)),
        *((36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)),
    ):
        layers.append(nn.Conv2d(channels, filters, kernel, stride, padding, bias=bias))
        layers.append(ACTIVATIONS[activation]())
        channels = filters
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    head = nn.Linear(channels * height * width, space.classes, bias=bias)
    return nn.Sequential(*layers, nn.Flatten(), head)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "lenet_rconv": lenet_rconv,
    "lenet_x": lenet_x,
    "lenet_relu": lenet_relu,
    "lenet_ex": lenet_ex,
    "cnn6": cnn6,
    "cnn6_x": cnn6_x,
}
"""The networks by name, as `factory(space, **options)`."""


def _network(
    space: InputSpace, stages: Sequence[tuple[int, int]], activation: str, early: str
) -> nn.Module:
    """Return 5 x 5 convolutions with given filters and strides, and a linear layer."""
    _check(activation)
    _check(early)
    channels, height, width = space.shape
    layers: list[nn.Module] = []
    for place, (filters, stride) in enumerate(stages):
        layers.append(nn.Conv2d(channels, filters, 5, stride, padding=2))
        layers.append(ACTIVATIONS[early if place < 2 else activation]())
        channels, height, width = filters, -(-height // stride), -(-width // stride)
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels * height * width, space.classes)
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}")
