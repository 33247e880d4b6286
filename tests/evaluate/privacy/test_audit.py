import math
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from federated import batch, convolutional, mlp, rng
from torch import Generator, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    ClientDP,
    Defense,
    Guarantee,
    Loss,
    Noise,
    Plan,
    TopK,
    Update,
    batch_gradient,
)
from leakfrontier.defenses.dpsgd import ClippedGradient
from leakfrontier.evaluate.privacy.accounting import epsilon, gaussian_sigma
from leakfrontier.evaluate.privacy.audit import (
    AUDITS,
    SIGNIFICANCE,
    Audit,
    _heavy,
    _Noise,
    _reused,
    audit,
    most_damning,
    one_run,
    residual_noise,
    step_canaries,
)
from leakfrontier.evaluate.privacy.one_run import (
    CANARIES,
    log_likelihood_ratio,
    one_run_ceiling,
    one_run_lower_bound,
    one_run_p_value,
)

ONCE = Plan(1, 1.0, 1e-5)
SIGMA = 1.0812  # epsilon 4 at ONCE
DATA = batch(20)


def plus_noise(update: Update, std: float, rng: Generator) -> Update:
    return {k: v + std * torch.randn(v.shape, generator=rng) for k, v in update.items()}


@cache
def claim(sigma: float, plan: Plan) -> Guarantee:
    return DPSGD(sigma).guarantee(plan)


class Claimed(DPSGD):
    """Claims what DPSGD claims, whatever its subclasses do."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return claim(self.noise_multiplier, plan)


@dataclass
class QuietDPSGD(Claimed):
    """Draws 0.8 of the noise that it claims."""

    share: float = 0.8
    _worker: DPSGD | None = field(default=None, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        if self._worker is None:
            self._worker = DPSGD(self.share * self.noise_multiplier, self.max_grad_norm)
        self._worker._batch_size = self._batch_size
        return self._worker.gradient(model, loss, batch, rng)


class UnclippedDPSGD(Claimed):
    """Adds the right noise to gradients that nothing bounds."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        size = self._batch_size or len(batch.inputs)
        std = self.noise_multiplier * self.max_grad_norm / size
        return plus_noise(batch_gradient(model, loss, batch), std, rng)


class BatchClippedDPSGD(Claimed):
    """Clips the mean gradient, and not each example's."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        size = self._batch_size or len(batch.inputs)
        clipped = Noise(0.0, max_norm=self.max_grad_norm).on_update(
            batch_gradient(model, loss, batch), rng
        )
        return plus_noise(clipped, self.noise_multiplier * self.max_grad_norm / size, rng)


class LooselyClippedDPSGD(Claimed):
    """Clips to half as much again as it says."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        clipped = ClippedGradient(1.5 * self.max_grad_norm).gradient(model, loss, batch, rng)
        size = len(batch.inputs)
        return plus_noise(clipped, self.noise_multiplier * self.max_grad_norm / size, rng)


