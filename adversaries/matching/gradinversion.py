"""GradInversion: recover batches from gradients, BatchNorm statistics and group consistency."""

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
    """Search from several starts that must agree, with the model's statistics as a prior.

    The attack minimises `matching` / 2 * the squared error of the gradient plus priors. The priors
    are the total variation, the size, the distance from the statistics of the model's BatchNorm
    layers, and the distance from the mean of all starts. The paper's registration of images is
    left out. Adam takes the steps within the range of the data, with Langevin noise added. Labels
    are counted from the bias gradient; the paper assumes distinct labels.

    Without BatchNorm, the strongest prior is missing. The squared error depends on the scale of
    the gradients: a model with small gradients needs a larger `matching`.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts, optimised together. The attack keeps the one with the lowest
            objective.
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
        """Refuse updates of several local steps: they are not a gradient."""
        if observation.local_steps > 1:
            raise NotApplicable("the update comes from several local steps; it is not one gradient")

    def distance(self, observation: Observation) -> Distance:
        """Return the weighted squared error of all entries."""

        def weighted(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
            values, slopes = squared_error(replayed, observed)
            weight = self.matching / 2
            return weight * values, {name: slope.mul_(weight) for name, slope in slopes.items()}

        return weighted

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return the prior: images that fit the BatchNorm statistics and agree between starts."""
        value = self.total_variation * total_variation(inputs)
        value = value + self.size / 2 * mean_square(inputs)
        statistics = batch_norm_statistics(observation.model)
        if statistics is not None:
            value = value + self.batch_norm * statistics(inputs)
        if self.restarts > 1 and len(inputs) % self.restarts == 0:
            value = value + self.consistency * group_consistency(inputs, self.restarts)
        return value

    def optimizer(self) -> Adam:
        """Return Adam with Langevin noise."""
        schedule = partial(cosine_decay, warmup=50)
        return Adam(self.iterations, lr=self.lr, schedule=schedule, langevin=self.langevin)
