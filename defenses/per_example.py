"""Gradients example by example, on Opacus: what DP-SGD and an inspection of batches share."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from .base import Batch, Loss, Update, trainable


def mixing_layer(model: nn.Module) -> str | None:
    """Return which layer mixes the examples of a batch, if any does."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return f"layer {name!r} is a BatchNorm, which mixes the examples of a batch"
    return None


def replica(model: nn.Module) -> nn.Module:
    """Copy a model for Opacus.

    Parameters that an earlier local step computed become leaves, and nothing works in place, which
    hooks do not allow.
    """
    leaves = {
        id(value): nn.Parameter(
            value.detach().clone(), value.requires_grad or not isinstance(value, nn.Parameter)
        )
        for value in model.parameters()
    }
    copied = copy.deepcopy(model, leaves)
    for module in copied.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False
        if module._parameters:
            module.training = True  # Opacus's hooks ask for it; dropout stays as it is
    return copied


def ghost_module(model: nn.Module, max_grad_norm: float = 1.0) -> Any:  # noqa: ANN401 - untyped
    """Return a model whose backward pass leaves the norms of all examples' gradients behind."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping  # slow to import

    return GradSampleModuleFastGradientClipping(model, max_grad_norm=max_grad_norm)


def example_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each example."""
    return vmap(lambda o, y: loss(o.unsqueeze(0), y.unsqueeze(0)))(outputs, targets)


def gradient_norms(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return the norm of each example's gradient by each parameter, up to a common factor.

    By ghost norms: the gradients themselves are not computed.
    """
    module = ghost_module(replica(model))
    with warnings.catch_warnings():
        # Per-example gradients of parameters need no gradient of the inputs.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        example_losses(loss, module(batch.inputs), batch.targets).sum().backward()
    # A squared norm of nearly nothing may come out below zero.
    parameters: dict[str, Any] = trainable(module._module)
    return {name: p._norm_sample.nan_to_num(0.0) for name, p in parameters.items()}
