"""The fixed panel: named, versioned and frozen. A panel with other members needs a new version.

Every hyper-parameter is written out, so new defaults do not change a panel. A test compares what
each member reconstructs with what it reconstructed when the panel was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

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
    """Adversaries with fixed hyper-parameters. They make the rates of different runs comparable.

    Attributes:
        version: Recorded with every result.
        members: The adversaries by name, with budgets for CPUs. On 20 uploads of LeNet, a search
            takes seconds.
        published: The same adversaries with the budgets of their papers.
        alike: Earlier versions whose attacks differ only on texts. On all other data, their
            rates are comparable.
    """

    version: str
    members: Mapping[str, Adversary]
    published: Mapping[str, Adversary]
    alike: tuple[str, ...] = ()


_MEMBERS: dict[str, Adversary] = {
    "PriorGuess": PriorGuess(),
    "LinearLeakage": LinearLeakage(),
    "PriorAware": PriorAware(),
    "SPEAR": SPEAR(layer=None, samples=1024),
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
        iterations=300, restarts=1, lr=0.1, total_variation=1e-4, comparison="cosine"
    ),
    "SME": SME(iterations=300, restarts=1, lr=1.0, alpha=0.5, alpha_lr=1e-3, total_variation=0.01),
    "LearningToInvert": LearningToInvert(uploads=500, features=4096, max_examples=8),
    "DLG": DLG(iterations=40, restarts=1, patience=20),
    "IDLG": IDLG(iterations=40, restarts=1, patience=20, tolerance=1e-6),
    "GradInversion": GradInversion(
        iterations=150,
        restarts=1,
        lr=0.1,
        matching=1e-4,
        total_variation=1e-4,
        size=1e-6,
        batch_norm=0.1,
        consistency=0.01,
        langevin=0.2,
    ),
    "FedLeak": FedLeak(
        iterations=20,
        restarts=1,
        lr=0.01,
        matched=0.5,
        look_ahead=0.3,
        total_variation=1e-5,
        weight_decay=0.01,
        width=16,
    ),
    "DLFA": DLFA(
        iterations=100,
        restarts=1,
        lr=0.4,
        decay=0.995,
        total_variation=1e-3,
        range_penalty=2.0,
        order_prior=1000.0,
    ),
    "RobbingTheFed": RobbingTheFed(
        bins=256, query="random", mode=32, queries=1, rows="sparse", calibrated=True, gain=1e-3
    ),
    "RobbingTheFedDirectPass": RobbingTheFedDirectPass(calibrated=True),
    "LOKI": LOKI(bins_per_example=4, queries=1, signal=0.25, readout="brightness"),
    "TrapWeights": TrapWeights(s="auto", sigma=0.5),
    "ARES": ARES(
        bins="calibrated", separation="rows", lift=0.0, scale=1.0, clearance=6.0, iterations=400
    ),
    "ScaleMIA": ScaleMIA(epochs=5, examples=1000, batch_size=20, lr=0.003),
    "Fishing": Fishing(
        class_multiplier=0.5,
        feature_multiplier=300.0,
        iterations=150,
        restarts=1,
        total_variation=1e-4,
    ),
    "RGAP": RGAP(balance="blocks"),
    "RCONV": RCONV(constraints="both", separation="bilinear"),
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
    "LanguageGuess": LanguageGuess(),
    "LAMP": LAMP(
        iterations=40,
        lr=0.2,
        starts=10,
        norm_prior=2.0,
        reorder_every=20,
        orders=20,
        use_embedding=False,
        blocks=None,
        lengths=None,
        comparison="cosine",
        language=0.2,
        absolute=0.01,
    ),
    "GRAB": GRAB(
        iterations=40,
        lr=0.2,
        starts=10,
        norm_prior=2.0,
        reorder_every=20,
        orders=20,
        use_embedding=False,
        blocks=None,
        lengths=None,
        beams=8,
        rounds=10,
        learn_masks=True,
        mask_lr=0.2,
        mask_prior=0.01,
    ),
}

_TEXTS = {"iterations": 2000, "starts": 500, "reorder_every": 75, "orders": 200}
_BUDGETS: dict[str, dict[str, Any]] = {
    "SPEAR": {"samples": 1_000_000},
    "InvertingGradients": {"iterations": 24_000},
    "SME": {"iterations": 1000},
    "LearningToInvert": {"uploads": 5000},
    "DLG": {"iterations": 4000, "patience": 100},
    "IDLG": {"iterations": 4000, "patience": 100},
    "GradInversion": {"iterations": 20_000, "restarts": 4},
    "FedLeak": {"iterations": 10_000, "width": 256},
    "DLFA": {"iterations": 400},
    "RobbingTheFed": {"bins": 1024},
    "ScaleMIA": {"epochs": 350, "examples": 50_000, "batch_size": 50, "lr": 0.001},
    "Fishing": {"iterations": 24_000},
    "LAMP": _TEXTS,
    "GRAB": {**_TEXTS, "rounds": 30},
}
"""Budgets of the papers, for the members whose paper spends more than the panel.

The batch size and learning rate of ScaleMIA are chosen for its number of epochs.
"""

PANEL = Panel(
    version="2026.9",
    members=MappingProxyType(_MEMBERS),
    published=MappingProxyType(
        {name: replace(one, **_BUDGETS.get(name, {})) for name, one in _MEMBERS.items()}
    ),
    alike=("2026.8",),
)
"""The current panel."""
