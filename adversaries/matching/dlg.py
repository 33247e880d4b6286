"""Deep Leakage from Gradients: inputs and labels whose gradient is the observed one."""

from __future__ import annotations

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

    Minimises the sum of squared differences of the gradients over inputs and label logits at
    once, by L-BFGS from normal noise, with neither prior nor range. The search is of second
    order: it needs activations that can be differentiated twice, such as sigmoids; with ReLUs
    it is expected to fail. Unlike the authors' code, a step that does not lower the objective is
    halved, so that nothing diverges. Labels are not granted even where the threat model would.

    Attributes:
        iterations: Evaluations of the objective: in the paper's code 300 calls of L-BFGS with 20
            each.
        restarts: Random starts; the one with the lowest objective is kept.
        patience: Iterations without progress after which the search ends.

    References:
        Zhu, Liu, Han. "Deep Leakage from Gradients." NeurIPS 2019.
        https://arxiv.org/abs/1906.08935
    """

    precision: ClassVar[torch.dtype] = torch.float64  # single ends the search early
    cost: ClassVar[int] = 1

    iterations: int = 6000
    patience: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patience >= 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")

    def check(self, observation: Observation) -> None:
        """Refuse updates of several local steps, which no gradient equals."""
        if observation.local_steps > 1:
            raise NotApplicable("the update is of several local steps, not one gradient")

    def distance(self, observation: Observation) -> Distance:
        """Compare all entries."""
        return squared_error

    def optimizer(self) -> LBFGS:
        """Use curvature."""
        return LBFGS(self.iterations, patience=self.patience)

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Leave values as they are."""
        return unknowns

    def targets(self, observation: Observation, rng: Generator) -> Tensor:
        """Return placeholders: the labels are searched for."""
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
        """Return the inputs and their likeliest labels."""
        return unknowns["inputs"][0], unknowns["logits"][0].argmax(dim=-1)
