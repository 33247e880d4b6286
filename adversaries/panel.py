"""The fixed panel: named, versioned, frozen. Never edited, only succeeded.

Every hyper-parameter is written out, so that a default that changes changes no panel; a test
holds what each member reconstructs against what it did when the panel was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from .ares import ARES
from .base import Adversary
from .dlfa import DLFA
from .dlg import DLG
from .fedleak import FedLeak
from .fishing import Fishing
from .gradinversion import GradInversion
from .idlg import IDLG
from .inverting_gradients import InvertingGradients
from .learning_to_invert import LearningToInvert
from .linear_leakage import LinearLeakage
from .loki import LOKI
from .prior_aware import PriorAware
from .prior_guess import PriorGuess
from .robbing_the_fed import RobbingTheFed, RobbingTheFedDirectPass
from .scale_mia import ScaleMIA
from .sme import SME
from .spear import SPEAR
from .spearpp import SPEARPlusPlus
from .trap_weights import TrapWeights


@dataclass(frozen=True)
class Panel:
    """Adversaries with fixed hyper-parameters, so that rates of different runs compare.

    Attributes:
        version: Recorded with every result.
        members: The adversaries by name, with budgets for CPUs: on 20 uploads of LeNet, a search
            takes seconds.
        published: The same with the budgets of their papers.
    """

    version: str
    members: Mapping[str, Adversary]
    published: Mapping[str, Adversary]

    def succeeded_by(
        self, version: str, members: Mapping[str, Adversary], published: Mapping[str, Adversary]
    ) -> Panel:
        """Return the next panel: all members of this one, and those that join."""
        return Panel(
            version,
            MappingProxyType({**self.members, **members}),
            MappingProxyType({**self.published, **published}),
        )


class Budget(NamedTuple):
    """What a panel's members may spend: iterations, unless a name says otherwise."""

    spear_samples: int
    inverting_gradients: int
    sme: int
    learning_to_invert_uploads: int
    dlg: int
    dlg_patience: int
    gradinversion: int
    gradinversion_restarts: int
    fedleak: int
    fedleak_width: int
    dlfa: int


def _members_2026_4(budget: Budget) -> Mapping[str, Adversary]:
    members: dict[str, Adversary] = {
        "PriorGuess": PriorGuess(),
        "LinearLeakage": LinearLeakage(),
        "PriorAware": PriorAware(),
        "SPEAR": SPEAR(layer=None, samples=budget.spear_samples),
        "SPEARPlusPlus": SPEARPlusPlus(
            layer=None,
            loss="log-sum",
            optimizer="adam",
            starts="deflation",
            initialisations=20_000,
            steps=100,
            patience=30,
        ),
        "InvertingGradients": InvertingGradients(
            iterations=budget.inverting_gradients,
            restarts=1,
            lr=0.1,
            total_variation=1e-4,
            comparison="cosine",
        ),
        "SME": SME(
            iterations=budget.sme,
            restarts=1,
            lr=1.0,
            alpha=0.5,
            alpha_lr=1e-3,
            total_variation=0.01,
        ),
        "LearningToInvert": LearningToInvert(
            uploads=budget.learning_to_invert_uploads, features=4096, max_examples=8
        ),
        "DLG": DLG(iterations=budget.dlg, restarts=1, patience=budget.dlg_patience),
        "IDLG": IDLG(
            iterations=budget.dlg, restarts=1, patience=budget.dlg_patience, tolerance=1e-6
        ),
        "GradInversion": GradInversion(
            iterations=budget.gradinversion,
            restarts=budget.gradinversion_restarts,
            lr=0.1,
            matching=1e-4,
            total_variation=1e-4,
            size=1e-6,
            batch_norm=0.1,
            consistency=0.01,
            langevin=0.2,
        ),
        "FedLeak": FedLeak(
            iterations=budget.fedleak,
            restarts=1,
            lr=0.01,
            matched=0.5,
            look_ahead=0.3,
            total_variation=1e-5,
            weight_decay=0.01,
            width=budget.fedleak_width,
        ),
        "DLFA": DLFA(
            iterations=budget.dlfa,
            restarts=1,
            lr=0.4,
            decay=0.995,
            total_variation=1e-3,
            range_penalty=2.0,
            order_prior=1000.0,
        ),
    }
    return MappingProxyType(members)


PANEL_2026_4 = Panel(
    version="2026.4",
    members=_members_2026_4(
        Budget(
            spear_samples=1024,
            inverting_gradients=300,
            sme=300,
            learning_to_invert_uploads=500,
            dlg=40,
            dlg_patience=20,
            gradinversion=150,
            gradinversion_restarts=1,
            fedleak=20,
            fedleak_width=16,
            dlfa=100,
        )
    ),
    published=_members_2026_4(
        Budget(
            spear_samples=1_000_000,
            inverting_gradients=24_000,
            sme=1000,
            learning_to_invert_uploads=5000,
            dlg=4000,
            dlg_patience=100,
            gradinversion=20_000,
            gradinversion_restarts=4,
            fedleak=10_000,
            fedleak_width=256,
            dlfa=400,
        )
    ),
)


class ServerBudget(NamedTuple):
    """What malicious servers may spend.

    ScaleMIA's batches and step size are chosen for its number of epochs.
    """

    robbing_the_fed_bins: int
    fishing: int
    scale_mia_epochs: int
    scale_mia_examples: int
    scale_mia_batch_size: int
    scale_mia_lr: float


def _malicious_servers_2026_5(budget: ServerBudget) -> Mapping[str, Adversary]:
    """Return the attacks that send crafted models, the strongest variant of each."""
    return {
        "RobbingTheFed": RobbingTheFed(
            bins=budget.robbing_the_fed_bins,
            query="random",
            mode=32,
            queries=1,
            rows="sparse",
            calibrated=True,
            gain=1e-3,
        ),
        "RobbingTheFedDirectPass": RobbingTheFedDirectPass(calibrated=True),
        "LOKI": LOKI(bins_per_example=4, signal=0.25, readout="brightness"),
        "TrapWeights": TrapWeights(s="auto", sigma=0.5),
        "ARES": ARES(
            bins="calibrated",
            separation="rows",
            lift=0.0,
            scale=1.0,
            clearance=6.0,
            iterations=400,
        ),
        "ScaleMIA": ScaleMIA(
            epochs=budget.scale_mia_epochs,
            examples=budget.scale_mia_examples,
            batch_size=budget.scale_mia_batch_size,
            lr=budget.scale_mia_lr,
        ),
        "Fishing": Fishing(
            class_multiplier=0.5,
            feature_multiplier=300.0,
            iterations=budget.fishing,
            restarts=1,
            total_variation=1e-4,
        ),
    }


PANEL_2026_5 = PANEL_2026_4.succeeded_by(
    "2026.5",
    members=_malicious_servers_2026_5(
        ServerBudget(
            robbing_the_fed_bins=256,
            fishing=150,
            scale_mia_epochs=5,
            scale_mia_examples=1000,
            scale_mia_batch_size=20,
            scale_mia_lr=0.003,
        )
    ),
    published=_malicious_servers_2026_5(
        ServerBudget(
            robbing_the_fed_bins=1024,
            fishing=24_000,
            scale_mia_epochs=350,
            scale_mia_examples=50_000,
            scale_mia_batch_size=50,
            scale_mia_lr=0.001,
        )
    ),
)

PANEL = PANEL_2026_5
"""The panel in force."""
