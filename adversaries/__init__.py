"""Published gradient-inversion attacks, one per module."""

from .base import (
    Adversary,
    Candidates,
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
from .dlfa import DLFA
from .dlg import DLG
from .fedleak import FedLeak
from .gradinversion import GradInversion
from .idlg import IDLG
from .inverting_gradients import InvertingGradients
from .label_inference import infer_targets
from .learning_to_invert import LearningToInvert
from .linear_leakage import LinearLeakage
from .panel import PANEL, Panel
from .prior_aware import PriorAware
from .prior_guess import PriorGuess
from .sme import SME
from .spear import SPEAR
from .spearpp import SPEARPlusPlus

ADVERSARIES: dict[str, type[Adversary]] = {
    cls.__name__: cls
    for cls in (
        PriorGuess,
        LinearLeakage,
        PriorAware,
        SPEAR,
        SPEARPlusPlus,
        InvertingGradients,
        DLG,
        IDLG,
        GradInversion,
        FedLeak,
        DLFA,
        SME,
        LearningToInvert,
    )
}
"""Every adversary by name. Add a line here to add an adversary."""

__all__ = [
    "ADVERSARIES",
    "DLFA",
    "DLG",
    "IDLG",
    "PANEL",
    "SME",
    "SPEAR",
    "Adversary",
    "Candidates",
    "FedAvg",
    "FedLeak",
    "FedSGD",
    "GradInversion",
    "InputSpace",
    "InvertingGradients",
    "LearningToInvert",
    "LinearLeakage",
    "NotApplicable",
    "Observation",
    "Panel",
    "PriorAware",
    "PriorGuess",
    "Protocol",
    "PublicData",
    "Reconstruction",
    "SPEARPlusPlus",
    "Threat",
    "infer_targets",
]
