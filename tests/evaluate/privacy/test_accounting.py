import math
import time
import warnings
from itertools import permutations

import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, pld
from numpy.typing import NDArray
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

from leakfrontier.defenses import DPSGD, ClientDP, Plan
from leakfrontier.defenses.pld import (
    LARGEST_LOSS,
    MOST_STEPS,
    loss_grid,
    numerical_error,
    privacy_loss,
)
from leakfrontier.evaluate.privacy.accounting import (
    ACCOUNTANTS,
    NOISE_RANGE,
    Segment,
    Unreachable,
    calibrate,
    client_segment,
    delta_warning,
    epsilon,
    epsilons,
    least_noise,
    record_segment,
    schedule_epsilon,
)

Floats = NDArray[np.float64]

REFERENCES = [  # sample rate, sigma, steps, delta; epsilon by RDP, PRV and PLD
    (256 / 60000, 1.1, 14040, 1e-5, 2.594, 2.390, 2.380),
    (256 / 60000, 1.3, 3510, 1e-5, 0.954, 0.874, 0.864),
    (0.01, 1.0, 1000, 1e-5, 2.101, 1.838, 1.828),
    (0.01, 0.6, 1000, 1e-5, 8.666, 7.444, 7.434),
    (1.0, 5.0, 100, 1e-5, 10.7255, 10.008, 9.997),
    (1.0, 40.0, 100, 1e-5, 1.01255, 0.936, 0.926),
    (0.02, 0.8, 500, 1e-3, 3.647, 3.013, 3.003),
]
SMALL = (0.01, 1.0, 100, 1e-5)


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "rdp", "prv", "pld"), REFERENCES)
def test_accountants_equal_the_references(
    q: float, sigma: float, steps: int, delta: float, rdp: float, prv: float, pld: float
) -> None:
    ours = epsilons((Segment(q, sigma, steps),), delta)
    assert list(ours) == list(ACCOUNTANTS) == ["pld", "prv", "rdp"]
    assert ours == pytest.approx({"pld": pld, "prv": prv, "rdp": rdp}, rel=0.005)
    assert ours["pld"] <= ours["prv"] <= ours["rdp"]
    assert epsilon(q, sigma, steps, delta) == ours["pld"]
    assert DPSGD(sigma).guarantee(Plan(steps, q, delta)).epsilon == ours["pld"]


@pytest.mark.parametrize(
    ("sigma", "published"),
    [(75, 0.51206), (40, 1.01255), (27, 1.55676), (21, 2.05180), (9.5, 5.01595), (5, 10.72551)],
)
def test_rdp_equals_published_results_to_all_their_digits(sigma: float, published: float) -> None:
    assert epsilon(1.0, sigma, 100, 1e-5, "rdp") == pytest.approx(published, abs=6e-6)


@pytest.mark.parametrize(
    ("setting", "too_low"),
    zip(REFERENCES, [2.322, 0.834, 1.618, 5.563, 10.122, 0.927, 2.638], strict=True),
)
def test_the_accountant_that_is_not_offered_is_too_low_where_sampled(
    setting: tuple[float, ...], too_low: float
) -> None:
    q, sigma, steps, delta, _, _, exact = setting
    gdp = GaussianAccountant()
    gdp.history = [(sigma, q, int(steps))]
    assert gdp.get_epsilon(delta) == pytest.approx(too_low, rel=0.005)
    assert (gdp.get_epsilon(delta) < 0.98 * exact) == (q < 1)


def test_the_accountant_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="accountant must be one of pld, prv, rdp, got 'gdp'"):
        epsilon(*SMALL, accountant="gdp")


@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [(1.0, 0.01, 1000), (0.01, 0.1, 100), (0.001, 2.0, 10_000), (1e-4, 5.0, 10_000)],
)
def test_extreme_settings_stay_upper_bounds(q: float, sigma: float, steps: int) -> None:
    ours = epsilon(q, sigma, steps, 1e-6)
    assert 0 < ours <= epsilon(q, sigma, steps, 1e-6, "rdp")
    assert ours >= epsilon(q, 1.01 * sigma, steps, 1e-6)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "width"), [(1e-3, 2.0, 2000, 1e-5), (0.02, 0.7, 200, 1e-4)]
)
def test_the_grid_is_fine_enough(q: float, sigma: float, steps: int, width: float) -> None:
    fine = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=width
    )
    exact = fine.self_compose(steps).get_epsilon_for_delta(1e-6)
    assert exact * (1 - 1e-6) <= epsilon(q, sigma, steps, 1e-6) <= exact * (1 + 5e-4)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(1e-4, 2.0, 10**6), (0.02, 0.7, 200)])
