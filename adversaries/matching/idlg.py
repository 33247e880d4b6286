"""Improved Deep Leakage from Gradients: infer the label first, then search for the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..base import Observation
from ..spaces import NotApplicable
from .matching import Distance, Matching, squared_error
from .optimizers import LBFGS, Unknowns


@dataclass(frozen=True)
class IDLG(Matching):
    """Infer the label of a single example, then search for the input as DLG does.

    Attributes:
        iterations: Evaluations of the objective. The authors' code makes 300 calls of L-BFGS
            with 20 evaluations each.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        patience: The search ends after this many iterations without progress.
        tolerance: The search ends when the sum of squared differences reaches this value.

    References:
        Zhao, Mopuri, Bilen. "iDLG: Improved Deep Leakage from Gradients." 2020.
        https://arxiv.org/abs/2001.02610
    """

    precision: ClassVar[torch.dtype] = torch.float64  # float32 ends the search too early
    cost: ClassVar[int] = 1

    iterations: int = 6000
    patience: int = 100
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patience >= 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be >= 0, got {self.tolerance}")

    def check(self, observation: Observation) -> None:
        """Refuse several examples, whose labels the rule cannot tell, and several local steps."""
        if observation.batch_size > 1:
            raise NotApplicable(f"iDLG needs one example, got {observation.batch_size}")
        if observation.local_steps > 1:
            raise NotApplicable("the update comes from several local steps; it is not one gradient")

    def distance(self, observation: Observation) -> Distance:
        """Return the squared error of all entries."""
        return squared_error

    def optimizer(self) -> LBFGS:
        """Return L-BFGS."""
        return LBFGS(self.iterations, goal=self.tolerance, patience=self.patience)

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Return the unknowns unchanged."""
        return unknowns
