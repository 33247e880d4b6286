"""Inverting Gradients: match the direction of the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..base import Observation
from .matching import DISTANCES, Distance, Matching, cosine, likelihood, total_variation
from .optimizers import Adam, step_decay


@dataclass(frozen=True)
class InvertingGradients(Matching):
    """Search for inputs whose replayed update has the direction of the observed one.

    The attack minimises 1 - cos(update(x), observed) + `total_variation` * TV(x) within the range
    of the data. It runs Adam on the sign of the gradient and divides the step size by ten after
    3/8, 5/8 and 7/8 of the iterations. The client's own code replays the update. Therefore one or
    many local steps, and a known defense, need no special treatment. Labels are inferred unless
    the threat model grants them. All observations and restarts are optimised at once.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        lr: Initial step size of Adam.
        total_variation: Weight of the total-variation prior.
        comparison: How updates are compared: `cosine`, `squared` or `absolute` error, or
            `likelihood`. The last is the likelihood of a known defense per entry of the update;
            if there is none, the cosine.

    References:
        Geiping, Bauermeister, Droege, Moeller. "Inverting Gradients: How easy is it to break
        privacy in federated learning?" NeurIPS 2020. https://arxiv.org/abs/2003.14053
    """

    iterations: int = 24_000
    lr: float = 0.1
    total_variation: float = 1e-4
    comparison: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if self.comparison not in (*DISTANCES, "likelihood"):
            known = ", ".join((*DISTANCES, "likelihood"))
            raise ValueError(f"comparison must be one of {known}, got {self.comparison!r}")
        if not 0 <= self.total_variation < math.inf:
            raise ValueError(f"total_variation must be >= 0, got {self.total_variation}")

    def distance(self, observation: Observation) -> Distance:
        """Return the distance that `comparison` names."""
        if self.comparison == "likelihood":
            return likelihood(observation, otherwise=cosine)
        return DISTANCES[self.comparison]

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return the total-variation prior."""
        return self.total_variation * total_variation(inputs)

    def optimizer(self) -> Adam:
        """Return Adam on signs, with a decaying step size."""
        return Adam(self.iterations, lr=self.lr, schedule=step_decay, signed=True)
