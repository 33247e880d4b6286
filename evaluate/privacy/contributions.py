"""Compare how far one unit moves an upload with the noise that hides it.

Both tests compare two worlds, one with a unit and one without it. The distance between the means of
the worlds is measured in standard deviations of the uploads. It must be at most what the promised
noise allows: mu = 1 / sigma. The tests fix a direction first, and then measure fresh uploads along
it. Additional noise of any kind makes the distance smaller. The tests do not use the replay of the
defense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Loss

from ..foundations.seeds import copied, fork
from ..foundations.statistics import Floats
from .canaries import HUGE, Subject, flat
from .finding import SIGNIFICANCE, Audit, Symptom
from .promise import judged

NORMS = (0.5, 0.8, 1.1, 1.2, 1.35, 1.9, HUGE)
"""Norms of the canaries' gradients, relative to a huge gradient after clipping."""

GRADED, OFF_SIZE = 700, (1.0, 0.25, 4.0)
"""Number of canaries (half of them are in), and configured batch size / actual batch size."""

EXTREME = 100.0
"""Factor for an extreme input, because a claim must hold for every example."""

STEPS = (8, 40)
"""Smallest and largest number of uploads for each batch size."""

PILOTS, WORLDS = 2, (16, 96)
"""Pairs of uploads that fix a direction; smallest and largest number of uploads per world."""


def clipping(subject: Subject, runs: int = 1) -> Audit:
    """Test canaries of many norms, in batches of the configured size and of other sizes."""
    subject = subject.beside(GRADED)
    if not subject.per_record:
        raise NotApplicable("canaries can share an upload only if the unit is a record")
    wanted = math.ceil(30 * subject.promise.noise_multiplier**2)
    uploads = min(max(wanted, STEPS[0]), STEPS[1])
    symptoms = []
    for off in OFF_SIZE:
        count = uploads if off == 1 else STEPS[0]
        values, present = _graded_uploads(subject, off, count)
        for index, norm in enumerate(NORMS):
            if off == 1 or norm == HUGE:
                own = slice(index, None, len(NORMS))
                chosen = present[:, own]
                worlds = values[:, own][chosen], values[:, own][~chosen]
                symptoms.append(_apart(*worlds, subject, runs, _described(norm, off)))
    symptoms.sort(key=lambda one: one.p_value)
    fine = "canaries of all norms, in batches of several sizes, contribute no more than allowed"
    return judged("clipping", subject.promise, symptoms, runs, fine=fine)


def _described(norm: float, off: float) -> str:
    gradient = "a huge gradient" if norm == HUGE else f"a gradient of {norm:g} times the norm"
    batch = "" if off == 1 else f" in a batch of {1 / off:g} times the configured size"
    return f"{gradient}{batch}"


