"""DAGER and SOMP on language models: quality and time.

python benchmarks/text.py speed                    a random GPT-2 of 12 layers, 50,257 tokens
python benchmarks/text.py quality [--repeats N]    CoLA and SST-2, batches of 1 to 16
python benchmarks/text.py long    [--repeats N]    IMDB at 128 tokens, batches of 4 and 8
python benchmarks/text.py fedavg  [--repeats N]    Rotten Tomatoes, weight updates
python benchmarks/text.py noise   [--repeats N]    Rotten Tomatoes, Gaussian noise and DP-SGD
python benchmarks/text.py curve   --out CSV        draws the rows of `noise`, to docs/lab/

Texts are JSONL folders in --data DIR/text. Models: `smollm2`, and `gpt2`, 12 layers of width 768
with new weights and SmolLM2's tokenizer. Seconds are CPU time of one thread. They exclude loading
and the client's gradient.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import torch

from leakfrontier.adversaries import (
    ADVERSARIES,
    Adversary,
    FedAvg,
    FedSGD,
    NotApplicable,
    Protocol,
    TokenSpace,
)
from leakfrontier.defenses import DPSGD, Batch, Defense, Noise
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.data.text import Reading, as_dataset, read_splits
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality.modality import Text, modality_of
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.models.pretrained import SMOLLM2
from leakfrontier.evaluate.papers.somp import PUBLISHED, TABLES
from leakfrontier.evaluate.privacy.accounting import calibrate

GPT2_SMALL = {"layers": 12, "width": 768, "heads": 12}
SIGMAS = (5e-4, 1e-4, 5e-5, 1e-5)
EPSILON = 8.0
SCORES = ("rouge1", "rouge2", "rougeL", "token_accuracy", "exact")


@dataclass(frozen=True)
class Setting:
    """The attacked setting."""

    model: str
    data: str
    task: str
    size: int
    length: int | None = None
    protocol: Protocol = FedSGD()  # noqa: RUF009 - frozen
    defense: Defense | None = None


@cache
def dataset(folder: str, task: Any, length: int | None) -> Dataset:  # noqa: ANN401 - a literal
    """Return texts as SmolLM2's tokens."""
    return as_dataset(folder, read_splits(Path(folder), task), Reading(task, SMOLLM2, length))


@cache
def network(name: str, space: TokenSpace) -> torch.nn.Module:
    """Return a model, loaded once."""
    options = GPT2_SMALL if name == "gpt2" else {}
    return build_model(name, space, generator("text benchmark"), **options)


def upload(setting: Setting, folder: Path, seed: int) -> tuple[Upload, Text]:
    """Return the upload of a random batch, as the server sees it."""
    data = dataset(str(folder / setting.data), setting.task, setting.length)
    space = data.space
    assert isinstance(space, TokenSpace)
    rng = generator("text benchmark", setting.data, setting.size, seed)
    chosen = torch.randperm(len(data.train.inputs), generator=rng)[: setting.size]
    text = modality_of(space, data.vocabulary)
    assert isinstance(text, Text)
    client = Client(
        network(setting.model, space),
        text.loss,
        setting.defense or Defense(),
        setting.protocol,
        space,
    )
    return observe(client, [data.train.at(chosen)], ThreatModel(), rng)[0], text


def attack(adversary: Adversary, seen: Upload, text: Text, seed: int) -> dict[str, object]:
    """Return the mean scores over a batch, and the CPU seconds."""
    start = time.process_time()
    truth = seen.truth.inputs
    try:
        guess = adversary.reconstruct(seen.observation, generator("attack", seed))
    except NotApplicable as reason:
        return {"seconds": time.process_time() - start, "reason": str(reason)}
    row: dict[str, object] = {"seconds": time.process_time() - start}
    values = torch.cat([guess.inputs, text.nothing(truth)])
    found = values[text.match(guess.inputs, truth)]
    for name, score in text.scores(found, truth).items():
        if name in SCORES:
            row[name] = 100 * float(score.nanmean())
    row["guesses"] = len(guess.inputs)
    row["objective"] = guess.objective
    return row


