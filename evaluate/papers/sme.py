"""Surrogate Model Extension: the tables of its paper, and figure 6.

Settings use the paper's notation: E local epochs on N examples in batches of B, with a network that
was trained for R - 1 rounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad
from torch.profiler import ProfilerActivity, profile

from leakfrontier.adversaries import (
    DLFA,
    SME,
    FedAvg,
    ImageSpace,
    InputSpace,
    Observation,
    Reconstruction,
)
from leakfrontier.adversaries.matching.matching import Matching, cosine
from leakfrontier.defenses import Batch, Defense

from ..client.client import Client, ThreatModel, Upload, observe
from ..client.federation import Federation
from ..data.dataset import Dataset
from ..data.partition import partition
from ..foundations.seeds import fork, generator
from ..foundations.statistics import mean_interval
from ..models import networks
from ..models.models import build_model
from .sme_paths import LocalSteps, local_steps
from .table import Metric, PaperSetting, Row, Scores, Table, draw_batch, matched_psnr

FEMNIST = "emnist-letters"
"""The dataset that replaces FEMNIST."""

_LETTER = 14  # pixels; gives EMNIST letters the standard deviation of FEMNIST, 0.158
_FEMNIST_SPACE = ImageSpace((1, 28, 28), 62, (0.9642384,), (0.1576784,))
_FEDERATION = FedAvg(epochs=10, batch_size=50, lr=0.004)
_ROUNDS = (1, 5, 10, 20)

_DLFA_CIFAR100 = {
    "lr": 0.1,
    "decay": 0.9985,
    "total_variation": 2e-4,
    "range_penalty": 10.0,
    "order_prior": 62.675,
}


def sme_trial(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Attack one client's weights.

    Args:
        problem: The paper's setting. `dataset`, `network`, R and B have defaults.
        method: The `attack`: SME, IG or DLFA.
        data: Source of the client's examples.
        rng: Source of the examples, the weights and all other randomness.
    """
    upload = sme_upload(problem, data, rng)
    attack, own = build_attack(problem, method["attack"]), fork(rng)
    start = time.process_time()
    guess = attack.reconstruct(upload.observation, own)
    seconds = time.process_time() - start
    psnr = matched_psnr(guess.inputs, upload.truth.inputs, upload.observation.space)
    return {
        "psnr": psnr.tolist(),
        "L_sim": [_similarity_loss(attack, upload.observation, guess)],
        "seconds": [seconds],
    }


def path_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Measure the path of one client's local training, without an attack."""
    start = time.process_time()
    steps = path(problem, data, rng)
    return {
        "ratio": [float(steps.plane_shares.min())],
        "cos w_0": [float(steps.cosines[0])],
        "max cos": [float(steps.cosines.max())],
        "seconds": [time.process_time() - start],
    }


def cost_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Estimate the time and memory of an attack from a few iterations."""
    upload, own = sme_upload(problem, data, rng), fork(rng)
    few, more = 2, 5

    def attack(iterations: int) -> float:
        start = time.process_time()
        build_attack(problem, method["attack"], iterations).reconstruct(upload.observation, own)
        return time.process_time() - start

    memory = peak_memory(lambda: attack(few))
    whole = build_attack(problem, method["attack"]).iterations
    seconds = whole * (attack(more) - attack(few)) / (more - few)
    return {"time": [seconds], "memory": [memory / 1e9], "seconds": [seconds]}


def path(problem: PaperSetting, data: Dataset, rng: Generator) -> LocalSteps:
    """Return the path of a client with random examples."""
    return local_steps(*_client(problem, data, rng), rng)


def sme_upload(problem: PaperSetting, data: Dataset, rng: Generator) -> Upload:
    """Return the upload of a client with random examples."""
    client, batch = _client(problem, data, rng)
    (upload,) = observe(client, [batch], ThreatModel(knows_targets=True), rng)
    return upload


def build_attack(problem: PaperSetting, name: str, iterations: int | None = None) -> Matching:
    """Return one of the paper's three attacks, with its settings for the dataset."""
    options: dict[str, float] = {} if iterations is None else {"iterations": iterations}
    if name == "DLFA":
        options |= _DLFA_CIFAR100 if problem.get("dataset") == "cifar100" else {}
        return DLFA(**options)  # type: ignore[arg-type]
    if problem.get("network") == "ViT":
        options["lr"] = 0.1  # as in the released code, only for this network
    if name == "IG":
        options |= {"alpha": 0.0, "alpha_lr": 0.0}
    return SME(**options)  # type: ignore[arg-type]


