"""Does a defense keep its differential-privacy claim? Three tests, from its hooks alone.

- `residual_noise`: is the noise of an upload as large as claimed everywhere, fresh every time, and
  on top of what clipping leaves? Quick and sharp.
- `step_canaries`: can single canaries be told from none, at one step, better than the claim
  allows [1]? It covers clipping and noise together.
- `one_run`: the same over a training run, sampling included [2]. Slower, and far looser.

The claim is what the defense's `guarantee` says, and its `replay` is what the noise is added to.
The first two compare single steps with what is claimed of one step, and what they add up to over
the plan with what is claimed of the plan.

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

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.linalg import helmert
from scipy.optimize import brentq
from scipy.special import gammainc, ndtr, ndtri
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Defense, Loss, Plan, Update, trainable

from ..statistics import Flags, Floats, clopper_pearson
from .canaries import Subject, flat
from .one_run import (
    CANARIES,
    CONFIDENCE,
    correct_guesses,
    log_likelihood_ratio,
    one_run_ceiling,
    one_run_lower_bound,
    one_run_p_value,
)

SIGNIFICANCE = 1e-5
"""Chance of a false alarm of `residual_noise`, which every evaluation can afford to run."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found.

    Attributes:
        method: The test.
        claimed: Epsilon that the defense claims.
        lower_bound: What the true epsilon is not below, at `CONFIDENCE` (residual noise: at
            1 - `SIGNIFICANCE`), which the bounds of all announced repetitions keep together.
        ceiling: What `lower_bound` would be, on average, for a perfect implementation.
        p_value: Chance of a finding as bad as this, or worse, if the claim held.
        violated: Whether the claim is refuted.
        words: What was found.
        measured_noise: The noise multiplier as measured; residual noise alone.
        noise_limit: What the noise multiplier is not above, all faults found counted; likewise.
    """

    method: str
    claimed: float
    lower_bound: float
    ceiling: float
    p_value: float
    violated: bool
    words: str
    measured_noise: float = math.nan
    noise_limit: float = math.nan

    @property
    def verdict(self) -> str:
        """Return the finding in words, with what it means for the claim."""
        if self.violated:
            return f"violated: {self.words} (p = {self.p_value:.1g})"
        return f"no violation found: {self.words}"


def audit(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    methods: tuple[str, ...] = ("residual noise", "step canaries"),
    runs: int = 1,
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
        runs: How often this is repeated: bounds and verdicts of all repetitions hold together.
    """
    findings: dict[str, Audit | NotApplicable] = {}
    for method in methods:
        try:
            findings[method] = AUDITS[method](defense, model, loss, data, plan, rng, runs)
        except NotApplicable as reason:
            findings[method] = reason
    return findings


def most_damning(findings: Sequence[Audit]) -> Audit:
    """Return the worst of one test's repetitions, its p-value corrected for their number.

    Bounds and verdicts are already, if the number was announced as `runs`.
    """
    worst = min(findings, key=lambda finding: (finding.p_value, -finding.lower_bound))
    return replace(worst, p_value=min(1.0, len(findings) * worst.p_value))


NOT_ADDING_UP = "the noise is there, but does not add up to the claimed epsilon"

RESIDUAL_BATCH, REPEATS = 8, 16
"""Examples in the batch whose upload is repeated, and how often it is."""


