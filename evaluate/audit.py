"""Does a defense keep its differential-privacy claim? Three tests, from its hooks alone.

- `residual_noise`: is the noise of an upload as large as claimed, fresh every time, and on top of
  what clipping leaves? Quick and sharp.
- `step_canaries`: can single canaries be told from none, at one step, better than the claim
  allows [1]? It covers clipping and noise together.
- `one_run`: the same over a training run, sampling included [2]. Slower, and far looser.

The claim is what the defense's `guarantee` says, and its `replay` is what the noise is added to.
A canary is an example whose gradient is a single huge entry, of a linear layer beside the audited
model that nothing else excites. Canaries are examples of the private batch, so that they enter
before clipping, and uploads come from `release`, the one path.

A lower bound says that the true epsilon is not below it; it is no estimate. Beside it stands the
ceiling: what a perfect implementation of the claim would score. An audit that finds nothing
speaks of the faults that it looks for, and of no others.

References:
    [1] Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini, Terzis. "Tight Auditing of
        Differentially Private Machine Learning." USENIX Security 2023.
        https://arxiv.org/abs/2302.07956
    [2] Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
        https://arxiv.org/abs/2305.08846
    [3] Mahloujifar, Melis, Chaudhuri. "Auditing f-Differential Privacy in One Run." ICML 2025.
        https://arxiv.org/abs/2410.22235
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from scipy.special import bdtrc, ndtr, ndtri
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import FedSGD, NotApplicable
from leakfrontier.defenses import Batch, Chain, Defense, Guarantee, Loss, Plan, Update

from .accounting import NOISE_RANGE, epsilon
from .client import release
from .statistics import Flags, Floats, clopper_pearson

SIGNIFICANCE = 1e-5
"""Chance of a false alarm of `residual_noise`, which every evaluation can afford to run."""

CONFIDENCE = 0.95
"""Confidence level of the lower bounds from canaries."""

HUGE = 1e6
"""Factor by which gradients are inflated, so that clipping has something to do."""


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
    """

    method: str
    claimed: float
    lower_bound: float
    ceiling: float
    p_value: float
    violated: bool
    verdict: str


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


class _Probe(nn.Module):
    """A model, beside a linear layer that nothing but canaries excites.

    An example is packed as its own values and a code: all zeros, or one huge entry. Its loss is
    its own plus the layer's output, hence its gradient in the layer is the code.
    """

    def __init__(self, model: nn.Module, loss: Loss, example: Tensor, canaries: int) -> None:
        super().__init__()
        self.model, self.inner_loss = copy.deepcopy(model), loss
        self.canary = nn.utils.skip_init(nn.Linear, canaries, 1, bias=False)
        nn.init.zeros_(self.canary.weight)
        self.shape, self.dtype = example.shape, example.dtype
        with torch.no_grad():
            self.outputs = self.model(example.unsqueeze(0)).shape[1:]

    def forward(self, packed: Tensor) -> Tensor:
        """Return the model's outputs, flat, and the layer's."""
        values, codes = packed.tensor_split([self.shape.numel()], dim=1)
        inputs = values.reshape(len(packed), *self.shape).to(self.dtype)
        return torch.cat([self.model(inputs).flatten(1), self.canary(codes)], dim=1)

    def loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return the model's mean loss, plus the layer's mean output."""
        outputs = packed[:, :-1].reshape(len(packed), *self.outputs)
        return self.inner_loss(outputs, targets) + packed[:, -1].mean()

    def inflated_loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return a loss under which clipping leaves little of any gradient."""
        return HUGE * self.loss(packed, targets)