def relative_noise(seen: Upload) -> float:
    """Return the noise of an upload relative to the upload without noise (root mean squares).

    The upload without noise comes from the replay. Under DP-SGD it is the clipped gradient.
    """
    clean = seen.observation.simulate(*seen.truth)
    noise = sum((value - clean[n]).square().sum() for n, value in seen.observation.update.items())
    return float((noise / sum(value.square().sum() for value in clean.values())).sqrt())


def table(
    settings: Sequence[Setting], adversaries: Sequence[str], folder: Path, repeats: int
) -> Iterator[dict[str, object]]:
    """Yield a row for every attacked upload."""
    for setting in settings:
        for seed in range(repeats):
            seen, text = upload(setting, folder, seed)
            tokens = int(text.space.real(seen.truth.inputs).sum())
            noise = 0.0 if setting.defense is None else relative_noise(seen)
            for name in adversaries:
                row: dict[str, object] = {
                    "model": setting.model,
                    "data": setting.data,
                    "task": setting.task,
                    "batch size": setting.size,
                    "tokens": tokens,
                    "defense": "none" if setting.defense is None else repr(setting.defense),
                    "protocol": repr(setting.protocol),
                    "seed": seed,
                    "attack": name,
                    "noise": noise,
                }
                yield row | attack(build(name), seen, text, seed)


def build(name: str) -> Adversary:
    """Return an attack with the options of its authors' code."""
    return ADVERSARIES[name](**PUBLISHED.get(name, {}))