def residual_noise(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    runs: int = 1,
) -> Audit:
    """Test the noise itself: uploads of one batch, minus what they would be without noise.

    Two clients take turns. If the claim holds, what is left is independent and N(0, (sigma s)^2),
    where s is how far one unit can move an upload; more noise is no fault. Three tests, corrected
    for their number (Bonferroni): is the noise of uploads independent, is there nothing below it
    but clipped gradients, and is there enough of it, in all tensors and at all entries?
    """
    subject = Subject(defense, model, loss, data, plan, rng)
    size = min(RESIDUAL_BATCH, len(data.inputs))
    batch, inflated = subject.records(torch.arange(size)), subject.probe.inflated_loss
    clients = [subject.client(size) for _ in range(2)]
    expected = subject.replay(batch, inflated)
    uploads = [subject.upload(clients[turn % 2], batch, inflated) for turn in range(REPEATS)]
    sigma = subject.noise_multiplier
    mean = flat(expected) / (sigma * subject.unit_size(size))
    residuals = torch.stack(
        [flat(upload) / (sigma * subject.unit_size(size)) - mean for upload in uploads]
    )
    noise = _Noise(residuals, [value.numel() for value in expected.values()])
    level = SIGNIFICANCE / (3 * runs)
    quiet = _quiet(noise, level, subject.needs)
    findings = [_reused(noise), _heavy(residuals, mean, level), quiet]
    p_value = min(one.p_value for one in findings)
    guilty = [one for one in findings if one.p_value < level]
    worst = guilty[0] if guilty else quiet
    bound, words = subject.epsilon(sigma * worst.noise), worst.words
    unsound = not guilty and subject.is_exceeded_by(bound)
    if unsound:
        p_value = noise.scaled(sigma / subject.needed_noise()).p_values().min()
        words = f"{NOT_ADDING_UP}: {_comparison(bound, subject.claim.epsilon)}"
    return Audit(
        method="residual noise",
        claimed=subject.claim.epsilon,
        lower_bound=bound,
        ceiling=subject.epsilon(sigma * noise.ideal_limit(level)),
        p_value=min(1.0, 3 * float(p_value)),
        violated=bool(guilty) or unsound,
        words=words,
        measured_noise=sigma * quiet.measured,
        noise_limit=sigma * worst.noise,
    )


class _Finding(NamedTuple):
    """One test of residual noise: how likely its statistic is, and the noise that it leaves."""

    p_value: float
    words: str
    noise: float  # an upper confidence limit, relative to the claim
    measured: float = math.nan


class _Noise:
    """Residuals of repeated uploads, as independent contrasts, which have no mean.

    Attributes:
        contrasts: Repeats - 1, x entries; standard normal if the noise is exactly as claimed.
        squares: Their sums of squares, per entry.
        shift: The mean of the residuals.
    """

    def __init__(self, residuals: Tensor, sizes: Sequence[int]) -> None:
        self.contrasts: Floats = helmert(len(residuals)) @ residuals.cpu().numpy()
        self.squares: Floats = np.square(self.contrasts).sum(axis=0)
        self.shift: Floats = residuals.mean(dim=0).cpu().numpy()
        self.sizes, self.starts = np.array(sizes), np.cumsum([0, *sizes[:-1]])

    def scaled(self, share: float) -> _Noise:
        """Return the noise relative to another claim."""
        other = copy.copy(self)
        other.contrasts, other.squares = share * self.contrasts, share**2 * self.squares
        return other

    def sums(self, values: Floats) -> Floats:
        """Return sums over all entries, and over those of each tensor."""
        return np.array([values.sum(), *np.add.reduceat(values, self.starts)])

    def ratios(self) -> Floats:
        """Return the standard deviation as measured, in all and in each tensor."""
        ratios: Floats = np.sqrt(self.sums(self.squares) / self._freedom)
        return ratios

    @property
    def _freedom(self) -> Floats:
        return len(self.contrasts) * self.sums(np.ones(len(self.squares)))

    def p_values(self) -> Floats:
        """Return p-values that there is as much noise as claimed, corrected for their number.

        In all and in each tensor, from the sums of squares; likewise, from the p-values of single
        entries by Fisher's method, which sees noise that is missing at some entries and too large
        at others; and the quietest entry's.
        """
        entries = gammainc(len(self.contrasts) / 2, self.squares / 2)
        with np.errstate(divide="ignore"):
            fisher = self.sums(-2 * np.log(entries))
        p_values: Floats = np.concatenate(
            [
                stats.chi2.cdf(self.sums(self.squares), self._freedom),
                stats.chi2.sf(fisher, 2 * self._freedom / len(self.contrasts)),
                [len(entries) * entries.min()],
            ]
        )
        return len(p_values) * p_values

    def limit(self, level: float) -> float:
        """Return an upper confidence limit of the noise of the quietest entries."""
        most = float(self.ratios()[0]) * self.ideal_limit(level)

        def excess(log_share: float) -> float:
            p_value = float(self.scaled(math.exp(-log_share)).p_values().min())
            return math.log(max(p_value, 1e-300) / level)

        if not most > 0:
            return 0.0
        high = math.log(most) - 1e-6  # the limit for all entries together: mostly the least
        low = high - 50
        if excess(high) >= 0:
            return most
        return math.exp(brentq(excess, low, high, xtol=1e-6)) if excess(low) > 0 else 0.0

    def ideal_limit(self, level: float) -> float:
        """Return the limit for noise that is measured exactly as claimed."""
        freedom, tests = self._freedom[0], 2 * len(self._freedom) + 1
        return math.sqrt(freedom / float(stats.chi2.ppf(level / tests, freedom)))