def test_defenses_claim_what_is_accounted_for(q: float, sigma: float, steps: int) -> None:
    claimed = DPSGD(sigma).guarantee(Plan(steps, q, 1e-5)).epsilon
    assert claimed == epsilon(q, sigma, steps, 1e-5) <= epsilon(q, sigma, steps, 1e-5, "prv")


def test_a_single_step_equals_its_closed_form_to_the_least_delta() -> None:
    q, sigma = 0.01, 1.0
    for delta in (1e-5, 1e-9, 1e-13):
        found = epsilon(q, sigma, 1, delta)
        output = 0.5 + sigma**2 * math.log1p(math.expm1(found) / q)
        tails = ndtr(-output / sigma), ndtr((1 - output) / sigma)
        exact = (1 - q) * tails[0] + q * tails[1] - math.exp(found + log_ndtr(-output / sigma))
        assert 0.9 * delta <= exact <= delta * (1 + 1e-6)


def test_tiny_deltas_do_not_drown_in_rounding_errors() -> None:
    """Of the composition in double precision, which is 10 % too low at 1e-11."""
    schedule = (Segment(1e-5, 0.648, 100_000),)
    tiny = [schedule_epsilon(schedule, delta) for delta in (1e-9, 1e-10, 1e-11)]
    assert tiny == pytest.approx([0.2080, 0.3418, 0.5305], rel=2e-3)
    assert numerical_error(schedule) > 1e-11 > numerical_error(schedule, precise=True)
    assert schedule_epsilon(schedule, 1e-11, "prv") == math.inf


@pytest.mark.parametrize("delta", [1e-15, 1e-16, 1e-300])
def test_a_delta_that_cannot_be_computed_is_refused_with_the_reason(delta: float) -> None:
    for schedule in ((Segment(0.01, 2.0, 100),), (Segment(0.01, 2.0, 99), Segment(1.0, 2.0, 1))):
        with pytest.raises(ValueError, match=r"delta must be at least .*100 steps.*Rounding"):
            schedule_epsilon(schedule, delta)
    with pytest.raises(ValueError, match="Use a larger delta") as caught:
        calibrate(1.0, 0.01, 100, delta)
    assert not isinstance(caught.value, Unreachable)
    assert epsilon(0.01, 2.0, 100, 1e-14) == pytest.approx(0.475, abs=0.005)
    assert 0 < epsilon(1.0, 20.0, 100, delta) < math.inf


def test_losses_that_no_grid_holds_are_infinite() -> None:
    for q, sigma in ((0.01, 1e-5), (0.01, 1e-200), (1.0, 1e-200), (1e-9, 1e-3)):
        assert epsilon(q, sigma, 1, 1e-5) == math.inf
        assert DPSGD(sigma).guarantee(Plan(1, q, 1e-5)).epsilon == math.inf
    assert loss_grid((Segment(0.01, 0.002, 1),))[1] <= LARGEST_LOSS
    assert 1e5 < epsilon(0.01, 0.002, 1, 1e-5) < math.inf


def test_the_most_steps_are_refused_by_number() -> None:
    assert epsilon(1.0, 1e5, MOST_STEPS, 1e-5) < math.inf
    with pytest.raises(ValueError, match=r"steps must be at most 1e\+09, got 1e\+300"):
        epsilon(0.01, 1.0, int(1e300), 1e-5)
    with pytest.raises(ValueError, match="at most"):
        calibrate(3.0, 0.01, MOST_STEPS + 1, 1e-5)


def test_prv_is_opacuss_on_a_domain_of_another_size() -> None:
    opacus = PRVAccountant()
    opacus.history = [(0.9, 0.003, 3000)]
    theirs = opacus.get_epsilon(1e-5, eps_error=0.01)
    assert epsilon(0.003, 0.9, 3000, 1e-5, "prv") == pytest.approx(theirs, rel=1e-5)


def test_segments_compose() -> None:
    halves = (Segment(0.01, 1.0, 300), Segment(0.01, 1.0, 700))
    for name, whole in epsilons((Segment(0.01, 1.0, 1000),), 1e-5).items():
        assert schedule_epsilon(halves, 1e-5, name) == pytest.approx(whole, rel=1e-3)
    mixed = (Segment(0.01, 1.0, 1000), Segment(0.05, 2.0, 100), Segment(1.0, 20.0, 10))
    together = epsilons(mixed, 1e-5)
    assert together["pld"] <= together["prv"] <= together["rdp"]
    alone = [schedule_epsilon((segment,), 1e-5) for segment in mixed]
    assert max(alone) < together["pld"] < sum(alone)


