"""SOMP: the tables of its paper. They compare attacks on the gradients of language models.

The paper's models (GPT-J-6B, GPT-2, Qwen3-8B) must be downloaded. The procedures here use other
models: SmolLM2-135M, and a GPT-2 of the published size with new weights and SmolLM2's tokenizer.
Settings use the paper's notation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import Defense, Noise

from ..client.client import Client, ThreatModel, Upload, observe
from ..data.dataset import Dataset
from ..foundations.seeds import fork
from ..foundations.statistics import mean_interval
from ..modality.modality import Modality
from ..users.methods import Method, build_adversary
from ..world.scenario import Scenario, load_world
from .table import Metric, PaperSetting, Row, Scores, Table, draw_batch

MODELS: Mapping[str, Method] = {
    "smollm2": Method(name="smollm2"),
    "gpt2": Method(name="gpt2", options={"layers": 12, "width": 768, "heads": 12}),
}
"""The models of the procedures. Both use SmolLM2's tokenizer."""

LONG = 128
"""Tokens of an IMDB review. The paper uses up to 512, which is slow on CPUs."""

METRICS = {
    "rouge1": Metric("ROUGE-1 F-measure, mean over sentences", mean_interval, percent=True),
    "rouge2": Metric("ROUGE-2 F-measure, mean over sentences", mean_interval, percent=True),
    "rougeL": Metric("ROUGE-L F-measure, mean over sentences", mean_interval, percent=True),
    "exact": Metric("share of sentences that are exact", mean_interval, percent=True, brief=True),
}

FIELDS = {
    "k": "pool",
    "lambda1": "alignment",
    "lambda2": "consistency",
    "W": "width",
    "lambda_div": "diversity",
    "lambda_ng": "repetition",
    "lambda": "ridge",
    "epsilon": "tolerance",
    "tau_cluster": "cluster",
}
"""Maps the paper's parameters of SOMP to the fields of our class."""

PUBLISHED: Mapping[str, PaperSetting] = {"DAGER": {"rank_cutoff": 20}}
"""Options of attacks that follow their authors' code instead of our defaults."""


def text_trial(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator
) -> Scores:
    """Attack one batch of texts.

    Args:
        problem: The dataset, the batch size `B`, the task. Optionally the noise's deviation
            `sigma`, or FedAvg's epochs `E`, learning rate `eta` and `B_mini`.
        method: The `attack` with its options, and the `model`.
        data: Source of the batch. It is read again with the model's tokenizer.
        rng: Source of the batch, the weights and all other randomness.
    """
    options = dict(method)
    name, model = options.pop("attack"), options.pop("model")
    upload, modality = text_upload(problem, model, data, rng)
    adversary, own = build_adversary(Method(name=name, options=options)), fork(rng)
    start = time.perf_counter()
    guess = adversary.reconstruct(upload.observation, own).inputs
    seconds, truth = time.perf_counter() - start, upload.truth.inputs
    found = torch.cat([guess, modality.nothing(truth)])[modality.match(guess, truth)]
    scores = modality.scores(found, truth)
    return {  # a text of one word has no ROUGE-2; papers count it as 0
        **{name: scores[name][~scores[name].isnan()].tolist() for name in METRICS},
        "noise": [_relative_noise(problem, upload)] * len(truth),
        "seconds": [seconds],
    }


def text_upload(
    problem: PaperSetting, model: str, data: Dataset, rng: Generator
) -> tuple[Upload, Modality]:
    """Return the upload of a client with a language model and a random batch, and its modality."""
    scenario = Scenario(
        dataset=data.name,
        task=problem.get("task", "next-token"),
        tokenizer="smollm2",
        length=LONG if problem["dataset"] == "imdb" else None,
        model=MODELS[model],
    )
    world = load_world(scenario)
    defense = Noise(problem["sigma"]) if "sigma" in problem else Defense()
    client = Client(
        world.model(defense, 0), world.modality.loss, defense, _protocol(problem), world.space
    )
    batch = draw_batch(world.train, problem["B"], rng)
    (upload,) = observe(client, [batch], ThreatModel(), rng)
    return upload, world.modality


def _protocol(problem: PaperSetting) -> Protocol:
    if "E" not in problem:
        return FedSGD()
    return FedAvg(epochs=problem["E"], batch_size=problem["B_mini"], lr=problem["eta"])


def _relative_noise(problem: PaperSetting, upload: Upload) -> float:
    """Return the noise's deviation divided by the root mean square of the clean gradient."""
    if not problem.get("sigma"):
        return 0.0
    clean = upload.observation.replay(*upload.truth, upload.observation.update)
    entries = torch.cat([value.flatten() for value in clean.values()])
    return float(problem["sigma"] / entries.square().mean().sqrt())


