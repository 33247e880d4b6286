"""Malicious servers of a few lines, and clients that look at what they are sent."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import (
    Adversary,
    Crafted,
    NotApplicable,
    Observation,
    Reconstruction,
    Round,
    Threat,
)
from leakfrontier.defenses import Defense, Refused

CALLS: list[str] = []
"""What happened to a model, in this order."""


@dataclass(frozen=True)
class ToyImprint(Adversary):
    """Give every client neurons of its own, which sort examples by their brightness.

    All rows of a block measure the mean of the inputs, and their biases are quantiles of it, so
    that the gradients of neighbouring rows differ by the examples between two quantiles. The
    other clients' blocks are dead: a sum of updates keeps the clients apart.

    Attributes:
        own_blocks: Whether each client gets a block of its own; otherwise all get the first one's.
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS

    own_blocks: bool = True

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return a model per client."""
        if round.public is None:
            raise NotApplicable("no public data to take quantiles of")
        CALLS.append("craft")
        brightness = round.public.inputs.flatten(1).mean(dim=1)
        rows = _linear_layers(model)[0].out_features
        blocks = torch.arange(rows).split(rows // round.clients)
        if not self.own_blocks:
            return Crafted([_imprinted(model, blocks[0], brightness)] * round.clients)
        own = blocks[: round.clients]
        return Crafted([_imprinted(model, block, brightness) for block in own])

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return what each pair of neighbouring rows isolates."""
        found = [self._isolated(observation, model) for model in dict.fromkeys(observation.models)]
        return Reconstruction(torch.cat(found).view(-1, *observation.space.shape))

    def _isolated(self, observation: Observation, model: nn.Module) -> Tensor:
        layer = _linear_layers(model)[0]
        name = next(name for name, module in model.named_modules() if module is layer)
        alive = layer.weight.any(dim=1)
        weight, bias = (observation.update[f"{name}.{part}"][alive] for part in ("weight", "bias"))
        nothing = torch.zeros_like(weight[:1])
        weight = -torch.cat([weight, nothing]).diff(dim=0)
        bias = -torch.cat([bias, nothing[0, :1]]).diff()
        full = bias.abs() > 0.01
        return weight[full] / bias[full, None]


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def _imprinted(model: nn.Module, block: Tensor, brightness: Tensor) -> nn.Module:
    crafted = copy.deepcopy(model)
    first, *middle, last = _linear_layers(crafted)
    first.weight.zero_()
    first.bias.fill_(-1.0)
    first.weight[block] = 1 / first.in_features
    first.bias[block] = -brightness.quantile(torch.arange(len(block)) / len(block))
    first.bias[block[0]] = -brightness.min() + 1  # nothing is darker
    for layer in middle:
        layer.weight.fill_(1 / layer.in_features)
        layer.bias.zero_()
    last.weight.copy_(torch.linspace(-1, 1, last.out_features)[:, None].expand_as(last.weight))
    last.bias.zero_()
    return crafted


@dataclass(frozen=True)
class Normalising(Adversary):
    """Put a BatchNorm before the model."""

    threat: ClassVar[Threat] = Threat.ARCHITECTURE

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the same model for all."""
        normalised = nn.BatchNorm2d(round.space.shape[0], track_running_stats=False)
        return Crafted([nn.Sequential(normalised, model)] * round.clients)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Guess nothing."""
        return Reconstruction(torch.zeros(1, *observation.space.shape))


@dataclass
class Inspecting(Defense):
    """Refuse a model whose first layer has rows that are the same.

    Attributes:
        tolerance: Distance up to which rows are the same.
    """

    tolerance: float = 0.0

    def on_model(self, model: nn.Module) -> nn.Module:
        """Note that an architecture was agreed on."""
        CALLS.append("on_model")
        return model

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Look at the rows of the first linear layer."""
        CALLS.append("on_receive")
        rows = _linear_layers(model)[0].weight.detach()
        if bool((torch.pdist(rows) <= self.tolerance).any()):
            raise Refused("rows of the first layer are the same")
        return model


@dataclass(frozen=True)
class Generous(Normalising):
    """Send more models than there are clients."""

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return three models."""
        return Crafted([model] * 3)
