"""How defenses and adversaries are named and ordered, in every table and figure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from leakfrontier.evaluate.statistics import clopper_pearson


def parse(label: str) -> tuple[str, dict[str, str]]:
    """Return the class and the arguments that a label names; an opaque label has none.

    >>> parse("TopK(ratio=0.5)")
    ('TopK', {'ratio': '0.5'})
    """
    try:
        call = ast.parse(label, mode="eval").body
    except SyntaxError:
        return label, {}
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        return label, {}
    return ast.unparse(call.func), {str(k.arg): ast.unparse(k.value) for k in call.keywords}


def differences(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return, for every label, those arguments that differ within its class."""
    parsed = {label: parse(label) for label in labels}
    seen: dict[tuple[str, str], set[str | None]] = {}
    for name, arguments in parsed.values():
        for argument in arguments:
            peers = [others for other, others in parsed.values() if other == name]
            seen[name, argument] = {others.get(argument) for others in peers}
    return {
        label: {key: value for key, value in arguments.items() if len(seen[name, key]) > 1}
        for label, (name, arguments) in parsed.items()
    }


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Return names without the arguments that are equal for all labels of a class."""
    return {
        label: " ".join([parse(label)[0], ", ".join(f"{k}={v}" for k, v in kept.items())]).strip()
        for label, kept in differences(labels).items()
    }


def describe_defenses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per defense, the undefended control first, then by family and strength.

    Args:
        frame: Has the columns defense, family and strength.

    Returns:
        Columns defense, family, strength, `name` (short), `setting` (the values that differ
        within the family), `knob` (the argument that strength depends on, or ""), `sweep` (the
        line that the defense is a point of: equal in all but its knob) and `order`.
    """
    arms = frame[["defense", "family", "strength"]].drop_duplicates("defense").copy()
    arms["strength"] = pd.to_numeric(arms["strength"])
    arms["control"] = arms["family"] != "none"
    arms = arms.sort_values(["control", "family", "strength", "defense"]).drop(columns="control")
    kept = differences(arms["defense"])
    names = short_names(arms["defense"])
    arms["name"] = arms["defense"].map(names)
    arms["setting"] = ["/".join(kept[label].values()) for label in arms["defense"]]
    knobs = {family: _knob(group, kept) for family, group in arms.groupby("family")}
    arms["knob"] = arms["family"].map(knobs)
    arms["sweep"] = [
        _sweep(label, family, knobs[family], kept[label])
        for label, family in zip(arms["defense"], arms["family"], strict=True)
    ]
    arms["order"] = range(len(arms))
    return arms.reset_index(drop=True)


def _knob(family: pd.DataFrame, kept: Mapping[str, Mapping[str, str]]) -> str:
    """Return the first argument that decides a family's strength by itself."""
    for argument in {key: None for label in family["defense"] for key in kept[label]}:
        values = [kept[label].get(argument) for label in family["defense"]]
        strengths = family.groupby(pd.Series(values, index=family.index), dropna=False)["strength"]
        if family["strength"].nunique() > 1 and strengths.nunique().max() == 1:
            return argument
    return ""


def _sweep(label: str, family: str, knob: str, kept: Mapping[str, str]) -> str:
    if not knob:
        return label
    fixed = ", ".join(f"{key}={value}" for key, value in kept.items() if key != knob)
    return f"{family} ({fixed})" if fixed else family


def describe_attack(
    name: str, *, baseline: bool, simulates: bool, knows: bool | None, candidates: bool = False
) -> str:
    """Return an adversary's name with what it was told; `knows` is None without a defense."""
    if baseline:
        return f"{name} (blind)"
    told = ["given candidates"] if candidates else []
    if simulates and knows is not None:
        told.append("knows defense" if knows else "ignorant")
    return f"{name} ({', '.join(told)})" if told else name


def epsilon_text(value: float) -> str:
    """Return an epsilon; beyond a thousand, nothing is promised."""
    if pd.isna(value):
        return "none"
    return f"{value:.3g}" if value < 1000 else "> 1000"


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as text; a missing one as n/a."""
    return "n/a" if pd.isna(value) else f"{100 * value:.{digits}f} %"


def limit_text(value: float, low: float, high: float) -> str:
    """Return a rate with its limits; at or below zero, only the upper limit is evidence."""
    if pd.isna(value):
        return "n/a"
    if value <= 0:
        return f"<= {100 * max(high, 0.0):.1f} %"
    return f"{100 * value:.1f} % [{100 * max(low, 0.0):.1f}, {100 * high:.1f}]"


def rate_text(value: float, observations: float) -> str:
    """Return a share as text; of none out of n, its upper 95 % limit."""
    if pd.isna(value) or value > 0:
        return percent(value)
    return str(clopper_pearson(0, int(observations)))


def rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Return the rows as named tuples, whose values have the types of their columns."""
    return iter(frame.itertuples())