class ReusingDPSGD(Claimed):
    """Draws the same noise at every step."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        return super().gradient(model, loss, batch, torch.Generator().manual_seed(0))


@dataclass
class AlternatingDPSGD(Claimed):
    """Draws new noise for half of its steps only, and the first one's for the others."""

    _step: int = field(default=0, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self._step += 1
        seed = self._step if self._step % 2 else 1
        return super().gradient(model, loss, batch, torch.Generator().manual_seed(seed))


class HalfBareDPSGD(Claimed):
    """Forgets the noise of the last layer's bias: 10 of all parameters."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        noised = super().gradient(model, loss, batch, rng)
        clipped = ClippedGradient(self.max_grad_norm).gradient(model, loss, batch, rng)
        bare = next(name for name in noised if name.endswith("3.bias"))
        return {**noised, bare: clipped[bare]}


@dataclass
class Patterned(Claimed):
    """Makes the noise of its steps from fresh noise, in a way that subclasses know."""

    _step: int = field(default=-1, init=False, repr=False)
    _seed: int = field(default=0, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self._step += 1
        self._seed = self._seed or int(torch.randint(10**9, (), generator=rng))
        clipped = ClippedGradient(self.max_grad_norm).gradient(model, loss, batch, rng)
        std = self.noise_multiplier * self.max_grad_norm / len(batch.inputs)
        noise = self.noise({k: v.numel() for k, v in clipped.items()})
        return {k: v + std * noise[k].view_as(v) for k, v in clipped.items()}

    def noise(self, sizes: dict[str, int]) -> Update:
        return self.fresh(sizes, self._step)

    def fresh(self, sizes: dict[str, int], seed: int) -> Update:
        draws = torch.Generator().manual_seed(self._seed + seed)
        return {name: torch.randn(size, generator=draws) for name, size in sizes.items()}


class MirroringDPSGD(Patterned):
    """Draws z, uploads with z and then with -z."""

    def noise(self, sizes: dict[str, int]) -> Update:
        sign = -1 if self._step % 2 else 1
        return {k: sign * v for k, v in self.fresh(sizes, self._step // 2).items()}


class SummingDPSGD(Patterned):
    """Makes every third noise of the two before it."""

    def noise(self, sizes: dict[str, int]) -> Update:
        if self._step % 3 < 2:
            return super().noise(sizes)
        first, second = (self.fresh(sizes, self._step - back) for back in (2, 1))
        return {k: (first[k] + second[k]) / math.sqrt(2) for k in sizes}


class PartlyReusingDPSGD(Patterned):
    """Uses the noise of one small tensor a second time."""

    def noise(self, sizes: dict[str, int]) -> Update:
        again = next(name for name in sizes if name.endswith("1.bias"))
        return {**super().noise(sizes), again: self.fresh(sizes, self._step // 2)[again]}


class FadingDPSGD(Patterned):
    """Half of the variance is that of the noise before."""

    def noise(self, sizes: dict[str, int]) -> Update:
        new, old = (self.fresh(sizes, self._step - back) for back in (0, 1))
        return {k: (new[k] + old[k]) / math.sqrt(2) for k in sizes}


@dataclass
class UnevenDPSGD(Patterned):
    """Scales the noise of even and of odd entries differently."""

    even: float = math.sqrt(2)
    odd: float = 0.0

    def noise(self, sizes: dict[str, int]) -> Update:
        noise = super().noise(sizes)
        for value in noise.values():
            value[::2] *= self.even
            value[1::2] *= self.odd
        return noise


class ForgetfulDPSGD(DPSGD):
    """Claims of any number of steps what holds for one."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return claim(self.noise_multiplier, replace(plan, steps=1))


class QuietClientDP(ClientDP):
    @property
    def mechanism(self) -> Noise:
        return replace(super().mechanism, scale=0.8 * super().mechanism.scale)

    def guarantee(self, plan: Plan) -> Guarantee:
        return ClientDP(self.noise_multiplier, self.max_update_norm).guarantee(plan)


class UnclippedClientDP(ClientDP):
    def on_update(self, update: Update, rng: Generator) -> Update:
        return plus_noise(update, self.mechanism.scale, rng)


class ReusingClientDP(ClientDP):
    def on_update(self, update: Update, rng: Generator) -> Update:
        return super().on_update(update, torch.Generator().manual_seed(0))


@dataclass
class Handmade(Defense):
    """A defense that knows nothing of Opacus; it overrides no more than it must."""

    sigma: float
    share: float = 1.0

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        clipped = ClippedGradient(1.0).gradient(model, loss, batch, rng)
        return plus_noise(clipped, self.share * self.sigma / len(batch.inputs), rng)

    def replay(self, observed: object) -> Defense:
        return ClippedGradient(1.0)

    def guarantee(self, plan: Plan) -> Guarantee:
        return claim(self.sigma, plan)


def check(method: str, defense: Defense, seed: int = 0, plan: Plan = ONCE) -> Audit:
    finding = audit(defense, mlp(8), cross_entropy, DATA, plan, rng(seed), (method,))[method]
    assert isinstance(finding, Audit)
    assert finding.verdict.startswith("violated" if finding.violated else "no ")
    return finding


HONEST = [
    DPSGD(SIGMA),
    DPSGD(SIGMA, 0.1, per_example="hooks"),
    DPSGD(SIGMA, 3.0, clipping="per_layer", per_example="hooks"),
    DPSGD(SIGMA, poisson_sampling=False),
    ClientDP(SIGMA, 0.5),
    Handmade(SIGMA),
    Chain((DPSGD(SIGMA), TopK(0.1))),
    Patterned(SIGMA),
]


@pytest.mark.parametrize("defense", HONEST, ids=repr)
def test_honest_defenses_pass(defense: Defense) -> None:
    made = defense.guarantee(ONCE)
    assert made is not None
    for method in ("residual noise", "step canaries"):
        finding = check(method, defense)
        assert finding.claimed == made.epsilon
        assert not finding.violated
        assert finding.p_value > SIGNIFICANCE
        assert finding.lower_bound < finding.claimed
        assert finding.lower_bound == pytest.approx(finding.ceiling, rel=0.2)


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_residual_noise_measures_sigma_within_one_percent(build) -> None:  # noqa: ANN001
    for sigma in (1.0, 2.0):
        finding = residual_noise(DPSGD(sigma), build(), cross_entropy, DATA, ONCE, rng())
        assert not finding.violated
        measured = float(finding.verdict.split("noise is ")[1].split()[0])
        assert measured == pytest.approx(1, abs=0.01)
        assert 0.97 * finding.claimed < finding.lower_bound < finding.claimed


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        (QuietDPSGD(SIGMA), "the noise is 0.79"),
        (QuietClientDP(SIGMA, 0.5), "the noise is 0.79"),
        (Handmade(SIGMA, share=0.8), "the noise is 0.79"),
        (HalfBareDPSGD(SIGMA), "the noise is 0.000 of what is claimed"),
        (UnclippedDPSGD(SIGMA), "times what clipping allows"),
        (UnclippedClientDP(SIGMA, 0.5), "times what clipping allows"),
        (BatchClippedDPSGD(SIGMA), "times what clipping allows"),
        (LooselyClippedDPSGD(SIGMA), "times what clipping allows"),
        (ReusingDPSGD(SIGMA), "every upload has the same noise"),
        (ReusingClientDP(SIGMA), "every upload has the same noise"),
        (AlternatingDPSGD(SIGMA), "noise is used again"),
        (MirroringDPSGD(SIGMA), "noise is used again"),
        (SummingDPSGD(SIGMA), "noise is used again"),
        (PartlyReusingDPSGD(SIGMA), "noise is used again"),
        (FadingDPSGD(SIGMA), "noise is used again"),
        (UnevenDPSGD(SIGMA), "some entries have no more than 0.00"),
        (UnevenDPSGD(SIGMA, even=1.3**0.5, odd=0.7**0.5), "some entries have no more than 0."),
        (Chain((QuietDPSGD(SIGMA), TopK(0.1))), "the noise is 0.79"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Defense) else "",
)
def test_residual_noise_names_the_fault(defense: Defense, words: str) -> None:
    finding = check("residual noise", defense)
    assert finding.violated
    assert words in finding.verdict
    assert finding.p_value < SIGNIFICANCE
    assert finding.lower_bound > finding.claimed


