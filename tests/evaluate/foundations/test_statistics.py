import numpy as np
import pytest
from scipy import stats

from leakfrontier.evaluate.foundations import statistics
from leakfrontier.evaluate.foundations.statistics import Interval


@pytest.mark.parametrize(
    ("successes", "low", "high"),
    [(0, 0, 0.0711), (5, 0.0333, 0.2181), (10, 0.1003, 0.3372), (25, 0.3553, 0.6447)],
)
def test_clopper_pearson_reference_values(successes: int, low: float, high: float) -> None:
    interval = statistics.clopper_pearson(successes, 50)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert (interval.value, interval.n) == (successes / 50, 50)


@pytest.mark.parametrize(("n", "high"), [(20, 0.168), (50, 0.071), (100, 0.036), (300, 0.012)])
def test_zero_successes_have_an_upper_limit(n: int, high: float) -> None:
    assert statistics.clopper_pearson(0, n).high == pytest.approx(high, abs=5e-4)


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "n"), [(0, 7), (3, 7), (7, 7), (40, 113)])
def test_intervals_agree_with_scipy(successes: int, n: int, confidence: float) -> None:
    test = stats.binomtest(successes, n)
    for ours, method in ((statistics.clopper_pearson, "exact"), (statistics.wilson, "wilson")):
        expected = test.proportion_ci(confidence, method=method)
        interval = ours(successes, n, confidence)
        assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=1e-9)


@pytest.mark.parametrize("n", [1, 5, 20, 37])
def test_clopper_pearson_covers_at_every_rate(n: int) -> None:
    intervals = [statistics.clopper_pearson(k, n) for k in range(n + 1)]
    low, high = np.array([(i.low, i.high) for i in intervals]).T
    truth = np.linspace(0, 1, 1001)[:, None]
    covered = (low <= truth) & (truth <= high)
    coverage = (stats.binom.pmf(np.arange(n + 1), n, truth) * covered).sum(1)
    assert coverage.min() >= 0.95


def test_wilson_reference_value() -> None:
    interval = statistics.wilson(10, 50)
    assert (interval.low, interval.high) == pytest.approx((0.1124, 0.3304), abs=5e-5)


def test_no_data_is_not_a_rate() -> None:
    for interval in (
        statistics.clopper_pearson(0, 0),
        statistics.wilson(0, 0),
        statistics.rate([], []),
    ):
        assert np.isnan(interval.value)
        assert (interval.low, interval.high, interval.n) == (0, 1, 0)
        assert str(interval) == "n/a"


def test_counts_and_confidence_are_checked() -> None:
    for estimate in (statistics.clopper_pearson, statistics.wilson):
        for successes in (-1, 6):
            with pytest.raises(ValueError, match=r"successes must be in \[0, n = 5\]"):
                estimate(successes, 5)
        for confidence in (0.0, 1.0, float("nan")):
            with pytest.raises(ValueError, match=r"confidence must be in \(0, 1\)"):
                estimate(1, 5, confidence)


@pytest.mark.parametrize(
    ("successes", "text"),
    [(0, "<= 7.1 %"), (50, ">= 92.9 %"), (10, "20.0 % [10.0, 33.7]")],
)
def test_intervals_print_as_percentages(successes: int, text: str) -> None:
    assert str(statistics.clopper_pearson(successes, 50)) == text


def test_a_difference_of_zero_prints_both_limits() -> None:
    assert str(Interval(0.0, -0.071, 0.071, 50)) == "0.0 % [-7.1, 7.1]"


def test_rate_with_one_victim_per_observation_is_exact() -> None:
    successes = [1] * 10 + [0] * 40
    order = np.random.default_rng(0).permutation(50)
    assert statistics.rate(successes, order) == statistics.clopper_pearson(10, 50)


def test_rate_agrees_with_scipys_bootstrap_of_cluster_means() -> None:
    rng = np.random.default_rng(0)
    successes = rng.random((60, 4)) < rng.random((60, 1))
    interval = statistics.rate(successes.ravel(), np.repeat(np.arange(60), 4))
    expected = stats.bootstrap(
        (successes.mean(1),), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert interval.value == pytest.approx(successes.mean())
    assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=0.01)
    assert interval.n == 60


def test_rate_counts_observations_not_victims() -> None:
    # Victims of one observation that all share its fate add nothing.
    outcome = np.random.default_rng(0).random(40) < 0.4
    observation = np.repeat(np.arange(40), 25)
    clustered = statistics.rate(np.repeat(outcome, 25), observation)
    single = statistics.clopper_pearson(int(outcome.sum()), 40)
    pooled = statistics.clopper_pearson(int(outcome.sum()) * 25, 1000)
    assert clustered.high - clustered.low > 0.8 * (single.high - single.low)
    assert clustered.high - clustered.low > 3 * (pooled.high - pooled.low)


