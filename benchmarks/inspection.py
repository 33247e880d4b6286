"""Clients that look at what they are sent: false alarms, detections, and what blur changes.

    python benchmarks/inspection.py calibrate [--out FOLDER]   # statistics of honest models
    python benchmarks/inspection.py honest [--out FOLDER]      # false alarms, on other seeds
    python benchmarks/inspection.py crafted [--out FOLDER]     # detection and recovery over blur

Honest models are untrained, early (20 rounds) and trained (150; fewer for the large ones), on
fashion-mini. `calibrate` takes seeds from 1000 on, from which the thresholds of `WeightInspection`
and `DisaggregationSNR` were read; nothing else takes these. `crafted` takes every attack that may
send crafted models and two of a few lines, on all models to which they apply, and adds Gaussian
noise to each crafted tensor, relative to its root mean square. Recovered is an example that a
guess reaches with 20 dB; refused is the share of clients that either inspection keeps from it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    ADVERSARIES,
    Adversary,
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
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.client import Client, ThreatModel, observe
from leakfrontier.evaluate.data import Dataset, load_dataset
from leakfrontier.evaluate.federation import Federation
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.partition import partition
from leakfrontier.evaluate.seeds import generator

BATCHES = (2, 4, 8, 32)
BLURS = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
CALIBRATION = 1000
"""The first seed of the calibration."""


class Family(NamedTuple):
    """Honest models of one kind: how they are made and trained, and how many."""

    model: str
    options: dict[str, object]
    rounds: tuple[int, ...]
    seeds: int
    untrained: int


FAMILIES = (
    Family("mlp", {}, (0, 20, 150), 10, 50),
    Family("mlp", {"width": 32}, (0, 20, 150), 10, 50),
    Family("mlp", {"width": 512}, (0, 20, 150), 4, 20),
    Family("lenet", {}, (0, 20, 150), 10, 50),
    Family("lenet", {"activation": "relu"}, (0, 20, 150), 10, 50),
    Family("cnn", {}, (0, 20, 60), 2, 10),
    Family("resnet18", {}, (0, 10, 30), 2, 10),
)
STAGES = ("untrained", "early", "trained")


class Honest(NamedTuple):
    """An honest model."""

    model: str
    stage: str
    seed: int
    module: nn.Module


def honest_models(first_seed: int, data: Dataset, names: Sequence[str]) -> Iterator[Honest]:
    """Yield honest models of all kinds and stages."""
    for family in FAMILIES:
        if family.model not in names:
            continue
        name = " ".join([family.model, *(str(value) for value in family.options.values())])
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


def honest_rows(first_seed: int, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield what the inspections find of honest models: one row per model."""
    data = load_dataset("fashion-mini")
    train = data.normalised[0]
    for honest in honest_models(first_seed, data, names):
        module = honest.module
        found = [statistics for _, statistics in inspect(module)]
        row: dict[str, object] = {
            "model": honest.model,
            "stage": honest.stage,
            "seed": honest.seed,
            **{n: max(getattr(s, n) for s in found) for n in ("parallel", "zeroed", "direct")},
            "smallest scale": min(s.scale for s in found),
            "largest scale": max(s.scale for s in found),
            "irregularity": min(s.irregularity for s in found),
            "refused": refusal(WeightInspection(), module, module) is not None,
        }
        rng = generator("batches", honest.seed)
        for size in BATCHES:
            rows = torch.randint(len(train.targets), (size,), generator=rng)
            ratios = disaggregation_snr(module, cross_entropy, train.at(rows))
            row[f"D-SNR {size}"] = max(ratios.values())
        yield row


def refusal(defense: Defense, model: nn.Module, agreed: nn.Module) -> str | None:
    """Return why a client refuses a model, if it does."""
    try:
        defense.on_receive(model, agreed)
    except Refused as reason:
        return str(reason)
    return None
