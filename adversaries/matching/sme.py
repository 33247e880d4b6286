"""Surrogate Model Extension: treat a weight update as a gradient between its two end points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.func import functional_call, grad

from ..base import Observation
from ..spaces import NotApplicable
from .matching import Distance, Matching, Simulation, Update, cosine, total_variation
from .optimizers import Adam, Unknowns, step_decay


@dataclass(frozen=True)
class SME(Matching):
    """Search for inputs, and for weights at which their gradient points along the update.

    The update w_T - w_0 of many local steps is not a gradient at w_0. It is nearly a gradient at
    some surrogate w_0 + alpha (w_T - w_0), because local training moves almost in a plane
    [Prop. 4.1, Thm. 4.3]. The attack minimises 1 - cos(w_0 - w_T, gradient at the surrogate) +
    `total_variation` * TV(x) over inputs and alpha at once (Algorithm 1). All examples are in one
    batch. It needs neither the local learning rate nor the number of steps, and its cost does not
    depend on them. With `alpha` 0 and `alpha_lr` 0 it is the paper's baseline, Inverting Gradients
    at w_0.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        lr: Initial step size of Adam for the inputs. It is divided by ten after 3/8, 5/8 and 7/8
            of the iterations, like `alpha_lr`.
        alpha: Start value of alpha, from 0 at w_0 to 1 at w_T, as in the authors' code. The paper
            counts in the opposite direction.
        alpha_lr: Initial step size of Adam for alpha.
        total_variation: Weight of the total variation, averaged over height and width.

    References:
        Zhu, Yao, Blaschko. "Surrogate Model Extension (SME): A Fast and Accurate Weight Update
        Attack on Federated Learning." ICML 2023. https://arxiv.org/abs/2306.00127
    """

    simulates: ClassVar[bool] = False

    lr: float = 1.0
    alpha: float = 0.5
    alpha_lr: float = 1e-3
    total_variation: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")
        if not 0 <= self.alpha_lr < math.inf:
            raise ValueError(f"alpha_lr must be >= 0 and finite, got {self.alpha_lr}")
        if not 0 <= self.total_variation < math.inf:
            raise ValueError(f"total_variation must be >= 0, got {self.total_variation}")

    def check(self, observation: Observation) -> None:
        """Refuse uploads other than one client's change of weights."""
        if observation.protocol.uploads_gradient:
            raise NotApplicable("the update is a gradient, not a change of weights")
        if observation.protocol.clients > 1:
            raise NotApplicable("the server sees only the sum of several clients' updates")

    def distance(self, observation: Observation) -> Distance:
        """Return the cosine distance."""
        return cosine

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return the total-variation prior."""
        return self.total_variation / 2 * total_variation(inputs)

    def optimizer(self) -> Adam:
        """Return Adam with a decaying step size."""
        rates = {"alpha": self.alpha_lr}
        return Adam(self.iterations, lr=self.lr, rates=rates, schedule=step_decay)

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Draw inputs and set alpha to its start value."""
        return {
            **super().start(observation, rng),
            "alpha": torch.full((self.restarts,), self.alpha),
        }

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Clamp inputs to the range of the data, and alpha to [0, 1]."""
        projected = super().project(observation, unknowns)
        return {**projected, "alpha": unknowns["alpha"].clamp(0, 1)}

    def simulation(self, observation: Observation) -> Simulation:
        """Return the descent direction at the surrogate."""
        return lambda inputs, unknowns, targets, observed: descent_between(
            observation, inputs, targets, observed, unknowns["alpha"]
        )

    def alike(self, observation: Observation) -> tuple[object, ...]:
        """Group observations of the same model and batch size."""
        return (observation.model, observation.batch_size)

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return the objective at a guess, at the best alpha of a grid unless alpha is fixed."""
        alphas = torch.linspace(0, 1, 21) if self.alpha_lr else torch.tensor([self.alpha])
        cosines = cosine_between(observation, inputs, targets, alphas)
        return float(1 - cosines.max() + self.prior(observation, inputs.unsqueeze(0)))


def descent_between(
    observation: Observation, inputs: Tensor, targets: Tensor, observed: Update, alpha: Tensor
) -> Update:
    """Return minus the gradient at w_0 + alpha (w_T - w_0), with all examples in one batch."""
    sent = dict(observation.model.named_parameters())
    weights = {name: sent[name].detach() + alpha * change for name, change in observed.items()}

    def gain(weights: dict[str, Tensor]) -> Tensor:
        return -observation.loss(functional_call(observation.model, weights, (inputs,)), targets)

    return dict(grad(gain)(weights))


def cosine_between(
    observation: Observation, inputs: Tensor, targets: Tensor, alphas: Iterable[Tensor]
) -> Tensor:
    """Return the cosine between w_0 - w_T and the gradient at each alpha (Figure 4)."""
    values = []
    for alpha in alphas:
        descent = descent_between(observation, inputs, targets, observation.update, alpha)
        distance, _ = cosine(
            {name: value.unsqueeze(0) for name, value in descent.items()},
            {name: value.unsqueeze(0) for name, value in observation.update.items()},
        )
        values.append(1 - distance)
    return torch.cat(values)
