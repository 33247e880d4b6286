"""Names, order and sweeps of methods, from their options as data."""

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from leakfrontier.evaluate.conclude.labels import (
    describe_attack,
    describe_defenses,
    labelled,
    limit_text,
    scope_text,
    short_names,
    sweeps,
)


def defenses(*arms: tuple[str, str, float | None, dict[str, Any]]) -> pd.DataFrame:
    columns = ["defense", "family", "strength", "defense_options"]
    return labelled(pd.DataFrame(arms, columns=columns))


DP = defenses(
    ("DP(1, 1)", "DP", 1.0, {"noise": 1.0, "clip": 1}),
    ("DP(0.1, 1)", "DP", 0.1, {"noise": 0.1, "clip": 1}),
    ("DP(0.1, 9)", "DP", 0.1, {"noise": 0.1, "clip": 9}),
    ("none", "none", None, {}),
    ("Any", "Any", None, {}),
)


def test_names_hold_what_differs() -> None:
    assert short_names(DP, "defense") == {
        "DP(1, 1)": "DP noise=1.0, clip=1",
        "DP(0.1, 1)": "DP noise=0.1, clip=1",
        "DP(0.1, 9)": "DP noise=0.1, clip=9",
        "none": "none",
        "Any": "Any",
    }
    attacks = pd.DataFrame(
        {
            "adversary": ["IG(iterations=3)", "IG(iterations=9)", "SME(iterations=3)"],
            "adversary_name": ["IG", "IG", "SME"],
            "adversary_options": [{"lr": 1, "iterations": n} for n in (3, 9, 3)],
        }
    )
    assert list(short_names(attacks, "adversary").values()) == [
        *("IG iterations=3", "IG iterations=9", "SME")
    ]


def test_an_option_left_at_its_default_differs() -> None:
    arms = defenses(("DP", "DP", 1.0, {}), ("DP(clip=9)", "DP", 1.0, {"clip": 9}))
    assert short_names(arms, "defense") == {"DP": "DP", "DP(clip=9)": "DP clip=9"}


def test_defenses_are_ordered_and_swept_by_their_knob() -> None:
    described = describe_defenses(DP).set_index("defense")
    assert described.index.tolist() == ["none", "Any", "DP(0.1, 1)", "DP(0.1, 9)", "DP(1, 1)"]
    assert described["control"].tolist() == [True, False, False, False, False]
    assert described.loc["DP(1, 1)", "knob"] == "noise"
    assert described.loc["DP(1, 1)", "setting"] == "1.0/1"
    assert described.loc["DP(1, 1)", "sweep"] == "DP (clip=1)"
    assert described.loc["DP(0.1, 9)", "sweep"] == "DP (clip=9)"
    assert described.loc["Any", "sweep"] == "Any"


def test_chains_sweep_whatever_their_options_are() -> None:
    def chain(noise: float, layers: list[Any]) -> tuple[str, str, float, dict[str, Any]]:
        options = {"1 DP noise": noise, "2 TopK layers": layers}
        return f"{noise} then {layers}", "DP then TopK", noise, options

    arms = defenses(chain(0.1, [1, {"a": 2}]), chain(1.0, [1, {"a": 2}]), chain(9.0, [3]))
    (sweep,) = sweeps(arms)
    assert sweep["strength"].tolist() == [0.1, 1.0]
    described = describe_defenses(arms).set_index("strength")
    assert described.loc[1.0, "knob"] == "1 DP noise"
    assert described.loc[1.0, "name"] == (
        "DP then TopK 1 DP noise=1.0, 2 TopK layers=[1, {'a': 2}]"
    )


@pytest.mark.parametrize(
    ("labels", "knows", "name"),
    [
        ({"baseline": True}, None, "A (blind)"),
        ({}, True, "A"),
        ({"simulates": True}, None, "A"),
        ({"simulates": True}, True, "A (knows defense)"),
        ({"simulates": True}, False, "A (ignorant)"),
        (
            {"candidates_granted": True, "simulates": True},
            True,
            "A (given candidates, knows defense)",
        ),
        ({"threat": "parameters"}, True, "A (crafts parameters)"),
    ],
)
def test_attacks_say_what_they_were_told(
    labels: dict[str, Any], knows: bool | None, name: str
) -> None:
    flags = dict.fromkeys(("baseline", "simulates", "candidates_granted"), False)
    attack = SimpleNamespace(**{"threat": "passive", **flags, **labels})
    assert describe_attack("A", attack, knows) == name


def test_texts() -> None:
    assert limit_text(0.0, 0.0, 0.168) == "<= 16.8 %"
    assert limit_text(0.5, -0.1, 0.9) == "50.0 % [0.0, 90.0]"
    assert scope_text(20, 0) == ""
    assert scope_text(4, 16) == "of 4 uploads still safe; 16 not needed"
    assert scope_text(15, 0, 5) == "5 refused"
