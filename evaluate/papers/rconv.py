"""R-CONV++ and R-GAP: single images, large images and batches, from gradients alone."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Sequence

import torch
from scipy import stats
from torch import Generator, Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate

from leakfrontier.adversaries import RCONV, RGAP, Adversary, FedSGD, ImageSpace, NotApplicable
from leakfrontier.defenses import Batch, Defense

from ..client.client import Client, ThreatModel, Upload, observe
from ..data.dataset import Dataset
from ..foundations.seeds import fork
from ..foundations.statistics import Interval, mean_interval, rate
from ..modality import metrics
from ..models.models import build_model
from .table import Metric, PaperSetting, Row, Scores, Table, draw_batch

PEAK = 48.1308
"""Difference in dB between PSNR at peak 255 (as in the paper, on images in [0, 1]) and peak 1."""

RECOVERED = 20
"""PSNR at peak 1, in dB, above which an image of a batch counts as recovered."""

_NETWORKS = {
    "LeNet": "lenet_rconv",
    "LeNet-x": "lenet_x",
    "LeNet-ex": "lenet_ex",
    "CNN6": "cnn6",
    "CNN6-x": "cnn6_x",
}
_REFERENCE = (
    "Eltaras, Malluhi, Savino, Di Carlo, Qayyum. R-CONV++: Uncovering Privacy Vulnerabilities "
    "through Analytical Gradient Inversion Attacks. Computing 107:156, 2025. "
    "https://doi.org/10.1007/s00607-025-01508-w"
)


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean logistic loss of single logits, for R-GAP's binary task."""
    return binary_cross_entropy_with_logits(outputs.squeeze(1), targets.to(outputs))


def upload_of(
    problem: PaperSetting, data: Dataset, rng: Generator, defense: Defense | None = None
) -> Upload:
    """Return the gradient of an untrained network on random test images.

    Args:
        problem: `network`, `activation`, `precision`, and `batch`, `labels`, `size` or `clients`,
            who share the images.
        data: Source of the images.
        rng: Source of randomness for images and weights.
        defense: The client's defense. By default none.
    """
    images, targets = _examples(problem, data, rng)
    binary = problem["network"] == "CNN6"
    space = ImageSpace(tuple(images.shape[1:]), 1 if binary else len(data.classes))
    options = {} if "activation" not in problem else {"activation": problem["activation"]}
    model = build_model(_NETWORKS[problem["network"]], space, rng, **options)
    precision = torch.float32 if problem.get("precision") == "single" else torch.float64
    if binary:
        targets = targets % 2
    loss = logistic if binary else cross_entropy
    client = Client(model.to(precision), loss, defense or Defense(), FedSGD(), space)
    batch, clients = Batch(images.to(precision), targets), problem.get("clients", 1)
    shares = [batch.at(rows) for rows in torch.arange(len(targets)).chunk(clients)]
    return observe(client, shares, ThreatModel(), fork(rng))[0]


def _examples(problem: PaperSetting, data: Dataset, rng: Generator) -> Batch:
    if "size" in problem:
        images, targets = draw_batch(data.test, 1, rng)
        size = (problem["size"], problem["size"])
        if images.shape[2:] != size:
            images = interpolate(images, size, mode="area")
        return Batch(images, targets)
    if problem.get("labels") == "distinct":
        order = torch.randperm(len(data.test.targets), generator=rng)
        first: dict[int, int] = {}
        for place in order.tolist():
            first.setdefault(int(data.test.targets[place]), place)
        return data.test.at(torch.tensor(list(first.values())[: problem["batch"]]))
    return draw_batch(data.test, problem.get("batch", 1), rng)


def single_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Attack the gradient of one image."""
    upload = upload_of(problem, data, rng)
    attack: Adversary = RGAP() if method["attack"] == "R-GAP" else RCONV()
    begun = time.process_time()
    try:
        guess = attack.reconstruct(upload.observation, fork(rng)).inputs
    except NotApplicable:  # dead filters leave too few constraints: guess grey
        guess = torch.full_like(upload.truth.inputs, 0.5)
    seconds = time.process_time() - begun
    psnr = float(metrics.psnr(guess, upload.truth.inputs)[0])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "median": [psnr],
        "psnr255": [psnr + PEAK],
        "60 dB": [float(psnr > 60)],
        "GiB": [memory],
        "seconds": [seconds],
    }


def batch_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Attack the gradient of a batch, and count the recovered images."""
    upload = upload_of({"network": "LeNet-ex", **problem}, data, rng)
    attack = RCONV(separation=method["separation"])
    begun = time.process_time()
    guess = attack.reconstruct(upload.observation, fork(rng))
    seconds = time.process_time() - begun
    truth, labels = upload.truth
    errors = torch.cdist(guess.inputs.flatten(1), truth.flatten(1)).square() / truth[0].numel()
    levels = -10 * errors.clamp(min=metrics.LEAST_ERROR).log10()
    missing = torch.zeros(len(truth), len(truth), dtype=levels.dtype)
    levels = torch.cat([levels, missing])
    best = levels[metrics.assign(-levels), torch.arange(len(truth))]
    unique = (labels.unsqueeze(1) == labels).sum(1) == 1
    return {
        "recovered": [float((best > RECOVERED).sum())],
        "exact": [float((best > 60).sum())],
        "unique": [float(unique.sum())],
        "seconds": [seconds],
    }


