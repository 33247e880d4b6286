"""Clients that inspect the received model: false alarms, detections, and the effect of blur.

    python benchmarks/inspection.py calibrate [--out FOLDER]   # statistics of honest models
    python benchmarks/inspection.py honest [--out FOLDER]      # false alarms, on other seeds
    python benchmarks/inspection.py crafted [--out FOLDER]     # detection and recovery over blur
    python benchmarks/inspection.py draw CSV                   # writes docs/lab/malicious_blur.svg

Honest models are untrained, early (20 rounds) and trained (150; fewer for the large ones).
`calibrate` uses seeds from 1000 on. The thresholds of `WeightInspection` and `DisaggregationSNR`
come from them, and nothing else uses these seeds. `crafted` runs every attack that sends crafted
models, and two simple attacks of this file, on all models to which they apply. It adds Gaussian
noise ("blur") to each crafted tensor, relative to its root mean square. An example counts as
recovered if a guess reaches 20 dB. Refusals by weights assume that the client agreed to the
architecture.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import altair as alt
import numpy as np
import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    ADVERSARIES,
    Adversary,
    Crafted,
    FedSGD,
    NotApplicable,
    Observation,
    PublicData,
    Reconstruction,
    Round,
    Threat,
)
from leakfrontier.defenses import Batch, Defense, DisaggregationSNR, Refused, WeightInspection
from leakfrontier.defenses.disaggregation_snr import disaggregation_snr
from leakfrontier.defenses.weight_inspection import inspect
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.data.partition import partition
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

BATCHES = (2, 4, 8, 8, 16, 16, 32, 32)  # whose D-SNR is measured
BLURS = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
LOOSE = WeightInspection(1.0, 1.0, 1.0, 1.0, float("inf"), 0.0)
"""Refuses only another architecture."""

CALIBRATION = 1000
"""The first seed of the calibration."""


class Family(NamedTuple):
    """Honest models of one kind: rounds of the stages, number of trained and of all seeds."""

    model: str
    options: dict[str, Any]
    rounds: tuple[int, ...]
    seeds: int
    untrained: int


FAMILIES = (
    Family("mlp", {}, (0, 20, 150), 6, 40),
    Family("mlp", {"width": 32}, (0, 20, 150), 6, 40),
    Family("mlp", {"width": 512}, (0, 20, 150), 2, 6),
    Family("lenet", {}, (0, 20, 150), 2, 20),
    Family("lenet", {"activation": "relu"}, (0, 20, 150), 2, 20),
    Family("cnn", {}, (0, 10, 30), 2, 10),
    Family("resnet18", {}, (0, 10, 30), 2, 10),
)
STAGES = ("untrained", "early", "trained")
SHARES = ("parallel", "aligned", "zeroed", "direct")


class Honest(NamedTuple):
    """An honest model."""

    model: str
    stage: str
    seed: int
    module: nn.Module


def honest_models(first_seed: int, data: Dataset, names: Sequence[str]) -> Iterator[Honest]:
    """Yield honest models of all kinds and stages."""
    for family in FAMILIES:
        name = " ".join([family.model, *(str(value) for value in family.options.values())])
        if not {name, family.model} & {*names}:
            continue
        for seed in range(first_seed, first_seed + family.untrained):
            rng = generator("inspected", name, seed)
            model = build_model(family.model, data.space, rng, **family.options)
            if seed < first_seed + family.seeds:
                yield from _trained(name, family, seed, model, data)
            else:
                yield Honest(name, "untrained", seed, model)


def _trained(
    name: str, family: Family, seed: int, model: nn.Module, data: Dataset
) -> Iterator[Honest]:
    kept: list[Honest] = []

    def keep(done: int, model: nn.Module) -> None:
        stage = STAGES[family.rounds.index(done)]
        kept.append(Honest(name, stage, seed, copy.deepcopy(model)))

    client = Client(model, cross_entropy, Defense(), FedSGD(), data.space)
    shares = partition(data.normalised[0], 10, "iid", generator("shares", seed))
    federation = Federation(client, shares, 2, batch_size=32, lr=0.005)
    federation.train(
        family.rounds[-1], generator("training", name, seed), at=family.rounds, on_checkpoint=keep
    )
    yield from kept


Rows = list[dict[str, object]]


def honest_rows(first_seed: int, names: Sequence[str], data: Dataset) -> tuple[Rows, Rows]:
    """Return the findings of the inspections on honest models: rows per model and per batch."""
    train = data.normalised[0]
    weights: Rows = []
    ratios: Rows = []
    for honest in honest_models(first_seed, data, names):
        module, labels = honest.module, {**honest._asdict()}
        del labels["module"]
        found = [statistics for _, statistics in inspect(module)]
        row = {n: max(getattr(s, n) for s in found) for n in SHARES}
        row |= {
            "smallest scale": min(s.scale for s in found),
            "largest scale": max(s.scale for s in found),
            "irregularity": min(s.irregularity for s in found),
            "refused": refusal(WeightInspection(), module, module) is not None,
        }
        weights.append({**labels, **row})
        rng = generator("batches", honest.seed)
        for size in BATCHES:
            rows = torch.randint(len(train.targets), (size,), generator=rng)
            ratio = max(disaggregation_snr(module, cross_entropy, train.at(rows)).values())
            ratios.append({**labels, "batch": size, "D-SNR": ratio})
    return weights, ratios


def refusal(defense: Defense, model: nn.Module, agreed: nn.Module) -> str | None:
    """Return why a client refuses a model. None if it accepts."""
    try:
        defense.on_receive(model, agreed)
    except Refused as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class Bins(Adversary):
    """Imprint the first layer of a perceptron: all its rows measure one random projection.

    Attributes:
        single: Instead of bins, give all rows slightly different directions and one threshold that
            one example of a batch exceeds.
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS

    single: bool = False

    @torch.no_grad()
    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the same model for all clients."""
        crafted = copy.deepcopy(model)
        first, *middle, last = _linear_layers(crafted)
        if round.public is None or next(iter(crafted.children())) is first:
            raise NotApplicable("no public data")
        query = torch.randn(first.in_features, generator=rng) / first.in_features**0.5
        seen = round.public.inputs.flatten(1) @ query
        first.weight.copy_(query.expand_as(first.weight))
        levels = torch.arange(first.out_features) / first.out_features
        if self.single:
            other = torch.randn(first.weight.shape, generator=rng) / first.in_features**0.5
            first.weight.add_(0.3 * other)
            levels = torch.full_like(levels, 1 - 1 / round.batch_size)
        first.bias.copy_(-seen.quantile(levels))
        for layer in middle:
            layer.weight.fill_(layer.in_features**-0.5)  # a scale that looks honest
            layer.bias.zero_()
        column = torch.linspace(-1, 1, last.out_features) * last.in_features**-0.5
        last.weight.copy_(column[:, None].expand_as(last.weight))
        last.bias.zero_()
        return Crafted([crafted] * round.clients)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the rows (or their differences) with the largest bias gradients."""
        weight, bias = (observation.update[f"1.{part}"] for part in ("weight", "bias"))
        if not self.single:
            weight, bias = ((v - torch.cat([v[1:], 0 * v[:1]])) for v in (weight, bias))
        top = bias.abs().topk(observation.batch_size).indices
        inputs = weight[top] / bias[top, None]
        return Reconstruction(inputs.nan_to_num().view(-1, *observation.space.shape))


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) < 2 or any(isinstance(module, nn.Conv2d) for module in model.modules()):
        raise NotApplicable("no perceptron")
    return layers