def _quiet(noise: _Noise, level: float, needs: str) -> _Finding:
    """Test whether there is less noise than claimed: in all, in a tensor, or at some entries."""
    p_values, ratios, limit = noise.p_values(), noise.ratios(), noise.limit(level)
    worst, p_value = int(p_values.argmin()), float(p_values.min())
    if p_value < level and worst >= len(ratios):
        words = f"some entries have no more than {limit:.3f} of the noise that {needs}"
        return _Finding(p_value, words, limit, limit)
    ratio = float(ratios[worst if p_value < level else 0])
    return _Finding(p_value, f"the noise is {ratio:.3f} of what {needs}", limit, ratio)


BARE = 1e-3
"""Share of the claimed noise below which an entry's is taken for rounding."""


def _reused(noise: _Noise) -> _Finding:
    """Test whether uploads have independent noise, in all and in each tensor.

    Entries are brought to one scale first, so that this is about nothing else.
    """
    repeats = len(noise.contrasts)
    noisy = noise.squares > BARE**2 * repeats
    if not noisy.all() and np.square(noise.shift[~noisy]).mean() > 0.1:
        where = " at some entries" if noisy.any() else ""
        return _Finding(0.0, f"every upload has the same noise{where}", 0.0)
    if not noisy.any():
        return _Finding(0.0, "there is no noise at all", 0.0)
    contrasts = noise.contrasts[:, noisy] * np.sqrt(repeats / noise.squares[noisy])
    sizes = np.add.reduceat(noisy, noise.starts, dtype=int)
    groups = [contrasts, *np.split(contrasts, np.cumsum(sizes)[:-1], axis=1)]
    p_values, left = zip(*(_dependence(group) for group in groups), strict=True)
    p_value, worst = len(groups) * min(p_values), int(np.argmin(p_values))
    words = f"noise is used again: only {left[worst]:.2g} of it is new in some upload"
    return _Finding(p_value, words, math.sqrt(left[worst]))


def _dependence(vectors: Floats) -> tuple[float, float]:
    """Return the p-value that normal vectors are independent, and the least share that is new.

    The share of the i-th that is no combination of those before it is Beta((n - i) / 2, i / 2),
    independently of the other shares; their product is the determinant of the correlations, whose
    logarithm is the statistic of Bartlett's test. Fisher's method combines their exact p-values.

    References:
        Bartlett, "A Note on the Multiplying Factors for Various chi^2 Approximations", Journal of
        the Royal Statistical Society B 1954, https://www.jstor.org/stable/2984057
    """
    entries = vectors.shape[1]
    vectors = vectors[:entries]  # any others are combinations of these, whatever the noise
    if len(vectors) < 2:
        return 1.0, 1.0
    products = vectors @ vectors.T
    rest = np.linalg.cholesky(products + 1e-12 * entries * np.eye(len(vectors)))
    new = (np.diagonal(rest) ** 2 / np.diagonal(products))[1:]
    before = np.arange(1, len(vectors))
    with np.errstate(divide="ignore"):
        p_values = np.log(stats.beta.cdf(new, (entries - before) / 2, before / 2))
    fresh = entries / (entries - before)  # makes up for what is explained by chance
    return float(stats.chi2.sf(-2 * p_values.sum(), 2 * len(before))), float((new * fresh).min())