@pytest.mark.parametrize(
    "defense",
    [
        QuietDPSGD(SIGMA),
        Handmade(SIGMA, share=0.8),
        UnclippedDPSGD(SIGMA),
        BatchClippedDPSGD(SIGMA),
        LooselyClippedDPSGD(SIGMA),
        QuietClientDP(SIGMA, 0.5),
    ],
    ids=repr,
)
def test_step_canaries_see_too_little_noise_and_clipping(defense: Defense) -> None:
    finding = check("step canaries", defense)
    assert finding.violated
    assert finding.lower_bound > finding.claimed > finding.ceiling
    assert finding.p_value < 0.05


@pytest.mark.parametrize("sizes", [[3], [1, 2, 9], [400, 5, 30]], ids=str)
def test_p_values_of_residual_noise_are_small_as_often_as_they_say(sizes: list[int]) -> None:
    entries, draws, runs = sum(sizes), rng(), 1000
    mean = torch.randn(entries, generator=rng(1)).double()
    small = np.zeros(3)
    for _ in range(runs):
        residuals = torch.randn(16, entries, generator=draws).double()
        noise = _Noise(residuals, sizes)
        tests = (_reused(noise).p_value, _heavy(residuals, mean, 0.05).p_value)
        small += [p_value < 0.05 for p_value in (*tests, noise.p_values().min())]
    assert (small / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)).all()
    assert (small / runs >= 0.003).all()  # and not for want of power


