"""Gradients of single examples: clip them, and check that a model does not mix examples."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .base import Batch, Defense, Loss, Update, trainable


@dataclass
class ClippedGradient(Defense):
    """The mean of per-example clipped gradients: the replay of DP-SGD.

    It is differentiable, unlike Opacus's hooks, and equals `DPSGD` without noise.
    """

    max_grad_norm: float
    clipping: str = "flat"
    _batch_size: int | None = field(default=None, init=False, repr=False, compare=False)

    def expect(self, batch_size: int) -> None:
        """Divide by this batch size from now on."""
        self._batch_size = batch_size

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the clipped mean gradient."""
        gradients = example_gradients(model, loss, batch)
        factors = self.factors({name: g.flatten(1).norm(dim=1) for name, g in gradients.items()})
        size = self._batch_size or len(batch.inputs)
        return {
            name: torch.einsum("i,i...->...", factors[name], g) / size
            for name, g in gradients.items()
        }

    def factors(self, norms: Update) -> Update:
        """Return the factor of each example's gradient, as Opacus computes it."""
        if self.clipping == "per_layer":
            bound = self.max_grad_norm / math.sqrt(len(norms))
            return {name: (bound / (norm + 1e-6)).clamp(max=1.0) for name, norm in norms.items()}
        together = torch.stack(list(norms.values())).norm(dim=0)
        return dict.fromkeys(norms, (self.max_grad_norm / (together + 1e-6)).clamp(max=1.0))


