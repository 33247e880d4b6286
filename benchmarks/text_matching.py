"""Compare LAMP and GRAB with blind guesses, on language models of the papers' size.

python benchmarks/text_matching.py DATA OUT [--models ...] [--texts ...] [--batches ...]
    [--attacks ...] [--observations N] [--iterations N] [--length N]

DATA is a folder with the texts cola and sst2 as JSONL. Models: `gpt2`, 12 layers of width 768 with
random weights, as a classifier; `smollm2`, pretrained, learning next tokens; `smollm2-classifier`.
Each line of OUT (JSONL) is one attacked upload. Lines are written at once, and stored uploads are
not attacked again. Labels of classifiers are granted, and lengths are estimated. Scores are means
over sentences, matched to the truth. Seconds are those of one core.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch

from leakfrontier.adversaries import (
    GRAB,
    LAMP,
    Adversary,
    FedSGD,
    LanguageGuess,
    NotApplicable,
    PriorGuess,
    PublicData,
    TokenSpace,
)
from leakfrontier.defenses import Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.data.text import Reading
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality.modality import Text
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.models.pretrained import Task

MODELS: dict[str, tuple[str, dict[str, Any], Task]] = {
    "gpt2": ("gpt2", {"layers": 12, "width": 768, "heads": 12}, "classification"),
    "smollm2": ("smollm2", {}, "next-token"),
    "smollm2-classifier": ("smollm2", {}, "classification"),
}
Row = dict[str, object]
PUBLIC = 200
"""Number of public texts of the adversary. None of them is attacked."""


def main() -> None:
    """Run the attacks that are not in OUT yet, and print the table."""
    asked = _arguments()
    done = _rows(asked.out)
    with asked.out.open("a") as out:
        for row in _measured(asked, done):
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(json.dumps(row), flush=True)
    table = pd.DataFrame(_rows(asked.out))
    scores = ["rouge1", "rouge2", "rougeL", "token_accuracy", "exact", "seconds"]
    cells = table.groupby(["model", "texts", "batch", "attack"], sort=False)
    print(cells[scores].mean().join(cells.size().rename("uploads")).round(3).to_string())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--texts", nargs="+", default=["cola", "sst2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--attacks", nargs="+", default=["PriorGuess", "LanguageGuess", *_SEARCHES])
    parser.add_argument("--observations", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--length", type=int, default=16)
    return parser.parse_args()


_SEARCHES = ("LAMP", "GRAB")


def _attack(name: str, iterations: int) -> Adversary:
    """Return an attack with a budget. It searches for an order after each quarter."""
    if name in ("PriorGuess", "LanguageGuess"):
        return {"PriorGuess": PriorGuess, "LanguageGuess": LanguageGuess}[name]()
    every = max(1, iterations // 4)
    budget: dict[str, Any] = {
        "iterations": iterations,
        "reorder_every": every,
        "starts": 16,
        "orders": 16,
    }
    if name == "LAMP":
        return LAMP(**budget, blocks=2)
    return GRAB(**budget, blocks=2, beams=4, rounds=10)


def _measured(asked: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    """Yield the scores of every attack, the smallest batches first."""
    keys = ("model", "texts", "batch", "index", "attack")
    known = {tuple(row[key] for key in keys) for row in done}
    wanted = product(asked.batches, asked.texts, asked.models, range(asked.observations))
    for batch, texts, model, index in wanted:
        cells = [(model, texts, batch, index, attack) for attack in asked.attacks]
        if all(cell in known for cell in cells):
            continue
        name, options, task = MODELS[model]
        reading = Reading(task, "smollm2", asked.length)
        dataset = load_dataset(str(asked.data / texts), reading=reading)
        network = build_model(name, dataset.space, generator("model"), **options)
        for cell in cells:
            if cell not in known:
                adversary = _attack(cell[-1], asked.iterations)
                scores = _scores(dataset, network, adversary, batch, index)
                setting = dict(zip(keys, cell, strict=True))
                yield {**setting, "iterations": asked.iterations, **scores}


def _scores(
    dataset: Dataset, network: torch.nn.Module, adversary: Adversary, size: int, index: int
) -> Row:
    """Return the mean scores of one attacked upload, and its sentences."""
    rows = torch.randperm(len(dataset.train.inputs), generator=generator("texts"))
    public, victims = dataset.train.at(rows[:PUBLIC]), dataset.train.at(rows[PUBLIC:])
    truth = victims.at(slice(index * size, (index + 1) * size))
    granted = cast(TokenSpace, dataset.space).task == "classification"
    threat = ThreatModel(knows_targets=granted, public=PublicData(*public))
    modality = cast(Text, dataset.modality)
    client = Client(network, modality.loss, Defense(), FedSGD(), dataset.space)
    (upload,) = observe(client, [truth], threat, generator("client", index))
    started = time.process_time()
    try:
        guess = adversary.reconstruct(upload.observation, generator("attack", index))
    except NotApplicable as reason:
        return {"reason": str(reason)}
    seconds = time.process_time() - started
    values = torch.cat([guess.inputs, modality.nothing(truth.inputs)])  # if no guess is left
    matched = values[modality.match(guess.inputs, truth.inputs)]
    scores = modality.scores(matched, truth.inputs)
    texts = [[modality.text(row) for row in part] for part in (truth.inputs, matched)]
    at_truth = adversary.objective(upload.observation, truth.inputs, truth.targets)
    return {
        **{name: float(values.double().nanmean()) for name, values in scores.items()},
        "seconds": seconds,
        "objective": guess.objective,
        "objective_at_truth": at_truth,
        "truth": texts[0],
        "guess": texts[1],
    }


def _rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
