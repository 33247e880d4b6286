"""The fixed panel: named, versioned, frozen. Never edited, only succeeded."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .base import Adversary
from .inverting_gradients import InvertingGradients
from .learning_to_invert import LearningToInvert
from .linear_leakage import LinearLeakage
from .prior_aware import PriorAware
from .prior_guess import PriorGuess
from .sme import SME
from .spearpp import SPEARPlusPlus


@dataclass(frozen=True)
class Panel:
    """Adversaries with fixed hyper-parameters, so that rates of different runs compare.

    Attributes:
        version: Recorded with every result.
        members: The adversaries by name.
    """

    version: str
    members: Mapping[str, Adversary]


PANEL_2026_1 = Panel(
    version="2026.1",
    members=MappingProxyType(
        {
            "PriorGuess": PriorGuess(),
            "LinearLeakage": LinearLeakage(),
            "InvertingGradients": InvertingGradients(iterations=300),
        }
    ),
)

PANEL_2026_2 = Panel(
    version="2026.2",
    members=MappingProxyType({**PANEL_2026_1.members, "SPEARPlusPlus": SPEARPlusPlus()}),
)

PANEL_2026_3 = Panel(
    version="2026.3",
    members=MappingProxyType(
        {
            **PANEL_2026_2.members,
            "PriorAware": PriorAware(),
            "SME": SME(iterations=300),
            "LearningToInvert": LearningToInvert(uploads=500),
        }
    ),
)

PANEL = PANEL_2026_3
"""The panel in force."""
