"""A reproducibility pack: a run in one small file that others can verify.

A pack is a zip archive. The same run on the same machine gives the same bytes:

    pack.json       format, panel, configuration, versions, machine, verdict
    cells.csv       every planned cell: its status, its labels, a digest of its exact rows
    rows/*.csv      the rows of all cells; numbers have six digits
    tables/*.csv    the rates, the frontier and the checks, derived from these rows
    gallery/*       a few victims and their reconstructions under every defense
    sources/*       users' own defenses, adversaries, protocols and models
    SHA256SUMS      checksums of all files, in the format of sha256sum

It contains no weights and no data. The gallery contains the only pictures of private examples.
Reading a pack executes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from leakfrontier.adversaries import PANEL

from ..conclude.analysis import FINISHED, with_scores
from ..conclude.checks import conclusion
from ..conclude.labels import rows
from ..conclude.results import Conclusions
from ..data.data import is_named
from ..data.tokenizers import TOKENIZERS
from ..foundations.errors import given_by_user
from ..foundations.foreign import (
    check_cells,
    check_labelled,
    check_labels,
    check_meta,
    check_rows,
    parse_json,
)
from ..foundations.plugins import file_of, local_files
from ..foundations.rows import LATER, MEDIA, TABLES, Column, Outcome, columns
from ..run.cells import AttackTrial, Trial
from ..run.config import RunConfig, received_config
from ..run.environment import environment
from ..run.run import plan
from ..run.store import received_results
from ..users.methods import own_code
from .archive import PackError, file_digest, sha256, unzipped, zipped
from .packed_rows import from_csv, outcomes_of, rows_digest, to_csv

FORMAT = 1
VICTIMS = 4
"""The number of victims that the gallery of a pack shows under every defense."""

MANY_UPLOADS = 1000
"""The number of uploads that a configuration may have even if none was attacked."""

META, CELLS = "pack.json", "cells.csv"

_ROWS = {name: row_type for name, row_type in TABLES.items() if name != "renderings"}
_TABLES: dict[str, tuple[str, ...]] = {
    "rates": (
        *("scenario", "checkpoint", "defense", "adversary", "knows_defense"),
        *("observations", "victims", "found", "rate", "low", "high", "text"),
    ),
    "frontier": (
        *("scenario", "checkpoint", "defense", "accuracy", "accuracy_low", "accuracy_high"),
        *("success", "success_low", "success_high", "parameters_rate", "architecture_rate"),
        *("candidates_rate", "epsilon", "delta", "verdict"),
    ),
    "checks": ("name", "verdict", "text"),
}


@dataclass(frozen=True)
class Pack:
    """A pack whose checksums are right.

    Attributes:
        name: The name of the pack.
        meta: The content of `pack.json`.
        entries: The content of all files, by name.
        digest: The checksum of the file; "" if it was not read from a file.
    """

    name: str
    meta: Mapping[str, Any]
    entries: Mapping[str, bytes]
    digest: str = ""

    @property
    def panel(self) -> str:
        """Return the version of the panel."""
        return str(self.meta["panel"])

    @cached_property
    def comparable(self) -> str:
        """Return the panel to compare with: the current one if they differ only on texts."""
        shown = {*self.rows("renderings")["media"]}
        for version in PANEL.alike if shown and "tokens" not in shown else ():
            if re.search(rf"(?<![\d.]){re.escape(version)}(?!\d)", self.panel):
                return self.panel.replace(version, PANEL.version)
        return self.panel

    @property
    def sources(self) -> dict[str, bytes]:
        """Return the users' own code."""
        return {name: body for name, body in self.entries.items() if name.startswith("sources/")}

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Return the planned cells in their order: cells.csv with parsed `labels`."""
        cells = from_csv(self.entries[CELLS], dict.fromkeys(_CELL_COLUMNS, Column(str)))
        labels: list[Any] = [check_labels(parse_json(text)) for text in cells["labels"]]
        cells["labels"] = labels
        return cells.assign(**{name: pd.to_numeric(cells[name]) for name in ("seconds", "busy")})

    @cached_property
    def results(self) -> Conclusions:
        """Return the rows in the form of a run's results."""
        cells = self.cells
        labels = pd.DataFrame(
            [{"cell": cell.cell, "kind": cell.kind, **cell.labels} for cell in rows(cells)]
        )
        outcomes = cells.drop(columns=["kind", "labels", "digest"])
        check_cells(labels.merge(outcomes, on="cell"))
        check_labelled(labels)
        frames = {name: labels.merge(self.rows(name), on="cell") for name in TABLES}
        return Conclusions(
            self.meta["config"],
            self.panel,
            labels.merge(outcomes, on="cell"),
            **frames,
            notes=self.meta["notes"],
        )

    def rows(self, table: str) -> pd.DataFrame:
        """Return the rows of a table, with the keys of their cells."""
        return self._rows[table]

    @cached_property
    def _rows(self) -> dict[str, pd.DataFrame]:
        return {table: self._parsed(table) for table in TABLES}

    def _parsed(self, table: str) -> pd.DataFrame:
        types = {"number": Column(int), **columns(TABLES[table])}
        header = ",".join(types).encode()  # `read_pack` requires all but later tables
        frame = from_csv(self.entries.get(f"rows/{table}.csv", header), types)
        if table == "renderings":
            for name in ("truth", "guess"):
                frame[name] = [self.entries[file] for file in frame[name]]
        frame.insert(0, "cell", self.cells["cell"].loc[frame.pop("number")].to_numpy())
        check_rows(frame, TABLES[table])
        return frame


