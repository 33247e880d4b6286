"""Does a defense keep its differential-privacy claim? Three tests, from its hooks alone.

- `residual_noise`: is the noise of an upload as large as claimed, fresh every time, and on top of
  what clipping leaves? Quick and sharp.
- `step_canaries`: can single canaries be told from none, at one step, better than the claim
  allows [1]? It covers clipping and noise together.
- `one_run`: the same over a training run, sampling included [2]. Slower, and far looser.

The claim is what the defense's `guarantee` says, and its `replay` is what the noise is added to.

A lower bound says that the true epsilon is not below it; it is no estimate. Beside it stands the
ceiling: what a perfect implementation of the claim would score. An audit that finds nothing
speaks of the faults that it looks for, and of no others.

References:
    [1] Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini, Terzis. "Tight Auditing of
        Differentially Private Machine Learning." USENIX Security 2023.
        https://arxiv.org/abs/2302.07956
    [2] Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
        https://arxiv.org/abs/2305.08846
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Defense, Loss, Plan, Update

from .one_run import (
    CANARIES,
    CONFIDENCE,
    correct_guesses,
    log_likelihood_ratio,
    one_run_ceiling,
    one_run_lower_bound,
    one_run_p_value,
)
from .probe import Subject, flat
from .statistics import Flags, Floats, clopper_pearson

SIGNIFICANCE = 1e-5
"""Chance of a false alarm of `residual_noise`, which every evaluation can afford to run."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        method: The test.
        claimed: Epsilon that the defense claims.
        lower_bound: What the true epsilon is not below, at the confidence level.
        ceiling: What `lower_bound` would be, on average, for a perfect implementation.
        p_value: Chance of a finding as bad as this, or worse, if the claim held.
        violated: Whether the claim is refuted.
        verdict: The finding in words.
        measured_noise: The noise multiplier as measured; residual noise alone.
        noise_limit: What the noise multiplier is not above, all faults found counted; likewise.
    """

    method: str
    claimed: float
    lower_bound: float
    ceiling: float
    p_value: float
    violated: bool
    verdict: str
    measured_noise: float = math.nan
    noise_limit: float = math.nan


def audit(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    methods: tuple[str, ...] = ("residual noise", "step canaries"),
) -> dict[str, Audit | NotApplicable]:
    """Return the findings of several audits, by name.

    Args:
        defense: Any defense that claims differential privacy; of a chain, the link that makes
            the claim is audited.
        model: The model, after the defense's `on_model`.
        loss: Mean loss of a batch.
        data: Examples such as the client's.
        plan: Steps, sample rate and delta for which epsilon is claimed.
        rng: Source of all randomness.
        methods: Names in `AUDITS`.
    """
    findings: dict[str, Audit | NotApplicable] = {}
    for method in methods:
        try:
            findings[method] = AUDITS[method](defense, model, loss, data, plan, rng)
        except NotApplicable as reason:
            findings[method] = reason
    return findings


def most_damning(findings: Sequence[Audit]) -> Audit:
    """Return the worst of one test's repetitions, its p-value corrected for their number."""
    worst = min(findings, key=lambda finding: (finding.p_value, -finding.lower_bound))
    p_value = min(1.0, len(findings) * worst.p_value)
    level = SIGNIFICANCE if worst.method == "residual noise" else 1 - CONFIDENCE
    return replace(worst, p_value=p_value, violated=worst.violated and p_value < level)


RESIDUAL_BATCH, REPEATS = 8, 16
"""Examples in the batch whose upload is repeated, and how often it is."""