def test_rate_weighs_victims_equally_in_observations_of_unequal_size() -> None:
    interval = statistics.rate([1, 1, 1, 0], ["a", "a", "a", "b"])
    assert interval.value == 0.75
    assert interval.n == 2


@pytest.mark.parametrize("outcome", [0, 1])
def test_rate_without_variation_is_clopper_pearson_on_observations(outcome: int) -> None:
    interval = statistics.rate([outcome] * 150, np.repeat(np.arange(50), 3))
    expected = statistics.clopper_pearson(50 * outcome, 50)
    assert (interval.value, interval.n) == (outcome, 50)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert str(interval) == str(expected)


def test_one_success_does_not_lower_the_upper_limit() -> None:
    observation = np.repeat(np.arange(50), 2)
    none = statistics.rate(np.zeros(100), observation)
    one = statistics.rate(np.eye(100)[0], observation)
    assert one.high > none.high


def test_rate_never_has_a_width_of_zero() -> None:
    half_of_each = statistics.rate([0, 1] * 20, np.repeat(np.arange(20), 2))
    assert half_of_each.low < 0.45 < 0.55 < half_of_each.high
    single = statistics.rate([0, 1, 0, 1], ["only"] * 4)
    assert single.n == 1
    assert single.low < 0.05
    assert single.high > 0.95


def test_rate_covers_clustered_victims() -> None:
    rng, truth, hits = np.random.default_rng(0), 0.3, 0
    observation = np.repeat(np.arange(40), 4)
    for seed in range(300):
        chance = rng.beta(0.6, 1.4, size=(40, 1))  # mean 0.3, strongly clustered
        interval = statistics.rate((rng.random((40, 4)) < chance).ravel(), observation, seed=seed)
        hits += interval.low <= truth <= interval.high
    assert hits / 300 > 0.95 - 4 * (0.95 * 0.05 / 300) ** 0.5


def test_bootstraps_are_deterministic_by_seed() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2, (2, 90))
    values, cluster = rng.random(90), np.repeat(np.arange(30), 3)
    for estimate in (
        lambda seed: statistics.rate(a, cluster, seed=seed),
        lambda seed: statistics.mean_interval(values, cluster, seed=seed),
        lambda seed: statistics.paired_difference(a, b, cluster, seed=seed),
    ):
        assert estimate(1) == estimate(1)
    assert statistics.mean_interval(values, cluster, seed=1) != statistics.mean_interval(
        values, cluster, seed=2
    )


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_mean_interval_agrees_with_scipys_bootstrap(confidence: float) -> None:
    values = np.random.default_rng(0).normal(20, 5, size=81)
    interval = statistics.mean_interval(values, np.arange(81), confidence)
    expected = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=20_000,
        confidence_level=confidence,
        method="percentile",
        rng=1,
    ).confidence_interval
    assert interval.value == pytest.approx(values.mean())
    assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=0.1)
    assert interval.n == 81


def test_mean_of_one_cluster_has_no_limits() -> None:
    interval = statistics.mean_interval([1, 2, 6], [0, 0, 0])
    assert (interval.value, interval.low, interval.high) == (3, -np.inf, np.inf)
    assert np.isnan(statistics.mean_interval([], []).value)


def test_clusters_must_fit_the_values() -> None:
    with pytest.raises(ValueError, match="one cluster for each of 3 entries"):
        statistics.mean_interval([1, 2, 3], [0, 1])
    with pytest.raises(ValueError, match="one cluster for each of 3 entries"):
        statistics.rate([1, 0, 1], [[0, 1], [0, 1], [0, 2]])


def test_outcomes_must_be_measured() -> None:
    for bad in ([0, 2], [0, float("nan")]):
        with pytest.raises(ValueError, match="outcomes must be 0 or 1"):
            statistics.rate(bad, [0, 1])
        with pytest.raises(ValueError, match="outcomes must be 0 or 1"):
            statistics.paired_difference(bad, [0, 1], [0, 1])
    with pytest.raises(ValueError, match="outcomes must have one dimension"):
        statistics.rate([[0, 1]], [0])


def test_outcomes_must_be_paired() -> None:
    with pytest.raises(ValueError, match="paired, got 2 and 1"):
        statistics.paired_difference([1, 0], [1], [0, 1])


def test_accuracy_of_few_seeds_spans_them_and_the_interval_of_one_test_set() -> None:
    close = statistics.accuracy_interval([80, 80], [100, 100])
    sampled = statistics.wilson(80, 100)
    assert (close.value, close.low, close.high) == (0.8, sampled.low, sampled.high)
    apart = statistics.accuracy_interval([700, 800, 900], [1000, 1000, 1000])
    assert (apart.value, apart.low, apart.high, apart.n) == (pytest.approx(0.8), 0.7, 0.9, 3)