def peak_memory(run: Callable[[], object]) -> int:
    """Return the peak memory of torch's tensors during a call, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to the terminal
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    results = record.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    sizes = torch.tensor([0, *(event.nbytes() for event in changes)])
    return int(sizes.cumsum(dim=0).max())


def _client(problem: PaperSetting, data: Dataset, rng: Generator) -> tuple[Client, Batch]:
    """Return a client with its received network, and its examples."""
    space = data.space if problem.get("dataset") == "cifar100" else _FEMNIST_SPACE
    network = f"{networks.__name__}:sme_{problem.get('network', 'CNN').lower()}"
    rounds = problem.get("R", 1)
    if rounds == 1:
        model = build_model(network, space, rng)
    else:
        model = deepcopy(_trained(network, data)[rounds])
    client = Client(model, cross_entropy, Defense(), _protocol(problem), space)
    return client, _inputs(draw_batch(data.train, problem["N"], rng), space)


def _inputs(batch: Batch, space: InputSpace) -> Batch:
    """Return images as inputs. Letters become small and dark on white, like FEMNIST."""
    pixels = batch.inputs
    if space is _FEMNIST_SPACE:
        margin = (pixels.shape[-1] - _LETTER) // 2
        small = interpolate(pixels, size=(_LETTER, _LETTER), mode="bilinear", antialias=True)
        pixels = 1 - pad(small.clamp(0, 1), [margin] * 4)
    return Batch(space.to_inputs(pixels), batch.targets)


@lru_cache(maxsize=1)
def _trained(network: str, data: Dataset) -> Mapping[int, nn.Module]:
    """Return the networks that clients receive in `_ROUNDS`, trained as in appendix D.

    The result is always the same. A client holds about 225 of at most 40,000 examples, and a tenth
    of the clients take part in a round.
    """
    rng = generator("SME federation")
    examples = draw_batch(data.train, min(len(data.train.targets), 40_000), rng)
    shares = partition(
        _inputs(examples, _FEMNIST_SPACE),
        max(1, len(examples.targets) // 225),
        "feature-skew",
        rng,
    )
    model = build_model(network, _FEMNIST_SPACE, rng)
    federation = Federation(
        Client(model, cross_entropy, Defense(), _FEDERATION, _FEMNIST_SPACE),
        shares,
        clients_per_round=max(1, len(shares) // 10),
        server="sgd",
        lr=1.0,
    )
    found: dict[int, nn.Module] = {}
    federation.train(
        max(_ROUNDS) - 1,
        rng,
        at=[number - 1 for number in _ROUNDS],
        on_checkpoint=lambda done, model: found.update({done + 1: deepcopy(model)}),
    )
    return found


def _protocol(problem: PaperSetting) -> FedAvg:
    lr = 0.4 if problem.get("network") == "LeNet" else 0.004
    return FedAvg(problem["E"], problem.get("B", 10), lr)


def _similarity_loss(attack: Matching, observation: Observation, guess: Reconstruction) -> float:
    """Return 1 - the cosine of the client's update and the update of the guess."""
    if guess.objective is not None and isinstance(attack, SME):
        return guess.objective - float(attack.prior(observation, guess.inputs.unsqueeze(0)))
    if guess.targets is None:
        raise ValueError("the attack returned no labels")
    replayed = observation.simulate(guess.inputs, guess.targets)
    distance, _ = cosine(_stacked(replayed), _stacked(observation.update))
    return float(distance)


def _stacked(update: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: value.unsqueeze(0) for name, value in update.items()}


