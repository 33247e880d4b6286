"""GradInversion: batches from gradients, BatchNorm statistics and agreement between starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..base import Observation
from ..spaces import NotApplicable
from .matching import (
    Distance,
    Matching,
    Update,
    batch_norm_statistics,
    group_consistency,
    mean_square,
    squared_error,
    total_variation,
)
from .optimizers import Adam, cosine_decay


@dataclass(frozen=True)
class GradInversion(Matching):
    """Search for inputs from several starts that must agree, with the model as a prior.

    Minimises `matching` / 2 * the squared error of the gradient plus priors: total variation,
    size, distance from the statistics that the model's BatchNorm layers hold, and distance
    from the mean of all starts (without the paper's registration of images). Steps of Adam
    within the range of the data are disturbed by Langevin noise. Labels are counted from the
    bias gradient, where the paper assumes distinct ones. Without BatchNorm, its strongest
    prior is missing. The squared error is not free of scale: a model with small gradients
    needs a larger `matching`.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts, optimised together; the one with the lowest objective is kept.
        lr: Step size of Adam, which rises over 50 steps and falls to zero as a cosine.
        matching: Weight of the squared error.
        total_variation: Weight of the total variation.
        size: Weight of half the mean square.
        batch_norm: Weight of the BatchNorm statistics.
        consistency: Weight of the distance from the mean of all starts.
        langevin: Noise of a step, in units of the step size.

    References:
        Yin, Mallya, Vahdat, Alvarez, Kautz, Molchanov. "See through Gradients: Image Batch
        Recovery via GradInversion." CVPR 2021. https://arxiv.org/abs/2104.07586
    """

    cost: ClassVar[int] = 3

    iterations: int = 20_000
    restarts: int = 4
    lr: float = 0.1
    matching: float = 1e-4
    total_variation: float = 1e-4
    size: float = 1e-6
    batch_norm: float = 0.1
    consistency: float = 0.01
    langevin: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "matching"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("total_variation", "size", "batch_norm", "consistency", "langevin"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")

    def check(self, observation: Observation) -> None:
        """Refuse updates of several local steps, which no gradient equals."""
        if observation.local_steps > 1:
            raise NotApplicable("the update is of several local steps, not one gradient")

    def distance(self, observation: Observation) -> Distance:
        """Compare all entries."""

        def weighted(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
            values, slopes = squared_error(replayed, observed)
            weight = self.matching / 2
            return weight * values, {name: slope.mul_(weight) for name, slope in slopes.items()}

        return weighted

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Expect images that the model finds usual and that the starts agree on."""
        value = self.total_variation * total_variation(inputs)
        value = value + self.size / 2 * mean_square(inputs)
        statistics = batch_norm_statistics(observation.model)
        if statistics is not None:
            value = value + self.batch_norm * statistics(inputs)
        if self.restarts > 1 and len(inputs) % self.restarts == 0:
            value = value + self.consistency * group_consistency(inputs, self.restarts)
        return value

    def optimizer(self) -> Adam:
        """Descend with noise."""
        schedule = partial(cosine_decay, warmup=50)
        return Adam(self.iterations, lr=self.lr, schedule=schedule, langevin=self.langevin)