def test_no_noise_behind_a_claim_is_caught() -> None:
    finding = check("residual noise", QuietDPSGD(SIGMA, share=0.0))
    assert "there is no noise at all" in finding.verdict
    assert finding.lower_bound == math.inf


@cache
def repeated(defense_type: type[DPSGD], method: str) -> list[Audit]:
    return [check(method, defense_type(SIGMA), seed) for seed in range(20)]


@pytest.mark.parametrize("method", ["residual noise", "step canaries"])
def test_twenty_audits_of_epsilon_four(method: str) -> None:
    honest, quiet = repeated(DPSGD, method), repeated(QuietDPSGD, method)
    assert all(finding.claimed == pytest.approx(4, abs=1e-3) for finding in honest)
    assert sum(finding.violated for finding in honest) == 0
    assert sum(finding.violated for finding in quiet) >= 18
    mean = np.mean([finding.lower_bound for finding in honest])
    assert mean == pytest.approx(honest[0].ceiling, rel=0.05)


def test_more_noise_than_claimed_is_no_fault_however_uneven() -> None:
    for seed in range(5):
        assert not check("residual noise", UnevenDPSGD(SIGMA, even=5.0, odd=1.0), seed).violated


@pytest.mark.parametrize("method", ["residual noise", "step canaries"])
def test_steps_that_do_not_add_up_to_the_claim_are_a_violation(method: str) -> None:
    plan = Plan(100, 1.0, 1e-5)
    finding = check(method, ForgetfulDPSGD(SIGMA), plan=plan)
    assert finding.violated
    assert finding.claimed == pytest.approx(4, abs=1e-3)
    assert "the noise is there, but does not add up to the claimed epsilon" in finding.verdict
    assert 60 < finding.lower_bound < epsilon(1.0, SIGMA, 100, 1e-5)
    assert finding.p_value < SIGNIFICANCE
    once = check(method, ForgetfulDPSGD(SIGMA))
    honest = check(method, DPSGD(SIGMA), plan=plan)
    assert not once.violated
    assert not honest.violated


def test_repetitions_are_corrected_for() -> None:
    finding = Audit(
        method="step canaries",
        claimed=4.0,
        lower_bound=4.1,
        ceiling=3.0,
        p_value=0.02,
        violated=True,
        words="by a hair",
    )
    fine = replace(finding, p_value=0.6, lower_bound=3.0, violated=False)
    assert most_damning([fine, finding]) == replace(finding, p_value=0.04)
    assert most_damning([fine, finding]).verdict == "violated: by a hair (p = 0.04)"
    assert most_damning([fine, fine]).p_value == 1


@pytest.mark.parametrize("method", ["residual noise", "step canaries"])
def test_bounds_of_announced_repetitions_hold_together(method: str) -> None:
    run = partial(AUDITS[method], QuietDPSGD(SIGMA, share=0.93), mlp(8), cross_entropy, DATA, ONCE)
    once, one_of_many = run(rng(), 1), run(rng(), 10**6)
    assert one_of_many.p_value == once.p_value
    assert one_of_many.lower_bound < once.lower_bound
    level = SIGNIFICANCE if method == "residual noise" else 0.05
    for runs in (1, 10, 10**3, 10**6, 10**9):
        finding = run(rng(), runs)
        assert finding.violated == (runs * finding.p_value < level)
        assert finding.violated == (finding.lower_bound > finding.claimed)


def test_an_epsilon_of_zero_says_what_noise_it_needs() -> None:
    finding = check("residual noise", DPSGD(1e6))
    assert finding.claimed == 0
    assert not finding.violated
    assert "of what an epsilon of 0 needs" in finding.verdict
    assert finding.measured_noise == pytest.approx(1e6, rel=0.02)
    assert check("residual noise", QuietDPSGD(1e6, share=1e-6)).violated