def test_segments_without_sampling_compose_to_one_gaussian() -> None:
    schedule = (Segment(1.0, 5.0, 3), Segment(1.0, 2.0, 2))
    sigma = (3 / 25 + 2 / 4) ** -0.5
    exact = gaussian_mechanism.get_epsilon_gaussian(sigma, 1e-5)
    assert schedule_epsilon(schedule, 1e-5) == pytest.approx(exact)
    composed = privacy_loss(schedule).get_epsilon_for_delta(1e-5)
    assert exact <= composed == pytest.approx(exact, rel=1e-4)


def test_calibration_keeps_its_promise_and_equals_the_references() -> None:
    for target, q, steps, sigma in [
        (3.0, 256 / 60000, 14040, 0.9680),
        (4.0, 1.0, 1, 1.081),
        (4.0, 0.1, 100, 1.386),
        (4.0, 0.01, 1000, 0.735),
        (4.0, 0.01, 10_000, 1.288),
    ]:
        found = calibrate(target, q, steps, 1e-5)
        assert found == pytest.approx(sigma, rel=1e-3)
        assert 0.999 * target <= epsilon(q, found, steps, 1e-5) <= target
    for accountant, sigma in (("rdp", 1.0144), ("prv", 0.9705)):
        other = epsilon(256 / 60000, sigma, 14040, 1e-5, accountant)
        assert other == pytest.approx(3.0, rel=0.005)


@pytest.mark.parametrize("power", [0.5, 1.0, 7.0])
def test_calibration_takes_few_evaluations(power: float) -> None:
    asked = []

    def risk(sigma: float) -> float:
        asked.append(sigma)
        return math.inf if sigma < 0.3 else sigma**-power

    found = least_noise("risk", 2.0, risk)
    assert found == pytest.approx(max(0.3, 2 ** (-1 / power)), rel=3e-4)
    assert risk(found) <= 2.0
    assert len(asked) == len(set(asked)) + 1
    assert len(asked) <= 12 or power < 1  # where there is a jump


def test_an_unreachable_target_says_what_is_closest() -> None:
    with pytest.raises(
        Unreachable, match=r"risk 1 cannot be reached: the closest.* is 2"
    ) as caught:
        least_noise("risk", 1.0, lambda sigma: 2 + 1 / (1 + sigma))
    assert caught.value.closest == pytest.approx(2, abs=1e-5)
    assert least_noise("risk", 1.0, lambda sigma: 0.5) == NOISE_RANGE[0]


def test_records_are_amplified_by_secret_poisson_sampling_only() -> None:
    assert record_segment(60_000, 256, 1.1, 10) == Segment(256 / 60_000, 1.1, 10)
    shuffled = record_segment(12_000, 100, 1.1, 240, poisson_sampling=False)
    assert shuffled == Segment(1.0, 1.1, 2)  # two epochs of 120 batches
    assert record_segment(143, 142, 1.1, 10, poisson_sampling=False) == Segment(1.0, 1.1, 5)
    assert record_segment(8, 8, 1.1, 10, poisson_sampling=False) == Segment(1.0, 1.1, 10)
    assert epsilon(0.01, 4.0, 10, 1e-5, poisson_sampling=False) == epsilon(1.0, 4.0, 10, 1e-5)
    assert epsilon(1.0, 5.0, 10, 1e-5, poisson_sampling=False) == epsilon(1.0, 5.0, 10, 1e-5)
    with pytest.raises(ValueError, match=r"batch_size must be in \[1, examples = 10\], got 11"):
        record_segment(10, 11, 1.0, 1)


def densities(gradients: list[float], batch_size: int, sigma: float) -> Floats:
    """Return the density of the sums of one shuffled epoch of two batches, by enumeration."""
    axis = np.linspace(-7 * sigma - 4, 7 * sigma + 4, 701)
    total = np.zeros((701, 701))
    orders = [*permutations(gradients)]
    for order in orders:
        parts = (sum(order[:batch_size]), sum(order[batch_size:]))
        first, second = (norm.pdf(axis, mean, sigma) for mean in parts)
        total += np.outer(first, second) / len(orders)
    return total * (axis[1] - axis[0]) ** 2


def exceeding(first: Floats, second: Floats, epsilon: float) -> float:
    """Return delta of two distributions at an epsilon, in both directions."""
    pairs = ((first, second), (second, first))
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in pairs)


