"""Inverting Gradients: matching the direction of the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..base import Observation
from .matching import DISTANCES, Distance, Matching, cosine, likelihood, total_variation
from .optimizers import Adam, step_decay


@dataclass(frozen=True)
class InvertingGradients(Matching):
    """Search for inputs whose replayed update points the way of the observed one.

    Minimises 1 - cos(update(x), observed) + `total_variation` * TV(x) within the range of the
    data, by Adam on the sign of the gradient, with the step size divided by ten after 3/8, 5/8
    and 7/8 of the iterations. The update is replayed by the client's own code, so that one
    local step or many, and a known defense, are the same to the attack. Labels are inferred
    unless granted. All observations and restarts are optimised at once.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts; the one with the lowest objective is kept.
        lr: Initial step size of Adam.
        total_variation: Weight of the total-variation prior.
        comparison: How updates are compared: by `cosine`, `squared` or `absolute` error, or by
            `likelihood`: that of a known defense per entry of the update, where it has one, or
            else the cosine.

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
        """Compare directions, unless told otherwise."""
        if self.comparison == "likelihood":
            return likelihood(observation, otherwise=cosine)
        return DISTANCES[self.comparison]

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Expect smooth images."""
        return self.total_variation * total_variation(inputs)

    def optimizer(self) -> Adam:
        """Descend by signs, in steps of three sizes."""
        return Adam(self.iterations, lr=self.lr, schedule=step_decay, signed=True)
