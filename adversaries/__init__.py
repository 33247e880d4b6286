"""Published gradient-inversion attacks, one per module."""

from .base import (
    Adversary,
    Candidates,
    Crafted,
    Loss,
    Observation,
    PublicData,
    Reconstruction,
    Replay,
    Round,
    Threat,
)
from .exact.linear_leakage import LinearLeakage
from .exact.spear import SPEAR
from .exact.spearpp import SPEARPlusPlus
from .malicious.ares import ARES
from .malicious.fishing import Fishing
from .malicious.loki import LOKI
from .malicious.robbing_the_fed import RobbingTheFed, RobbingTheFedDirectPass
from .malicious.scale_mia import ScaleMIA
from .malicious.trap_weights import TrapWeights
from .matching.dlfa import DLFA
from .matching.dlg import DLG
from .matching.fedleak import FedLeak
from .matching.gradinversion import GradInversion
from .matching.idlg import IDLG
from .matching.inverting_gradients import InvertingGradients
from .matching.label_inference import infer_targets
from .matching.sme import SME
from .panel import PANEL, Panel
from .priors.learning_to_invert import LearningToInvert
from .priors.matched_filter import MatchedFilter
from .priors.prior_aware import InformedPriorAware, PriorAware
from .priors.prior_guess import PriorGuess
from .protocols import FedAvg, FedBuff, FedSGD, Protocol
from .recursive.rconv import RCONV
from .recursive.rgap import RGAP
from .spaces import ContinuousSpace, ImageSpace, InputSpace, NotApplicable, TokenSpace, WaveSpace
from .text.dager import DAGER
from .text.grab import GRAB
from .text.lamp import LAMP
from .text.language_guess import LanguageGuess
from .text.somp import SOMP

ADVERSARIES: dict[str, type[Adversary]] = {
    cls.__name__: cls
    for cls in (
        PriorGuess,
        LinearLeakage,
        PriorAware,
        InformedPriorAware,
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
        MatchedFilter,
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
    "Crafted",
    "FedAvg",
    "FedBuff",
    "FedLeak",
    "FedSGD",
    "Fishing",
    "GradInversion",
    "ImageSpace",
    "InformedPriorAware",
    "InputSpace",
    "InvertingGradients",
    "LanguageGuess",
    "LearningToInvert",
    "LinearLeakage",
    "Loss",
    "MatchedFilter",
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
