"""Published gradient-inversion attacks, one per module."""

from .base import (
    Adversary,
    FedAvg,
    FedSGD,
    InputSpace,
    NotApplicable,
    Observation,
    Protocol,
    PublicData,
    Reconstruction,
    Threat,
)
from .inverting_gradients import InvertingGradients
from .label_inference import infer_targets
from .linear_leakage import LinearLeakage
from .panel import PANEL, Panel
from .prior_guess import PriorGuess

ADVERSARIES: dict[str, type[Adversary]] = {
    cls.__name__: cls for cls in (PriorGuess, LinearLeakage, InvertingGradients)
}
"""Every adversary by name. Add a line here to add an adversary."""

__all__ = [
    "ADVERSARIES",
    "PANEL",
    "Adversary",
    "FedAvg",
    "FedSGD",
    "InputSpace",
    "InvertingGradients",
    "LinearLeakage",
    "NotApplicable",
    "Observation",
    "Panel",
    "PriorGuess",
    "Protocol",
    "PublicData",
    "Reconstruction",
    "Threat",
    "infer_targets",
]