@pytest.mark.parametrize("others", [[-1.0, -1.0], [1.0, -1.0], [0.3, 0.0], [-1.0, -1.0, -1.0]])
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_shuffled_epochs_keep_their_epsilon_by_enumeration(
    others: list[float], sigma: float
) -> None:
    """All orders of one epoch of two batches, with an example of gradient 1 or without it."""
    with_it, without = ([one, *others] for one in (1.0, 0.0))
    found = [densities(one, 2, sigma) for one in (with_it, without)]
    assert found[0].sum() == pytest.approx(1, abs=1e-6)
    for delta in (1e-1, 1e-2, 1e-3):
        bound = epsilon(1.0, sigma, 1, delta, poisson_sampling=False)
        assert exceeding(*found, bound) <= delta * (1 + 1e-3)


def test_an_example_that_is_removed_leaves_its_place_to_another() -> None:
    """Why the adjacency is zero-out: with n secret, the same epsilon would not hold."""
    sigma, delta = 1.0, 1e-3
    bound = epsilon(1.0, sigma, 1, delta, poisson_sampling=False)
    here, removed = densities([1.0, -1.0, -1.0], 2, sigma), densities([-1.0, -1.0], 2, sigma)
    assert exceeding(here, removed, bound) > 3 * delta


def test_clients_are_not_amplified_where_the_server_sees_them() -> None:
    seen = client_segment(2.0, rounds=10, sample_rate=0.1)
    assert seen == Segment(1.0, 2.0, 10)
    claimed = ClientDP(2.0).guarantee(Plan(10, 0.1, 1e-5)).epsilon
    assert schedule_epsilon((seen,), 1e-5) == pytest.approx(claimed, rel=1e-3)
    assert client_segment(2.0, rounds=10, sample_rate=0.1, secret=True).sample_rate == 0.1


def test_delta_must_be_below_one_over_n() -> None:
    with pytest.warns(UserWarning, match=r"delta 0.01 is not below 1 / 100: a mechanism that"):
        epsilon(0.01, 1.0, 100, 0.01, units=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon(0.01, 1.0, 100, 1e-3, units=100)
    assert delta_warning(1e-5, 60_000) is None
    assert delta_warning(1e-5, 100_000) is not None  # not below, but equal


def test_no_noise_is_infinite_and_says_so() -> None:
    with pytest.warns(UserWarning, match="infinite without noise: nothing is guaranteed"):
        assert epsilon(0.01, 0.0, 100, 1e-5) == math.inf
    with pytest.warns(UserWarning, match="without noise"):
        assert schedule_epsilon((Segment(0.01, 1.0, 5), Segment(0.01, 0.0, 1)), 1e-5) == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.1, 1.0, 1, 1e-5), r"sample_rate must be in \(0, 1\], got 1.1"),
        ((0.0, 1.0, 1, 1e-5), "sample_rate"),
        ((math.nan, 1.0, 1, 1e-5), "sample_rate"),
        ((0.1, -1.0, 1, 1e-5), r"noise_multiplier must be in \[0, inf\), got -1.0"),
        ((0.1, math.inf, 1, 1e-5), "noise_multiplier"),
        ((0.1, 1.0, 0, 1e-5), "steps must be a positive whole number, got 0"),
        ((0.1, 1.0, 1.5, 1e-5), "steps"),
        ((0.1, 1.0, 1, 0.0), r"delta must be in \(0, 1\), got 0.0"),
        ((0.1, 1.0, 1, math.nan), "delta"),
    ],
)
def test_rejects_bad_parameters(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epsilon(*arguments)  # type: ignore[arg-type]


def test_rejects_an_empty_schedule_and_a_bad_target() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        schedule_epsilon((), 1e-5)
    for target in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"target must be in \(0, inf\)"):
            calibrate(target, 0.01, 1, 1e-5)


def test_large_noise_takes_no_longer_and_is_as_tight() -> None:
    small, large = (Segment(0.5, 12.0, 100),), (Segment(0.5, 61.5, 4000),)
    epsilons(small, 1e-9)  # imports
    start = time.process_time()
    found = epsilons(large, 1e-9)
    assert time.process_time() - start < 2  # 4 to 6, with Opacus's orders and domain
    assert found["pld"] <= found["prv"] <= found["pld"] + 0.02
    accountant = RDPAccountant()
    accountant.history = [(12.0, 0.5, 100)]
    assert epsilons(small, 1e-9)["rdp"] == pytest.approx(accountant.get_epsilon(1e-9), rel=1e-3)


def test_very_many_steps_cost_prv_precision_not_memory() -> None:
    wide = epsilon(1e-3, 5.0, 10**7, 1e-6, "prv")
    assert epsilon(1e-3, 5.0, 10**7, 1e-6) <= wide <= 1.1 * epsilon(1e-3, 5.0, 10**7, 1e-6)
    assert epsilon(0.5, 1000.0, 10**6, 1e-10, "prv") == math.inf