def procedures(
    attack: str | None = None, **options: object
) -> dict[str, Callable[[PaperSetting], PaperSetting]]:
    """Return the procedures of a table, one per model. `attack` applies if rows name none."""
    default = {**options} if attack is None else {"attack": attack, **options}

    def on(model: str, method: PaperSetting) -> PaperSetting:
        known = default | {FIELDS.get(name, name): value for name, value in method.items()}
        return {**PUBLISHED.get(str(known["attack"]), {}), **known, "model": model}

    return {model: partial(on, model) for model in MODELS}


def table(name: str, number: str, title: str, rows: list[Row], **options: Any) -> Table:  # noqa: ANN401
    """Return a table of the paper."""
    notes = options.pop("notes", "")
    return Table(
        name=name,
        title=title,
        reference=(
            "Li, Li. SOMP: Scalable Gradient Inversion for Large Language Models via "
            f"Subspace-Guided Orthogonal Matching Pursuit. 2026, {number}. "
            "https://arxiv.org/abs/2603.16761"
        ),
        datasets=dict.fromkeys((str(row.problem["dataset"]) for row in rows), None),
        metrics=options.pop("metrics", METRICS),
        rows=rows,
        trial=text_trial,
        procedures=options.pop("procedures", procedures("SOMP")),
        notes=(
            "The paper's models are GPT-J-6B and GPT-2. Ours is SmolLM2-135M, or with --procedure "
            "gpt2 a model of GPT-2's size with new weights. rouge-score splits the words. "
            "Sentences are assigned to references one to one. "
            f"IMDB is cut to {LONG} tokens. {notes}"
        ).strip(),
        **options,
    )


_TABLE2 = {
    ("imdb", "LAMP"): (1.2, 0.3, 0.1),
    ("imdb", "GRAB"): (8.6, 2.0, 0.9),
    ("imdb", "DAGER"): (58.4, 39.2, 31.6),
    ("imdb", "SOMP"): (89.3, 73.5, 76.4),
    ("cola", "LAMP"): (10.6, 6.3, 1.4),
    ("cola", "GRAB"): (42.6, 35.1, 24.3),
    ("cola", "DAGER"): (92.9, 87.8, 84.8),
    ("cola", "SOMP"): (96.3, 94.5, 89.7),
    ("sst2", "LAMP"): (12.9, 7.2, 1.8),
    ("sst2", "GRAB"): (43.3, 36.4, 22.3),
    ("sst2", "DAGER"): (100.0, 92.9, 87.1),
    ("sst2", "SOMP"): (100.0, 95.8, 92.6),
}
_TABLE3 = {
    ("cola", "DAGER", None): (3, 6, 10, 19, 36),
    ("cola", "SOMP", 4): (7, 10, 13, 21, 26),
    ("cola", "SOMP", 8): (7, 10, 14, 24, 31),
    ("cola", "SOMP", 16): (8, 13, 21, 33, 41),
    ("sst2", "DAGER", None): (3, 4, 9, 18, 31),
    ("sst2", "SOMP", 4): (6, 9, 13, 22, 30),
    ("sst2", "SOMP", 8): (7, 11, 14, 26, 37),
    ("sst2", "SOMP", 16): (8, 12, 30, 40, 52),
    ("imdb", "DAGER", None): (61, 118, 248, 467, 1127),
    ("imdb", "SOMP", 4): (48, 96, 191, 359, 672),
    ("imdb", "SOMP", 8): (58, 117, 231, 448, 968),
    ("imdb", "SOMP", 16): (75, 143, 289, 572, 1308),
}
_TABLE6: dict[str, dict[float, float]] = {
    "k": {800: 59.7, 1200: 71.5, 1600: 73.4, 2000: 74.5, 2400: 73.3},
    "lambda1": {0.6: 74.7, 0.8: 67.3, 1.0: 53.4},
    "lambda2": {0.3: 68.4, 0.5: 74.5, 0.7: 61.7},
    "W": {2: 37.1, 4: 59.9, 6: 66.4, 8: 72.7, 12: 79.3},
    "lambda_div": {0.1: 62.2, 0.15: 74.7, 0.2: 69.5},
    "lambda_ng": {0.1: 64.8, 0.2: 74.8, 0.3: 71.5},
    "lambda": {5e-4: 69.8, 1e-3: 74.2, 5e-3: 71.6, 1e-2: 73.7},
    "epsilon": {5e-5: 76.5, 1e-4: 73.9, 5e-4: 68.4},
    "tau_cluster": {0.6: 67.0, 0.8: 73.5, 1.0: 81.4},
}
_TABLE9 = (
    *((2, 1e-4, 4, 99.1, 98.2), (5, 1e-4, 4, 97.5, 95.8)),
    *((10, 1e-4, 4, 95.3, 93.9), (20, 1e-4, 4, 95.7, 94.4)),
    *((10, 1e-5, 4, 99.8, 99.1), (10, 5e-5, 4, 98.7, 97.9)),
    *((10, 1e-4, 2, 93.3, 91.4), (10, 1e-4, 8, 97.7, 96.1), (10, 1e-4, 16, 99.5, 98.6)),
)
_TABLE10 = {1e-5: (78.1, 72.8), 5e-5: (55.9, 34.5), 1e-4: (26.7, 16.6), 5e-4: (9.6, 1.9)}
_ABLATIONS: dict[str, dict[str, object]] = {
    "SOMP": {},
    "SOMP1, no language-model prior": {"language": 0.0},
    "SOMP2, no pursuit": {"matching": False},
    "SOMP3, no sparsity": {"sparsity": 0.0},
    "SOMP4, no consistency": {"consistency": 0.0},
    "SOMP5, no distance": {"alignment": 0.0},
}