def test_lower_bounds_are_composed_with_the_plan() -> None:
    plan = Plan(100, 0.05, 1e-5)
    sigma = 0.9395
    finding = check("step canaries", DPSGD(sigma), plan=plan)
    assert not finding.violated
    assert finding.claimed == pytest.approx(4, abs=0.01)
    assert 2.9 < finding.lower_bound < 4
    quiet = check("step canaries", QuietDPSGD(sigma), plan=plan)
    assert quiet.violated
    exact = epsilon(plan.sample_rate, 0.8 * sigma, plan.steps, plan.delta)
    assert 4 < quiet.lower_bound < exact


def test_one_run_stays_below_its_claim_and_near_its_ceiling() -> None:
    plan = Plan(50, 0.05, 1e-5)
    honest = check_one_run(DPSGD(0.8), plan)
    assert not honest.violated
    assert honest.p_value > 0.9
    assert 0.3 < honest.lower_bound < 0.5 * honest.claimed
    assert honest.lower_bound == pytest.approx(honest.ceiling, abs=0.5)
    assert "a perfect implementation would show" in honest.verdict
    unclipped = check_one_run(UnclippedDPSGD(2.0), plan)
    assert unclipped.violated
    assert unclipped.p_value < 0.05


def check_one_run(defense: Defense, plan: Plan) -> Audit:
    return one_run(defense, mlp(8), cross_entropy, batch(300), plan, rng(3))


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (Defense(), "claims no differential privacy"),
        (Noise(1.0), "claims no differential privacy"),
        (TopK(0.1), "claims no differential privacy"),
        (Chain((TopK(0.1),)), "claims no differential privacy"),
        (DPSGD(0.0), "claims an infinite epsilon"),
        (Noise(1.0, "laplace", max_norm=1.0), "the noise is not Gaussian"),
    ],
    ids=repr,
)
def test_what_cannot_be_audited_says_why(defense: Defense, reason: str) -> None:
    findings = audit(defense, mlp(8), cross_entropy, DATA, ONCE, rng(), tuple(AUDITS))
    assert list(findings) == list(AUDITS)
    for finding in findings.values():
        assert isinstance(finding, NotApplicable)
        assert reason in str(finding)


@dataclass
class Blabbing(Handmade):
    """Has no replay of its own."""

    def replay(self, observed: object) -> Defense:
        return self


def test_noise_in_a_replay_is_put_at_its_mean() -> None:
    assert not check("residual noise", Blabbing(SIGMA)).violated
    assert check("residual noise", Blabbing(SIGMA, share=0.5)).violated


def test_noise_that_cannot_be_left_out_of_a_replay_is_refused() -> None:
    @dataclass
    class Hidden(Blabbing):
        def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
            seed = int(torch.randint(2**31, (), generator=rng))
            return super().gradient(model, loss, batch, torch.Generator().manual_seed(seed))

    with pytest.raises(NotApplicable, match="let its `replay"):
        residual_noise(Hidden(1.0), mlp(8), cross_entropy, DATA, ONCE, rng())


def test_a_claim_under_replacement_asks_for_twice_the_noise() -> None:
    @dataclass
    class Replacing(Handmade):
        def guarantee(self, plan: Plan) -> Guarantee:
            return replace(claim(SIGMA, plan), adjacency="replace")

    right, half = (check("residual noise", Replacing(scale * SIGMA)) for scale in (2.0, 1.0))
    assert not right.violated
    assert half.violated
    assert "noise is 0.49" in half.verdict
    assert not check("step canaries", Replacing(2 * SIGMA)).violated


def test_an_audit_needs_an_example() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        residual_noise(
            DPSGD(1.0), mlp(8), cross_entropy, Batch(*(t[:0] for t in DATA)), ONCE, rng()
        )


def test_one_run_is_for_records() -> None:
    with pytest.raises(NotApplicable, match="only where the unit is a record"):
        one_run(ClientDP(1.0), mlp(8), cross_entropy, DATA, ONCE, rng())


