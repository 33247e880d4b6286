"""Soteria: pruning the representation that a fully connected layer leaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.func import vjp, vmap

from .base import Batch, Defense, Loss, Update, batch_gradient
from .topk import Masked

_OFFSET = 0.1  # limits the scores of features near zero, as in the authors' code
_FLOATS_AT_ONCE = 2**18  # input derivatives held at once


@dataclass
class Soteria(Defense):
    """Withhold the columns of one linear layer's gradient that reveal most of the input.

    The gradient of a linear layer with input features r has columns proportional to r. Each feature
    has the score s_i = sum over the batch of ||dr_i/dX|| / (|r_i| + 0.1). The columns of the
    features below the `pruning_rate` quantile are set to zero. There, |r_i| is large although the
    input hardly moves it. Hiding such features changes most the input that an inversion of the
    layer finds [1]. Everything else, including the layer's bias, is uploaded unchanged.

    The paper and its code leave some choices. We take these:

    - The denominator is |r_i| + 0.1. For non-negative features it equals the authors' r_i + 0.1.
    - A new mask is made at every local step.
    - By default, the layer is the model's last linear one.
    - As in the authors' code, features that are off (a ReLU at zero) score lowest and count as
      pruned, although their columns were zero anyway. If half of the features are off, a rate of
      0.5 hardly changes the layer.

    The scores need a backward pass per feature. The examples must not influence each other.

    The zero columns are visible and all other layers are unchanged. So an adversary who matches
    only the rest of the update loses little [2]. The replay uses the zero columns of the observed
    upload. After several local steps, these are the columns that were zero in all steps. If the
    defended layer is the first one, the kept columns leak their pixels exactly.

    Attributes:
        pruning_rate: Share of features to withhold, in [0, 1). 0 uploads everything.
        layer: Name of the defended linear layer; by default the last one.

    References:
        [1] Sun, Li, Wang, Yang, Li, Chen. "Soteria: Provable Defense against Privacy Leakage in
            Federated Learning from Representation Perspective." CVPR 2021.
            https://arxiv.org/abs/2012.06043
        [2] Balunovic, Dimitrov, Staab, Vechev. "Bayesian Framework for Gradient Leakage."
            ICLR 2022. https://arxiv.org/abs/2111.04706
    """

    pruning_rate: float
    layer: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.pruning_rate < 1:
            raise ValueError(f"pruning_rate must be in [0, 1), got {self.pruning_rate}")

    @property
    def strength(self) -> float:
        """Return the share of features that are withheld."""
        return self.pruning_rate

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient without the columns of the lowest-scoring features."""
        name, layer = self._defended(model)
        gradient = batch_gradient(model, loss, batch)
        scores = feature_scores(model, layer, batch.inputs)
        kept = scores >= scores.quantile(self.pruning_rate)
        weight = f"{name}.weight" if name else "weight"
        if weight not in gradient:
            raise ValueError(f"Soteria withholds columns of {weight!r}, which is frozen")
        return {**gradient, weight: gradient[weight] * kept}

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the mask of columns that the observed upload shows.

        The defense withholds features that are off first. If there are more zero columns than it
        withholds, it withheld only features that are off. Then every column is known.
        """
        kept = {name: torch.ones_like(value, dtype=torch.bool) for name, value in observed.items()}
        weight = self._defended_weight(observed)
        zero = (observed[weight] == 0).all(dim=0)
        at_most = int(self.pruning_rate * (len(zero) - 1)) + 1
        kept[weight] = kept[weight] & ~(zero & (zero.sum() <= at_most))
        return Masked(kept)

    def _defended(self, model: nn.Module) -> tuple[str, nn.Linear]:
        """Return the defended layer and its name."""
        linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        if not linear:
            raise ValueError("Soteria defends a linear layer, but the model has none")
        name = list(linear)[-1] if self.layer is None else self.layer
        if name not in linear:
            raise ValueError(f"layer must be one of {', '.join(linear)}, got {name!r}")
        return name, linear[name]

    def _defended_weight(self, observed: Mapping[str, Tensor]) -> str:
        """Return the defended tensor's name; by default that of the last matrix."""
        if self.layer is not None:
            return f"{self.layer}.weight"
        return [name for name, value in observed.items() if value.dim() == 2][-1]


def feature_scores(model: nn.Module, layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Return s_i of every input feature of a layer, summed over the batch."""
    if not inputs.is_floating_point():
        raise ValueError(f"Soteria needs inputs with derivatives, got {inputs.dtype}")

    def features(inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            model(inputs)
        finally:
            hook.remove()
        return seen[0]

    representation, pullback = cast(
        tuple[Tensor, Callable[[Tensor], tuple[Tensor]]], vjp(features, inputs)
    )
    if representation.dim() != 2:
        raise ValueError(
            "Soteria needs a layer that sees one vector per example, "
            f"got features of shape {tuple(representation.shape)}"
        )

    def slopes(direction: Tensor) -> Tensor:
        """Return ||dr_i/dX|| of every example, where r_i is the feature along a direction."""
        (slope,) = pullback(direction.expand_as(representation))
        norms: Tensor = slope.flatten(1).norm(dim=1)
        return norms

    directions = torch.eye(layer.in_features).to(representation)
    at_once = max(1, _FLOATS_AT_ONCE // inputs.numel())
    with torch.no_grad():  # scores only select features, so they need no derivatives
        every: Tensor = vmap(slopes, chunk_size=at_once)(directions)
    return (every.T / (representation.abs() + _OFFSET)).sum(dim=0)