def zipf(vocabulary: int, size: int, length: int, seed: int) -> torch.Tensor:
    """Return sequences of tokens whose frequencies follow Zipf's law, like words."""
    rng = generator("zipf", size, length, seed)
    chance = 1 / torch.arange(1, vocabulary, dtype=torch.float64)
    tokens = 1 + torch.multinomial(chance, size * length, True, generator=rng).view(size, length)
    lengths = torch.randint(length // 2, length + 1, (size,), generator=rng)
    lengths[0] = length
    return tokens.masked_fill(torch.arange(length) >= lengths[:, None], 0)


def speed(adversaries: Sequence[str], repeats: int) -> Iterator[dict[str, object]]:
    """Yield the times on a GPT-2 with the published vocabulary."""
    for task in ("classification", "next-token"):
        for size, length in ((4, 10), (8, 16)):
            classes = 2 if task == "classification" else 50_257
            space = TokenSpace((length,), classes, 50_257, 0, task)  # type: ignore[arg-type]
            text = modality_of(space, tuple(f" w{token}" for token in range(50_257)))
            assert isinstance(text, Text)
            client = Client(network("gpt2", space), text.loss, Defense(), FedSGD(), space)
            for seed in range(repeats):
                tokens = zipf(50_257, size, length, seed)
                targets = tokens if task == "next-token" else torch.arange(size) % 2
                rng = generator("speed", seed)
                (seen,) = observe(client, [Batch(tokens, targets)], ThreatModel(), rng)
                for name in adversaries:
                    row: dict[str, object] = {
                        "model": "gpt2",
                        "task": task,
                        "batch size": size,
                        "length": length,
                        "seed": seed,
                        "attack": name,
                    }
                    yield row | attack(build(name), seen, text, seed)


def settings_of(what: str, model: str, task: str) -> list[Setting]:
    """Return the settings of a benchmark."""
    if what == "quality":
        return [
            Setting(model, data, task, size)
            for data in ("cola", "sst2")
            for size in (1, 2, 4, 8, 16)
        ]
    if what == "long":
        return [Setting(model, "imdb", task, size, length=128) for size in (4, 8)]
    if what == "fedavg":
        return [
            Setting(model, "rotten_tomatoes", task, 8, protocol=FedAvg(epochs, batch, lr))
            for epochs, batch, lr in ((10, 4, 1e-4), (10, 4, 1e-5), (2, 4, 1e-4), (10, 8, 1e-4))
        ]
    noises = [DPSGD(private_noise(), poisson_sampling=False), *(Noise(s) for s in SIGMAS)]
    return [Setting(model, "rotten_tomatoes", task, 1, defense=noise) for noise in noises]


def private_noise() -> float:
    """Return DP-SGD's noise at `EPSILON`: 2000 texts, Poisson samples of 16, three epochs."""
    return round(calibrate(EPSILON, 16 / 2000, 3 * 2000 // 16, 1e-5), 3)


def curve(csv: Path) -> None:
    """Draw ROUGE-1 over Gaussian noise, ours and the paper's, and over the relative noise.

    Uploads on which an attack fails have no score. The table counts them.
    """
    rows = pd.read_csv(csv)
    rows = rows[rows["defense"].str.startswith("Noise")]
    sigma = rows["defense"].str.extract(r"scale=([\d.e-]+)", expand=False).astype(float)
    rows = rows.assign(sigma=sigma, source=rows["attack"] + ", " + rows["model"])
    cells = rows.groupby(["source", "sigma"], as_index=False)
    ours = cells.agg(
        noise=("noise", "mean"),
        rouge1=("rouge1", "mean"),
        uploads=("rouge1", "size"),
        scored=("rouge1", "count"),
    )
    (published,) = (table for table in TABLES if table.name == "somp-table10")
    paper = pd.DataFrame(
        {
            "source": "SOMP's paper, GPT-2",
            "sigma": row.problem["sigma"],
            "rouge1": 100 * row.paper["rouge1"],
        }
        for row in published.rows
    )
    both = pd.concat([ours, paper])
    both.to_csv("docs/lab/text_noise.csv", index=False, float_format="%.4g")
    charts = [
        alt.Chart(frame)
        .mark_line(point=True)
        .encode(
            x=alt.X(f"{x}:Q", title=title, scale=alt.Scale(type="log")),
            y=alt.Y("rouge1:Q", title="ROUGE-1 in %", scale=alt.Scale(domain=[0, 100])),
            color=alt.Color("source:N", title=None),
        )
        .properties(width=300, height=220)
        for frame, x, title in (
            (both, "sigma", "deviation of the noise"),
            (ours, "noise", "noise over the gradient, both as rms"),
        )
    ]
    alt.hconcat(*charts).save("docs/lab/text_noise.svg")


def main() -> None:
    """Run one of the benchmarks, and print a row per upload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "quality", "long", "fedavg", "noise", "curve"))
    parser.add_argument("--data", type=Path, default=os.environ.get("LEAKFRONTIER_DATA"))
    parser.add_argument("--model", nargs="+", choices=("smollm2", "gpt2"), default=["smollm2"])
    parser.add_argument("--task", choices=("next-token", "classification"), default="next-token")
    parser.add_argument("--attacks", nargs="+", default=["DAGER", "SOMP"])
    parser.add_argument("--sizes", nargs="+", type=int, help="only these batch sizes")
    parser.add_argument("--first", type=int, help="only the first settings of a model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "curve":
        if options.out is None:
            parser.error("curve needs --out, the file that `noise` wrote")
        curve(options.out)
        return
    if options.what == "speed":
        rows = speed(options.attacks, options.repeats)
    else:
        chosen = [
            setting
            for model in options.model
            for setting in settings_of(options.what, model, options.task)[: options.first]
            if options.sizes is None or setting.size in options.sizes
        ]
        rows = table(chosen, options.attacks, Path(options.data) / "text", options.repeats)
    seen = []
    for row in rows:
        seen.append(row)
        brief = {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}
        print(brief, flush=True)
        if options.out is not None:
            pd.DataFrame(seen).to_csv(options.out, index=False, float_format="%.4g")
    frame = pd.DataFrame(seen)
    keys = ["model", "data", "task", "protocol", "defense", "batch size", "attack"]
    keys = [key for key in keys if key in frame]
    shown = [name for name in ("tokens", "noise", *SCORES, "seconds") if name in frame]
    cells = frame.groupby(keys, sort=False)
    counts = pd.DataFrame({"uploads": cells.size(), "scored": cells["rouge1"].count()})
    print(cells[shown].mean().join(counts).round(2).to_string())


if __name__ == "__main__":
    main()