_CELL_COLUMNS = ("cell", "kind", "status", "error", "note", "seconds", "busy", "digest", "labels")


def pack_run(folder: Path, *, trust_code: bool = False) -> bytes:
    """Return the pack of a run.

    Args:
        folder: The folder of a run, with `results.sqlite`.
        trust_code: Whether code that the run names may be executed.

    Raises:
        PackError: If it is not the folder of a run, or if the code has changed since the run.
    """
    results = received_results(folder)
    if not {"scenarios", "defenses", "observations"} <= {*results.config}:
        raise PackError(f"{folder} is not a folder of `leakfrontier run`: only these can be packed")
    config = received_config(results.config, Path(), trust_code=trust_code)
    if config.observations > max(MANY_UPLOADS, len(results.attacks)):
        raise PackError(f"{folder} has a run of {config.observations:,} uploads, but fewer rows")
    trials = narrowed(plan_of(config), results)
    outcomes = outcomes_of(results)
    finished = results.cells["status"].isin(FINISHED).tolist()
    same = len(trials) == len(results.cells) and config.panel == results.panel
    for trial, key, done in zip(trials, results.cells["cell"], finished, strict=False):
        same = same and (trial.cell.key == key or not done)
    if not same:
        raise PackError(
            f"the code has changed since the rows of {folder} were made. Run the same command "
            "again to renew the affected rows, then pack the folder"
        )
    labels = [dict(trial.cell.labels) for trial in trials]
    return write_pack(results, labels, outcomes, *portable(config))


def write_pack(
    results: Conclusions,
    labels: Sequence[Mapping[str, Any]],
    outcomes: Mapping[str, Outcome],
    config: Mapping[str, Any],
    sources: Mapping[str, bytes],
) -> bytes:
    """Return a pack.

    Args:
        results: All rows.
        labels: The labels of every cell, in the order of `results.cells`.
        outcomes: The same rows as outcomes of cells, by their keys.
        config: The configuration, without paths of this machine.
        sources: The files that the configuration names, by name.
    """
    cells = results.cells[["cell", "kind", "status", "error", "note", "seconds", "busy"]].copy()
    for name in ("error", "note"):  # tracebacks contain folders of this machine
        cells[name] = [str(text or "").partition("\n")[0] for text in cells[name].fillna("")]
    cells["digest"] = [rows_digest(outcomes.get(key, Outcome())) for key in cells["cell"]]
    cells["labels"] = [json.dumps(one) for one in labels]
    numbers = {key: number for number, key in enumerate(cells["cell"])}
    entries = {CELLS: to_csv(cells), **sources}
    for name in _ROWS:
        frame = getattr(results, name)
        own = frame[[*columns(TABLES[name])]].copy()
        own.insert(0, "number", frame["cell"].map(numbers).astype(int))
        entries[f"rows/{name}.csv"] = to_csv(own)
    entries |= _gallery(results, numbers)
    meta = {
        "format": FORMAT,
        "panel": results.panel,
        "config": config,
        "notes": [*results.notes],
        **environment(),
    }
    written = Pack("", meta, entries)
    entries |= derived(written.results)
    meta["conclusion"] = conclusion(written.results.checks())
    # Keys keep their order because labels list options in it.
    entries[META] = (json.dumps(meta, indent=1) + "\n").encode()
    return zipped(entries)


def read_pack(path: Path) -> Pack:
    """Return a pack whose checksums are right.

    Raises:
        PackError: If it is not a pack, or this version cannot read it.
        AlteredError: If a file does not match its checksum.
    """
    tables = (f"rows/{table}.csv" for table in TABLES if table not in LATER)
    entries = unzipped(path, (META, CELLS, *tables))
    meta = _parsed(path, entries[META])
    if meta["format"] != FORMAT:
        raise PackError(
            f"{path} has format {meta['format']}, but this version of leakfrontier reads {FORMAT}: "
            "open it with the version that made it"
        )
    pack = Pack(path.stem, meta, entries, file_digest(path))
    try:
        pack.results  # noqa: B018 - raises if any row is wrong
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PackError(f"{path} has rows that cannot be read: {error}") from error
    return pack


