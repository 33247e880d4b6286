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
    "HeavyBall",
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
    names = (*FOUND, *FAILING, *HONEST, "InPlace")
    config = {
        "scenarios": [SCENARIO],
        "defenses": ["none", *map(method, names)],
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
