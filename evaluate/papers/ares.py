"""ARES: the tables of its paper, and the figures whose settings the paper states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from leakfrontier.adversaries import FedAvg, FedSGD, InputSpace, Protocol
from leakfrontier.adversaries.malicious.imprint import counted_recovery, dissect, expected_recovery
from leakfrontier.defenses import ATS, Defense, Noise, Quantization, SecureAggregation, TopK

from ..client.client import Upload
from ..data.dataset import Dataset
from ..foundations.seeds import fork, generator
from ..foundations.statistics import mean_interval, rate
from ..models import networks
from ..models.models import build_model
from .servers import METRICS, Setup, attack_of, attacked, crafted_upload, psnrs, scores, shrunk
from .table import Metric, PaperSetting, Row, Scores, Table, TrialFunction

BINS = 1024
"""Rows of the CNN's linear layer."""

NETWORKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "CNN": ("cnn", {}),
    "MLP": ("mlp", {"width": 512}),
    "3 each": (f"{networks.__name__}:ares_summed", {}),
    "audio": (f"{networks.__name__}:ares_audio", {}),
    "strided": (f"{networks.__name__}:scale_mia", {}),
}
"""Networks with options, by their names in the rows."""


def ares_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator, *, largest: int = 64
) -> Scores:
    """Attack one round.

    Args:
        problem: The `batch` of all clients (default 32), the `network` (default CNN), and the
            options of `_defense` and `_protocol`.
        method: The `attack` and its options.
        data: Source of the batch. Its test split is public.
        rng: Source of the batch, the weights and all other randomness.
        largest: Larger images are scaled to this many pixels.
    """
    data = shrunk(data, largest)
    attack, own = attack_of(method), fork(rng)
    upload = crafted_upload(attack, _setup(problem, data.space, rng), data, rng)
    found, guess = attacked(attack, upload, own)
    if "b" in problem:
        found = {**found, "noise": [math.log10(problem["b"] / median_entry(upload))]}
    if problem.get("defense") == "ATS":
        seen = psnrs(guess, upload.trained_on.inputs, data.space)
        found = {**found, **scores(seen), "original": found["psnr"]}
    return found


def rate_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Count the examples that are alone in a bin, and the expected number."""
    attack, examples = attack_of(method), problem["batch"]
    upload = crafted_upload(attack, _setup(problem, data.space, rng), data, rng)
    found, _ = attacked(attack, upload, rng)
    return {
        "alone": alone(upload, nested=method["attack"] != "TW").double().tolist(),
        "expected": [expected_recovery(examples, BINS)],
        "Eq. 16": [counted_recovery(examples, BINS)],
        "60 dB": found["60 dB"],
        "seconds": found["seconds"],
    }


@torch.no_grad()
def alone(upload: Upload, *, nested: bool = True) -> Tensor:
    """Return which examples are alone in a row, or in a bin between rows.

    Args:
        upload: Upload of a client that received a crafted model.
        nested: Whether all rows measure one projection. If so, bins lie between rows.
    """
    model = upload.observation.model
    layer = dissect(model, upload.observation.space).layer
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        model(upload.truth.inputs)
    finally:
        handle.remove()
    active = seen[0].T > 0
    if nested:
        active = active & ~torch.cat([active[1:], torch.zeros_like(active[:1])])
    return active[active.sum(dim=1) == 1].any(dim=0)


def median_entry(upload: Upload) -> float:
    """Return the median absolute entry of the attacked gradient without noise."""
    observation = upload.observation
    name = dissect(observation.model, observation.space).name
    clean = observation.simulate(*upload.truth)[f"{name}.weight"].abs()
    return float(clean[clean > 0].median())


def _setup(problem: PaperSetting, space: InputSpace, rng: Generator) -> Setup:
    network = problem.get("network", "3 each" if "clients" in problem else "CNN")
    name, options = NETWORKS[network]
    # Scale-MIA trains an encoder for its network, so trials differ only in their examples.
    source = generator("network") if network == "strided" else rng
    clients = problem.get("clients", 1)
    return Setup(
        build_model(name, space, source, **options),
        examples=problem.get("batch", 32) // clients,
        clients=clients,
        defense=_defense(problem).for_space(*_normalisation(space)),
        protocol=_protocol(problem),
    )


def _normalisation(space: InputSpace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return getattr(space, "mean", (0.0,)), getattr(space, "std", (1.0,))


def _defense(problem: PaperSetting) -> Defense:
    """Return the defense of the clients: quantization, sparsification, noise and so on."""
    if "bits" in problem:
        return Quantization(problem["bits"])
    if "density" in problem:
        return TopK(problem["density"])
    if "b" in problem:
        return Noise(problem["b"], "laplace")
    if problem.get("defense") == "ATS":
        return ATS()
    if "clients" in problem:
        return SecureAggregation(problem["clients"])
    return Defense()


def _protocol(problem: PaperSetting) -> Protocol:
    """Return FedAvg with `E` epochs of one batch of 8 each, or FedSGD without `E`."""
    return FedAvg(epochs=problem["E"], batch_size=8, lr=0.01) if "E" in problem else FedSGD()


_SHAPES = {
    "cifar10": (3, 32, 32),
    "mnist": (1, 28, 28),
    "photos": (3, 64, 64),
    "ham": (3, 128, 128),
    "speech": None,
}
_SETUP = (
    "Inputs are normalised, and PSNR has peak 1. Bins are calibrated on the test split; "
    "'paper' uses the published bins, quantiles of N(0, 1). Our head has equal columns with values "
    "that differ by class. The authors' head has equal values, with which only rounding errors "
    "leak. s is processor time. "
)


def _table(
    name: str,
    title: str,
    rows: Iterable[Row],
    *,
    trial: TrialFunction = ares_trial,
    metrics: Mapping[str, Metric] = METRICS,
    dataset: str = "cifar10",
    notes: str = "",
) -> Table:
    found = list(rows)
    used = {row.problem.get("dataset", dataset): None for row in found}
    return Table(
        name=f"ares-{name}",
        title=title,
        reference=(
            "Gong et al. ARES: Scalable and Practical Gradient Inversion Attack in Federated "
            "Learning through Activation Recovery. IEEE S&P 2026."
        ),
        datasets={name: _SHAPES[name] for name in used},
        metrics=metrics,
        rows=found,
        trial=trial,
        procedures={"ours": dict, "paper": _as_published},
        quick=1,
        notes=_SETUP + notes,
    )


def _as_published(method: PaperSetting) -> PaperSetting:
    """Return the attack with the bins of its paper."""
    published: dict[str, PaperSetting] = {
        "ARES": {"bins": "paper"},
        "RtF": {"calibrated": False},
    }
    return {**method, **published.get(method["attack"], {})}


def _rows(
    problems: Iterable[PaperSetting], means: Mapping[str, Iterable[float | None]], trials: int = 3
) -> Iterable[Row]:
    """Yield a row per problem and attack, with the paper's mean of each attack."""
    for problem, of_attacks in zip(problems, zip(*means.values(), strict=True), strict=True):
        for attack, mean in zip(means, of_attacks, strict=True):
            paper = {} if mean is None else {"psnr": mean}
            yield Row(problem, paper, {"attack": attack}, trials)