def _heavy(residuals: Tensor, mean: Tensor, level: float) -> _Finding:
    """Test whether examples weigh more than clipping allows: the mean is not the expected one."""
    repeats, entries = residuals.shape
    shift = residuals.mean(dim=0)
    variance = float((residuals - shift).square().sum()) / ((repeats - 1) * entries)
    error = max(math.sqrt(variance / repeats), 1e-12)  # of each entry of the shift
    length = max(float(mean.norm()), 1e-12)
    along = float(shift @ mean) / length
    elsewhere = float(shift.square().sum()) / (entries * error**2)
    p_value = 2 * min(
        float(stats.t.sf(along / error, (repeats - 1) * entries)),
        float(stats.f.sf(elsewhere, entries, (repeats - 1) * entries)),
    )
    least = 1 + (along + float(stats.t.ppf(level, (repeats - 1) * entries)) * error) / length
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
    runs: int = 1,
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
    claimed, confidence = 1 / subject.noise_multiplier, _confidence(runs)
    mu = errors.separation(confidence)
    miss = float(ndtr(-subject.reach * claimed / 2))  # of the test, were the claim exact
    ideal = errors._replace(misses=round(miss * errors.present), alarms=round(miss * errors.absent))
    bound = subject.epsilon(_inverse(mu))
    unsound = mu <= claimed and subject.is_exceeded_by(bound)
    return _verdict(
        "step canaries",
        subject.claim.epsilon,
        bound,
        subject.epsilon(_inverse(ideal.separation(confidence))),
        errors.p_value(1 / subject.needed_noise() if unsound else claimed),
        mu > claimed or unsound,
        f"{NOT_ADDING_UP}: " if unsound else "",
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


def _confidence(runs: int) -> float:
    """Return the confidence level of single bounds that keep `CONFIDENCE` together."""
    return 1 - (1 - CONFIDENCE) / runs


def _inverse(separation: float) -> float:
    return 1 / separation if separation else math.inf


def _verdict(
    method: str,
    claimed: float,
    bound: float,
    ceiling: float,
    p_value: float,
    violated: bool,
    fault: str = "",
) -> Audit:
    words = fault + _comparison(bound, claimed)
    if not violated:
        words += f"; a perfect implementation would show {ceiling:.2f}"
    return Audit(
        method=method,
        claimed=claimed,
        lower_bound=bound,
        ceiling=ceiling,
        p_value=p_value,
        violated=violated,
        words=words,
    )


def _comparison(bound: float, claimed: float) -> str:
    return f"epsilon is at least {bound:.2f}, where {claimed:.2f} is claimed"


def one_run(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    runs: int = 1,
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
        runs: See `audit`.
        canaries: Number of canaries.
        lr: Learning rate of the run.
    """
    present = torch.rand(canaries, generator=rng) < 0.5
    examples = len(data.inputs) + int(present.sum())
    batch_size = max(1, round(plan.sample_rate * examples))
    plan = replace(plan, sample_rate=batch_size / examples)
    subject = Subject(defense, model, loss, data, plan, rng, canaries)
    if not subject.per_record:
        raise NotApplicable(
            "one run holds many canaries only where the unit is a record: use step canaries"
        )
    records = subject.records(torch.arange(len(data.inputs)))
    training = _joined(records, subject.canaries(present.nonzero().flatten()))
    claimed, sigma = subject.claim.epsilon, subject.noise_multiplier / subject.reach
    scores = np.zeros(canaries)
    for update in _train(subject, training, batch_size, lr):
        values = subject.canary_values(update, batch_size)
        scores += log_likelihood_ratio(values, plan.sample_rate, sigma)
    guesses, confidence = 2 * (canaries // 10), _confidence(runs)
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
            for name, parameter in trainable(subject.probe.model).items():
                parameter.sub_(lr * update[f"model.{name}"])
        yield update


AUDITS: dict[str, Callable[[Defense, nn.Module, Loss, Batch, Plan, Generator, int], Audit]] = {
    "residual noise": residual_noise,
    "step canaries": step_canaries,
    "one run": one_run,
}
"""Every audit by name, the quickest first."""