def crafted_rows(
    attacks: dict[str, Adversary], names: Sequence[str], seeds: int, batch_size: int, data: Dataset
) -> Iterator[dict[str, object]]:
    """Yield detection and recovery, one row per attack, model, blur and seed."""
    train, test = data.normalised
    for name in names:
        for attack_name, attack in attacks.items():
            for seed in range(seeds):
                rng = generator("crafted", name, attack_name, seed)
                agreed = build_model(name, data.space, rng)
                known = Round(data.space, FedSGD(), 1, batch_size, PublicData(*test))
                try:
                    crafted = attack.craft(agreed, known, rng)
                except NotApplicable as reason:
                    print(f"{attack_name} on {name}: not applicable: {reason}", flush=True)
                    break
                share = train.at(torch.randperm(len(train.targets), generator=rng)[:batch_size])
                labels = {"attack": attack_name, "model": name, "seed": seed}
                for blur in BLURS:
                    found = attacked(attack, crafted, agreed, blur, share, data, rng)
                    yield {**labels, "blur": blur, **found}


def attacked(
    attack: Adversary,
    crafted: Crafted,
    agreed: nn.Module,
    blur: float,
    share: Batch,
    data: Dataset,
    rng: Generator,
) -> dict[str, object]:
    """Return the findings of both inspections on a blurred model, and the recovered share."""
    sent = crafted.models[0]
    blurred = with_blur(sent, blur, rng)
    client = Client(blurred, cross_entropy, Defense(), FedSGD(), data.space)
    (upload,) = observe(client, [share], ThreatModel(), rng, kept=crafted.kept)
    # The server attacks with the weights that it crafted, without the noise.
    observation = replace(upload.observation, models=(sent,))
    try:
        guess: Tensor | None = attack.reconstruct(observation, rng).inputs
    except NotApplicable:
        guess = None
    ratio = max(disaggregation_snr(blurred, cross_entropy, share).values())
    return {
        "recovered": recovered(guess, share.inputs, data),
        "by architecture": refusal(LOOSE, blurred, agreed),
        "by weights": refusal(WeightInspection(), blurred, sent),
        "D-SNR": ratio,
        "by D-SNR": ratio > DisaggregationSNR().threshold,
    }