def residual_noise(
    defense: Defense, model: nn.Module, loss: Loss, data: Batch, plan: Plan, rng: Generator
) -> Audit:
    """Test the noise itself: uploads of one batch, minus what they would be without noise.

    Two clients take turns. If the claim holds, what is left is independent and N(0, (sigma s)^2),
    where s is how far one unit can move an upload. Its size is tested (over all entries, and for
    each tensor, so that none is left bare), the distances between uploads (is the noise fresh?)
    and its mean (is there more below than clipped gradients?), Bonferroni-corrected.
    """
    subject = Subject(defense, model, loss, data, plan, rng)
    size = min(RESIDUAL_BATCH, len(data.inputs))
    batch, inflated = subject.records(torch.arange(size)), subject.probe.inflated_loss
    clients = [subject.client(size) for _ in range(2)]
    expected = subject.replay(batch, inflated)
    uploads = [subject.upload(clients[turn % 2], batch, inflated) for turn in range(REPEATS)]
    std = subject.noise_multiplier * subject.unit_size(size)
    mean = flat(expected) / std
    residuals = torch.stack([flat(upload) / std - mean for upload in uploads])
    sizes = [value.numel() for value in expected.values()]
    findings = [_reused(residuals), _heavy(residuals, mean), _quiet(residuals, sizes)]
    guilty = [one for one in findings if len(findings) * one.p_value < SIGNIFICANCE]
    worst = guilty[0] if guilty else findings[-1]
    p_value = min(1.0, len(findings) * min(one.p_value for one in findings))
    groups = np.array([sum(sizes), *sizes]) * (REPEATS - 1)
    return Audit(
        "residual noise",
        subject.claim.epsilon,
        subject.epsilon(subject.noise_multiplier * worst.noise),
        subject.epsilon(subject.noise_multiplier * float(_limits(groups, groups).min())),
        p_value,
        bool(guilty),
        f"violated: {worst.words} (p = {p_value:.1g})"
        if guilty
        else f"no fault found: {worst.words}",
        subject.noise_multiplier * findings[-1].measured,
        subject.noise_multiplier * worst.noise,
    )


class _Finding(NamedTuple):
    """One test of residual noise: how likely its statistic is, and the noise that it leaves."""

    p_value: float
    words: str
    noise: float  # an upper confidence limit, relative to the claim
    measured: float = math.nan


def _quiet(residuals: Tensor, sizes: list[int]) -> _Finding:
    """Test whether the noise is smaller than claimed, in all tensors or in one of them."""
    squares = (residuals - residuals.mean(dim=0)).square().sum(dim=0)
    sums = np.array([float(group.sum()) for group in (squares, *squares.split(sizes))])
    freedom = np.array([len(squares), *sizes]) * (len(residuals) - 1)
    limits = _limits(sums, freedom)
    worst = int(limits.argmin())
    ratio = math.sqrt(sums[worst] / freedom[worst])
    p_value = len(sums) * float(np.min(stats.chi2.cdf(sums, freedom)))
    words = f"the noise is {ratio:.3f} of what is claimed"
    return _Finding(p_value, words, float(limits[worst]), ratio)


def _limits(sums: Floats, freedom: Floats) -> Floats:
    """Return upper confidence limits of standard deviations, all of which hold together."""
    limits: Floats = np.sqrt(sums / stats.chi2.ppf(SIGNIFICANCE / len(sums), freedom))
    return limits


def _reused(residuals: Tensor) -> _Finding:
    """Test whether two uploads are closer to each other than fresh noise lets them be."""
    repeats, entries = residuals.shape
    usual = 2 * float((residuals - residuals.mean(dim=0)).square().sum()) / (repeats - 1)
    distances = torch.pdist(residuals).square()
    if usual < 1e-6 * entries:  # nothing but rounding
        same = float(residuals.mean(dim=0).square().mean()) > 0.1
        words = "every upload has the same noise" if same else "there is no noise at all"
        return _Finding(0.0, words, 0.0)
    ratio = float(distances.min()) / usual
    p_value = len(distances) * float(stats.f.cdf(ratio, entries, (repeats - 1) * entries))
    words = f"noise is used again: two uploads differ by {ratio:.2g} of what fresh noise makes"
    return _Finding(p_value, words, 0.0)


