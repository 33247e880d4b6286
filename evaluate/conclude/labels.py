"""Names and order of defenses and adversaries in every table and figure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, Literal

import pandas as pd

from ..foundations.statistics import clopper_pearson, rounded_up

ARM = ["scenario", "checkpoint", "defense"]
"""The columns that say what is attacked."""

ATTACK = [*ARM, "adversary", "knows_defense"]
"""The columns that say what is attacked, by whom, and with which knowledge."""

DEFENSE = ["family", "defense_options", "strength", "control"]
"""The columns that describe a defense; `control` marks the undefended one."""

FLAGS = ["baseline", "simulates", "candidates_granted"]
ADVERSARY = ["adversary_name", "adversary_options", "threat", *FLAGS]
"""The columns that describe an adversary."""

_KIND = {"defense": "family", "adversary": "adversary_name"}


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows with all labels, typed. Training cells have no labels of an adversary."""
    labels = [*ATTACK, *DEFENSE, *ADVERSARY]
    frame = frame.reindex(columns=frame.columns.union(labels, sort=False))
    flags = {name: frame[name].astype("boolean") for name in FLAGS}
    return frame.assign(
        checkpoint=pd.to_numeric(frame["checkpoint"]).astype("Int64"),
        strength=pd.to_numeric(frame["strength"]),
        control=frame["family"] == "none",
        knows_defense=frame["knows_defense"].astype("boolean"),
        **{name: flag.fillna(False).astype(bool) for name, flag in flags.items()},
    )


def short_names(frame: pd.DataFrame, role: Literal["defense", "adversary"]) -> dict[str, str]:
    """Return names by label, without the options that all methods of a kind share.

    Args:
        frame: Has the labels of a role, its kind (family or class) and its options.
        role: Whether to name defenses or adversaries.
    """
    kinds = dict(_methods(frame, role)[[role, _KIND[role]]].itertuples(index=False, name=None))
    return {
        label: " ".join([str(kinds[label]), _listing(options)]).strip()
        for label, options in _differences(frame, role).items()
    }


def shared_options(frame: pd.DataFrame, role: Literal["defense", "adversary"]) -> dict[str, str]:
    """Return, by kind, the options that `short_names` leaves out."""
    methods, kept = _methods(frame, role), _differences(frame, role)
    shared = {}
    for label, kind, options in methods.itertuples(index=False, name=None):
        left = {key: str(value) for key, value in options.items() if key not in kept[label]}
        shared[str(kind)] = _listing(left)
    return {kind: listing for kind, listing in shared.items() if listing}


def describe_defenses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per defense, the undefended control first, then by family and strength.

    Args:
        frame: Has the column defense and those of `DEFENSE`.

    Returns:
        These columns and `name` (short), `setting` (the values that differ within the family),
        `knob` (the option that strength depends on, or ""), `sweep` (the curve of the defense:
        its points differ only in the knob) and `order`.
    """
    arms = frame[["defense", *DEFENSE]].drop_duplicates("defense")
    arms = arms.sort_values(
        ["control", "family", "strength", "defense"], ascending=[False, True, True, True]
    )
    kept = _differences(arms, "defense")
    strengths: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows(arms):
        strengths[row.family][row.defense] = row.strength
    knobs = {family: _knob(own, kept) for family, own in strengths.items()}
    labels = arms["defense"]
    arms = arms.assign(
        name=labels.map(short_names(arms, "defense")),
        setting=["/".join(kept[label].values()) for label in labels],
        knob=arms["family"].map(knobs),
        order=range(len(arms)),
    )
    arms["sweep"] = [_sweep(row.defense, row.family, row.knob, kept) for row in rows(arms)]
    return arms.reset_index(drop=True)


def sweeps(arms: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield every set of two or more defenses of a family that differ in only one option."""
    arms = arms[arms["strength"].notna()]
    for _, family in arms.groupby("family", sort=False):
        for swept in sorted(set().union(*family["defense_options"])):
            others = [
                json.dumps({**options, swept: None}, sort_keys=True)
                for options in family["defense_options"]
            ]
            yield from (alike for _, alike in family.groupby(others) if len(alike) > 1)


def _methods(frame: pd.DataFrame, role: str) -> pd.DataFrame:
    """Return label, kind and options of every method in a role."""
    return frame[[role, _KIND[role], f"{role}_options"]].drop_duplicates(role)