@torch.no_grad()
def with_blur(model: nn.Module, blur: float, rng: Generator) -> nn.Module:
    """Return a model with noise on each tensor, relative to its root mean square."""
    blurred = copy.deepcopy(model)
    for value in blurred.parameters():
        noise = torch.randn(value.shape, generator=rng)
        value.add_(blur * value.square().mean().sqrt() * noise)
    return blurred


def recovered(guess: Tensor | None, truth: Tensor, data: Dataset) -> float:
    """Return the share of examples for which a guess reaches 20 dB."""
    if guess is None or not len(guess):
        return 0.0
    pixels, private = (data.space.to_unit(v).clamp(0, 1) for v in (guess, truth))
    assigned = metrics.match(pixels, private)
    scores = metrics.psnr(pixels[assigned], private)
    return float(((scores >= 20) & (assigned >= 0)).float().mean())


def active_attacks(names: Sequence[str]) -> dict[str, Adversary]:
    """Return the attacks that send crafted models, of this file and of the package."""
    active = {n: cls() for n, cls in ADVERSARIES.items() if cls.threat is not Threat.PASSIVE}
    attacks = {"bins": Bins(), "single-bin": Bins(single=True), **active}
    return {name: attacks[name] for name in names or attacks}


def show_honest(weights: pd.DataFrame, ratios: pd.DataFrame) -> None:
    """Print the statistics of honest models, and how often each inspection refuses one."""
    extremes = dict.fromkeys((*SHARES, "largest scale"), "max")
    extremes |= dict.fromkeys(("smallest scale", "irregularity"), "min")
    by = ["model", "stage"]
    print(weights.groupby(by).agg({"seed": "count", **extremes, "refused": "mean"}).to_string())
    print(f"refused: {weights.refused.sum()} of {len(weights)}")
    ratios["refused"] = ratios["D-SNR"] > DisaggregationSNR().threshold
    grouped = ratios.groupby([*by, "batch"])
    shown = grouped["D-SNR"].quantile(np.array([0.5, 0.99])).unstack()
    print(shown.join(grouped.agg({"seed": "count", "refused": "mean"})).round(3).to_string())
    print(ratios.groupby("batch").refused.mean().round(4).to_string())


def draw(rows: pd.DataFrame) -> None:
    """Write the shares of recovered and refused over the blur, for each attack."""
    rows["refused"] = rows["by weights"].notna().astype(float)
    shares = ["recovered", "refused"]
    means = rows.groupby(["model", "attack", "blur"])[shares].mean().round(3).reset_index()
    means.to_csv("docs/lab/malicious_blur.csv", index=False)
    means["blur"] = means["blur"].clip(lower=min(b for b in BLURS if b) / 10)
    lines = (
        alt.Chart(means.melt(["model", "attack", "blur"], var_name="share"))
        .mark_line(point={"size": 12})
        .encode(
            x=alt.X("blur", scale=alt.Scale(type="log"), title="noise / rms of the weights"),
            y=alt.Y("value", title=None),
            color=alt.Color("share", title=None, scale=alt.Scale(range=["#D55E00", "#0072B2"])),
        )
        .properties(width=150, height=90)
    )
    lines.facet(column=alt.Column("attack", title=None), row=alt.Row("model", title=None)).save(
        "docs/lab/malicious_blur.svg"
    )


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["calibrate", "honest", "crafted", "draw"])
    parser.add_argument("csv", nargs="?", type=Path, help="the file that `crafted` wrote")
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet", "cnn", "resnet18"])
    parser.add_argument("--dataset", default="fashion-mini")
    parser.add_argument("--attacks", nargs="+", default=[], help="names of attacks (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of crafted models")
    parser.add_argument("--batch", type=int, default=16, help="examples of an attacked client")
    parser.add_argument("--out", type=Path, default=Path("runs/inspection"))
    given = parser.parse_args()
    if given.part == "draw":
        draw(pd.read_csv(given.csv))
        return
    data = load_dataset(given.dataset)
    given.out.mkdir(parents=True, exist_ok=True)
    name = "-".join([given.part, given.dataset, *given.models, *given.attacks]).replace(" ", "-")
    if given.part == "crafted":
        attacks = active_attacks(given.attacks)
        rows = pd.DataFrame(crafted_rows(attacks, given.models, given.seeds, given.batch, data))
        rows.to_csv(given.out / f"{name}.csv", index=False)
        refusals = ["by architecture", "by weights"]
        rows[refusals] = rows[refusals].notna()
        shown = rows.groupby(["model", "attack", "blur"])
        print(shown[["recovered", *refusals, "by D-SNR"]].mean().round(2).to_string())
        return
    found = honest_rows(CALIBRATION if given.part == "calibrate" else 0, given.models, data)
    weights, ratios = (pd.DataFrame(part) for part in found)
    weights.to_csv(given.out / f"{name}.csv", index=False)
    ratios.to_csv(given.out / f"{name}-dsnr.csv", index=False)
    show_honest(weights, ratios)


if __name__ == "__main__":
    main()