def _graded_uploads(subject: Subject, off: float, uploads: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the canaries' entries in some uploads, and which canaries were in."""
    scale = torch.tensor([subject.entry * norm for norm in NORMS]).repeat(GRADED // len(NORMS))
    actual = GRADED // 2
    client = subject.client(max(1, round(off * actual)))
    present, values = [], []
    for _ in range(uploads):
        chosen = torch.randperm(GRADED, generator=subject.rng)[:actual]
        batch = subject.canaries(chosen, scale[chosen], weight=0.0)
        upload = subject.upload(client, batch, subject.probe.loss)
        values.append(subject.canary_entries(upload))
        present.append(np.isin(np.arange(GRADED), chosen.cpu().numpy()))
    return np.stack(values), np.stack(present)


def neighbours(subject: Subject, runs: int = 1) -> Audit:
    """Test real examples. In the second world, one of them contributes nothing.

    Uploads with the same random draws give the direction in which the worlds differ most, because
    added noise cancels. This test finds models that mix examples, which `clipping` misses.
    """
    count = min(8, len(subject.data.inputs))
    mu, noise = subject.promise.separation, subject.promise.noise_multiplier
    unit = noise * subject.unit_size(count)
    symptoms = []
    for objective, stretch in (
        (subject.probe.inflated_loss, 1.0),
        (subject.probe.loss, 1.0),
        (subject.probe.inflated_loss, EXTREME),
    ):
        worlds = _worlds(subject, count, stretch)
        direction = _difference(subject, worlds, objective, count)
        length = float(direction.norm()) / unit
        if not length > 1.02 * mu:
            continue
        wanted = math.ceil(160 / (length - mu) ** 2)
        fresh = min(max(wanted, WORLDS[0]), WORLDS[1])
        seen = [
            np.array(
                [
                    float(flat(one) @ direction)
                    for one in _uploads(subject, world, objective, count, fresh)
                ]
            )
            for world in worlds
        ]
        with_it, without = seen
        found = _apart(with_it, without, subject, runs, "an example", neighbours=True)
        symptoms.append(found)
    fine = "an example changes an upload by no more than allowed"
    return judged("neighbours", subject.promise, symptoms or [Symptom(1.0, "")], runs, fine=fine)


def _worlds(subject: Subject, count: int, stretch: float) -> tuple[Batch, Batch]:
    """Return a batch and its neighbour, in which one example (or the client) contributes nothing.

    Args:
        subject: The audited defense.
        count: Size of the batch.
        stretch: Factor for the input of the tested example.
    """
    batch, nobody = subject.records(torch.arange(count)), subject.nobody(count)
    if subject.data.inputs.is_floating_point():
        batch.inputs[0, : subject.data.inputs[0].numel()] *= stretch
    if not subject.per_record:
        return batch, Batch(nobody.inputs, batch.targets)
    inputs, targets = batch.inputs.clone(), batch.targets.clone()
    if subject.distance == 2 and len(subject.data.inputs) > count:
        other = subject.records(torch.tensor([count]))
        inputs[0], targets[0] = other.inputs[0], other.targets[0]
    else:
        inputs[0] = nobody.inputs[0]
    return batch, Batch(inputs, targets)


def _difference(subject: Subject, worlds: Sequence[Batch], objective: Loss, count: int) -> Tensor:
    """Return the mean difference of the worlds' uploads under the same random draws."""
    draws = [fork(subject.rng) for _ in range(PILOTS)]
    sums = []
    for world in worlds:
        uploads = [
            subject.upload(subject.client(count), world, objective, rng=copied(one))
            for one in draws
        ]
        sums.append(torch.stack([flat(one) for one in uploads]).mean(dim=0))
    return sums[0] - sums[1]


def _uploads(
    subject: Subject, world: Batch, objective: Loss, count: int, uploads: int
) -> list[dict[str, Tensor]]:
    client = subject.client(count)
    return [subject.upload(client, world, objective) for _ in range(uploads)]


def _apart(
    with_it: Floats,
    without: Floats,
    subject: Subject,
    runs: int,
    what: str,
    *,
    neighbours: bool = False,
) -> Symptom:
    """Test whether two worlds are further apart than mu, in units of their pooled deviation.

    Args:
        with_it: Uploads with the unit, projected on one direction.
        without: The same without the unit.
        subject: The audited defense.
        runs: Number of announced repetitions.
        what: The unit, in words.
        neighbours: Whether the worlds are neighbours. Otherwise they may be half as far apart.
    """
    mu, sizes = subject.promise.separation, (len(with_it), len(without))
    freedom = sum(sizes) - 2
    squares = sum(float(np.square(one - one.mean()).sum()) for one in (with_it, without))
    spread = max(math.sqrt(squares / freedom), 1e-300)
    share = 1 if neighbours else subject.distance
    found = share * float(with_it.mean() - without.mean()) / spread
    root = math.sqrt(1 / sizes[0] + 1 / sizes[1])
    # Distance / deviation is noncentral t, which is nearly normal for many degrees of freedom.
    if freedom < 1000:
        p_value = float(stats.nct.sf(found / (share * root), freedom, mu / (share * root)))
    else:
        p_value = float(stats.norm.sf((found - mu) / _error(mu, share * root, freedom)))
    limit = found - float(stats.norm.isf(SIGNIFICANCE / runs)) * _error(
        found, share * root, freedom
    )
    words = (
        f"{what} moves uploads by {found:.2g} standard deviations of their noise, but the claim "
        f"allows {mu:.2g}"
    )
    return Symptom(p_value, words, mu / limit if limit > 0 else math.inf)


def _error(distance: float, root: float, freedom: int) -> float:
    """Return the standard error of a distance in units of the deviation."""
    return math.hypot(root, distance / math.sqrt(2 * freedom))