def _differences(frame: pd.DataFrame, role: str) -> dict[str, dict[str, str]]:
    """Return, for every label, the options that differ within its kind, as text."""
    methods = [*_methods(frame, role).itertuples(index=False, name=None)]
    peers: dict[str, list[dict[str, str]]] = defaultdict(list)
    for _, kind, options in methods:
        peers[kind].append({key: str(value) for key, value in options.items()})
    return {
        label: {
            key: str(value)
            for key, value in options.items()
            if any(peer.get(key) != str(value) for peer in peers[kind])
        }
        for label, kind, options in methods
    }


def _listing(options: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def _knob(strengths: Mapping[str, float], kept: Mapping[str, Mapping[str, str]]) -> str:
    """Return the first option that decides a family's strength by itself."""
    known = {label: strength for label, strength in strengths.items() if pd.notna(strength)}
    if len({*known.values()}) < 2:
        return ""
    for option in {key: None for label in strengths for key in kept[label]}:
        pairs = {(kept[label].get(option), strength) for label, strength in known.items()}
        if len(pairs) == len({value for value, _ in pairs}):
            return option
    return ""


def _sweep(label: str, family: str, knob: str, kept: Mapping[str, Mapping[str, str]]) -> str:
    if not knob:
        return label
    fixed = _listing({key: value for key, value in kept[label].items() if key != knob})
    return f"{family} ({fixed})" if fixed else family


def describe_attack(name: str, attack: Any, knows: bool | None) -> str:  # noqa: ANN401 - a row
    """Return an adversary's name with its power and its knowledge.

    Args:
        name: Its name.
        attack: Has the labels of `ADVERSARY` as attributes.
        knows: Whether it knows the defense; None without a defense.
    """
    if attack.baseline:
        return f"{name} (blind)"
    told = [] if attack.threat == "passive" else [f"crafts {attack.threat}"]
    if attack.candidates_granted:
        told.append("given candidates")
    if attack.simulates and knows is not None:
        told.append("knows defense" if knows else "ignorant")
    return f"{name} ({', '.join(told)})" if told else name


def scope_text(observations: float, not_needed: float, refused: float = 0) -> str:
    """Return which uploads a rate covers; "" if it covers all."""
    parts = []
    if not_needed:
        parts = [f"of {observations:.0f} uploads still safe", f"{not_needed:.0f} not needed"]
    if refused:
        parts.append(f"{refused:.0f} refused")
    return "; ".join(parts)


def epsilon_text(value: float) -> str:
    """Return an epsilon as text; above a thousand it promises nothing."""
    if pd.isna(value):
        return "none"
    return f"{value:.3g}" if value < 1000 else "> 1000"


def number(value: float) -> str:
    """Return an epsilon in three digits, rounded up."""
    return "inf" if value == inf else f"{rounded_up(value, 3):g}"


def final_round(rounds: pd.Series[Any]) -> str:
    """Return the round at which accuracies were measured, as text."""
    known = sorted({int(one) for one in rounds.dropna()})
    return "final round" + (f" {known[0]}" if len(known) == 1 else "")


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as text; n/a if it is missing."""
    return "n/a" if pd.isna(value) else f"{100 * value:.{digits}f} %"


def limit_text(value: float, low: float, high: float) -> str:
    """Return a rate with its limits; only the upper limit if the rate is not positive."""
    if pd.isna(value):
        return "n/a"
    if value <= 0:
        return f"<= {100 * max(high, 0.0):.1f} %"
    return f"{100 * value:.1f} % [{100 * max(low, 0.0):.1f}, {100 * high:.1f}]"


def rate_text(value: float, observations: float) -> str:
    """Return a share as text; its upper 95 % limit if the share is zero."""
    if pd.isna(value) or value > 0:
        return percent(value)
    return str(clopper_pearson(0, int(observations)))


def rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Return the rows as named tuples. Their values keep the types of their columns."""
    return iter(frame.itertuples())


def rounds_named(checkpoint: Any) -> str:  # noqa: ANN401 - a number of pandas
    """Return the name of the attacked rounds: the first, or random ones up to a round."""
    return f"rounds up to {checkpoint:.0f}" if checkpoint else "round 0"