def _heavy(residuals: Tensor, mean: Tensor) -> _Finding:
    """Test whether examples weigh more than clipping allows: the mean is not the expected one."""
    repeats, entries = residuals.shape
    shift = residuals.mean(dim=0)
    variance = float((residuals - shift).square().sum()) / ((repeats - 1) * entries)
    error = max(math.sqrt(variance / repeats), 1e-12)  # of each entry of the shift
    length = max(float(mean.norm()), 1e-12)
    along = float(shift @ mean) / length
    elsewhere = float(shift.square().sum()) / (entries * error**2)
    p_value = 2 * min(
        float(stats.norm.sf(along / error)),
        float(stats.f.sf(elsewhere, entries, (repeats - 1) * entries)),
    )
    least = 1 + (along + float(stats.norm.ppf(SIGNIFICANCE)) * error) / length
    words = f"examples weigh {1 + along / length:.3g} times what clipping allows"
    return _Finding(p_value, words, 1 / max(1.0, least))


RECORDS = 8
"""Real examples beside the canaries at one step."""

STEPS, UPLOADS = (10, 100), 1_000
"""Least and most steps at which canaries are tested; uploads, where one is a whole update."""


class _Errors(NamedTuple):
    """How often canaries that were in were missed, and others raised an alarm."""

    misses: int
    present: int
    alarms: int
    absent: int

    def separation(self, confidence: float) -> float:
        """Return a lower confidence limit of mu: the Gaussian test with these errors, or fewer."""
        missed = clopper_pearson(self.misses, self.present, confidence).high
        alarmed = clopper_pearson(self.alarms, self.absent, confidence).high
        return max(0.0, -float(ndtri(alarmed)) - float(ndtri(missed)))

    def p_value(self, mu: float) -> float:
        """Return the least significance level at which the separation exceeds mu."""

        def excess(log_level: float) -> float:
            return self.separation(-math.expm1(log_level)) - mu

        least, most = math.log(1e-12), math.log(1 - 1e-9)
        if excess(most) <= 0:
            return 1.0
        return math.exp(least if excess(least) > 0 else brentq(excess, least, most))


def step_canaries(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    confidence: float = CONFIDENCE,
) -> Audit:
    """Test clipping and noise at single steps, by canaries that are in or out.

    In units of what one record can contribute, a canary's entry of the upload is N(1, sigma^2)
    if it is in and N(0, sigma^2) if not. The test calls those above 1/2 in; exact limits of its
    two error rates bound the separation mu = 1 / sigma from below, and PLD composes it over the
    plan. Canaries of one step count as independent trials, as they are where the noise is.

    Where the unit is a record, half of all canaries are in at each step. Where it is a client, one
    canary is the client's whole update.
    """
    subject = Subject(defense, model, loss, data, plan, rng, CANARIES)
    errors = _record_errors(subject) if subject.per_record else _client_errors(subject)
    claimed = 1 / subject.noise_multiplier
    mu = errors.separation(confidence)
    miss = float(ndtr(-subject.reach * claimed / 2))  # of the test, were the claim exact
    ideal = errors._replace(misses=round(miss * errors.present), alarms=round(miss * errors.absent))
    return _verdict(
        "step canaries",
        subject.claim.epsilon,
        subject.epsilon(_inverse(mu)),
        subject.epsilon(_inverse(ideal.separation(confidence))),
        errors.p_value(claimed),
        mu > claimed,
    )


