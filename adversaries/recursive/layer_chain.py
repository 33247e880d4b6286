"""A model as a chain of layers that recursive attacks can go back through.

Recursive attacks [1, 2] know the input of the first linear layer and the slope of the loss there.
They go back from it layer by layer. The model is run once to find its layers, their order and the
functions between them. A function that an attack cannot invert is an `Obstacle`.

References:
    [1] Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
        https://arxiv.org/abs/2010.07733
    [2] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
        through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
        https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..base import in_evaluation
from ..spaces import InputSpace, NotApplicable
from .activations import ACTIVATIONS, Activation

_KEEPS_VALUES = {
    *("flatten", "view", "reshape", "ravel", "unflatten", "squeeze", "unsqueeze", "contiguous"),
    *("clone", "detach", "to", "float", "double", "requires_grad_"),
}
_REASONS = {
    "its derivative is not a function of its output": (
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
    ),
    "pooling discards pixels": (
        *("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d"),
        *("adaptive_avg_pool2d", "adaptive_max_pool2d", "mean", "amax", "lp_pool2d"),
    ),
    "a normalisation is in the way": (
        *("batch_norm", "group_norm", "layer_norm", "instance_norm", "rms_norm"),
        "local_response_norm",
    ),
    "the mask of a dropout is not known": ("dropout", "dropout1d", "dropout2d", "feature_dropout"),
    "attention mixes positions": (
        "softmax",
        "scaled_dot_product_attention",
        "multi_head_attention",
    ),
}
_OBSTACLES = {name: reason for reason, names in _REASONS.items() for name in names}


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer, with the activation behind it.

    A convolution over time is treated as one of images with a height of 1.

    Attributes:
        name: Name of the module in the model.
        weight: W, of shape (filters, channels, height, width) or (outputs, inputs).
        bias: b, if there is one.
        input_shape: Shape of its input, for one example.
        output_shape: Shape of its output, for one example.
        activation: Activation applied to its outputs; None if there is none.
        stride: Stride of a convolution.
        padding: Zeros on either side, of a convolution.
        dilation: Distance between the taps of a convolution's kernel.
        groups: Groups of channels of a convolution.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    activation: Activation | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def is_linear(self) -> bool:
        """Return whether it is a linear layer, not a convolution."""
        return self.weight.ndim == 2

    def parameter(self, name: str) -> str:
        """Return the name of one of its parameters in the model."""
        return f"{self.name}.{name}" if self.name else name


@dataclass(frozen=True)
class Obstacle:
    """A function that an attack cannot go back through.

    Attributes:
        name: Name of the function.
        reason: Why an attack cannot invert it.
    """

    name: str
    reason: str


Path = tuple[Layer | Obstacle, ...]
"""Layers and obstacles, in the order in which a model runs them."""


def trace(model: nn.Module, shape: Sequence[int]) -> Path:
    """Return the layers and obstacles on an example's way through a model.

    On the meta device, nothing is computed.

    Args:
        model: The model. It is not changed.
        shape: Shape of one example.
    """
    some = next((value for value in model.parameters() if value.is_floating_point()), None)
    if some is None:
        raise NotApplicable("the model has no parameters")
    example = torch.zeros(1, *shape, dtype=some.dtype, device=some.device)
    names = {id(value): name for name, value in model.named_parameters()}
    tracer = _Tracer(names, example, training=model.training)
    with in_evaluation(model), torch.no_grad(), tracer:
        model(example)
    return tuple(tracer.path)


def chain(model: nn.Module, space: InputSpace) -> tuple[Layer, ...]:
    """Return the layers from the inputs to the last one, if no obstacle is in between.

    Raises:
        NotApplicable: If there is an obstacle before the first linear layer.
    """
    if not space.continuous:
        raise NotApplicable("token inputs are embedded before any layer")
    return passable(trace(model, space.shape))


def passable(path: Iterable[Layer | Obstacle]) -> tuple[Layer, ...]:
    """Return the layers up to the first obstacle after the first linear layer.

    Raises:
        NotApplicable: If an obstacle comes earlier, or there is no linear layer.
    """
    layers: list[Layer] = []
    for step in path:
        reached = bool(layers) and layers[-1].is_linear
        if isinstance(step, Obstacle):
            if reached:
                break
            raise NotApplicable(f"{step.name}: {step.reason}")
        if reached and not step.is_linear:
            break
        layers.append(step)
    if not layers or not layers[-1].is_linear:
        raise NotApplicable("the model has no linear layer to start from")
    return tuple(layers)


class _Tracer(TorchFunctionMode):
    """Follows an example through the functions that are applied to it."""

    def __init__(self, names: Mapping[int, str], example: Tensor, *, training: bool) -> None:
        super().__init__()
        self.names, self.training = names, training
        self.path: list[Layer | Obstacle] = []
        self.seen: dict[int, Tensor] = {id(example): example}  # kept alive, so ids stay unique

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        sources = {id(value): value for value in _tensors((*args, *kwargs.values()))}
        followed = [value for key, value in sources.items() if key in self.seen]
        shape = tuple(followed[0].shape[1:]) if followed else ()
        result = func(*args, **kwargs)
        made = list(_tensors([result]))
        if not followed or not made:
            return result
        self.seen |= {id(value): value for value in made}
        name = getattr(func, "__name__", repr(func))
        if len(followed) > 1:
            reason = "branches are joined, as by a residual connection"
            self.path.append(Obstacle(name, reason))
        else:
            self._step(name, args, kwargs, shape, tuple(made[0].shape[1:]))
        return result

    def _step(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        shape: tuple[int, ...],
        output: tuple[int, ...],
    ) -> None:
        name = name.rstrip("_") if not name.startswith("__") else name
        if name in _KEEPS_VALUES or (name == "adaptive_avg_pool2d" and shape == output):
            return
        if "dropout" in name and not self._drops(*args, **kwargs):
            return
        last = self.path[-1] if self.path else None
        if name in ACTIVATIONS and isinstance(last, Layer) and last.activation is None:
            activation = ACTIVATIONS[name](*args[1:], **_without(kwargs, "input"))
            self.path[-1] = replace(last, activation=activation)
        elif name == "linear":
            self.path.append(self._linear(args, kwargs, shape, output))
        elif name in ("conv1d", "conv2d"):
            self.path.append(self._convolution(args, kwargs, shape, output))
        else:
            reason = _OBSTACLES.get(name, "the attack cannot invert this function")
            if name in ACTIVATIONS:
                if isinstance(last, Obstacle):
                    return  # an obstacle is already recorded
                reason = "an activation that does not follow a layer"
            self.path.append(Obstacle(name, reason))

    def _drops(
        self, values: Tensor, p: float = 0.5, training: bool = True, *_: object, **__: object
    ) -> bool:
        """Return whether a dropout acts when the client trains; in this trace it is off."""
        return p > 0 and (training or self.training)

    def _linear(
        self, args: Sequence[Any], kwargs: dict[str, Any], *shapes: tuple[int, ...]
    ) -> Layer | Obstacle:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        if len(shapes[0]) != 1:
            return Obstacle("linear", "a linear layer is applied at several positions")
        return self._named(named["weight"], named.get("bias"), *shapes)

    def _convolution(
        self, args: Sequence[Any], kwargs: dict[str, Any], *shapes: tuple[int, ...]
    ) -> Layer | Obstacle:
        keys = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        named = dict(zip(keys, args, strict=False)) | kwargs
        weight = named["weight"]
        flat = weight.ndim == 3
        sizes = {key: _pair(named.get(key, default), flat, default) for key, default in _DEFAULTS}
        if named.get("padding") == "same":
            taps, dilation = [1] * flat + [*weight.shape[2:]], sizes["dilation"]
            totals = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
            if any(total % 2 for total in totals):
                return Obstacle("conv", "its padding differs between the two sides")
            sizes["padding"] = (totals[0] // 2, totals[1] // 2)
        images = [(shape[0], 1, *shape[1:]) if flat else shape for shape in shapes]
        found = self._named(weight, named.get("bias"), *images)
        if isinstance(found, Obstacle):
            return found
        if flat:
            found = replace(found, weight=weight.unsqueeze(2))
        groups = int(named.get("groups", 1))
        return replace(found, groups=groups, **sizes)  # type: ignore[arg-type]

    def _named(
        self,
        weight: Tensor,
        bias: Tensor | None,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
    ) -> Layer | Obstacle:
        name = self.names.get(id(weight))
        if name is None or not name.endswith("weight"):
            return Obstacle("weight", "the weights of a layer are not parameters of the model")
        name = name.removesuffix("weight").removesuffix(".")
        return Layer(name, weight, bias, input_shape, output_shape)


_DEFAULTS = (("stride", 1), ("padding", 0), ("dilation", 1))


def _pair(value: int | str | Sequence[int], flat: bool, default: int) -> tuple[int, int]:
    """Return an option of a convolution for both axes; `valid` and `same` give the default."""
    if isinstance(value, str):
        return (default, default)
    values = [value] if isinstance(value, int) else [*value]
    return (default, values[0]) if flat else (values[0], values[-1])


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}
