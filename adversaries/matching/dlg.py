"""Deep Leakage from Gradients: find inputs and labels that reproduce the observed gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..base import Observation
from ..spaces import NotApplicable
from .matching import Distance, Matching, Simulation, squared_error
from .optimizers import LBFGS, Unknowns


@dataclass(frozen=True)
class DLG(Matching):
    """Search for inputs and soft labels whose gradient is nearest to the observed one.

    The attack minimises the sum of squared differences of the gradients over inputs and label
    logits at once. It runs L-BFGS from normal noise, without a prior and without a range for the
    inputs. The search is of second order, so it needs activations that can be differentiated
    twice, such as sigmoids. With ReLUs it is expected to fail. Unlike the authors' code, a step
    that does not lower the objective is halved, which prevents divergence. The attack does not
    use labels, even if the threat model grants them.

    Attributes:
        iterations: Evaluations of the objective. The paper's code makes 300 calls of L-BFGS with
            20 evaluations each.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        patience: The search ends after this many iterations without progress.

    References:
        Zhu, Liu, Han. "Deep Leakage from Gradients." NeurIPS 2019.
        https://arxiv.org/abs/1906.08935
    """

    precision: ClassVar[torch.dtype] = torch.float64  # float32 ends the search too early
    cost: ClassVar[int] = 1

    iterations: int = 6000
    patience: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patience >= 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")

    def check(self, observation: Observation) -> None:
        """Refuse several local steps, and more unknowns than the gradient has entries."""
        if observation.local_steps > 1:
            raise NotApplicable("the update comes from several local steps; it is not one gradient")
        unknown = observation.batch_size * math.prod(observation.space.shape)
        entries = sum(value.numel() for value in observation.update.values())
        if unknown > entries:
            raise NotApplicable(
                f"{unknown} unknown values do not follow from {entries} entries of a gradient: DLG "
                "has no prior"
            )

    def distance(self, observation: Observation) -> Distance:
        """Return the squared error of all entries."""
        return squared_error

    def optimizer(self) -> LBFGS:
        """Return L-BFGS."""
        return LBFGS(self.iterations, patience=self.patience)

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Return the unknowns unchanged."""
        return unknowns

    def targets(self, observation: Observation, rng: Generator) -> Tensor:
        """Return placeholders, because the search finds the labels."""
        return torch.zeros(observation.batch_size, dtype=torch.long)

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Draw inputs and label logits."""
        shape = (self.restarts, observation.batch_size, observation.space.classes)
        logits = torch.randn(shape, generator=rng)
        return {**super().start(observation, rng), "logits": logits}

    def simulation(self, observation: Observation) -> Simulation:
        """Replay the client on soft labels."""
        return lambda inputs, unknowns, _, observed: observation.replay(
            inputs, unknowns["logits"].softmax(dim=-1), observed
        )

    def finish(
        self, observation: Observation, unknowns: Unknowns, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and their most likely labels."""
        return unknowns["inputs"][0], unknowns["logits"][0].argmax(dim=-1)
