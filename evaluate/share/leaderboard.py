"""Ranks the defenses of several packs in each setting.

A setting is a scenario and an attacked round. Packs share a setting if their scenarios differ only
in their title. `dominance.judge` gives verdicts and places, as on the page of a run. They are the
same for all servers. Within a pack, comparisons are paired over victims and seeds. Across packs,
intervals must not overlap, and one seed shows no difference in accuracy. Each setting of a pack is
judged by its own checks. If they fail, its defenses have no place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from leakfrontier.adversaries.base import THREATS

from ..conclude.analysis import SERVERS
from ..conclude.checks import Check, conclusion, failed_checks, overall
from ..conclude.coordinates import coordinates, success_column
from ..conclude.dominance import Arm, Dominance, Gap, judge
from ..conclude.frontier import Frontier
from ..conclude.labels import limit_text, rounds_named
from ..conclude.results import Conclusions
from ..foundations.errors import UserError
from ..foundations.rows import MEDIA, digest
from .pack import Pack


@dataclass(frozen=True)
class Evaluation:
    """One setting of one pack.

    Attributes:
        pack: The name of the pack.
        results: Its rows of this setting.
        frontier: The frontier of the pack alone.
        checks: The checks of the evaluation.
    """

    pack: str
    results: Conclusions
    frontier: Frontier
    checks: Sequence[Check]

    @property
    def failed(self) -> bool:
        """Return whether its own checks fail."""
        return overall(self.checks) == "fail"

    @property
    def conclusion(self) -> str:
        """Return the conclusion of its checks."""
        return conclusion(self.checks)


@dataclass(frozen=True)
class Setting:
    """A scenario and an attacked round, with the evaluations of all packs.

    Attributes:
        name: The name of the scenario.
        checkpoint: The attacked round.
        modality: The kind of private examples: `Medium.examples`.
        evaluations: One per pack.
        table: The table of `standings`.
    """

    name: str
    checkpoint: int
    modality: str
    evaluations: tuple[Evaluation, ...]
    table: pd.DataFrame

    @property
    def title(self) -> str:
        """Return its name for readers."""
        return f"{self.name}, {rounds_named(self.checkpoint)}"


@dataclass
class _Found:
    name: str
    evaluations: list[Evaluation] = field(default_factory=list)


def make_settings(packs: Sequence[Pack]) -> list[Setting]:
    """Return every setting of some packs, with its standings.

    Raises:
        UserError: If packs have the same name or different panels.
    """
    panels = {_panel(pack): pack.name for pack in packs}
    if len(panels) > 1:
        listed = "; ".join(f"{panel!r} ({name})" for panel, name in panels.items())
        raise UserError(f"packs must be of one panel to be comparable, got {listed}")
    names = [pack.name for pack in packs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two packs are called {name!r}: rename one of the files")
    found: dict[tuple[str, int], _Found] = {}
    for pack in packs:
        for key, evaluation in _evaluations(pack):
            found.setdefault(key, _Found(evaluation.frontier.scenario)).evaluations.append(
                evaluation
            )
    return [
        Setting(
            one.name,
            checkpoint,
            _modality(one.evaluations),
            tuple(one.evaluations),
            standings(one.evaluations),
        )
        for (_, checkpoint), one in found.items()
    ]


def standings(evaluations: Sequence[Evaluation]) -> pd.DataFrame:
    """Return one row per server and defense of a setting, ordered by place.

    A defense with the same measurements in two packs has one row. The columns are:

    - `server`, `pack`, `defense`, `family`, `control` and `epsilon`;
    - `success` of the server from nothing and `accuracy`, each with `_low`, `_high` and `_text`;
    - `candidates_text`, the success given candidates;
    - `gamma_upload` and `gamma_run`, the proven limits, and `evidence`;
    - `place` among the defenses of the same evidence, NaN if there is none, and `tied`, the number
      of others that share it;
    - `dominated` and `tied_with`, the defense that dominates it or that it is tied with;
    - `partner`, `partner_success_text` and `partner_epsilon`, the DP-SGD of equal accuracy in the
      same pack, and `beside`, the verdict on the pair, for a passive server;
    - `verdict`, and `evaluation`, the verdict of the checks.
    """
    entries = _ranked(_entries(evaluations))
    rows = [row for server in THREATS for row in _for_server(entries, server)]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _entries(evaluations: Iterable[Evaluation]) -> list[dict[str, Any]]:
    """Return the measurements of every defense, without duplicates."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for evaluation in sorted(evaluations, key=lambda one: one.failed):  # sound ones first
        points, pairs = evaluation.frontier.points, evaluation.frontier.baseline
        beside = pairs.set_index("defense")
        described = points.set_index("defense")
        for _, point in points.iterrows():
            entry = {
                "point": point,
                "pack": evaluation.pack,
                **{key: point[key] for key in _DESCRIBED},
                "accuracy_text": limit_text(*(point[f"accuracy{end}"] for end in _ENDS)),
                "evaluation": overall(evaluation.checks),
                "failed": failed_checks(evaluation.checks),
                "orders": {},
            }
            if point["defense"] in beside.index:
                pair = beside.loc[point["defense"]]
                partner = described.loc[pair["partner"]]
                entry |= {
                    "partner": pair["partner"],
                    "partner_success_text": partner["success_text"],
                    "partner_epsilon": partner["epsilon"],
                    "beside": pair["verdict"],
                }
            ends = [success_column(server, end) for server in SERVERS for end in ("", "low")]
            measured = (point["defense"], point["accuracy"], *(point[end] for end in ends))
            kept = found.setdefault(tuple(map(str, measured)), entry)
            kept["orders"][evaluation.pack] = evaluation.frontier.order
    return [*found.values()]