class _Subject:
    """A defense that claims privacy, applied to a probe.

    Attributes:
        defense: The one defense that makes the claim.
        claim: The claim under the plan.
        noise_multiplier: sigma of the Gaussian mechanism with the epsilon that is claimed.
        sample_rate: What the claim counts on: the plan's, or 1 without amplification.
        sensitivity: How far one unit can move the sum of contributions, as replayed.
        reach: What a canary contributes to its own entry, as a share of it.
    """

    def __init__(
        self,
        defense: Defense,
        model: nn.Module,
        loss: Loss,
        data: Batch,
        plan: Plan,
        rng: Generator,
        canaries: int = 1,
    ) -> None:
        if not len(data.inputs) >= 1:
            raise ValueError("data must have at least one example, got none")
        self.data, self.plan, self.rng = data, plan, rng
        self.defense = _claiming(defense, plan.delta)
        self.claim = _claim(self.defense, plan)
        once = _claim(self.defense, Plan(1, 1.0, plan.delta)).epsilon
        sampled = _claim(self.defense, replace(plan, steps=1)).epsilon
        self.noise_multiplier = gaussian_sigma(once, plan.delta)
        self.sample_rate = plan.sample_rate if sampled < once else 1.0
        self.probe = _Probe(model, loss, data.inputs[0], canaries)
        self._check_replay()
        canary = self.canaries(torch.zeros(1, dtype=torch.long))
        largest = _norm(self.replay(canary, self.probe.inflated_loss))
        self.sensitivity = largest * (2 if self.claim.adjacency == "replace" else 1)
        entries = self.replay(canary, self.probe.loss)["canary.weight"]
        self.reach = float(entries.detach().max()) / self.sensitivity

    @property
    def per_record(self) -> bool:
        """Return whether the claim is for single records, and not for the client as a whole."""
        return self.claim.unit == "record"

    def records(self, rows: Tensor) -> Batch:
        """Return some of the real examples, packed."""
        codes = self.probe.canary.weight.new_zeros(len(rows), self.probe.canary.in_features)
        return self._packed(rows, codes)

    def canaries(self, which: Tensor) -> Batch:
        """Return canaries, which are the first example in all but their code."""
        codes = nn.functional.one_hot(which, self.probe.canary.in_features)
        return self._packed(torch.zeros_like(which), HUGE * codes.to(self.probe.canary.weight))

    def _packed(self, rows: Tensor, codes: Tensor) -> Batch:
        values = self.data.inputs[rows].flatten(1).to(codes)
        return Batch(torch.cat([values, codes], dim=1), self.data.targets[rows])

    def client(self, batch_size: int) -> Defense:
        """Return a fresh client that has been told its batch size, as in training."""
        client = replace(self.defense)
        next(iter(client.batches(batch_size, batch_size, 1, self.rng)))
        return client

    def upload(self, client: Defense, batch: Batch, loss: Loss) -> Update:
        """Return what a client releases of a batch."""
        return release(self.probe, loss, [batch], [client], FedSGD(), self.rng)[0]

    def replay(self, batch: Batch, loss: Loss) -> Update:
        """Return the same without noise, as an informed adversary replays it."""
        observed = {name: value.detach() for name, value in self.probe.named_parameters()}
        return self.upload(replace(self.defense).replay(observed), batch, loss)

    def unit_size(self, batch_size: int) -> float:
        """Return how far one unit can move an upload, the mean over a batch."""
        return self.sensitivity / (batch_size if self.per_record else 1)

    def canary_values(self, update: Update, batch_size: int) -> Floats:
        """Return the canaries' entries of an upload: 1 for one that is in, plus noise."""
        entries = update["canary.weight"].detach().flatten().double().numpy()
        values: Floats = entries / (self.reach * self.unit_size(batch_size))
        return values

    def epsilon(self, noise_multiplier: float) -> float:
        """Return what epsilon would be with this noise; infinite with next to none."""
        if noise_multiplier == math.inf:
            return 0.0
        if not noise_multiplier >= NOISE_RANGE[0]:
            return math.inf
        return epsilon(self.sample_rate, noise_multiplier, self.plan.steps, self.plan.delta)

    def _check_replay(self) -> None:
        """Refuse what the audits cannot judge."""
        record = self.records(torch.arange(1))
        expected, again = (self.replay(record, self.probe.loss) for _ in range(2))
        if not torch.equal(_flat(expected), _flat(again)):
            raise NotApplicable("the defense's replay must leave out the noise, and does not")
        near, far = (
            self.defense.log_likelihood(
                {name: value + shift for name, value in expected.items()}, expected, batch_size=1
            )
            for shift in (1.0, 2.0)
        )
        if near is not None and far is not None and not torch.isclose(far, 4 * near, rtol=1e-3):
            raise NotApplicable("the noise is not Gaussian")