def test_an_audit_leaves_the_model_and_the_global_generator_alone() -> None:
    model = mlp(8)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    plan = Plan(3, 0.5, 1e-5)
    findings = audit(DPSGD(2.0), model, cross_entropy, DATA, plan, rng(), tuple(AUDITS))
    assert all(isinstance(finding, Audit) for finding in findings.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    again = audit(DPSGD(2.0), model, cross_entropy, DATA, plan, rng(), tuple(AUDITS))
    assert findings == again


def test_token_inputs_pass_through() -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 10))
    tokens = Batch(torch.randint(50, (12, 6), generator=rng()), torch.arange(12) % 10)
    for test in (residual_noise, step_canaries):
        assert not test(DPSGD(1.0), model, cross_entropy, tokens, ONCE, rng()).violated


ONE_RUN = [  # canaries, guesses, correct, delta; lower bound, p-value of epsilon 2
    (100, 100, 100, 0, 3.4930, 3.07e-6),
    (1000, 1000, 1000, 0, 5.8091, None),
    (1000, 100, 95, 0, 2.1724, 0.0161),
    (1000, 100, 95, 1e-5, 2.1652, 0.01782),
    (1000, 200, 180, 1e-5, 1.7963, 0.2387),
    (5000, 500, 480, 1e-5, 2.7830, 0.00186),
    (1000, 1000, 600, 1e-5, 0.2972, None),
]


@pytest.mark.parametrize(("canaries", "guesses", "correct", "delta", "bound", "p"), ONE_RUN)
def test_one_run_equals_the_references(
    canaries: int, guesses: int, correct: int, delta: float, bound: float, p: float | None
) -> None:
    ours = one_run_lower_bound(canaries, guesses, correct, delta)
    assert ours == pytest.approx(bound, abs=1e-3)
    assert one_run_p_value(canaries, guesses, correct, ours, delta) == pytest.approx(0.05)
    if p is not None:
        at_two = one_run_p_value(canaries, guesses, correct, 2.0, delta)
        assert at_two == pytest.approx(p, rel=5e-3)


def test_one_run_limits() -> None:
    assert one_run_lower_bound(1000, 200, 100, 1e-5) == 0  # as good as a coin
    assert one_run_p_value(1000, 200, 0, 1.0, 1e-5) == 1
    with pytest.raises(ValueError, match="must not decrease, got 3, 2, 10"):
        one_run_p_value(10, 2, 3, 1.0, 1e-5)


EXPECTED = [  # true epsilon; mean and standard deviation of 20 lower bounds, by canaries
    (1, {200: (0.02, 0.06), 1000: (0.26, 0.10), 5000: (0.36, 0.05)}),
    (2, {200: (0.29, 0.25), 1000: (0.63, 0.16), 5000: (0.80, 0.08)}),
    (4, {200: (0.95, 0.34), 1000: (1.44, 0.16), 5000: (1.61, 0.07)}),
    (8, {200: (2.00, 0.37), 1000: (2.78, 0.24), 5000: (3.22, 0.22)}),
    (16, {200: (2.55, 0.2), 1000: (4.17, 0.2), 5000: (5.57, 0.18)}),
]


@pytest.mark.parametrize(("true", "expected"), EXPECTED)
def test_the_ceiling_equals_the_references(
    true: float, expected: dict[int, tuple[float, float]]
) -> None:
    sigma = gaussian_sigma(true, 1e-5)
    for canaries, (mean, deviation) in expected.items():
        ceiling = one_run_ceiling(1.0, sigma, 1, 1e-5, canaries, canaries // 5)
        error = deviation * math.sqrt(1 / 20 + 1 / 20)
        assert ceiling == pytest.approx(mean, abs=3 * error + 0.005)
        assert ceiling < true / 2 or true < 4


def test_log_likelihood_ratio_is_that_of_the_mixture() -> None:
    values, q, sigma = np.linspace(-3, 4, 8), 0.3, 0.7
    present = q * np.exp(-((values - 1) ** 2) / (2 * sigma**2))
    absent = np.exp(-(values**2) / (2 * sigma**2))
    exact = np.log((present + (1 - q) * absent) / absent)
    np.testing.assert_allclose(log_likelihood_ratio(values, q, sigma), exact)
    assert np.isfinite(log_likelihood_ratio(np.array([1e6]), 1.0, 0.01)).all()
    assert CANARIES % 10 == 0
