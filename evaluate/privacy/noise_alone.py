"""Test uploads of examples that contribute nothing: pure noise, over many steps."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import helmert

from leakfrontier.adversaries import FedAvg, NotApplicable
from leakfrontier.defenses import Update, trainable

from ..foundations.statistics import Floats
from .canaries import Subject, flat
from .finding import SIGNIFICANCE, Audit
from .noise_tests import MeasuredNoise, innovations, quiet_uploads, shape, shared_entries, size
from .promise import judged

LOCAL_STEPS = 8
"""Local steps of an upload. Each must add noise."""

REPEATS, VALUES = (6, 16), 9_000
"""Smallest and largest number of such uploads; total number of entries that suffices. With so many
entries, missing noise at one step is 8 standard errors of the variance."""

MANY = 160
"""Number of uploads in the search for rare faults."""

ENTRIES = 2**21
"""Largest number of entries, over all uploads, in the test of shape."""


def local_steps(subject: Subject, runs: int = 1) -> Audit:
    """Test the noise of uploads with several local steps.

    If the unit is a record, each step must add noise, so the variance is that of one step times
    their number. If the unit is a client, noise is added once.
    """
    protocol = FedAvg(batch_size=2, lr=1e-3)
    batch, client = subject.nobody(2 * LOCAL_STEPS), subject.client(2)
    entries = sum(value.numel() for value in trainable(subject.probe).values())
    repeats = min(max(1 + math.ceil(VALUES / entries), REPEATS[0]), REPEATS[1])
    uploads = [subject.upload(client, batch, subject.probe.loss, protocol) for _ in range(repeats)]
    scale = protocol.lr * math.sqrt(LOCAL_STEPS) if subject.per_record else 1.0
    rows = _rows(uploads, scale * subject.promise.noise_multiplier * subject.unit_size(2))
    noise = MeasuredNoise(helmert(repeats) @ rows, _sizes(uploads))
    level = SIGNIFICANCE / (2 * runs)
    found = size(noise, level, subject.needs)
    return judged(
        "local steps",
        subject.promise,
        [found, innovations(noise)],
        runs,
        fine=f"over {LOCAL_STEPS} local steps, {found.words}",
        ideal=noise.ideal_limit(level),
    )


def rare_steps(subject: Subject, runs: int = 1) -> Audit:
    """Test many uploads of one client for single uploads without noise and for repeated noise."""
    batch, client = subject.nobody(1), subject.client(1)
    uploads = [subject.upload(client, batch, subject.probe.loss) for _ in range(MANY)]
    rows = _rows(uploads, subject.promise.noise_multiplier * subject.unit_size(1))
    noise = MeasuredNoise(rows, _sizes(uploads))
    level = SIGNIFICANCE / (5 * runs)
    found = size(noise, level, subject.needs)
    return judged(
        "rare steps",
        subject.promise,
        [
            quiet_uploads(noise),
            innovations(noise),
            shared_entries(noise),
            shape(rows[:, : max(1, ENTRIES // MANY)]),
            found,
        ],
        runs,
        fine=f"in {MANY} uploads, {found.words}",
        ideal=noise.ideal_limit(level),
    )


def _rows(uploads: list[Update], unit: float) -> Floats:
    rows: Floats = np.stack([flat(upload).cpu().numpy() / unit for upload in uploads])
    if not np.isfinite(rows).all():
        raise NotApplicable("an upload of examples without a gradient has NaN or infinite values")
    return rows


def _sizes(uploads: list[Update]) -> list[int]:
    return [value.numel() for value in uploads[0].values()]