def _record_errors(subject: Subject) -> _Errors:
    rows = torch.arange(min(RECORDS, len(subject.data.inputs)))
    size = len(rows) + CANARIES // 2
    client = subject.client(size)
    # As many as it takes to see that a fifth of the noise is missing, with high power.
    steps = math.ceil(1300 * subject.noise_multiplier**2 / (CANARIES // 2))
    present, values = [], []
    for _ in range(min(max(steps, STEPS[0]), STEPS[1])):
        chosen = torch.randperm(CANARIES, generator=subject.rng)[: CANARIES // 2]
        batch = _joined(subject.records(rows), subject.canaries(chosen))
        upload = subject.upload(client, batch, subject.probe.loss)
        values.append(subject.canary_values(upload, size))
        present.append(np.isin(np.arange(CANARIES), chosen.numpy()))
    return _errors(np.stack(values), np.stack(present))


def _client_errors(subject: Subject) -> _Errors:
    client = subject.client(1)
    chosen = torch.randint(CANARIES, (UPLOADS,), generator=subject.rng)
    values = [
        subject.canary_values(subject.upload(client, subject.canaries(one), subject.probe.loss), 1)
        for one in chosen.split(1)
    ]
    return _errors(np.stack(values), np.arange(CANARIES) == chosen.numpy()[:, None])


def _errors(values: Floats, present: Flags) -> _Errors:
    called = values > 0.5
    return _Errors(
        int((present & ~called).sum()),
        int(present.sum()),
        int((called & ~present).sum()),
        int((~present).sum()),
    )


def _joined(first: Batch, second: Batch) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(first, second, strict=True)))


def _inverse(separation: float) -> float:
    return 1 / separation if separation else math.inf


def _verdict(
    method: str, claimed: float, bound: float, ceiling: float, p_value: float, violated: bool
) -> Audit:
    figures = f"epsilon is at least {bound:.2f}, where {claimed:.2f} is claimed"
    words = (
        f"violated: {figures} (p = {p_value:.1g})"
        if violated
        else f"no violation found: {figures}; a perfect implementation would show {ceiling:.2f}"
    )
    return Audit(method, claimed, bound, ceiling, p_value, violated, words)


def one_run(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    confidence: float = CONFIDENCE,
    canaries: int = CANARIES,
    lr: float = 0.1,
) -> Audit:
    """Train once, each canary being in the data with probability 1/2, and guess which were [2].

    All uploads are seen. A canary's score is the log-likelihood ratio of its entries, for being
    sampled with the plan's rate against never. The tenth with the highest scores are guessed in,
    the tenth with the lowest out, which is fixed before looking.

    Args:
        defense: As for `audit`, and so are the next five.
        model: See `audit`.
        loss: See `audit`.
        data: The real examples of the training data.
        plan: See `audit`; its sample rate is met as nearly as the batch size allows.
        rng: See `audit`.
        confidence: Confidence level of the lower bound.
        canaries: Number of canaries.
        lr: Learning rate of the run.
    """
    present = torch.rand(canaries, generator=rng) < 0.5
    examples = len(data.inputs) + int(present.sum())
    batch_size = max(1, round(plan.sample_rate * examples))
    plan = replace(plan, sample_rate=batch_size / examples)
    subject = Subject(defense, model, loss, data, plan, rng, canaries)
    if not subject.per_record:
        raise NotApplicable("one run holds many canaries only where the unit is a record")
    records = subject.records(torch.arange(len(data.inputs)))
    training = _joined(records, subject.canaries(present.nonzero().flatten()))
    claimed, sigma = subject.claim.epsilon, subject.noise_multiplier / subject.reach
    scores = np.zeros(canaries)
    for update in _train(subject, training, batch_size, lr):
        values = subject.canary_values(update, batch_size)
        scores += log_likelihood_ratio(values, plan.sample_rate, sigma)
    guesses = 2 * (canaries // 10)
    correct = correct_guesses(scores[None], present.numpy()[None], guesses)[0]
    bound = one_run_lower_bound(canaries, guesses, int(correct), plan.delta, confidence)
    ceiling = one_run_ceiling(
        plan.sample_rate, sigma, plan.steps, plan.delta, canaries, guesses, confidence
    )
    p_value = one_run_p_value(canaries, guesses, int(correct), claimed, plan.delta)
    return _verdict("one run", claimed, bound, ceiling, p_value, bound > claimed)


def _train(subject: Subject, training: Batch, batch_size: int, lr: float) -> Iterator[Update]:
    """Yield the uploads of a training run, drawn as the defense draws them."""
    client, steps = replace(subject.defense), subject.plan.steps
    drawn = client.batches(len(training.targets), batch_size, steps, subject.rng)
    for rows in islice(drawn, steps):
        batch = Batch(training.inputs[rows], training.targets[rows])
        update = subject.upload(client, batch, subject.probe.loss)
        with torch.no_grad():
            for name, parameter in subject.probe.model.named_parameters():
                parameter.sub_(lr * update[f"model.{name}"])
        yield update


AUDITS: dict[str, Callable[[Defense, nn.Module, Loss, Batch, Plan, Generator], Audit]] = {
    "residual noise": residual_noise,
    "step canaries": step_canaries,
    "one run": one_run,
}
"""Every audit by name, the quickest first."""