def portable(config: RunConfig) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a configuration without folders of this machine, and the files that it names.

    Users' code is in `sources/`. Users' data is not in a pack, and is called `data/NAME`.
    """
    methods = [method for one in config.scenarios for method in (one.model, one.protocol)]
    methods += config.defenses
    methods += [defense for one in config.scenarios for defense in one.defenses]
    methods += [] if config.adversaries == "panel" else config.adversaries
    names: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for spec in dict.fromkeys(name for method in methods for name in own_code(method)):
        file = file_of(spec)
        if file is None:  # it is from an installed package
            continue
        folder = f"sources/{len(names)}"
        names[spec] = f"{folder}/{file.name}:{spec.rpartition(':')[2]}"
        for found in local_files(file):
            files[f"{folder}/{found.relative_to(file.parent).as_posix()}"] = found.read_bytes()
    for scenario in config.scenarios:
        if not is_named(scenario.dataset):
            names[scenario.dataset] = f"data/{Path(scenario.dataset).name}"
        for source in (scenario.model.options.get("id"), scenario.tokenizer):
            if isinstance(source, str) and source not in TOKENIZERS and Path(source).exists():
                names[source] = f"data/{Path(source).name}"
    moved = _renamed(config.model_dump(mode="json"), names)
    for scenario in moved["scenarios"]:
        scenario["data_folder"] = None
    return moved, files


def plan_of(config: RunConfig) -> list[Trial]:
    """Return the cells of a configuration from others. Raise an error for users if it is wrong."""
    with given_by_user():
        planned = plan(config)
        for trial in planned:
            trial.cell  # noqa: B018 - computes and caches it
    return planned


def narrowed(trials: Sequence[Trial], results: Conclusions) -> list[Trial]:
    """Return planned cells with the uploads on which they ran in a cascade."""
    attacked = results.attacks.groupby("cell")["observation"].unique()
    found: list[Trial] = []
    for trial, cell in zip(trials, rows(results.cells), strict=False):
        if isinstance(trial, AttackTrial) and cell.status in FINISHED:
            uploads = sorted(map(int, attacked.get(cell.cell, ())))
            trial = replace(trial, observations=tuple(uploads))
        found.append(trial)
    return found + list(trials[len(found) :])


def derived(results: Conclusions) -> dict[str, bytes]:
    """Return the tables that are derived from rows."""
    frontiers = [frontier.points for frontier in results.frontiers()]
    tables = {
        "rates": results.rates(),
        "frontier": pd.concat(frontiers) if frontiers else pd.DataFrame(),
        "checks": pd.DataFrame([asdict(check) for check in results.checks()]),
    }
    return {
        f"tables/{name}.csv": to_csv(tables[name].reindex(columns=columns))
        for name, columns in _TABLES.items()
    }


def _gallery(results: Conclusions, numbers: Mapping[str, int]) -> dict[str, bytes]:
    """Return the best passive reconstructions of the first victims under every defense."""
    attacks = with_scores(results.attacks, results.scores)
    chosen = attacks["threat"].eq("passive") & ~attacks["candidates_granted"] & ~attacks["baseline"]
    place, victim = ["scenario", "checkpoint", "defense"], ["seed", "observation", "victim"]
    key = ["cell", "observation", "victim"]
    shown = results.renderings.merge(
        attacks.loc[chosen, [*key, "identified", "psnr"]], on=key, how="inner"
    ).sort_values(["identified", "psnr"], ascending=False, kind="stable")
    shown = shown.drop_duplicates([*place, *victim]).sort_values(["victim", "seed", "observation"])
    shown = shown.groupby(place, sort=False).head(VICTIMS).sort_index()
    entries: dict[str, bytes] = {}
    files: dict[str, list[str]] = {"truth": [], "guess": []}
    for row in rows(shown):
        for name, paths in files.items():
            body: bytes = getattr(row, name)
            path = f"gallery/{sha256(body)[:16]}.{MEDIA[row.media].extension}"
            entries[path] = body
            paths.append(path)
    table = shown[["observation", "victim", "media"]].assign(**files)
    table.insert(0, "number", shown["cell"].map(numbers).astype(int))
    return {**entries, "rows/renderings.csv": to_csv(table)}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value


def _parsed(path: Path, body: bytes) -> dict[str, Any]:
    try:
        meta = check_meta(parse_json(body))
    except ValueError as error:
        raise PackError(f"{path}: {META} cannot be read: {error}") from error
    missing = {"format", "panel", "config", "notes", "versions", "machine", "code"} - {*meta}
    if missing:
        raise PackError(f"{path}: {META} lacks {', '.join(sorted(missing))}")
    return dict(meta)