_SECONDS = Metric("seconds of the attack, without loading and client", mean_interval)
_NOISE = Metric("sigma / root mean square of the gradient", mean_interval, digits=2, brief=True)

TABLES = (
    table(
        "somp-table2",
        "table 2",
        "Reconstruction of texts from aggregated gradients",
        [
            Row({"dataset": data, "B": size}, {"rougeL": value / 100}, {"attack": attack}, 3)
            for (data, attack), values in _TABLE2.items()
            for size, value in zip((4, 8, 16), values, strict=True)
        ],
        procedures=procedures(),
        quick=1,
        notes=(
            "Most ROUGE-L of the paper's table equal the ROUGE-2 of its table 7. Compare with both."
        ),
    ),
    table(
        "somp-table3",
        "table 3",
        "Seconds per batch",
        [
            Row(
                {"dataset": data, "B": size},
                {"seconds": value},
                {"attack": attack} | ({} if beams is None else {"W": beams}),
                2,
            )
            for (data, attack, beams), values in _TABLE3.items()
            for size, value in zip((1, 2, 4, 8, 16), values, strict=True)
        ],
        metrics={"seconds": _SECONDS, **METRICS},
        procedures=procedures(),
        notes="The paper measured its seconds with GPT-2 on an RTX 5060.",
    ),
    table(
        "somp-table6",
        "table 6",
        "Sensitivity of SOMP to its parameters",
        [
            Row({"dataset": "imdb", "B": 8}, {"rougeL": value / 100}, {name: chosen}, 2)
            for name, values in _TABLE6.items()
            for chosen, value in values.items()
        ],
        procedures=procedures("SOMP", geometry="headwise"),
        notes="The paper's row of the defaults differs by up to 8 points between its blocks.",
    ),
    table(
        "somp-table9",
        "table 9",
        "SOMP against FedAvg",
        [
            Row(
                {"dataset": "rotten_tomatoes", "B": 16, "E": epochs, "eta": lr, "B_mini": size},
                {"rouge1": rouge1 / 100, "rouge2": rouge2 / 100},
                trials=3,
            )
            for epochs, lr, size, rouge1, rouge2 in _TABLE9
        ],
        notes=(
            "The paper does not say how many examples a client has; here 16. Its second row with "
            "E = 10, eta = 1e-4 and B_mini = 4 has 94.5 and 93.6."
        ),
    ),
    table(
        "somp-table10",
        "table 10",
        "SOMP against Gaussian noise",
        [
            Row(
                {"dataset": "rotten_tomatoes", "B": 1, "sigma": sigma},
                {"rouge1": rouge1 / 100, "rouge2": rouge2 / 100},
                trials=10,
            )
            for sigma, (rouge1, rouge2) in _TABLE10.items()
        ],
        metrics={**METRICS, "noise": _NOISE},
        notes="The effect of noise depends on its ratio to the gradient, which the paper omits.",
    ),
    table(
        "somp-fig4",
        "figure 4",
        "SOMP without one of its parts",
        [
            Row({"dataset": "imdb", "B": size}, {}, {"variant": variant}, 2)
            for size in (2, 4, 8)
            for variant in _ABLATIONS
        ],
        procedures={
            model: partial(
                lambda model, method: {
                    "attack": "SOMP",
                    "geometry": "headwise",
                    "model": model,
                    **_ABLATIONS[method["variant"]],
                },
                model,
            )
            for model in MODELS
        },
        notes="The paper shows a figure without numbers, and no table.",
    ),
)