_ATTACKS = ("DLFA", "IG", "SME")
_EPOCHS_EXAMPLES = ((10, 10), (20, 10), (50, 10), (10, 50), (20, 50), (50, 50))
_QUALITY = {
    "psnr": Metric("mean PSNR in dB", mean_interval),
    "L_sim": Metric("1 - cosine of the updates of client and guess", mean_interval, digits=3),
}
_STAND_IN = (
    "EMNIST letters replace FEMNIST, which also names writers. They are dark on white and shrunk "
    f"to {_LETTER} of 28 pixels, which gives them FEMNIST's standard deviation of 0.158. "
    "Normalisation is FEMNIST's. The head has 62 classes, of which 26 occur. "
)
_SETUP = (
    "Untrained networks unless R says otherwise, local learning rate 0.004 (LeNet 0.4), B = 10, "
    "labels known, linear sum assignment. s is processor time. IG is SME with alpha fixed at "
    "w_0. L_sim of SME is the value at the best of 21 alphas. L_sim of DLFA uses the returned "
    "images in every epoch."
)


def _table(
    name: str,
    title: str,
    rows: Iterable[Row],
    trial: Callable[[PaperSetting, PaperSetting, Dataset, Generator], Scores] = sme_trial,
    metrics: Mapping[str, Metric] = _QUALITY,
    quick: int = 3,
    notes: str = "",
) -> Table:
    found = list(rows)
    datasets = {FEMNIST: (1, 28, 28), "cifar100": (3, 32, 32)}
    used = {row.problem.get("dataset", FEMNIST) for row in found}
    return Table(
        name=f"sme-{name}",
        title=title,
        reference=(
            "Zhu, Yao, Blaschko. Surrogate Model Extension (SME): A Fast and Accurate Weight "
            "Update Attack on Federated Learning. ICML 2023. https://arxiv.org/abs/2306.00127"
        ),
        datasets={dataset: shape for dataset, shape in datasets.items() if dataset in used},
        metrics=metrics,
        rows=found,
        trial=trial,
        procedures={"ours": dict},
        quick=quick,
        notes=(_STAND_IN if FEMNIST in used else "") + _SETUP + notes,
    )


