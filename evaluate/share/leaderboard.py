"""Ranks the defenses of several packs in each setting.

A setting is a scenario, an attacked round, the number of uploads and seeds, and the learning rates.
Packs share a setting if their scenarios differ only in their title, and in the rates of users' own
defenses. `dominance.judge` gives verdicts and places, as on the page of a run. They are the same
for all servers. Within a pack, comparisons are paired over victims and seeds. Across packs,
intervals must not overlap, and one seed shows no difference in accuracy. Each setting of a pack is
judged by its own checks. If they fail, its defenses have no place.

A defense is verified by the keys whose valid statements confirm it and its control. Defenses that
nobody verified, or that a valid statement refutes, are ranked apart.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from leakfrontier.adversaries.base import THREATS
from leakfrontier.defenses import DEFENSES

from ..conclude.analysis import SERVERS
from ..conclude.checks import Check, conclusion, failed_checks, of_arm, overall
from ..conclude.coordinates import coordinates, success_column
from ..conclude.dominance import Arm, Dominance, Gap, judge
from ..conclude.frontier import Frontier
from ..conclude.labels import limit_text, rounds_named
from ..conclude.results import Conclusions
from ..foundations.errors import UserError
from ..foundations.rows import MEDIA, digest
from .judgement import Decision
from .pack import Pack
from .statement import Statement


@dataclass(frozen=True)
class Evaluation:
    """One setting of one pack.

    Attributes:
        pack: The name of the pack.
        results: Its rows of this setting.
        frontier: The frontier of the pack alone.
        checks: The checks of the evaluation.
        statements: The valid statements on the pack.
    """

    pack: str
    results: Conclusions
    frontier: Frontier
    checks: Sequence[Check]
    statements: Sequence[Statement] = ()

    def keys(self, defense: str, decision: Decision) -> int:
        """Return how many keys confirm, or refute, a defense and its control."""
        points, here = self.frontier.points, (self.frontier.scenario, self.frontier.checkpoint)
        concerned = {defense, *points.loc[points["control"], "defense"]}
        found: dict[str, set[Decision | None]] = {}
        for one in self.statements:
            own = {one.on(*here, str(name)) for name in concerned}
            found.setdefault(one.key, set()).update(own)
        if decision == "refuted":
            return sum("refuted" in own for own in found.values())
        return sum(own == {decision} for own in found.values())

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
        uploads: The number of attacked uploads.
        seeds: The number of seeds.
        modality: The kind of private examples: `Medium.examples`.
        evaluations: One per pack.
        table: The table of `standings`.
    """

    name: str
    checkpoint: int
    uploads: int
    seeds: int
    modality: str
    evaluations: tuple[Evaluation, ...]
    table: pd.DataFrame

    @property
    def title(self) -> str:
        """Return its name for readers."""
        return f"{self.name}, {rounds_named(self.checkpoint)}"

    @property
    def extent(self) -> str:
        """Return its size for readers."""
        return f"{self.uploads} uploads, {self.seeds} seed{'s' if self.seeds > 1 else ''}"


class _Key(NamedTuple):
    """The identity of a setting."""

    scenario: str
    checkpoint: int
    uploads: int
    seeds: int


def make_settings(
    packs: Sequence[Pack], statements: Mapping[str, Sequence[Statement]] | None = None
) -> list[Setting]:
    """Return every setting of some packs, with its standings.

    Args:
        packs: The packs.
        statements: The valid statements on each pack, by its name.

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
    found: dict[_Key, list[Evaluation]] = {}
    for pack in packs:
        for key, evaluation in _evaluations(pack, (statements or {}).get(pack.name, ())):
            found.setdefault(key, []).append(evaluation)
    return [
        Setting(
            own[0].frontier.scenario,
            key.checkpoint,
            key.uploads,
            key.seeds,
            _modality(own),
            tuple(own),
            standings(own),
        )
        for key, own in found.items()
    ]


def standings(evaluations: Sequence[Evaluation]) -> pd.DataFrame:
    """Return one row per server and defense of a setting, ordered by place.

    A defense with the same measurements in two packs has one row. Verified defenses come first.
    Places are among verified defenses, or among the others. The columns are:

    - `server`, `pack`, `defense`, `family`, `control` and `epsilon`;
    - `verified` and `refuted_by`, the numbers of keys whose statements confirm or refute it;
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
    entries = _entries(evaluations)
    ranked = [
        one
        for verified in (True, False)
        for one in _ranked([one for one in entries if _is_verified(one) == verified])
    ]
    rows = [row for server in THREATS for row in _for_server(ranked, server)]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _is_verified(entry: Mapping[str, Any]) -> bool:
    return bool(entry["verified"] and not entry["refuted_by"])


