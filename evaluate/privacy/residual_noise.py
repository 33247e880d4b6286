"""Test the noise of repeated uploads of one batch: size, covariance and shape."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.linalg import helmert

from .canaries import Subject, flat
from .finding import SIGNIFICANCE, Audit
from .noise_tests import MeasuredNoise, innovations, shape, shared_entries, size
from .promise import judged

RESIDUAL_BATCH, REPEATS = 8, 16
"""Examples in the batch, and number of its uploads."""

HANDICAP = (
    "; the replay of the defense adds noise, so uploads were compared with each other, and attacks "
    "that know the defense were handicapped"
)


def residual_noise(subject: Subject, runs: int = 1) -> Audit:
    """Test the noise of alternating uploads of two clients, on a batch with clipped gradients.

    Size and covariance are tested on contrasts of uploads, whose mean is zero. The shape is tested
    on uploads minus the replay or, if the replay adds noise, on differences of pairs.
    """
    count = min(RESIDUAL_BATCH, len(subject.data.inputs))
    batch, inflated = subject.records(torch.arange(count)), subject.probe.inflated_loss
    clients = [subject.client(count) for _ in range(2)]
    uploads = [subject.upload(clients[turn % 2], batch, inflated) for turn in range(REPEATS)]
    unit = subject.promise.noise_multiplier * subject.unit_size(count)
    rows = np.stack([flat(upload).cpu().numpy() / unit for upload in uploads])
    if subject.replayable:
        single = rows - flat(subject.replay(batch, inflated)).cpu().numpy() / unit
    else:
        single = (rows[::2] - rows[1::2]) / math.sqrt(2)
    noise = MeasuredNoise(helmert(REPEATS) @ rows, [value.numel() for value in uploads[0].values()])
    level = SIGNIFICANCE / (4 * runs)
    found = size(noise, level, subject.needs)
    return judged(
        "residual noise",
        subject.promise,
        [found, innovations(noise), shared_entries(noise), shape(single)],
        runs,
        fine=found.words + ("" if subject.replayable else HANDICAP),
        ideal=noise.ideal_limit(level),
    )
