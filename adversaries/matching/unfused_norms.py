"""Normalisation layers, split into two steps so that second derivatives are right in stacks.

If a layer norm or instance norm applies its weight itself, `torch.func.vmap` treats the mean and
the deviation in the weight's gradient as constants. That gradient is right, but its derivative is
wrong, and a search that matches gradients follows that derivative. The derivative of a norm without
a weight is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_AFFECTED = (nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


def unfused_norms(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context that splits the norms of a model, if the model has such norms."""
    affected = any(isinstance(module, _AFFECTED) for module in model.modules())
    return _UnfusedNorms() if affected else nullcontext()


class _UnfusedNorms(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is functional.layer_norm:
            return _layer_norm(*args, **kwargs)
        if func is functional.instance_norm:
            return _instance_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(
    values: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _applied(functional.layer_norm(values, shape, eps=eps), weight, bias)


def _instance_norm(
    values: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *options: Any,  # noqa: ANN401 - passed on unchanged
    **named: Any,  # noqa: ANN401
) -> Tensor:
    normal = functional.instance_norm(
        values, running_mean, running_var, None, None, *options, **named
    )
    channels = (-1, *[1] * (values.dim() - 2))
    weight, bias = (None if one is None else one.view(channels) for one in (weight, bias))
    return _applied(normal, weight, bias)


def _applied(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias
