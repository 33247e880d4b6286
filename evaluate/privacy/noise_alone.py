"""Uploads of examples that contribute nothing: noise alone, of many steps."""

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
"""Local steps of an upload, which must all have noise."""

REPEATS, VALUES = (6, 16), 9_000
"""Least and most of such uploads, and entries of all of them that are enough: noise that is
missing at one step is then 8 standard errors of the variance."""

MANY = 160
"""Uploads among which rare faults are sought."""

ENTRIES = 2**21
"""Most entries of all uploads together whose shape is looked at."""


def local_steps(subject: Subject, runs: int = 1) -> Audit:
    """Test the noise of uploads of several local steps.

    Each step must add its noise: their sum has as many times the variance. A claim for the client
    as a whole is kept by the noise of one step.
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
    """Test many uploads of one client: single ones without noise, or noise that comes back."""
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