def _quality_rows(
    problems: Iterable[PaperSetting], published: Iterable[Sequence[tuple[float, float]]]
) -> Iterable[Row]:
    """Yield a row per problem and attack, from pairs of PSNR and L_sim."""
    for problem, pairs in zip(problems, published, strict=True):
        steps = problem["E"] * -(-problem["N"] // 10)
        for attack, (psnr, loss) in zip(_ATTACKS, pairs, strict=True):
            paper = {"psnr": psnr, "L_sim": loss} if psnr else {}
            trials = 1 if attack == "DLFA" else 10
            yield Row(problem, paper, {"attack": attack}, 1 if steps > 100 else trials)


_NONE = (0.0, 0.0)  # not in the paper
_TABLE2 = {
    FEMNIST: [
        ((24.9, 0.021), (27.8, 0.044), (30.3, 0.019)),
        ((25.4, 0.019), (24.2, 0.090), (28.6, 0.019)),
        ((26.4, 0.016), (19.5, 0.202), (25.7, 0.050)),
        ((21.7, 0.015), (19.1, 0.091), (22.2, 0.027)),
        ((21.7, 0.014), (17.0, 0.176), (21.5, 0.037)),
        ((20.3, 0.015), (15.0, 0.322), (20.1, 0.065)),
    ],
    "cifar100": [
        ((26.7, 0.017), (26.0, 0.050), (28.5, 0.024)),
        ((26.0, 0.013), (22.3, 0.102), (26.9, 0.040)),
        ((24.3, 0.011), (16.4, 0.225), (24.2, 0.056)),
        ((20.3, 0.023), (17.9, 0.094), (23.5, 0.035)),
        ((19.5, 0.018), (14.8, 0.154), (21.7, 0.047)),
        (_NONE, (12.1, 0.280), (18.3, 0.056)),
    ],
}
_TABLE6 = {
    5: [
        ((22.1, 0.003), (22.7, 0.026), (24.8, 0.009)),
        ((23.0, 0.003), (20.9, 0.064), (24.7, 0.018)),
        ((20.8, 0.005), (18.7, 0.062), (21.4, 0.020)),
        ((20.9, 0.005), (17.2, 0.131), (20.3, 0.042)),
    ],
    10: [
        ((22.5, 0.003), (21.4, 0.034), (23.8, 0.011)),
        ((23.1, 0.004), (19.5, 0.079), (23.2, 0.019)),
        ((20.7, 0.006), (17.7, 0.107), (19.8, 0.027)),
        ((20.5, 0.008), (16.7, 0.298), (18.4, 0.060)),
    ],
    20: [
        ((21.3, 0.008), (19.0, 0.053), (20.7, 0.019)),
        ((20.8, 0.013), (17.9, 0.109), (19.6, 0.044)),
        ((19.4, 0.020), (16.2, 0.208), (17.3, 0.152)),
        ((19.0, 0.020), (15.4, 0.374), (16.2, 0.306)),
    ],
}
_TABLE6[1] = [_TABLE2[FEMNIST][index] for index in (0, 1, 3, 4)]
_TABLE7 = {
    "MLP": [
        ((36.0, 0.018), (31.7, 0.043), (35.9, 0.009)),
        ((31.3, 0.025), (29.5, 0.041), (34.1, 0.013)),
        ((28.0, 0.051), (25.1, 0.097), (30.1, 0.023)),
        ((27.0, 0.030), (25.1, 0.056), (31.4, 0.009)),
        ((24.6, 0.039), (23.3, 0.090), (28.5, 0.017)),
        ((22.0, 0.058), (20.6, 0.173), (22.8, 0.054)),
    ],
    "LeNet": [
        ((16.3, 0.315), (29.1, 0.000), (29.5, 0.000)),
        ((16.0, 0.555), (27.8, 0.002), (29.4, 0.000)),
        ((16.1, 0.690), (23.0, 0.015), (29.0, 0.000)),
        ((15.9, 0.663), (23.0, 0.003), (24.6, 0.000)),
        ((16.1, 0.553), (19.8, 0.017), (24.2, 0.000)),
        ((16.4, 0.690), (15.0, 0.159), (19.4, 0.019)),
    ],
    "ResNet8": [
        ((16.5, 0.148), (32.7, 0.004), (36.8, 0.001)),
        ((16.3, 0.163), (26.7, 0.011), (36.6, 0.001)),
        ((16.2, 0.125), (18.4, 0.059), (33.2, 0.001)),
        ((15.9, 0.114), (21.2, 0.015), (28.2, 0.002)),
        ((16.1, 0.116), (17.1, 0.061), (27.3, 0.002)),
        ((16.2, 0.206), (14.0, 0.163), (20.8, 0.028)),
    ],
    "ViT": [
        ((25.6, 0.008), (25.1, 0.037), (30.3, 0.012)),
        ((21.1, 0.007), (21.1, 0.079), (26.4, 0.028)),
        ((18.9, 0.013), (17.7, 0.138), (21.3, 0.053)),
        ((20.6, 0.017), (19.1, 0.067), (23.3, 0.022)),
        ((18.3, 0.015), (16.8, 0.114), (20.0, 0.044)),
        (_NONE, (14.9, 0.157), (17.2, 0.070)),
    ],
}
_PATHS = [
    ({"E": 10, "B": 50, "R": 1}, (0.996, 0.984, 0.997)),
    ({"E": 50, "B": 50, "R": 1}, (0.977, 0.867, 0.980)),
    ({"E": 10, "B": 10, "R": 1}, (0.977, 0.872, 0.979)),
    ({"E": 10, "B": 50, "R": 20}, (0.960, 0.825, 0.973)),
    ({"E": 10, "B": 10, "R": 5}, (0.937, 0.871, 0.962)),
    ({"E": 10, "B": 10, "R": 10}, (0.813, 0.764, 0.902)),
    ({"E": 10, "B": 10, "R": 20}, (0.406, 0.542, 0.602)),
]
_PATH_METRICS = {
    "ratio": Metric(
        "smallest share of a step's gradient in the plane of two principal components",
        mean_interval,
        digits=3,
    ),
    "cos w_0": Metric("cosine of w_0 - w_T with the gradient at w_0", mean_interval, digits=3),
    "max cos": Metric("the largest such cosine between w_0 and w_T", mean_interval, digits=3),
}
_COSTS = [  # seconds and gigabytes of DLFA, IG and SME
    (FEMNIST, 10, ((212, 2.1), (10.4, 1.8), (10.4, 1.8))),
    (FEMNIST, 20, ((425, 2.4), (10.4, 1.8), (10.4, 1.8))),
    (FEMNIST, 50, ((1084, 3.9), (10.4, 1.8), (10.4, 1.8))),
    ("cifar100", 10, ((1195, 11.1), (57.6, 2.8), (57.6, 2.8))),
    ("cifar100", 20, ((2434, 29.9), (57.6, 2.8), (57.6, 2.8))),
    ("cifar100", 50, (_NONE, (57.6, 2.8), (57.6, 2.8))),
]


def _cost_rows() -> Iterable[Row]:
    for dataset, epochs, pairs in _COSTS:
        for attack, (seconds, memory) in zip(_ATTACKS, pairs, strict=True):
            paper = {"time": seconds, "memory": memory} if seconds else {}
            yield Row({"dataset": dataset, "E": epochs, "N": 50}, paper, {"attack": attack}, 1)


TABLES = [
    _table(
        "table1",
        "SME: local training stays near a plane (tables 1 and 5)",
        [
            Row({"N": 50, **problem}, dict(zip(_PATH_METRICS, paper, strict=True)), trials=20)
            for problem, paper in _PATHS
        ],
        path_trial,
        _PATH_METRICS,
    ),
    _table(
        "table2",
        "SME: attacks on weight updates",
        _quality_rows(
            [
                {"dataset": dataset, "E": epochs, "N": examples}
                for dataset in _TABLE2
                for epochs, examples in _EPOCHS_EXAMPLES
            ],
            (pairs for rows in _TABLE2.values() for pairs in rows),
        ),
    ),
    _table(
        "table3",
        "SME: cost of an attack on weight updates",
        _cost_rows(),
        cost_trial,
        {
            "time": Metric("seconds of an attack, by three iterations", mean_interval, digits=0),
            "memory": Metric("peak gigabytes of tensors", mean_interval, digits=2),
        },
        notes=" The paper used a V100 and JAX; its hours for 100 attacks are divided by 100.",
    ),
    _table(
        "table6",
        "SME: attacks on trained networks",
        _quality_rows(
            [
                {"R": rounds, "E": epochs, "N": examples}
                for rounds in _ROUNDS
                for epochs, examples in ((10, 10), (20, 10), (10, 50), (20, 50))
            ],
            (pairs for rounds in _ROUNDS for pairs in _TABLE6[rounds]),
        ),
        notes=(
            " Networks are trained by FedAvg as in appendix D: clients have about 225 images with "
            "similar features, a tenth of the clients take part in a round, and they train for 10 "
            "epochs in batches of 50."
        ),
    ),
    _table(
        "table7",
        "SME: attacks on other networks",
        _quality_rows(
            [
                {"network": network, "E": epochs, "N": examples}
                for network in _TABLE7
                for epochs, examples in _EPOCHS_EXAMPLES
            ],
            (pairs for rows in _TABLE7.values() for pairs in rows),
        ),
        notes=" ViT: initial step size 0.1 as in the released code, which keeps it constant.",
    ),
    _table(
        "fig6",
        "SME: more examples (figure 6; only its first point has numbers in the paper)",
        _quality_rows(
            [{"dataset": "cifar100", "E": 20, "N": examples} for examples in (50, 100, 150, 200)],
            [_TABLE2["cifar100"][4], *[(_NONE, _NONE, _NONE)] * 3],
        ),
    ),
]
