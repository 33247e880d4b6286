"""What a defense is compared by, and the sentence that says so."""

from math import nan
from typing import Any

import pandas as pd
import pytest
from synthetic import SCENARIOS, shared_results

from leakfrontier.evaluate.conclude.coordinates import (
    Coordinates,
    coordinates,
    headline,
    proof_text,
    with_proofs,
)
from leakfrontier.evaluate.privacy.bounds import reconstruction

CLAIM = {
    "epsilon": 7.97,
    "delta": 1e-5,
    "refuted": False,
    "unit": "record",
    "noise_multiplier": 0.447,
    "sample_rate": 0.008,
    "steps": 100,
}


def proven(bounds: tuple[float | None, ...] = (0.4645,), **change: Any) -> pd.Series:  # noqa: ANN401
    """Return the point of a defense with a claim, and bounds on its attacks."""
    claims = pd.DataFrame([{"defense": "A", **CLAIM, **change}])
    attacks = pd.DataFrame({"defense": "A", "bound": [*bounds], "candidates": 100})
    return with_proofs(pd.DataFrame({"defense": ["A"]}), claims, attacks).iloc[0]


def test_a_proof_is_for_the_upload_and_for_the_run() -> None:
    point = proven()
    assert point["gamma_upload"] == 0.4645
    assert point["gamma_run"] == pytest.approx(reconstruction(0.01, 0.008, 0.447, 100))
    assert point["gamma_run"] == pytest.approx(0.0696, abs=1e-4)
    assert (point["evidence"], proof_text(point)) == ("proven", "46.5 %; run 7.0 %")


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": nan},
        {"epsilon": 20.1},
        {"epsilon": float("inf")},
        {"epsilon": -1.0},
        {"refuted": True},
    ],
)
def test_without_a_valid_claim_nothing_is_proven(change: dict[str, Any]) -> None:
    point = proven(**change)
    assert (point["gamma_upload"], point["gamma_run"]) == (1, 1)
    assert (point["evidence"], proof_text(point)) == ("empirical only", "no proof")


def test_a_missing_or_impossible_bound_proves_nothing_of_an_upload() -> None:
    assert proven((None,))["gamma_upload"] == 1
    assert proven((0.0,))["gamma_upload"] == 1  # below chance
    assert proven((0.0, 0.3, 0.2))["gamma_upload"] == 0.3  # with the most guesses


@pytest.mark.parametrize(
    "change",
    [
        {"sample_rate": 0.0},
        {"steps": 0},
        {"steps": float("inf")},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": 1e300},
    ],
)
def test_impossible_claims_prove_nothing_of_a_run(change: dict[str, Any]) -> None:
    assert proven(**change)["gamma_run"] == 1


def test_claims_that_are_not_gaussian_are_bounded_by_epsilon() -> None:
    found = proven(noise_multiplier=None, epsilon=1.0)
    assert found["gamma_run"] == pytest.approx(0.01 * 2.718282 + 1e-5)
    assert proven(noise_multiplier=None)["gamma_run"] == 1


def test_a_server_can_do_what_weaker_ones_can() -> None:
    results = shared_results(scenarios=SCENARIOS[:1], active=True)
    points = results.frontier().points.set_index("defense")
    found = coordinates(points.loc["TopK(ratio=0.1)"])
    assert found.success["parameters"] == 1.0
    assert found.success["architecture"] == 1.0  # which tried nothing of its own
    assert pd.isna(found.success["candidates"])
    assert found.evidence == "empirical only"


def test_unknown_is_not_better() -> None:
    known, unknown = (Coordinates(0.5, {"candidates": one}) for one in (1.0, nan))
    assert not unknown.is_no_worse(known)
    assert known.is_no_worse(unknown)


def point(**change: Any) -> pd.Series:  # noqa: ANN401
    servers = {"parameters": nan, "architecture": 0.0139}
    found: dict[str, Any] = {"success": 0.0139, "success_low": 0.0, "success_high": 0.075}
    for server, rate in servers.items():
        found |= {f"{server}_rate": rate, f"{server}_low": 0.0, f"{server}_high": 0.075}
    found |= dict.fromkeys(("blind", "parameters_blind", "architecture_blind"), 0.0139)
    found |= {"candidates_rate": 0.194, "candidates_low": 0.111, "candidates_high": 0.307}
    found |= {**CLAIM, "gamma_upload": 0.4645, "look_alikes": 100}
    return pd.Series(found | change)


def test_the_headline_says_what_is_measured_and_what_is_proven() -> None:
    assert headline(point()) == (
        "From nothing, no attack is shown to beat guessing; given 100 candidates 19 % [11, 31]; "
        "proof allows 46 %; epsilon 8, delta 1e-5, per record."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"candidates_rate": nan}, "; given candidates unknown; proof allows 46 %"),
        ({"epsilon": 322.0}, "; no proof, because epsilon is 322."),
        ({"epsilon": nan}, "; no proof, because it claims no guarantee."),
        ({"refuted": True}, "; no proof, because its privacy claim is refuted."),
        ({"success_low": 0.02}, "From nothing, a passive server identifies 1 % [2, 8];"),
        (
            {"success_low": 0.02, "architecture_low": 0.9, "architecture_rate": 1.0},
            "[2, 8], a server that may send a crafted architecture 100 % [90, 8];",
        ),
        ({"success": nan, "architecture_rate": nan}, "From nothing, no attack ran;"),
    ],
)
def test_the_headline_never_praises_what_is_unknown(change: dict[str, Any], words: str) -> None:
    text = headline(point(**change))
    assert words in text
    assert "stop" not in text