def _entries(evaluations: Iterable[Evaluation]) -> list[dict[str, Any]]:
    """Return the measurements of every defense, without duplicates."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for evaluation in sorted(evaluations, key=lambda one: one.failed):  # sound ones first
        points, pairs = evaluation.frontier.points, evaluation.frontier.baseline
        beside = pairs.set_index("defense")
        described = points.set_index("defense")
        for _, point in points.iterrows():
            own = of_arm(evaluation.checks, evaluation.frontier.scenario, str(point["defense"]))
            entry = {
                "point": point,
                "pack": evaluation.pack,
                **{key: point[key] for key in _DESCRIBED},
                "verified": evaluation.keys(str(point["defense"]), "confirmed"),
                "refuted_by": evaluation.keys(str(point["defense"]), "refuted"),
                "accuracy_text": limit_text(*(point[f"accuracy{end}"] for end in _ENDS)),
                "evaluation": overall(own),
                "failed": failed_checks(own),
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
            key = tuple(map(str, measured))
            kept = found.setdefault(key, entry)
            if _is_verified(entry) and not _is_verified(kept):
                entry["orders"] |= kept["orders"]
                kept = found[key] = entry
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
    apart = (not _is_verified(entry), pd.isna(entry["place"]), entry["evidence"] != "proven")
    return *apart, first, bool(entry["control"]), bool(entry["dominated"]), leak, cost


def _evaluations(pack: Pack, statements: Sequence[Statement]) -> Iterable[tuple[_Key, Evaluation]]:
    """Yield the evaluations of a pack, with a key that excludes the scenario's title."""
    results = pack.results
    places = results.attacks[["scenario", "checkpoint"]].drop_duplicates()
    configs = pack.meta["config"].get("scenarios", ())
    names = dict.fromkeys(results.cells["scenario"])
    own = _own_defenses(pack.meta["config"])
    digests = dict(zip(names, (_scenario_digest(one, own) for one in configs), strict=False))
    for scenario, checkpoint in places.itertuples(index=False):
        part = results.part(scenario, int(checkpoint))
        (frontier,) = part.frontiers()
        key = _Key(
            digests.get(scenario, scenario),
            int(checkpoint),
            uploads=_least(part.attacks, ["seed", "observation"]),
            seeds=min(_least(rows, ["seed"]) for rows in (part.attacks, part.utility)),
        )
        yield key, Evaluation(pack.name, part, frontier, part.checks(), statements)


def _least(rows: pd.DataFrame, unit: list[str]) -> int:
    """Return the number of units of the defense with fewest; 0 without rows."""
    counts = rows[["defense", *unit]].drop_duplicates().groupby("defense").size()
    return 0 if counts.empty else int(counts.min())


def _scenario_digest(config: Any, own: Collection[str] = ()) -> str:  # noqa: ANN401 - JSON
    """Return a digest of a scenario without its title, device and defenses.

    Args:
        config: The configuration of the scenario.
        own: The class names of users' own defenses, whose learning rates do not count.
    """
    if isinstance(config, dict):
        ignored = ("title", "device", "defenses")
        config = {key: value for key, value in config.items() if key not in ignored}
        if isinstance(tune := config.get("tune"), dict):  # choices differ between defenses
            config["tune"] = {key: value for key, value in tune.items() if key != "chosen"}
        training = config.get("training")
        if isinstance(training, dict) and isinstance(training.get("defense_lr"), dict | None):
            rates = (training.get("defense_lr") or {}).items()
            counted = {name: rate for name, rate in rates if not _families(name) & {*own}}
            config["training"] = training | {"defense_lr": counted}
    return digest(config)


def _families(label: str) -> set[str]:
    return {part.partition("(")[0] for part in label.split(" then ")}


def _own_defenses(config: Mapping[str, Any]) -> set[str]:
    """Return the class names of users' own defenses that are not named like one of ours."""
    scenarios = [one for one in config.get("scenarios", ()) if isinstance(one, Mapping)]
    groups = [config.get("defenses"), *(one.get("defenses") for one in scenarios)]
    methods = [one for group in groups if isinstance(group, list) for one in group]
    links = [one.get("links") for one in methods if isinstance(one, Mapping)]
    methods += [one for group in links if isinstance(group, list) for one in group]
    names = [one.get("name") if isinstance(one, Mapping) else one for one in methods]
    own = {name.rpartition(":")[2] for name in names if isinstance(name, str) and ":" in name}
    return own - {*DEFENSES}


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
_COLUMNS += ["verified", "refuted_by"]
_BESIDE = ["partner", "partner_success_text", "partner_epsilon", "beside"]
_COLUMNS += _BESIDE
