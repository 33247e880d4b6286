"""Worthless defenses do not look good: the evaluation fails, or the rate is the true one."""

from __future__ import annotations

from typing import Any

import pytest
import tricks
import two_faced

from leakfrontier.evaluate.conclude.checks import failed_checks
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.run import load_config, run

SCENARIO: dict[str, Any] = {
    "dataset": "digits",
    "model": {"name": "mlp", "width": 32},
    "candidates": 20,
    "training": {"rounds": 15, "clients": 12, "clients_per_round": 12, "lr": 0.01},
}
FOUND = (
    *("FirstIsZero", "UnlessDrawn", "NaNSlopes", "Power", "Sums", "Alternating", "Inspecting"),
    *("HeavyBall", "FrozenIdentity", "Rotation"),
)
"""Attacks find the victims of these, because what is attacked is what was trained."""

FAILING = {
    "LastRound": "invertibility",
    "PublicFactors": "invertibility",
    "Permuted": "invertibility",
    "Flipped": "invertibility",
    "OtherPermutation": "replay",
    "Echo": "replay",
    "LowBits": "proven bound",
    "ClaimedCancelling": "invertibility",
    "Pooling": "completeness",
    "FirstPlain": "invertibility",
    "EveryRoundAnew": "invertibility",
    "LatePrivacyLost": "claimed noise",
    "LateQuiet": "claimed noise",
}
"""Evaluations of these fail, and the check names them."""

HONEST = ("CorrelatedNoise", "DecayingNoise")
"""No check accuses these, although they change over rounds."""

CLAIMING = ("LowBits", "ClaimedCancelling", "LatePrivacyLost", "LateQuiet", "CorrelatedNoise")


def method(name: str) -> dict[str, Any]:
    module = two_faced if hasattr(two_faced, name) else tricks
    options = {"noise_multiplier": 1.0} if name in CLAIMING else {}
    return {"name": f"{module.__file__}:{name}", **options}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    names = (*FOUND, *FAILING, *HONEST, "InPlace", "NoBias")
    config = {
        "scenarios": [SCENARIO],
        "defenses": ["none", {"name": "DPSGD", "noise_multiplier": 3.0}, *map(method, names)],
        "adversaries": ["PriorGuess", "LinearLeakage", "PriorAware", "RobbingTheFedDirectPass"],
        "observations": 6,
    }
    return run(load_config(config), tmp_path_factory.mktemp("red team"), workers=2)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_trained_is_attacked(results: Conclusions, name: str) -> None:
    worst = results.worst_case().set_index("defense")
    assert worst.loc[name, "rate"] == 1
    assert worst.loc[name, "parameters_rate"] == 1


@pytest.mark.parametrize("name", FAILING)
def test_the_evaluation_fails_and_says_why(results: Conclusions, name: str) -> None:
    (check,) = (one for one in results.checks() if one.name == FAILING[name])
    assert check.name in failed_checks(results.checks())
    named = name if FAILING[name] != "completeness" else "error"
    assert any(named in line for line in check.details), check.details


def test_nobody_is_accused_without_reason(results: Conclusions) -> None:
    for check in results.checks():
        if check.name in ("invertibility", "proven bound", "claimed noise", "replay"):
            accused = [line for line in check.details for name in HONEST if line.startswith(name)]
            assert not accused
        if check.name in ("invertibility", "proven bound"):
            assert not any("none," in line or "NaNSlopes" in line for line in check.details)


def test_accuracy_from_elsewhere_does_not_count(results: Conclusions) -> None:
    points = results.frontier().points.set_index("defense")
    assert points.loc["InPlace", "accuracy"] < 0.2 < points.loc["none", "accuracy"]
    assert not points.loc["InPlace", "verdict"].startswith("Pareto")


def test_an_attack_that_a_changed_model_evades_counts(results: Conclusions) -> None:
    (check,) = (one for one in results.checks() if one.name == "changed model")
    assert check.verdict == "warn"
    assert all("NoBias" in line for line in check.details)
    assert any(line.startswith("LinearLeakage") for line in check.details)
    points = results.frontier().points.set_index("defense")
    assert not points.loc["NoBias", "gains"]
    for name in ("FrozenIdentity", "Rotation", "NoBias"):
        assert points.loc[name, "verdict"].startswith("no privacy gain shown")


def test_honest_defenses_do_not_fail_with_others(results: Conclusions) -> None:
    assert failed_checks(results.checks())
    points = results.frontier().points.set_index("family")
    assert "fails its checks" not in points.loc["DPSGD", "verdict"]
    assert points.loc["LastRound", "verdict"].startswith("its evaluation fails its checks")


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    """Return a run on batches of four examples, which defenses draw in other sizes."""
    training = {**SCENARIO["training"], "clients_per_round": 6}  # clients are not in step
    config = {
        "scenarios": [{**SCENARIO, "batch_size": 4, "training": training}],
        "defenses": ["none", {"name": "DPSGD", "noise_multiplier": 1.0}, method("SizeDecoy")],
        "adversaries": ["PriorGuess", "LinearLeakage", "PriorAware"],
        "observations": 12,
    }
    return run(load_config(config), tmp_path_factory.mktemp("four"), workers=2)


def test_a_defense_does_not_choose_the_attacked_uploads(of_four: Conclusions) -> None:
    attacks = of_four.attacks[of_four.attacks["family"] == "SizeDecoy"]
    sizes = attacks.groupby("observation")["victim"].max() + 1
    assert {*sizes} == {4, 5}
    assert (sizes == 5).mean() > 0.2


def test_samples_of_other_sizes_are_scored(of_four: Conclusions) -> None:
    guarded = of_four.attacks[of_four.attacks["family"] == "DPSGD"]
    assert (guarded.groupby("observation")["victim"].max() + 1).nunique() > 1
    (check,) = (one for one in of_four.checks() if one.name == "completeness")
    assert check.verdict == "pass"