def _unpublished(
    problems: Iterable[PaperSetting], attacks: Sequence[str], trials: int = 2
) -> Iterable[Row]:
    """Yield a row per problem and attack."""
    for problem in problems:
        yield from (Row(problem, {}, {"attack": attack}, trials) for attack in attacks)


_BATCHES = (32, 64, 256)
_TABLE2 = {  # mean PSNR of ARES, RtF and TW
    "cifar10": ((92.27, 90.47, 37.08), (17.35, 17.20, 15.08), (13.55, 13.03, 13.51)),
    "mnist": ((105.29, 94.16, 42.42), (17.53, 16.68, 13.08), (13.89, 13.02, 11.87)),
    "photos": ((104.89, 90.72, 41.61), (16.58, 15.20, 14.86), (12.92, 12.59, 12.56)),
    "ham": ((120.93, 69.96), (15.32, 15.01), (15.29, 14.39)),
}
_SCALE_MIA = {"attack": "Scale-MIA"}
_TABLE3 = {32: (28.52, 92.27), 64: (28.53, 90.47), 128: (28.26, 85.01), 256: (27.06, 37.08)}
_RATES = {
    "alone": Metric("share of examples that are alone in a bin or row", rate, percent=True),
    "expected": Metric("(1 - 1/K)^(n-1)", mean_interval, percent=True, brief=True),
    "Eq. 16": Metric("the paper's count", mean_interval, percent=True, brief=True),
    "60 dB": METRICS["60 dB"],
}
_CURVES = "The paper shows curves and no table: "
_GAINS = (
    _CURVES + "it says that ARES has {} times the PSNR of RtF in the CNN and {} times in the MLP. "
    "Photos are Tiny ImageNet's at 32 pixels, in batches of 32."
)


def _perturbed(name: str, title: str, key: str, values: Sequence[float], gains: str) -> Table:
    """Return one of three tables of defenses by their strength."""
    noise = Metric("log10 of b divided by the median attacked entry", mean_interval, brief=True)
    return _table(
        name,
        title,
        _unpublished(
            [{"network": network, key: value} for network in ("CNN", "MLP") for value in values],
            ("ARES", "RtF"),
        ),
        trial=partial(ares_trial, largest=32),
        metrics={**METRICS, "noise": noise} if key == "b" else METRICS,
        dataset="photos",
        notes=_GAINS.format(*gains.split()),
    )