def example_gradients(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return every example's gradient, one by one if layers cannot be vectorised."""
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
"""Larger relative changes of one example's output, gradient or loss are not rounding errors."""

ALONE = 1e-2
"""The same for a sum of clipped gradients, whose parts are computed in a different way."""

_AT_ONCE = 2**24  # entries of gradients that are compared at a time

_MODEL_MIXES = (
    "the model mixes the examples of a batch: {} (statistics over the batch or over groups of it, "
    "attention along the wrong axis, ...). Clipping each example's gradient then bounds "
    "nothing. Use layers that process each example separately, such as GroupNorm, or "
    "batch_first=True"
)


def check_apart(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise if an example's output, gradient or share of the loss depends on other examples.

    The check runs the model on pairs and on batches of this size. It places one example first and
    last, beside other examples: those of the batch, zeros, and large values. Draws from torch's
    generator (e.g. by dropout) are the same each time, so they make no difference.

    The check cannot detect a model that mixes only at another size, in a later call, or beside
    certain examples. See `check_alone`, and call both at every new size.

    Args:
        model: A copy, whose buffers may change.
        loss: Mean loss of a batch.
        batch: At least one example.

    Raises:
        ValueError: If one of them does. The message says which.
    """
    for size in sorted({2, len(batch.inputs)} - {1}):
        rows = torch.arange(size) % len(batch.inputs)
        _check_outputs(model, batch.inputs[rows])
        _check_gradients(model, loss, batch.at(rows))
        _check_loss(model, loss, batch.at(rows))


def check_alone(
    model: nn.Module, loss: Loss, batch: Batch, total: Update, clipped: ClippedGradient
) -> None:
    """Raise if a sum of clipped gradients differs from the sum over examples computed alone.

    The check applies to the sum that is about to be noised. It detects any mixing: in the forward
    pass, in the loss, or in a backward pass that is not the derivative.

    Args:
        model: A copy, whose buffers may change. It must not draw random numbers.
        loss: Mean loss of a batch.
        batch: At least one example.
        total: The sum of their clipped gradients.
        clipped: The defense that clips them.

    Raises:
        ValueError: If the sums differ.
    """
    entries = sum(value.numel() for value in total.values())
    missing, squares = dict(total), 0.0
    with _same_draws(batch.inputs):
        for rows in torch.arange(len(batch.inputs)).split(max(1, _AT_ONCE // max(1, entries))):
            gradients = _gradients_alone(model, loss, batch.at(rows))
            norms = {name: g.flatten(1).norm(dim=1) for name, g in gradients.items()}
            for name, factors in clipped.factors(norms).items():
                missing[name] = missing[name] - torch.einsum(
                    "i,i...->...", factors, gradients[name]
                )
                squares += float((factors * norms[name]).square().sum())
    gap = math.sqrt(sum(float(value.square().sum()) for value in missing.values()))
    if math.isfinite(squares) and not gap <= ALONE * max(math.sqrt(squares), 1e-6):
        raise ValueError(
            _MODEL_MIXES.format("its gradients in a batch are not those of each example alone")
        )


def _check_outputs(model: nn.Module, inputs: Tensor) -> None:
    """Raise if the output of the first example depends on the other examples."""
    for place in (0, -1):
        outputs = []
        for others in _companions(inputs):
            others[place] = inputs[0]
            with torch.no_grad(), _same_draws(others):
                outputs.append(model(others)[place])
        beside_its_own = outputs[0].abs().max().clamp(min=1e-6)
        for other in outputs[1:]:
            if not (other - outputs[0]).abs().max() <= MIXED * beside_its_own:
                raise ValueError(
                    _MODEL_MIXES.format("the output of one example depends on another example")
                )


def _check_gradients(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise if the gradient of the first example's loss depends on the other examples."""
    if not trainable(model):
        return
    found = []
    for others in _companions(batch.inputs):
        others[0] = batch.inputs[0]
        with _same_draws(others):
            found.append(_slopes(model, loss, others, batch.targets[:1]))
    size = _norm(found[0])
    for other in found[1:]:
        if not _norm([a - b for a, b in zip(other, found[0], strict=True)]) <= MIXED * size:
            raise ValueError(
                _MODEL_MIXES.format("the gradient of one example depends on another example")
            )


def _check_loss(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise if the loss of a batch is not the mean of the losses of its examples."""
    with torch.no_grad(), _same_draws(batch.inputs):
        outputs = model(batch.inputs)
        rows = torch.arange(len(outputs)).split(1)
        alone = torch.stack([loss(outputs[i], batch.targets[i]) for i in rows]).mean()
        together = loss(outputs, batch.targets)
    if not (together - alone).abs() <= MIXED * alone.abs().clamp(min=1e-6):
        raise ValueError(
            "the loss mixes the examples of a batch: it is not the mean of the losses of the "
            "examples (weights normalised over the batch, contrastive losses, ...). Clipping each "
            "example's gradient then bounds nothing"
        )


def _companions(inputs: Tensor) -> list[Tensor]:
    """Return batches into which an example is placed."""
    blank = torch.zeros_like(inputs) if inputs[0].any() else torch.ones_like(inputs)
    numbers = bool((inputs != inputs.round()).any())  # whole numbers may be tokens
    return [inputs.clone(), blank, *([8 * inputs.flip(0)] if numbers else [])]


def _same_draws(inputs: Tensor) -> AbstractContextManager[None]:
    """Restore torch's generators afterwards, so that the next call draws the same numbers."""
    return torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else [])


def _slopes(model: nn.Module, loss: Loss, inputs: Tensor, target: Tensor) -> list[Tensor]:
    """Return the gradient of the first example's loss, from the backward pass of this batch."""
    parameters = [*trainable(model).values()]
    with torch.enable_grad():
        own = loss(model(inputs)[:1], target)
        slopes = torch.autograd.grad(own, parameters, allow_unused=True, materialize_grads=True)
    return [slope.detach() for slope in slopes]


def _gradients_alone(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return every example's gradient, one by one if `torch.func` does not support a layer."""
    try:
        gradients = example_gradients(model, loss, batch)
        return {name: gradient.detach() for name, gradient in gradients.items()}
    except (RuntimeError, NotImplementedError):
        rows = torch.arange(len(batch.inputs)).split(1)
        ones = [_slopes(model, loss, *batch.at(row)) for row in rows]
        return {
            name: torch.stack(slopes) for name, *slopes in zip(trainable(model), *ones, strict=True)
        }


def _norm(values: list[Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in values))


_ARCHITECTURES: WeakKeyDictionary[nn.Module, tuple[object, ...]] = WeakKeyDictionary()


def architecture(model: nn.Module) -> tuple[object, ...]:
    """Return a model without its tensors: modules, their functions and plain attributes.

    It is computed once for each object and mode.
    """
    known = _ARCHITECTURES.get(model)
    if known is None or known[0] != model.training:
        parts = [
            (name, type(module), *map(_as_key, vars(module).values()))
            for name, module in model.named_modules()
        ]
        known = _ARCHITECTURES[model] = (model.training, *parts)
    return known


def _as_key(value: object) -> object:
    if isinstance(value, bool | int | float | str | tuple):
        return repr(value)
    if not isinstance(value, FunctionType):
        return None
    cells = [repr(cell) for cell in value.__closure__ or ()]  # identifies the object in each cell
    return value.__code__, repr(value.__defaults__), *cells
