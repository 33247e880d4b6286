"""Common parts of the tables of malicious servers: the round and its scores.

Their papers report a mean PSNR. Exact examples count as about 130 dB. Missing ones, replaced by the
dataset's mean colour, count as about 12 dB. So this mean is a recovery rate in disguise. We report
it at peak 1, together with the recovery rates and the median.
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
"""The attacks of the rows. All other entries of a row's method are their options."""

LEVELS = (20, 30, 60)
"""PSNR in dB above which an example counts as recovered."""

METRICS = {
    "psnr": Metric("mean PSNR in dB; missing examples count as the mean colour", mean_interval),
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
        model: The agreed model.
        examples: Private examples of each client.
        clients: Number of clients. If above 1, the defense must sum their updates.
        defense: The defense of the clients.
        protocol: The protocol of the clients.
        public: Whether the server may calibrate on the test split.
    """

    model: nn.Module
    examples: int
    clients: int = 1
    defense: Defense = field(default_factory=Defense)
    protocol: Protocol = field(default_factory=FedSGD)
    public: bool = True


def attack_of(method: PaperSetting) -> Adversary:
    """Return the attack of a row, with the options of its method."""
    options: dict[str, Any] = {key: value for key, value in method.items() if key != "attack"}
    return replace(ATTACKS[method["attack"]], **options)


def crafted_upload(attack: Adversary, setup: Setup, data: Dataset, rng: Generator) -> Upload:
    """Return the upload that the server sees, for random training examples."""
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
    """Attack an upload. Return the scores and the guesses."""
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
    """Return the PSNR of each example, under the assignment with the largest mean.

    An assignment by squared error, as in a report, would give up exact guesses in favour of
    mixtures. An example gets the mean colour if no guess is left or none is better.
    """
    private = space.to_unit(truth.double()).clamp(0, 1).flatten(1)
    mean = torch.zeros_like(truth)
    pixels = space.to_unit(torch.cat([guess, mean]).double()).clamp(0, 1).flatten(1)
    errors = torch.cdist(pixels, private, compute_mode="donot_use_mm_for_euclid_dist").square()
    levels = -10 * (errors / private.shape[1]).clamp(min=metrics.LEAST_ERROR).log10()
    return levels[metrics.assign(-levels), torch.arange(len(private))]


@lru_cache(maxsize=4)
def shrunk(data: Dataset, size: int) -> Dataset:
    """Return the data with images scaled down to at most a size."""
    if not (isinstance(data.space, ImageSpace) and max(data.space.shape) > size):
        return data
    train, test = (
        Batch(interpolate(part.inputs, (size, size), mode="area"), part.targets)
        for part in (data.train, data.test)
    )
    space = replace(data.space, shape=(data.space.shape[0], size, size))
    return Dataset(data.name, train, test, data.classes, space)
