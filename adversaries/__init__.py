"""Published gradient-inversion attacks, one per module."""

from .ares import ARES
from .base import (
    Adversary,
    Candidates,
    Loss,
    Observation,
    PublicData,
    Reconstruction,
    Replay,
    Round,
    Threat,
)
from .dager import DAGER
from .dlfa import DLFA
from .dlg import DLG
from .fedleak import FedLeak
from .fishing import Fishing
from .grab import GRAB
from .gradinversion import GradInversion
from .idlg import IDLG
from .inverting_gradients import InvertingGradients
from .label_inference import infer_targets
from .lamp import LAMP
from .language_guess import LanguageGuess
from .learning_to_invert import LearningToInvert
from .linear_leakage import LinearLeakage
from .loki import LOKI
from .panel import PANEL, Panel
from .prior_aware import PriorAware
from .prior_guess import PriorGuess
from .protocols import FedAvg, FedBuff, FedSGD, Protocol
from .rconv import RCONV
from .rgap import RGAP
from .robbing_the_fed import RobbingTheFed, RobbingTheFedDirectPass
from .scale_mia import ScaleMIA
from .sme import SME
from .somp import SOMP
from .spaces import (
    ContinuousSpace,
    ImageSpace,
    InputSpace,
    NotApplicable,
    TokenSpace,
    WaveSpace,
)
from .spear import SPEAR
from .spearpp import SPEARPlusPlus
from .trap_weights import TrapWeights

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
        LanguageGuess,
        LAMP,
        GRAB,
        RobbingTheFed,
        RobbingTheFedDirectPass,
        LOKI,
        Fishing,
        TrapWeights,
        ScaleMIA,
        ARES,
        DAGER,
        SOMP,
        RGAP,
        RCONV,
    )
}
"""Every adversary by name. Add a line here to add an adversary."""

__all__ = [
    "ADVERSARIES",
    "ARES",
    "DAGER",
    "DLFA",
    "DLG",
    "GRAB",
    "IDLG",
    "LAMP",
    "LOKI",
    "PANEL",
    "RCONV",
    "RGAP",
    "SME",
    "SOMP",
    "SPEAR",
    "Adversary",
    "Candidates",
    "ContinuousSpace",
    "FedAvg",
    "FedBuff",
    "FedLeak",
    "FedSGD",
    "Fishing",
    "GradInversion",
    "ImageSpace",
    "InputSpace",
    "InvertingGradients",
    "LanguageGuess",
    "LearningToInvert",
    "LinearLeakage",
    "Loss",
    "NotApplicable",
    "Observation",
    "Panel",
    "PriorAware",
    "PriorGuess",
    "Protocol",
    "PublicData",
    "Reconstruction",
    "Replay",
    "RobbingTheFed",
    "RobbingTheFedDirectPass",
    "Round",
    "SPEARPlusPlus",
    "ScaleMIA",
    "Threat",
    "TokenSpace",
    "TrapWeights",
    "WaveSpace",
    "infer_targets",
]
