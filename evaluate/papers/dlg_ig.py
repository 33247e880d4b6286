"""Deep Leakage from Gradients and Inverting Gradients: single images from their gradients."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

from torch import Generator, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    DLG,
    IDLG,
    FedSGD,
    ImageSpace,
    InvertingGradients,
    NotApplicable,
)
from leakfrontier.adversaries.matching.matching import Matching
from leakfrontier.defenses import Batch, Defense

from ..client.client import Client, ThreatModel, Upload, make_replay, observe
from ..client.federation import Federation
from ..data.dataset import Dataset
from ..foundations.seeds import fork, generator
from ..foundations.statistics import mean_interval, rate
from ..models import networks
from ..models.models import build_model
from .table import Metric, PaperSetting, Row, Scores, Table, draw_batch, matched_psnr

ATTACKS: dict[str, Matching] = {
    "DLG": DLG(),
    "iDLG": IDLG(),
    "Euclidean": IDLG(tolerance=0.0),  # L-BFGS on the squared error, with the label known
    "IG": InvertingGradients(iterations=2000),
}
"""The attacks of the rows."""

_BROKEN = 40  # dB
_TOGETHER = 5  # images of a trial
_CIFAR10 = "cifar10"
_REDUCED = {"images": 1, "iterations": 3000}  # half a minute per batch on one core


def image_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Attack the gradients of single images together. All come from one network.

    Args:
        problem: The `network`, and whether it is `trained`.
        method: The `attack`, with fewer `images` or `iterations` in a smoke test.
        data: Source of the images.
        rng: Source of the images, the weights and all other randomness.
    """
    uploads = image_uploads(problem, data, rng, images=method.get("images", _TOGETHER))
    attack, rngs = ATTACKS[method["attack"]], [fork(rng) for _ in uploads]
    most = method.get("iterations", attack.iterations)
    attack = replace(attack, iterations=min(attack.iterations, most))
    start = time.process_time()
    guesses = attack.reconstruct_all([upload.observation for upload in uploads], rngs)
    seconds = (time.process_time() - start) / len(uploads)
    psnr = []
    for guess, upload in zip(guesses, uploads, strict=True):
        if isinstance(guess, NotApplicable):
            raise guess
        psnr += matched_psnr(guess.inputs, upload.truth.inputs, upload.observation.space).tolist()
    return {
        "psnr": psnr,
        "broken": [float(value > _BROKEN) for value in psnr],
        "seconds": [seconds],
    }


def image_uploads(
    problem: PaperSetting, data: Dataset, rng: Generator, *, images: int = _TOGETHER
) -> list[Upload]:
    """Return the gradients of some images. In `dlg`, pixels are not normalised."""
    known = "activation" not in problem
    space = data.space if known else ImageSpace(data.space.shape, len(data.classes))
    if problem.get("trained"):
        model = deepcopy(_trained_lenet(data))
    elif problem["network"] == "ResNet20-4":
        model = build_model(f"{networks.__name__}:ig_resnet20", space, rng)
    else:
        activation = problem.get("activation", "sigmoid")
        model = build_model("lenet", space, rng, activation=activation)
    count = 1 if problem["network"] == "ResNet20-4" else images
    pixels, targets = draw_batch(data.test, count, rng)
    examples = zip(space.to_inputs(pixels).split(1), targets.split(1), strict=True)
    client = Client(model, cross_entropy, Defense(), FedSGD(), space)
    threat = ThreatModel(knows_targets=known)
    replay = make_replay(client, threat, rng)
    return [observe(client, [Batch(*one)], threat, rng, replay=replay)[0] for one in examples]


@lru_cache(maxsize=1)
def _trained_lenet(data: Dataset) -> nn.Module:
    """Return LeNet after 2,000 steps of Adam. The result is always the same."""
    rng, space = generator("trained LeNet"), data.space
    model = build_model("lenet", space, rng)
    federation = Federation(
        Client(model, cross_entropy, Defense(), FedSGD(), space),
        [data.normalised[0]],
        clients_per_round=1,
        batch_size=64,
        lr=0.003,
    )
    for _ in range(2000):
        federation.round(rng)
    return federation.model


_METRICS = {
    "psnr": Metric("mean PSNR in dB", mean_interval),
    "broken": Metric(f"share of images with a PSNR above {_BROKEN} dB", rate, percent=True),
}

TABLES = [
    Table(
        name="dlg",
        title="DLG and iDLG on LeNet: with sigmoids, and with ReLUs (expected to fail)",
        reference=(
            "Zhu, Liu, Han. Deep Leakage from Gradients. NeurIPS 2019. "
            "https://arxiv.org/abs/1906.08935; Zhao, Mopuri, Bilen. iDLG: Improved Deep Leakage "
            "from Gradients. 2020. https://arxiv.org/abs/2001.02610"
        ),
        datasets={"cifar100": (3, 32, 32)},
        metrics=_METRICS,
        rows=[
            Row({"network": "LeNet", "activation": activation}, {}, {"attack": attack}, trials=4)
            for attack in ("DLG", "iDLG")
            for activation in ("sigmoid", "relu")
        ],
        trial=image_trial,
        procedures={"ours": dict},
        reduced=_REDUCED,
        notes=(
            "Untrained networks; the weights of sigmoid networks are drawn from U(-0.5, 0.5). "
            "Pixels in [0, 1], label unknown. A batch is "
            f"{_TOGETHER} images of one network, each with its own gradient, attacked together. s "
            "is processor time per image. The papers show pictures and curves of this case, but "
            "no table."
        ),
    ),
    Table(
        name="ig",
        title="Inverting Gradients against the squared error with L-BFGS",
        reference=(
            "Geiping, Bauermeister, Droege, Moeller. Inverting Gradients: How easy is it to "
            "break privacy in federated learning? NeurIPS 2020, table 1. "
            "https://arxiv.org/abs/2003.14053"
        ),
        datasets={_CIFAR10: (3, 32, 32)},
        metrics=_METRICS,
        rows=[
            Row(
                {"network": network, "trained": trained},
                {"psnr": psnr},
                {"attack": attack},
                trials=2 if network == "ResNet20-4" else 4,
            )
            for attack, network, trained, psnr in (
                ("Euclidean", "LeNet", False, 46.25),
                ("IG", "LeNet", False, 18.00),
                ("Euclidean", "LeNet", True, 13.24),
                ("IG", "LeNet", True, 18.08),
                ("Euclidean", "ResNet20-4", False, 10.29),
                ("IG", "ResNet20-4", False, 19.83),
            )
        ],
        trial=image_trial,
        procedures={"ours": dict},
        quick=2,
        reduced=_REDUCED,
        notes=(
            f"Test images, labels known. {_TOGETHER} images of one network are attacked together, "
            "each with its own gradient (ResNet20-4: one). IG runs for 2,000 iterations, fewer "
            "than in the paper. LeNet is trained for 2,000 steps. The paper's trained ResNet20-4 "
            "is left out because it cannot be trained here."
        ),
    ),
]
