"""Analytic leakage from a linear layer that sees the input."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Observation, Reconstruction, in_evaluation
from ..spaces import NotApplicable
from .affine_prefix import AffinePrefix, affine_prefix


@dataclass(frozen=True)
class LinearLeakage(Adversary):
    """Read inputs off the gradients of the model's first linear layer.

    For a layer z = Wx + b and any loss L, the gradient of row k is dL/dW_k = dL/dz_k * x and
    dL/db_k = dL/dz_k. Their quotient is exactly x [1, 2, Prop. 3.1]. The quotient does not depend
    on the scale of the update, so clipping and learning rates do not matter. For one example, all
    rows agree, and the attack returns their least-squares mean, which averages out noise. In a
    batch, a row is exact if only one example activates it. Otherwise it is a linear combination of
    examples. The attack returns the rows with the largest bias gradients. If frozen layers in front
    amount to an invertible affine map, the attack inverts this map.

    References:
        [1] Phong, Aono, Hayashi, Wang, Moriai. "Privacy-Preserving Deep Learning via
            Additively Homomorphic Encryption." IEEE TIFS 13(5), 2018.
        [2] Geiping, Bauermeister, Droege, Moeller. "Inverting Gradients: How easy is it to
            break privacy in federated learning?" NeurIPS 2020.
            https://arxiv.org/abs/2003.14053
    """

    cost: ClassVar[int] = 0

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return at most one guess per example. A guess without signal is all zero."""
        layer, prefix = _first_linear_layer(observation)
        weight = observation.update[f"{layer}weight"]
        bias = observation.update[f"{layer}bias"]

        if observation.batch_size == 1:
            weight, bias = (bias @ weight).unsqueeze(0), bias.square().sum().unsqueeze(0)
        rows = bias.abs().topk(min(observation.batch_size, len(bias))).indices
        signal = bias[rows].unsqueeze(1)
        inputs = torch.where(signal == 0, 0.0, weight[rows] / signal)
        inputs = inputs if prefix is None else prefix.inputs(inputs)
        inputs = observation.space.clamp(inputs.view(-1, *observation.space.shape))
        return Reconstruction(inputs, observation.targets)


def _first_linear_layer(observation: Observation) -> tuple[str, AffinePrefix | None]:
    """Return the parameter prefix of the first trained linear layer, and what lies before it.

    Raises:
        NotApplicable: If that layer does not leak the inputs.
    """
    if not observation.space.continuous:
        raise NotApplicable("token inputs are embedded before any linear layer")
    size, frozen = math.prod(observation.space.shape), ""
    for name, module in observation.model.named_modules():
        trained = any(value.requires_grad for value in module.parameters())
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding):
            if trained:
                raise NotApplicable(f"layer {name!r} transforms the input before any linear layer")
            frozen = frozen or name
        if not isinstance(module, nn.Linear):
            continue
        prefix = f"{name}." if name else ""
        if not trained:
            frozen = frozen or name
            continue
        if not {f"{prefix}weight", f"{prefix}bias"} <= {*observation.update}:
            raise NotApplicable(f"layer {name!r} needs a bias and {size} inputs, got {module}")
        try:
            return prefix, affine_prefix(observation.model, module, observation.space)
        except NotApplicable as reason:
            if module.in_features == size and not _sees_pixels(module, observation):
                text = f"layer {name!r} sees features, not the pixels of an input: {reason}"
                raise NotApplicable(text) from reason
            if frozen or module.in_features != size:
                text = f"layer {name!r} needs a bias and {size} inputs, got {module}: {reason}"
                raise NotApplicable(text) from reason
            return prefix, None
    if frozen:
        raise NotApplicable(f"layer {frozen!r} is frozen, so the update does not contain it")
    raise NotApplicable("the model has no linear layer")


def _sees_pixels(layer: nn.Module, observation: Observation) -> bool:
    """Return whether the layer's inputs are the pixels, on any scale.

    Some pixels are changed, one in each of several copies of an example. Each must be what changes
    most among the inputs of the layer. The result is True if the layer's inputs are not seen.
    """
    shape, size = observation.space.shape, math.prod(observation.space.shape)
    changed = torch.tensor([size // 5, size // 2, size - 1])
    examples = torch.linspace(0.2, 0.3, size).repeat(1 + len(changed), 1)
    examples[range(1, len(examples)), changed] += 0.4
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        with in_evaluation(observation.model), torch.no_grad():
            observation.model(examples.view(-1, *shape).to(next(observation.model.parameters())))
    finally:
        handle.remove()
    if not seen:
        return True
    moved = (seen[0][1:] - seen[0][0]).abs().argmax(1).cpu()
    return torch.equal(moved, changed)