def _for_server(entries: Iterable[dict[str, Any]], server: str) -> list[dict[str, Any]]:
    """Return the entries with a server's success, ordered by place; DP-SGD is for the passive."""
    rows = []
    for entry in entries:
        limits = [entry["point"][success_column(server, end)] for end in ("", "low", "high")]
        success = dict(zip(("success", "success_low", "success_high"), limits, strict=True))
        row = entry | success | {"server": server, "success_text": limit_text(*limits)}
        if server != "passive":
            row |= dict.fromkeys(_BESIDE)
        rows.append(row)
    return sorted(rows, key=_order)


def _ranked(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with their verdicts and places."""
    arms = {number: _arm(one) for number, one in enumerate(entries)}
    verdicts = judge(arms, lambda one, other: _gap(entries[one], entries[other]))
    names = {number: str(one["defense"]) for number, one in enumerate(entries)}
    for number, one in enumerate(entries):
        found = verdicts[number]
        one["place"] = float("nan") if found.place is None else found.place
        for name, kind in {"dominated": "dominated", "tied_with": "tied"}.items():
            one[name] = names[found.other] if found.kind == kind else ""
        one["verdict"] = found.text(names)
    places = [(one["evidence"], one["place"]) for one in entries if pd.notna(one["place"])]
    for one in entries:
        one["tied"] = max(0, places.count((one["evidence"], one["place"])) - 1)
    return entries


def _arm(entry: Mapping[str, Any]) -> Arm:
    """Return an entry as an `Arm`, relative to the control of its own pack."""
    order: Dominance = entry["orders"][entry["pack"]]
    return Arm(
        at=coordinates(entry["point"]),
        control=bool(entry["control"]),
        gains=entry["defense"] in order.gains,
        over_control=order.over_control(str(entry["defense"])),
        refuted=bool(entry["point"]["refuted"]),
        failed=entry["failed"],
    )


def _gap(one: Mapping[str, Any], other: Mapping[str, Any]) -> Gap:
    """Compare two defenses: paired within a pack, otherwise by intervals."""
    pair = (str(one["defense"]), str(other["defense"]))
    orders: Mapping[str, Dominance] = one["orders"]
    for pack, order in orders.items():
        if pack in other["orders"]:
            return order.gaps.get(pair, Gap())
    points = one["point"], other["point"]
    seems = _apart(*points, "accuracy_low", "accuracy_high")
    seeds = min(point["seeds"] for point in points)
    ends = {server: [success_column(server, end) for end in ("low", "high")] for server in SERVERS}
    success = {server: -_apart(*points, *names) for server, names in ends.items()}
    return Gap(seems if seeds > 1 else 0, seems, success)


def _apart(one: Mapping[str, Any], other: Mapping[str, Any], low: str, high: str) -> int:
    """Return 1 if an interval is above another, -1 if below, else 0."""
    return int(one[low] > other[high]) - int(one[high] < other[low])


def _order(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    numbers = (entry["place"], entry["success"], -entry["accuracy"])
    first, leak, cost = (float("inf") if pd.isna(number) else number for number in numbers)
    apart = (pd.isna(entry["place"]), entry["evidence"] != "proven")
    return *apart, first, bool(entry["control"]), bool(entry["dominated"]), leak, cost


def _evaluations(pack: Pack) -> Iterable[tuple[tuple[str, int], Evaluation]]:
    """Yield the evaluations of a pack, with a key that excludes the scenario's title."""
    results = pack.results
    places = results.attacks[["scenario", "checkpoint"]].drop_duplicates()
    configs = pack.meta["config"].get("scenarios", ())
    names = dict.fromkeys(results.cells["scenario"])
    digests = dict(zip(names, map(_scenario_digest, configs), strict=False))
    for scenario, checkpoint in places.itertuples(index=False):
        part = results.part(scenario, int(checkpoint))
        (frontier,) = part.frontiers()
        key = (digests.get(scenario, scenario), int(checkpoint))
        yield key, Evaluation(pack.name, part, frontier, part.checks())


def _scenario_digest(config: Any) -> str:  # noqa: ANN401 - a part of a configuration
    """Return a digest of a scenario without its title, device and defenses."""
    if isinstance(config, dict):
        own = ("title", "device", "defenses")
        config = {key: value for key, value in config.items() if key not in own}
        if isinstance(config.get("training"), dict):
            config["training"] = config["training"] | {"defense_lr": None}
    return digest(config)


def _panel(pack: Pack) -> str:
    """Return the panel of a pack; a custom panel is identified by its attacks."""
    attacks = pack.meta["config"].get("adversaries", "panel")
    return pack.comparable if attacks == "panel" else f"{pack.comparable}: {json.dumps(attacks)}"


def _modality(evaluations: Iterable[Evaluation]) -> str:
    shown = {one for e in evaluations for one in e.results.renderings["media"].unique()}
    return MEDIA[min(shown)].examples if shown else "unknown"


_ENDS = ("", "_low", "_high")
_DESCRIBED = ["defense", "family", "control", "epsilon", "candidates_text"]
_DESCRIBED += ["gamma_upload", "gamma_run", "evidence"]
_DESCRIBED += [f"accuracy{end}" for end in _ENDS]
_COLUMNS = ["server", "evidence", "place", "tied", "defense", "pack", "family", "control"]
_COLUMNS += [f"success{end}" for end in (*_ENDS, "_text")]
_COLUMNS += [f"accuracy{end}" for end in (*_ENDS, "_text")]
_COLUMNS += ["candidates_text", "gamma_upload", "gamma_run"]
_COLUMNS += ["epsilon", "dominated", "tied_with", "verdict", "evaluation"]
_BESIDE = ["partner", "partner_success_text", "partner_epsilon", "beside"]
_COLUMNS += _BESIDE
