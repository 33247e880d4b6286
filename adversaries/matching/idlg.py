"""Improved Deep Leakage from Gradients: the label is read off first."""

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
        iterations: Evaluations of the objective: in the authors' code 300 calls of L-BFGS with
            20 each.
        restarts: Random starts; the one with the lowest objective is kept.
        patience: Iterations without progress after which the search ends.
        tolerance: Sum of squared differences that is low enough.

    References:
        Zhao, Mopuri, Bilen. "iDLG: Improved Deep Leakage from Gradients." 2020.
        https://arxiv.org/abs/2001.02610
    """

    precision: ClassVar[torch.dtype] = torch.float64  # single ends the search early
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
        """Refuse batches, whose labels the rule does not tell, and several local steps."""
        if observation.batch_size > 1:
            raise NotApplicable(f"iDLG is for one example, got {observation.batch_size}")
        if observation.local_steps > 1:
            raise NotApplicable("the update is of several local steps, not one gradient")

    def distance(self, observation: Observation) -> Distance:
        """Compare all entries."""
        return squared_error

    def optimizer(self) -> LBFGS:
        """Use curvature."""
        return LBFGS(self.iterations, goal=self.tolerance, patience=self.patience)

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Leave values as they are."""
        return unknowns