def test_accuracy_of_five_seeds_has_a_t_interval() -> None:
    accuracies = np.array([0.70, 0.75, 0.80, 0.85, 0.90])
    interval = statistics.accuracy_interval(
        [round(10_000 * accuracy) for accuracy in accuracies], [10_000] * 5
    )
    expected = stats.ttest_1samp(accuracies, 0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_accuracy_of_equal_seeds_is_still_uncertain() -> None:
    interval = statistics.accuracy_interval([80] * 5, [100] * 5)
    sampled = statistics.wilson(80, 100)
    assert (interval.low, interval.high) == (sampled.low, sampled.high)


@pytest.mark.parametrize(("correct", "total"), [([], []), ([1], [1, 2]), ([0], [0]), ([3], [2])])
def test_accuracy_counts_are_checked(correct: list[int], total: list[int]) -> None:
    with pytest.raises(ValueError, match="must"):
        statistics.accuracy_interval(correct, total)


def test_paired_difference_is_narrower_than_the_unpaired_spread() -> None:
    rng = np.random.default_rng(0)
    b = rng.random(200) < 0.5
    a = b | (rng.random(200) < 0.2)
    interval = statistics.paired_difference(a, b, np.arange(200))
    assert interval.value == pytest.approx(a.mean() - b.mean())
    difference = a.astype(float) - b
    half = 1.96 * difference.std() / 200**0.5
    assert (interval.low, interval.high) == pytest.approx(
        (interval.value - half, interval.value + half), abs=0.01
    )


@pytest.mark.parametrize(
    ("both", "more", "less"), [(0, 0, 0), (3, 5, 0), (3, 6, 0), (10, 7, 2), (0, 1, 9)]
)
def test_the_sign_test_of_single_victims_is_mcnemars(both: int, more: int, less: int) -> None:
    a = np.repeat([1, 1, 0], [both, more, less])
    b = np.repeat([1, 0, 1], [both, more, less])
    expected = stats.binomtest(more, more + less).pvalue if more + less else 1.0
    units = np.arange(len(a))
    p_value = statistics.sign_test(a, b, units)
    assert p_value == pytest.approx(expected)
    assert p_value == statistics.sign_test(b, a, units)
    shown = statistics.paired_difference(a, b, units) if len(a) else None
    if shown is not None and p_value >= 0.05:
        assert shown.low <= 0 <= shown.high


def test_the_sign_test_counts_uploads_not_victims() -> None:
    a, b = np.ones(40), np.zeros(40)
    assert statistics.sign_test(a, b, np.repeat(np.arange(4), 10)) == pytest.approx(2 * 0.5**4)


def test_a_difference_of_accuracies_is_paired_by_seed() -> None:
    """Seeds that differ far more than the defenses do not hide which is better."""
    seeds = np.array([5000, 6000, 7000, 8000, 9000])
    total = [10_000] * 5
    gap = statistics.accuracy_difference((seeds + 300).tolist(), seeds.tolist(), total)
    assert gap.value == pytest.approx(0.03)
    assert 0 < gap.low < 0.03 < gap.high
    apart = [statistics.accuracy_interval(one.tolist(), total) for one in (seeds + 300, seeds)]
    assert apart[0].low < apart[1].high


def test_one_seed_shows_no_difference_of_accuracies() -> None:
    assert statistics.accuracy_test([900], [100], [1000]) == 1
    assert statistics.accuracy_test([800] * 5, [800] * 5, [1000] * 5) == 1


def test_a_difference_of_accuracies_needs_seeds_and_test_examples() -> None:
    first, second = [620, 640, 630], [600, 610, 602]
    seeds = stats.ttest_rel(first, second).pvalue
    assert statistics.accuracy_test(first, second, [1000] * 3) > 0.2 > 0.05 > seeds
    large = ([1000 * one for one in pair] for pair in (first, second))
    assert statistics.accuracy_test(*large, [1_000_000] * 3) == pytest.approx(seeds)


def test_a_difference_of_accuracies_contains_test_sampling_and_the_seeds() -> None:
    one = statistics.accuracy_difference([150], [128], [1000])
    # Newcombe's method 10, by hand from the Wilson limits of both.
    a, b = statistics.wilson(150, 1000), statistics.wilson(128, 1000)
    below = ((a.value - a.low) ** 2 + (b.high - b.value) ** 2) ** 0.5
    assert (one.value, one.low) == (pytest.approx(0.022), pytest.approx(0.022 - below))
    assert one.low < 0 < one.high
    few = statistics.accuracy_difference([900, 500], [500, 520], [1000, 1000])
    assert few.low <= -0.02
    assert few.high >= 0.4
    same = statistics.accuracy_difference([800] * 5, [800] * 5, [1000] * 5)
    assert same.value == 0
    assert same.low == pytest.approx(-same.high)


def test_paired_difference_without_variation_has_a_width() -> None:
    most = statistics.clopper_pearson(0, 25).high
    ones, zeros, cluster = np.ones(50), np.zeros(50), np.repeat(np.arange(25), 2)
    for a, b, value, low, high in (
        (ones, ones, 0, -most, most),
        (ones, zeros, 1, 1 - 2 * most, 1),
        (zeros, ones, -1, -1, -1 + 2 * most),
    ):
        interval = statistics.paired_difference(a, b, cluster)
        assert (interval.value, interval.low, interval.high) == pytest.approx((value, low, high))


def test_holm_steps_down() -> None:
    assert statistics.holm([0.04, 0.01, 0.03, 0.02]).tolist() == pytest.approx(
        [0.06, 0.04, 0.06, 0.06]
    )
    assert statistics.holm([0.6, 0.9]).tolist() == [1, 1]
    assert statistics.holm([]).tolist() == []
    with pytest.raises(ValueError, match=r"p-values must be in \[0, 1\]"):
        statistics.holm([0.1, float("nan")])


def test_advantage_is_corrected_for_the_prior() -> None:
    assert statistics.advantage(0.55, 0.1) == pytest.approx(0.5)
    assert statistics.advantage(0.1, 0.1) == 0
    assert statistics.advantage(0.0, 0.5) == -1
    assert np.isnan(statistics.advantage(1.0, 1.0))


def brute_dominates(u: np.ndarray, s: np.ndarray, a: int, b: int) -> bool:
    return u[a] >= u[b] and s[a] <= s[b] and (u[a] > u[b] or s[a] < s[b])


def test_pareto_agrees_with_brute_force() -> None:
    rng = np.random.default_rng(0)
    utility, success = rng.integers(0, 5, (2, 40, 7)) / 4  # with ties
    wins = np.array(
        [
            [[brute_dominates(u, s, a, b) for b in range(7)] for a in range(7)]
            for u, s in zip(utility, success, strict=True)
        ]
    )
    optimal = ~wins.any(axis=1)
    assert np.allclose(statistics.pareto_probability(-utility, success), optimal.mean(0))
    for u, s, expected in zip(utility, success, optimal, strict=True):
        assert np.array_equal(statistics.pareto_mask(-u, s), expected)


def test_duplicates_are_both_optimal() -> None:
    mask = statistics.pareto_mask([-0.9, -0.9, -0.8, -0.5], [0.3, 0.3, 0.4, 0.1])
    assert mask.tolist() == [True, True, False, True]


def test_an_unknown_cost_dominates_no_known_one() -> None:
    nan = float("nan")
    assert statistics.pareto_mask([0.1, 0.2], [nan, 0.5]).tolist() == [True, True]
    assert statistics.pareto_mask([0.1, 0.2], [nan, nan]).tolist() == [True, False]
    assert statistics.pareto_mask([0.1, 0.2], [0.5, nan]).tolist() == [True, False]
    with pytest.raises(ValueError, match="draws x configurations"):
        statistics.pareto_mask([0.1, 0.2], [0.5])


def test_the_area_refuses_what_was_not_measured() -> None:
    with pytest.raises(ValueError, match="without NaN"):
        statistics.hypervolume([0.9, float("nan")], [0.1, 0.2])


def test_hypervolume_is_the_dominated_area() -> None:
    assert statistics.hypervolume([1], [1]) == 1
    assert statistics.hypervolume([], []) == 0
    assert statistics.hypervolume([0.5], [0.4]) == pytest.approx(0.2)
    assert statistics.hypervolume([0.5, 1.0], [1.0, 0.5]) == pytest.approx(0.75)
    assert statistics.hypervolume([1.2, -0.1], [0.5, 2.0]) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    utility, privacy = rng.random((2, 9))
    x, y = rng.random((2, 200_000, 1))
    area = ((x <= utility) & (y <= privacy)).any(1).mean()
    assert statistics.hypervolume(utility, privacy) == pytest.approx(area, abs=0.005)


def test_monotone_violations_are_significant_rises() -> None:
    strength = [4.0, 1.0, 2.0, 3.0]
    rate = [0.9, 0.5, 0.55, 0.1]
    low = [0.8, 0.4, 0.45, 0.0]
    high = [1.0, 0.6, 0.65, 0.2]
    pairs = statistics.monotone_violation(strength, rate, low, high)
    assert pairs == [(3, 0), (1, 0), (2, 0)]
    assert statistics.monotone_violation([1, 1], [0.1, 0.9], [0.0, 0.8], [0.2, 1.0]) == []
    with pytest.raises(ValueError, match="one value per configuration"):
        statistics.monotone_violation([1, 2], [0.1], [0.0], [0.2])