def _claiming(defense: Defense, delta: float) -> Defense:
    """Return the link of a chain whose claim the chain makes; what follows is post-processing."""
    if not isinstance(defense, Chain):
        return defense
    once = Plan(1, 1.0, delta)
    claim = defense.guarantee(once)
    links = [link for link in defense.links if link.guarantee(once) == claim]
    return _claiming(links[0], delta) if claim is not None and links else defense


@dataclass(frozen=True)
class _Configured:
    """A defense that equals another with the same configuration, as a key."""

    kind: type[Defense]
    configuration: str
    defense: Defense = field(compare=False)


def _claim(defense: Defense, plan: Plan) -> Guarantee:
    """Return what a defense claims; its accountant is slow, and audits ask again and again."""
    claim = _cached_claim(_Configured(type(defense), repr(defense), defense), plan)
    name = type(defense).__name__
    if claim is None:
        raise NotApplicable(f"{name} claims no differential privacy")
    if not claim.epsilon < math.inf:
        raise NotApplicable(f"{name} claims an infinite epsilon, which nothing can violate")
    return claim


@lru_cache(maxsize=64)
def _cached_claim(configured: _Configured, plan: Plan) -> Guarantee | None:
    return configured.defense.guarantee(plan)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Return the noise multiplier at which one Gaussian step has this epsilon, exactly."""
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))


def _flat(update: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in update.values()])


def _norm(update: Mapping[str, Tensor]) -> float:
    return float(_flat(update).norm())


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
    subject = _Subject(defense, model, loss, data, plan, rng)
    size = min(RESIDUAL_BATCH, len(data.inputs))
    batch, inflated = subject.records(torch.arange(size)), subject.probe.inflated_loss
    clients = [subject.client(size) for _ in range(2)]
    expected = subject.replay(batch, inflated)
    uploads = [subject.upload(clients[turn % 2], batch, inflated) for turn in range(REPEATS)]
    std = subject.noise_multiplier * subject.unit_size(size)
    mean = _flat(expected) / std
    residuals = torch.stack([_flat(upload) / std - mean for upload in uploads])
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
    )


class _Finding(NamedTuple):
    """One test of residual noise: how likely its statistic is, and the noise that it leaves."""

    p_value: float
    words: str
    noise: float  # an upper confidence limit, relative to the claim


def _quiet(residuals: Tensor, sizes: list[int]) -> _Finding:
    """Test whether the noise is smaller than claimed, in all tensors or in one of them."""
    squares = (residuals - residuals.mean(dim=0)).square().sum(dim=0)
    sums = np.array([float(group.sum()) for group in (squares, *squares.split(sizes))])
    freedom = np.array([len(squares), *sizes]) * (len(residuals) - 1)
    limits = _limits(sums, freedom)
    worst = int(limits.argmin())
    ratio = math.sqrt(sums[worst] / freedom[worst])
    p_value = len(sums) * float(np.min(stats.chi2.cdf(sums, freedom)))
    return _Finding(p_value, f"the noise is {ratio:.3f} of what is claimed", float(limits[worst]))


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


CANARIES, RECORDS = 1_000, 8
"""Canaries of an audit, half of which are in, and the real examples beside them at one step."""

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
    subject = _Subject(defense, model, loss, data, plan, rng, CANARIES)
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


def _record_errors(subject: _Subject) -> _Errors:
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


def _client_errors(subject: _Subject) -> _Errors:
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
    subject = _Subject(defense, model, loss, data, plan, rng, canaries)
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


def _train(subject: _Subject, training: Batch, batch_size: int, lr: float) -> Iterator[Update]:
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


def log_likelihood_ratio(values: Floats, sample_rate: float, noise_multiplier: float) -> Floats:
    """Return log p(value | in the data) / p(value | not), for a unit that adds 1 when sampled."""
    absent = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    sampled = math.log(sample_rate) + (2 * values - 1) / (2 * noise_multiplier**2)
    ratio: Floats = np.logaddexp(absent, sampled)
    return ratio


def correct_guesses(scores: Floats, present: Flags, guesses: int) -> NDArray[np.int64]:
    """Return how many guesses are right: half of them in, by the highest scores, half out.

    Args:
        scores: Runs x canaries.
        present: Which canaries were in the data; runs x canaries.
        guesses: Number of guesses; for the canaries between there are none.
    """
    ranked = np.take_along_axis(present, scores.argsort(axis=1), axis=1)
    half = guesses // 2
    right: NDArray[np.int64] = (~ranked[:, :half]).sum(axis=1) + ranked[:, -half:].sum(axis=1)
    return right


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return the chance of so many correct guesses, or more, under (epsilon, delta) ([2], 5.2)."""
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct guesses, guesses and canaries must not decrease, got {correct}, {guesses}, "
            f"{canaries}"
        )
    fewer = np.arange(correct + 1)
    at_least = bdtrc(correct - fewer - 1.0, guesses, 1 / (1 + math.exp(-epsilon)))
    added = (at_least[1:] - at_least[0]) / fewer[1:]  # Pr[correct > X >= correct - i] / i
    return min(1.0, float(at_least[0]) + 2 * canaries * delta * float(added.max(initial=0.0)))


