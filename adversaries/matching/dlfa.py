"""Data Leakage in Federated Averaging: simulate all local steps on guessed epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from ..base import Observation
from ..spaces import NotApplicable
from .matching import Distance, Matching, Simulation, Update
from .optimizers import Adam, Unknowns


@dataclass(frozen=True)
class DLFA(Matching):
    """Search for the examples of every epoch such that training on them gives the update.

    The client shuffles its examples in each epoch, so its batches are unknown. The attack
    therefore guesses separate examples for each epoch and simulates all local steps on them. A
    prior ties the epochs together by their mean image, which does not depend on the order. At the
    end, the attack matches the epochs to the first one and averages them.

    The objective is the squared error of the sum of gradients, with penalties on variation and on
    values outside the range of the data. Each layer counts e times as much as the next one. The
    authors raise the weight of the error during the first half of the search; here it is constant.
    The cost grows with the number of local steps.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        lr: Initial step size of Adam. The defaults are those for FEMNIST. For CIFAR-100 the
            authors use 0.1 and the values in parentheses.
        decay: Factor applied to the step size every ten iterations (0.9985).
        total_variation: Weight of the squared differences of neighbours (2e-4).
        range_penalty: Weight of the squared distance from the range of the data (10).
        order_prior: Weight of the squared differences between the epochs' mean images (62.675).

    References:
        Dimitrov, Balunovic, Konstantinov, Vechev. "Data Leakage in Federated Averaging." TMLR
        2022. https://arxiv.org/abs/2206.12395
    """

    cost: ClassVar[int] = 3

    iterations: int = 400
    lr: float = 0.4
    decay: float = 0.995
    total_variation: float = 1e-3
    range_penalty: float = 2.0
    order_prior: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")
        for name in ("total_variation", "range_penalty", "order_prior"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")

    def check(self, observation: Observation) -> None:
        """Refuse uploads other than one client's change of weights."""
        if observation.protocol.uploads_gradient:
            raise NotApplicable("the update is a gradient: there is no local training to simulate")
        if observation.protocol.clients > 1:
            raise NotApplicable("the server sees only the sum of several clients' updates")

    def distance(self, observation: Observation) -> Distance:
        """Return the squared error of the sum of gradients; early layers count more."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in observation.update))
        gradients = float(observation.protocol.as_gradient(torch.ones(()), observation.batch_size))
        scale = 2 * observation.local_steps * gradients**2
        weights = {
            name: scale * math.exp(-layers.index(name.rpartition(".")[0]))
            for name in observation.update
        }

        def weighted(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
            values, slopes = [], {}
            for name, weight in weights.items():
                error = replayed[name] - observed[name]
                values.append(weight * error.square().flatten(1).sum(dim=1))
                slopes[name] = 2 * weight * error
            return torch.stack(values).sum(dim=0), slopes

        return weighted

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return the prior: smooth images in range, with the same mean in every epoch."""
        variation = [inputs.diff(dim=axis).square() for axis in range(3, inputs.dim())]
        outside = observation.space.to_unit(inputs)
        outside = outside - outside.clamp(0, 1)
        images = inputs.shape[1]
        epochs = inputs.view(len(inputs), -1, observation.batch_size, *inputs.shape[2:])
        means = epochs.mean(dim=2)
        spread = 2 * means.var(dim=1, correction=0)  # equals the mean over all pairs of epochs
        return (
            self.total_variation * sum(v.flatten(1).sum(dim=1) for v in variation) / images
            + self.range_penalty * outside.square().flatten(1).sum(dim=1) / images
            + self.order_prior * spread.flatten(1).mean(dim=1)
        )

    def optimizer(self) -> Adam:
        """Return Adam with a slowly falling step size."""
        return Adam(self.iterations, lr=self.lr, schedule=lambda i, _: self.decay ** (i // 10))

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Draw the inputs of all epochs, one after the other."""
        images = observation.protocol.passes * observation.batch_size
        shape = (self.restarts, images, *observation.space.shape)
        return {"inputs": torch.randn(shape, generator=rng)}

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Return the unknowns unchanged, because the range is a penalty."""
        return unknowns

    def simulation(self, observation: Observation) -> Simulation:
        """Return a function that trains on the epochs' examples in their order."""
        passes = observation.protocol.passes

        def simulate(inputs: Tensor, _: Unknowns, targets: Tensor, observed: Update) -> Update:
            return observation.replay(inputs, targets.repeat(passes), observed, by_epoch=True)

        return simulate

    def finish(
        self, observation: Observation, unknowns: Unknowns, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Match the examples of all epochs to those of the first, and average them."""
        first, *others = unknowns["inputs"][0].split(observation.batch_size)
        total = first.clone()
        for epoch in others:
            distances = torch.cdist(first.flatten(1), epoch.flatten(1)).square()
            total += epoch[linear_sum_assignment(distances.cpu().numpy())[1]]
        return observation.space.clamp(total / (1 + len(others))), targets

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return the objective if every epoch has these examples in this order."""
        epochs = torch.cat([inputs] * observation.protocol.passes)
        with torch.no_grad():
            update = self.simulation(observation)(epochs, {}, targets, observation.update)
            return self.value(observation, update, epochs)