TABLES = [
    _table(
        "table2",
        "ARES: malicious servers on a CNN",
        (
            row
            for dataset, means in _TABLE2.items()
            for row in _rows(
                [{"dataset": dataset, "batch": size} for size in _BATCHES[: len(means[0])]],
                dict(zip(("ARES", "RtF", "TW"), means, strict=True)),
                trials=2 if dataset in ("photos", "ham") else 5,
            )
        ),
        notes=(
            "Photos come from Tiny ImageNet instead of ImageNet, because at 224 pixels the CNN has "
            "1.2 billion weights. HAM10000 is scaled to 64 pixels. In the paper's other columns, "
            "passive attacks reach 8 to 22 dB and Fishing, on one example, 12 to 13 dB. Its fifth "
            "dataset, Lung-Colon, is left out."
        ),
    ),
    _table(
        "table3",
        "ARES and Scale-MIA",
        (
            row
            for batch, (scale_mia, ares) in _TABLE3.items()
            for row in (
                Row({"network": "strided", "batch": batch}, {"psnr": scale_mia}, _SCALE_MIA, 2),
                Row({"network": "CNN", "batch": batch}, {"psnr": ares}, {"attack": "ARES"}, 3),
            )
        ),
        notes=(
            "Scale-MIA has its own network. Its autoencoder is trained for 10 epochs on the test "
            "split; the published one was trained for 350 epochs on the training data. The "
            "published mean covers only examples above 18 dB."
        ),
    ),
    _table(
        "fig7",
        "ARES: recovery rates on a CNN",
        _unpublished(
            [{"dataset": d, "batch": n} for d in ("cifar10", "mnist") for n in (64, 256)],
            ("ARES", "RtF", "TW"),
            trials=5,
        ),
        trial=rate_trial,
        metrics=_RATES,
        notes=(
            _CURVES + "it says that ARES and RtF improve on TW by 6.6 (batch 64) and 7.1 (256), "
            "without a unit, and, of figure 9, that rates deviate from Eq. 16 by 3.5 %."
        ),
    ),
    _table(
        "fig8",
        "ARES: an MLP, whose second layer leaks in addition to the first",
        _unpublished([{"network": "MLP", "batch": n} for n in (64, 256)], ("ARES", "RtF"), 5),
        notes=(
            _CURVES + "it says that ARES improves the recovery rate by 10.75 points (batch 64) "
            "and 28.34 (256). RtF has 512 bins in the first layer."
        ),
    ),
    _perturbed("fig10", "ARES under quantization", "bits", (2, 4, 8, 16), "5 1.35"),
    _perturbed("fig11", "ARES under sparsification", "density", (0.1, 0.5, 0.9), "3 1.12"),
    _perturbed(
        "fig12", "ARES under Laplace noise", "b", (1e-10, 1e-8, 1e-6, 1e-4, 1e-2), "2.5 1.14"
    ),
    _table(
        "fig13",
        "ARES under secure aggregation",
        (
            Row({"clients": 10, "batch": batch}, paper, {"attack": attack}, 1)
            for batch, mean in ((320, 53.7), (640, 51.9))
            for attack, paper in (
                ("ARES", {"psnr": mean}),
                ("ARES lift", {}),
                ("ARES rows", {}),
                ("LOKI", {}),
                ("RtF", {}),
            )
        ),
        notes=(
            "A convolution with 3 kernels for each client. ARES is as in the paper: each client "
            "gets its own kernels, whose units give half as many equations as there are pixels. "
            "'lift': kernels copy the channels, and biases keep all units active. 'rows': each "
            "client gets all kernels and a tenth of the rows. RtF sends all clients the same "
            "model. The paper says that ARES improves on LOKI by 7.3 and 7.1, without a unit."
        ),
    ),
    _table(
        "fig17",
        "ARES under FedAvg",
        _unpublished(
            [
                {"network": network, "E": epochs, "batch": 8}
                for network in ("CNN", "MLP")
                for epochs in (1, 2, 5, 10)
            ],
            ("ARES", "RtF"),
        ),
        dataset="ham",
        notes=(
            _CURVES + "it says that ARES has 2 times the PSNR of RtF in the CNN and 1.16 times in "
            "the MLP. HAM10000 at 64 pixels, one batch of 8 per epoch, learning rate 0.01. An "
            "asynchronous client (figure 18) uploads the same, because the server knows which "
            "model it sent."
        ),
    ),
    _table(
        "ats",
        "ARES against ATS",
        [Row({"defense": "ATS"}, {"psnr": 86.8}, {"attack": "ARES"}, trials=5)],
        metrics={
            **METRICS,
            "original": Metric("mean PSNR against the original", mean_interval, brief=True),
        },
        notes="CIFAR-10, batches of 32. As in the paper, scores compare with the trained examples.",
    ),
    _table(
        "audio",
        "ARES on spoken digits",
        _rows(
            [{"network": "audio", "batch": n} for n in (32, 64)], {"ARES": (58.55, 45.83)}, trials=3
        ),
        dataset="speech",
        notes=(
            "Waves of the Free Spoken Digit Dataset, PSNR for the range from -1 to 1. The paper "
            "uses AudioMNIST and names neither network nor representation."
        ),
    ),
]
