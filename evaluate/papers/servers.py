"""What trials of malicious servers' tables have in common: the round, and how it is scored.

Their papers count a mean in which exact examples stand at some 130 dB and missing ones, the
dataset's mean colour, at some 12: a recovery rate in disguise. It is kept, at peak 1, beside the
rates and the median.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from leakfrontier.adversaries import (
    ARES,
    LOKI,
    Adversary,
    FedSGD,
    ImageSpace,
    InputSpace,
    Protocol,
    PublicData,
    RobbingTheFed,
    RobbingTheFedDirectPass,
    Round,
    ScaleMIA,
    TrapWeights,
)
from leakfrontier.defenses import Batch, Defense

from ..client.client import Client, ThreatModel, Upload, observe
from ..data.dataset import Dataset
from ..foundations.seeds import fork
from ..foundations.statistics import mean_interval, rate
from ..modality import metrics
from .table import Metric, PaperSetting, Scores, draw_batch

ATTACKS: dict[str, Adversary] = {
    "ARES": ARES(),
    "ARES lift": ARES(lift=3.0),
    "ARES rows": ARES(separation="rows"),
    "RtF": RobbingTheFedDirectPass(),
    "RtF module": RobbingTheFed(),
    "TW": TrapWeights(),
    "LOKI": LOKI(),
    "Scale-MIA": ScaleMIA(),
}
"""The attacks of the tables' rows; all else that a row's method holds are their options."""

LEVELS = (20, 30, 60)
"""Decibels above which examples count as recovered."""

METRICS = {
    "psnr": Metric("mean PSNR in dB, missing ones at the mean colour", mean_interval),
    "median": Metric("median PSNR of a batch", mean_interval, digits=0, brief=True),
    **{
        f"{level} dB": Metric(f"share above {level} dB", rate, percent=True, brief=True)
        for level in LEVELS
    },
}
"""The columns of every table."""


@dataclass(frozen=True)
class Setup:
    """A round in which a server sends crafted models.

    Attributes:
        model: The model that was agreed on.
        examples: Private examples of each client.
        clients: Clients; above 1, the defense must add them up.
        defense: Their defense.
        protocol: How they make an update.
        public: Whether the server has the test split to calibrate on.
    """

    model: nn.Module
    examples: int
    clients: int = 1
    defense: Defense = field(default_factory=Defense)
    protocol: Protocol = field(default_factory=FedSGD)
    public: bool = True


def attack_of(method: PaperSetting) -> Adversary:
    """Return the attack of a row, with the options that its method has."""
    options: dict[str, Any] = {key: value for key, value in method.items() if key != "attack"}
    return replace(ATTACKS[method["attack"]], **options)


def crafted_upload(attack: Adversary, setup: Setup, data: Dataset, rng: Generator) -> Upload:
    """Return what the server sees of random training examples."""
    private, test = data.normalised
    batch = draw_batch(private, setup.clients * setup.examples, rng)
    public = PublicData(*test) if setup.public else None
    known = Round(data.space, setup.protocol, setup.clients, setup.examples, public)
    crafted = attack.craft(setup.model, known, fork(rng))
    rows = torch.arange(len(batch.targets)).split(setup.examples)
    shares = [batch.at(part) for part in rows]
    client = Client(setup.model, cross_entropy, setup.defense, setup.protocol, data.space)
    (upload,) = observe(
        client,
        shares,
        ThreatModel(public=public),
        fork(rng),
        models=crafted.models,
        kept=crafted.kept,
    )
    return upload


def attacked(attack: Adversary, upload: Upload, rng: Generator) -> tuple[Scores, Tensor]:
    """Attack an upload; return scores, and the guesses."""
    start = time.process_time()
    guess = attack.reconstruct(upload.observation, fork(rng)).inputs
    seconds = time.process_time() - start
    levels = psnrs(guess, upload.truth.inputs, upload.observation.space)
    return {**scores(levels), "seconds": [seconds]}, guess


def scores(levels: Tensor) -> Scores:
    """Return the columns of every table, from the PSNR of each example."""
    shares = {f"{level} dB": (levels > level).double().tolist() for level in LEVELS}
    return {"psnr": levels.tolist(), "median": [float(levels.median())], **shares}


def psnrs(guess: Tensor, truth: Tensor, space: InputSpace) -> Tensor:
    """Return the PSNR of each example, assigned so that its mean is the largest.

    An assignment by squared error, as in a report, gives exact guesses away for the sake of
    mixtures. Where no guess is left, or none is better, the mean colour is taken.
    """
    private = space.to_unit(truth.double()).clamp(0, 1).flatten(1)
    mean = torch.zeros_like(truth)
    pixels = space.to_unit(torch.cat([guess, mean]).double()).clamp(0, 1).flatten(1)
    errors = torch.cdist(pixels, private, compute_mode="donot_use_mm_for_euclid_dist").square()
    levels = -10 * (errors / private.shape[1]).clamp(min=metrics.LEAST_ERROR).log10()
    return levels[metrics.assign(-levels), torch.arange(len(private))]


@lru_cache(maxsize=4)
def shrunk(data: Dataset, size: int) -> Dataset:
    """Return images scaled down to a size at most; all else as it is."""
    if not (isinstance(data.space, ImageSpace) and max(data.space.shape) > size):
        return data
    train, test = (
        Batch(interpolate(part.inputs, (size, size), mode="area"), part.targets)
        for part in (data.train, data.test)
    )
    space = replace(data.space, shape=(data.space.shape[0], size, size))
    return Dataset(data.name, train, test, data.classes, space)
