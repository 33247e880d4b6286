"""Robbing the Fed: reproduction of the results of its released code."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Generator

from leakfrontier.adversaries import RobbingTheFed

from ..data.dataset import Dataset
from ..foundations.seeds import fork
from ..models.models import build_model
from .servers import METRICS, Setup, attacked, crafted_upload
from .table import PaperSetting, Row, Scores, Table

EXAMPLES = 64
"""Examples per batch."""


def rtf_trial(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Attack a batch behind an imprint module.

    Args:
        problem: Number of `bins`.
        method: The `query` (or several) and other options of the attack.
        data: Source of the batch. Its test split is public.
        rng: Source of the batch, the weights and all other randomness.
    """
    options = {**method, **_SEVERAL.get(method["query"], {})}
    attack, own = RobbingTheFed(bins=problem["bins"], **options), fork(rng)
    model = build_model("resnet18", data.space, rng)
    upload = crafted_upload(attack, Setup(model, EXAMPLES), data, rng)
    return attacked(attack, upload, own)[0]


def _ours(method: PaperSetting) -> PaperSetting:
    return {**method, "mode": 0} if method["query"] == "fourier" else method


def _as_published(method: PaperSetting) -> PaperSetting:
    return {**_ours(method), "calibrated": False}


_SEVERAL: Mapping[str, PaperSetting] = {"4 random": {"query": "random", "queries": 4}}
_CODE: Mapping[tuple[int, str], tuple[float, int]] = {  # mean PSNR, number of exact examples
    (1024, "average"): (117.4, 57),
    (1024, "random"): (130.4, 63),
    (128, "average"): (78.0, 35),
    (100, "fourier"): (70.1, 30),
}
TABLES = [
    Table(
        name="rtf",
        title="Robbing the Fed: its module before a ResNet-18",
        reference=(
            "Fowl, Geiping, Czaja, Goldblum, Goldstein. Robbing the Fed: Directly Obtaining "
            "Private Data in Federated Learning with Modified Models. ICLR 2022. "
            "https://arxiv.org/abs/2110.13057"
        ),
        datasets={"cifar10": (3, 32, 32)},
        metrics=METRICS,
        rows=[
            Row({"bins": bins}, {"psnr": mean, "60 dB": exact / EXAMPLES}, {"query": query}, 5)
            for (bins, query), (mean, exact) in _CODE.items()
        ]
        + [Row({"bins": 1024}, {}, {"query": "4 random"}, trials=5)],
        trial=rtf_trial,
        procedures={"ours": _ours, "paper": _as_published},
        notes=(
            f"Batches of {EXAMPLES}, normalised inputs, PSNR at peak 1. The paper's numbers come "
            "from one batch, attacked by the authors' code. 'ours' has bins at quantiles of the "
            "test split's projection, 'paper' at quantiles of N(0, 1) or a Laplace distribution. "
            "GroupNorm replaces BatchNorm. Of 64 independent examples in 1024 bins, 60.2 are alone "
            "on average. Four queries of 256 bins each give an example four chances. s is "
            "processor time."
        ),
    )
]
