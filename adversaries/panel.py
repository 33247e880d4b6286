"""The fixed panel: named, versioned, frozen. Never edited, only succeeded.

Every hyper-parameter is written out, so that a default that changes changes no panel; a test
holds what each member reconstructs against what it did when the panel was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from .base import Adversary
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
from .matching.sme import SME
from .priors.learning_to_invert import LearningToInvert
from .priors.prior_aware import PriorAware
from .priors.prior_guess import PriorGuess
from .recursive.rconv import RCONV
from .recursive.rgap import RGAP
from .text.dager import DAGER
from .text.grab import GRAB
from .text.lamp import LAMP
from .text.language_guess import LanguageGuess
from .text.somp import SOMP


@dataclass(frozen=True)
class Panel:
    """Adversaries with fixed hyper-parameters, so that rates of different runs compare.

    Attributes:
        version: Recorded with every result.
        members: The adversaries by name, with budgets for CPUs: on 20 uploads of LeNet, a search
            takes seconds.
        published: The same with the budgets of their papers.
        alike: Earlier versions whose attacks differ on texts alone: on all else, rates compare.
    """

    version: str
    members: Mapping[str, Adversary]
    published: Mapping[str, Adversary]
    alike: tuple[str, ...] = ()

    def succeeded_by(
        self,
        version: str,
        members: Mapping[str, Adversary],
        published: Mapping[str, Adversary],
        *,
        on_texts_alone: bool = False,
    ) -> Panel:
        """Return the next panel: all members of this one, and those that join."""
        return Panel(
            version,
            MappingProxyType({**self.members, **members}),
            MappingProxyType({**self.published, **published}),
            (*self.alike, self.version) if on_texts_alone else (),
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
        "LOKI": LOKI(bins_per_example=4, queries=1, signal=0.25, readout="brightness"),
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


class TextBudget(NamedTuple):
    """What searches for texts may spend: LAMP and GRAB spend the same."""

    iterations: int
    starts: int
    reorder_every: int
    orders: int
    grab_rounds: int


def _exact_2026_5() -> Mapping[str, Adversary]:
    """Return the exact attacks that join: recursive ones, and those on transformers."""
    return {
        "RGAP": RGAP(balance="blocks"),
        "RCONV": RCONV(constraints="both", separation="peeling"),
        "DAGER": DAGER(rank_cutoff=None, tolerance=1e-7, pool=400, combinations=20_000),
        "SOMP": SOMP(
            geometry="stacked",
            pool=None,
            width=None,
            groups=None,
            alignment=0.8,
            consistency=0.5,
            sparsity=0.5,
            language=0.33,
            diversity=0.15,
            repetition=0.2,
            ridge=1e-3,
            tolerance=1e-4,
            cluster=0.8,
            matching=True,
        ),
    }


def _texts_2026_5(budget: TextBudget) -> Mapping[str, Adversary]:
    """Return the searches for texts, and the guess that needs no upload."""
    return {
        "LanguageGuess": LanguageGuess(),
        "LAMP": LAMP(
            iterations=budget.iterations,
            lr=0.2,
            starts=budget.starts,
            norm_prior=2.0,
            reorder_every=budget.reorder_every,
            orders=budget.orders,
            use_embedding=False,
            blocks=None,
            lengths=None,
            comparison="cosine",
            language=0.2,
            absolute=0.01,
        ),
        "GRAB": GRAB(
            iterations=budget.iterations,
            lr=0.2,
            starts=budget.starts,
            norm_prior=2.0,
            reorder_every=budget.reorder_every,
            orders=budget.orders,
            use_embedding=False,
            blocks=None,
            lengths=None,
            beams=8,
            rounds=budget.grab_rounds,
            learn_masks=True,
            mask_lr=0.2,
            mask_prior=0.01,
        ),
    }


PANEL_2026_5 = PANEL_2026_4.succeeded_by(
    "2026.5",
    members={
        **_malicious_servers_2026_5(
            ServerBudget(
                robbing_the_fed_bins=256,
                fishing=150,
                scale_mia_epochs=5,
                scale_mia_examples=1000,
                scale_mia_batch_size=20,
                scale_mia_lr=0.003,
            )
        ),
        **_exact_2026_5(),
        **_texts_2026_5(
            TextBudget(iterations=40, starts=10, reorder_every=20, orders=20, grab_rounds=10)
        ),
    },
    published={
        **_malicious_servers_2026_5(
            ServerBudget(
                robbing_the_fed_bins=1024,
                fishing=24_000,
                scale_mia_epochs=350,
                scale_mia_examples=50_000,
                scale_mia_batch_size=50,
                scale_mia_lr=0.001,
            )
        ),
        **_exact_2026_5(),
        **_texts_2026_5(
            TextBudget(iterations=2000, starts=500, reorder_every=75, orders=200, grab_rounds=30)
        ),
    },
)

_RCONV_2026_6 = RCONV(constraints="both", separation="bilinear")

PANEL_2026_6 = PANEL_2026_5.succeeded_by(
    "2026.6", members={"RCONV": _RCONV_2026_6}, published={"RCONV": _RCONV_2026_6}
)
"""R-CONV++ tells mixed classes apart; ARES, DAGER and SOMP find more than under 2026.5."""

PANEL_2026_7 = PANEL_2026_6.succeeded_by("2026.7", members={}, published={})
"""The same members: R-CONV++, DAGER and SOMP find more than under 2026.6."""

PANEL_2026_8 = PANEL_2026_7.succeeded_by("2026.8", members={}, published={})
"""The same members: SOMP also weighs DAGER's sentences where there is noise."""

PANEL_2026_9 = PANEL_2026_8.succeeded_by("2026.9", members={}, published={}, on_texts_alone=True)
"""The same members: DAGER and SOMP find more, attacks on images and sounds are as they were.

Searches in networks with layer or instance norms, which no standard scenario has, follow slopes
that were a few percent off before (`unfused_norms`).
"""

PANEL = PANEL_2026_9
"""The panel in force."""