def one_run_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest epsilon that so many correct guesses refute; 0 if they refute none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    return _largest(excess)


def one_run_gaussian_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the same against Gaussian mechanisms alone, which is tighter ([3], Algorithm 3).

    It refutes that the mechanism is as private as one Gaussian step with that epsilon, and so is
    for runs without subsampling.
    """

    def excess(epsilon: float) -> float:
        mu = 1 / gaussian_sigma(epsilon, delta) if epsilon else 0.0
        right = (1 - confidence) * correct / canaries
        wrong = (1 - confidence) * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            more = max(wrong, float(ndtr(ndtri(right) - mu)))
            right = min(1.0, right + i / (guesses - i) * (more - wrong))
            wrong = more
        return guesses / canaries - right - wrong

    return _largest(excess)


def _largest(excess: Callable[[float], float], most: float = 100.0) -> float:
    """Return where an increasing function of epsilon crosses zero; 0 if it starts above."""
    return 0.0 if excess(0.0) > 0 else float(brentq(excess, 0.0, most))


def one_run_ceiling(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    canaries: int = CANARIES,
    guesses: int = CANARIES // 5,
    confidence: float = CONFIDENCE,
    runs: int = 20,
) -> float:
    """Return the mean lower bound that simulated runs of the exact mechanism score."""
    draws = np.random.default_rng(0)
    present = draws.random((runs, canaries)) < 0.5
    scores = np.zeros((runs, canaries))
    for _ in range(steps):
        sampled = present & (draws.random(present.shape) < sample_rate)
        values = sampled + noise_multiplier * draws.standard_normal(present.shape)
        scores += log_likelihood_ratio(values, sample_rate, noise_multiplier)
    correct, times = np.unique(correct_guesses(scores, present, guesses), return_counts=True)
    bounds = [
        one_run_lower_bound(canaries, guesses, int(one), delta, confidence) for one in correct
    ]
    return float(np.average(bounds, weights=times))


AUDITS: dict[str, Callable[[Defense, nn.Module, Loss, Batch, Plan, Generator], Audit]] = {
    "residual noise": residual_noise,
    "step canaries": step_canaries,
    "one run": one_run,
}
"""Every audit by name, the quickest first."""
