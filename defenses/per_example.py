"""Gradients of single examples: clipped, and whether there is such a thing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .base import Batch, Defense, Loss, Update, trainable


@dataclass
class ClippedGradient(Defense):
    """The mean of per-example clipped gradients: what can be replayed of DP-SGD.

    Differentiable, unlike Opacus's hooks, and equal to `DPSGD` without noise.
    """

    max_grad_norm: float
    clipping: str = "flat"
    _batch_size: int | None = field(default=None, init=False, repr=False, compare=False)

    def expect(self, batch_size: int) -> None:
        """Divide by this from now on."""
        self._batch_size = batch_size

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the clipped mean gradient."""
        gradients = example_gradients(model, loss, batch)
        factors = self._factors({name: g.flatten(1).norm(dim=1) for name, g in gradients.items()})
        size = self._batch_size or len(batch.inputs)
        return {
            name: torch.einsum("i,i...->...", factors[name], g) / size
            for name, g in gradients.items()
        }

    def _factors(self, norms: Update) -> Update:
        """Return what each example's gradient is multiplied by, in Opacus's own form."""
        if self.clipping == "per_layer":
            bound = self.max_grad_norm / math.sqrt(len(norms))
            return {name: (bound / (norm + 1e-6)).clamp(max=1.0) for name, norm in norms.items()}
        together = torch.stack(list(norms.values())).norm(dim=0)
        return dict.fromkeys(norms, (self.max_grad_norm / (together + 1e-6)).clamp(max=1.0))


def example_gradients(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return every example's gradient: at once, or one by one where layers cannot be vectorised."""
    parameters = trainable(model)

    def example_loss(parameters: Update, example: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, parameters, (example.unsqueeze(0),))
        return loss(output, target.unsqueeze(0))

    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        each = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")  # dropout
        return cast(Update, each(parameters, *batch))
    ones = [grad(example_loss)(parameters, *one) for one in zip(*batch, strict=True)]
    return {name: torch.stack([one[name] for one in ones]) for name in parameters}


MIXED = 1e-3
"""Relative change of one example's output, or of a loss, from which on it is no rounding."""


def check_apart(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise if an example's output, or its share of the loss, depends on other examples.

    By what they do: an example is looked at beside itself and beside another one.

    Args:
        model: A copy, whose buffers may change.
        loss: Mean loss of a batch.
        batch: At least one example.

    Raises:
        ValueError: If they do; it says which.
    """
    inputs, targets = (values[:1] for values in batch)
    other = torch.zeros_like(inputs) if inputs.any() else torch.ones_like(inputs)
    last = batch.targets[-1:]
    pairs = [torch.cat([inputs, one]) for one in (inputs, other)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        outputs = []
        for pair in pairs:
            torch.set_rng_state(state)  # the same dropout
            outputs.append(model(pair))
        alone = torch.stack(
            [loss(outputs[1][i : i + 1], y) for i, y in enumerate((targets, last))]
        ).mean()
        together = loss(outputs[1], torch.cat([targets, last]))
    beside_itself, beside_another = (one[0] for one in outputs)
    change = (beside_itself - beside_another).abs().max()
    if not change <= MIXED * beside_itself.abs().max().clamp(min=1e-6):
        raise ValueError(
            "the model mixes the examples of a batch: one's output changes with another's input "
            "(statistics over the batch, attention along the wrong axis, ...), so that clipping "
            "each example's gradient bounds nothing. Use layers that treat examples apart, such as "
            "GroupNorm, or batch_first=True"
        )
    if not (together - alone).abs() <= MIXED * alone.abs().clamp(min=1e-6):
        raise ValueError(
            "the loss mixes the examples of a batch: it is not the mean of the losses of each "
            "(weights normalised over the batch, contrastive losses, ...), so that clipping each "
            "example's gradient bounds nothing"
        )
