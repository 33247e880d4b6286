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

__all__ = [
    "Adversary",
    "FedAvg",
    "FedSGD",
    "InputSpace",
    "NotApplicable",
    "Observation",
    "Protocol",
    "PublicData",
    "Reconstruction",
    "Threat",
]
