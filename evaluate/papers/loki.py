"""LOKI: reproduction of the authors' demonstration."""

from __future__ import annotations

from torch import Generator

from leakfrontier.adversaries import LOKI, FedAvg
from leakfrontier.defenses import SecureAggregation

from ..data.dataset import Dataset
from ..foundations.seeds import fork
from ..models.models import build_model
from .servers import METRICS, Setup, attacked, crafted_upload
from .table import PaperSetting, Row, Scores, Table

CLIENTS, EXAMPLES = 10, 64
LOCAL = FedAvg(epochs=1, batch_size=8, lr=1e-4)


def loki_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Attack the sum of the updates of several clients.

    Args:
        problem: Number of `bins` for each example of a client.
        method: Options of the attack.
        data: Source of the examples. Its test split is public.
        rng: Source of the examples, the weights and all other randomness.
    """
    attack, own = LOKI(bins_per_example=problem["bins"], **method), fork(rng)
    model = build_model("resnet18", data.space, rng)
    defense = SecureAggregation(CLIENTS)
    setup = Setup(model, EXAMPLES, CLIENTS, defense, LOCAL)
    return attacked(attack, crafted_upload(attack, setup, data, rng), own)[0]


def _as_published(method: PaperSetting) -> PaperSetting:
    """Return the attack with the readout of its paper."""
    return {**method, "readout": "minmax"}


TABLES = [
    Table(
        name="loki",
        title="LOKI under secure aggregation",
        reference=(
            "Zhao, Sharma, Elkordy, Ezzeldin, Avestimehr, Bagchi. LOKI: Large-scale Data "
            "Reconstruction Attack against Federated Learning through Model Manipulation. IEEE "
            "S&P 2024. https://arxiv.org/abs/2303.12233"
        ),
        datasets={"cifar10": (3, 32, 32)},
        metrics=METRICS,
        rows=[
            Row({"bins": bins}, paper, {"queries": queries}, trials=2)
            for bins, queries, paper in (
                (4, 2, {"20 dB": 575 / 640}),
                (4, 1, {"20 dB": 575 / 640}),
                (8, 1, {}),
            )
        ],
        trial=loki_trial,
        procedures={"ours": dict, "paper": _as_published},
        notes=(
            f"{CLIENTS} clients with {EXAMPLES} examples each, 8 local steps of 8 examples, "
            "learning rate 1e-4, a ResNet-18 with GroupNorm behind the module. The authors' code, "
            "run once, counts 575 of 640 examples as leaked, i.e. alone in a bin. If the first "
            "example in a bin closes it for later steps t, independent examples are alone with "
            "probability (1 - 1/256)^(8t+7), i.e. 56 of 64. Two queries with half the bins each "
            "give an example two chances. Procedure 'paper' uses the published readout. Inputs are "
            "normalised, and the module undoes this. PSNR has peak 1. s is processor time."
        ),
    )
]