def median_interval(values: Sequence[float], trials: Sequence[int]) -> Interval:
    """Return a median with its 95 % interval between two order statistics."""
    ordered = sorted(values)
    if not ordered:
        return Interval(math.nan, -math.inf, math.inf, 0)
    below = int(stats.binom.ppf(0.025, len(ordered), 0.5)) - 1
    low, high = (ordered[below], ordered[~below]) if below >= 0 else (-math.inf, math.inf)
    return Interval(statistics.median(ordered), low, high, len(ordered))


_PSNR = {
    "median": Metric("median PSNR in dB at peak 1, capped at 200", median_interval, brief=True),
    "psnr255": Metric(
        "mean PSNR in dB at peak 255 on images in [0, 1], as in the paper", mean_interval
    ),
    "60 dB": Metric("share of images above 60 dB at peak 1", rate, percent=True, brief=True),
}


def _row(attack: str, psnr255: float | None, *, trials: int = 10, **problem: object) -> Row:
    paper = {} if psnr255 is None else {"psnr255": psnr255}
    return Row(problem, paper, {"attack": attack}, trials=trials)


TABLES = [
    Table(
        name="rconv-table2",
        title="R-CONV and R-GAP on single images",
        reference=f"{_REFERENCE} Table 2",
        datasets={"cifar100": (3, 32, 32), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)},
        metrics=_PSNR,
        rows=[
            *(
                _row(
                    "R-CONV",
                    None if precision == "single" else 114.68,
                    dataset=dataset,
                    network=network,
                    activation=activation,
                    precision=precision,
                )
                for precision in ("double", "single")
                for dataset in ("cifar100", "mnist")
                for network in ("LeNet", "LeNet-x")
                for activation in ("sigmoid", "relu")
            ),
            *(
                _row("R-CONV", 150.12, dataset="cifar10", network="CNN6-x", activation=activation)
                for activation in ("leaky_relu", "relu")
            ),
            *(
                _row(
                    "R-GAP",
                    76.73 if precision == "double" else None,
                    dataset="cifar10",
                    network="CNN6",
                    precision=precision,
                    trials=4,
                )
                for precision in ("double", "single")
            ),
        ],
        trial=single_trial,
        procedures={"ours": dict},
        quick=2,
        notes=(
            "Untrained networks with weights from U(-0.5, 0.5), CNN6 with torch's defaults. Pixels "
            "in [0, 1]. The first two activations are leaky ReLUs, as in the authors' code. Double "
            "precision unless a row says single. The paper's numbers are averages over all "
            "networks and activations of its figures 2 and 3. DLG, its third attack, is in the "
            "table `dlg`. s is processor time. R-GAP's task is binary, and its label is not given. "
            "If dead filters leave too few constraints, the attack fails, which counts as a grey "
            "image."
        ),
    ),
    Table(
        name="rconv-fig4",
        title="R-CONV++ and R-GAP on large photos, LeNet-ex",
        reference=f"{_REFERENCE} Figure 4",
        datasets={"tiny_imagenet20": (3, 64, 64), "imagenet_sample224": (3, 224, 224)},
        metrics={
            **_PSNR,
            "GiB": Metric("peak memory of the process so far", mean_interval, brief=True),
        },
        rows=[
            _row(
                attack,
                None,
                trials=2,
                dataset=dataset,
                network="LeNet-ex",
                size=size,
                precision=precision,
            )
            for dataset, size in (("tiny_imagenet20", 64), ("imagenet_sample224", 112))
            for precision in ("double", "single")
            for attack in ("R-CONV", "R-GAP")
        ],
        trial=single_trial,
        procedures={"ours": dict},
        notes=(
            "The paper shows pictures and no table: nearly perfect at 64 x 64, degraded at "
            "112 x 112, and R-GAP is worse. Photos of 224 x 224 are scaled to 112 x 112. "
            "The paper does not define LeNet-ex: see `evaluate/models/rconv_networks.py`. R-GAP "
            "is our implementation: it uses both kinds of constraints and computes in double "
            "precision; its authors' code computes in single. GiB belongs to a process that may "
            "have attacked other images before: use --workers 1 and one row to measure one image."
        ),
    ),
    Table(
        name="rconv-fig5to8",
        title="R-CONV++ on batches of CIFAR-100, LeNet-ex",
        reference=f"{_REFERENCE} Figures 5 to 8",
        datasets={"cifar100": (3, 32, 32)},
        metrics={
            "recovered": Metric(f"images of a batch above {RECOVERED} dB, peak 1", mean_interval),
            "exact": Metric("images of a batch above 60 dB, peak 1", mean_interval),
            "unique": Metric("images of a batch whose label is unique", mean_interval),
        },
        rows=[
            Row({"batch": batch, "labels": labels}, {"recovered": recovered}, trials=4)
            for labels in ("drawn", "distinct")
            for batch, recovered in ((8, 8), (16, 15), (32, 24), (48, 32))
        ],
        trial=batch_trial,
        procedures={
            "ours": lambda _: {"separation": "bilinear"},
            "peeling": lambda _: {"separation": "peeling"},
            "paper": lambda _: {"separation": "rows"},
        },
        notes=(
            "The paper counts by eye and does not say how labels were drawn. `drawn` takes random "
            "test images, `distinct` one of each class. Double precision. --procedure paper "
            "uses the rows of the last layer directly, `peeling` subtracts the images already "
            "found, `ours` also separates by the last convolution's gradient."
        ),
    ),
]
