"""A run in one small file that others can check: a reproducibility pack.

A pack is a zip archive, the same bytes for the same run on the same machine:

    pack.json       format, panel, configuration, versions, machine, verdict
    cells.csv       every planned cell: its status, its labels, a digest of its exact rows
    rows/*.csv      the rows of all cells, numbers with six digits
    tables/*.csv    the rates, the frontier and the checks that follow from these rows
    gallery/*       what the panel makes of a few victims under every defense
    sources/*       users' own defenses, adversaries and models
    SHA256SUMS      checksums of all of it, as sha256sum writes them

It has no weights, no data, and no pictures of private examples but the gallery's. Nothing in it is
executed by reading it.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, get_type_hints

import pandas as pd
import torch

from .analysis import FINISHED, with_scores
from .cells import AttackTrial, Trial
from .checks import conclusion
from .config import RunConfig, load_config
from .engine import cores
from .errors import UserError
from .identity import ROOT
from .labels import rows
from .methods import own_code
from .plugins import digest_of, file_of, local_files
from .results import Results
from .rows import Outcome, digest
from .run import plan
from .store import TABLES, Store

FORMAT = 1
DIGITS = 6
"""Significant digits of the numbers in a pack; a cell's digest is of all of them."""

VICTIMS = 4
"""Victims that the gallery of a pack shows under every defense."""

META, CELLS, SUMS = "pack.json", "cells.csv", "SHA256SUMS"
MOST_ENTRIES, MOST_BYTES = 20_000, 2**28
"""What is read of a pack at most: larger ones are refused unread."""

PACKAGES = ("leakfrontier", "torch", "torchvision", "opacus", "numpy", "scipy", "pandas")
"""Those on which rows depend."""

_ROWS = {name: row_type for name, row_type in TABLES.items() if name != "renderings"}
_EXTENSIONS = {"image/png": "png", "audio/wav": "wav", "tokens": "json"}
_STORED = ("png", "wav")  # which do not get smaller
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
Table = Mapping[str, bytes]


class PackError(UserError):
    """A file that is no pack, or one that cannot be used; the message says why."""


class AlteredError(PackError):
    """A pack that is not what its checksums say."""


@dataclass(frozen=True)
class Pack:
    """A pack that was read, and whose checksums are right.

    Attributes:
        name: What it is called.
        meta: What `pack.json` says.
        entries: The content of all files, by name.
    """

    name: str
    meta: Mapping[str, Any]
    entries: Mapping[str, bytes]

    @property
    def panel(self) -> str:
        """Return the version of the panel."""
        return str(self.meta["panel"])

    @property
    def sources(self) -> dict[str, bytes]:
        """Return the users' own code."""
        return {name: body for name, body in self.entries.items() if name.startswith("sources/")}

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Return the planned cells, in their order: cells.csv with `labels` as data."""
        cells = _read(self.entries[CELLS], dict.fromkeys(_CELL_COLUMNS, str))
        cells["labels"] = [json.loads(text) for text in cells["labels"]]
        return cells.assign(**{name: pd.to_numeric(cells[name]) for name in ("seconds", "busy")})

    @cached_property
    def results(self) -> Results:
        """Return the rows, as those of a run's folder."""
        cells = self.cells
        labels = pd.DataFrame(
            [{"cell": cell.cell, "kind": cell.kind, **cell.labels} for cell in rows(cells)]
        )
        outcomes = cells.drop(columns=["kind", "labels", "digest"])
        frames = {name: labels.merge(self.rows(name), on="cell") for name in TABLES}
        return Results(
            self.meta["config"],
            self.panel,
            labels.merge(outcomes, on="cell"),
            **frames,
            notes=self.meta["notes"],
        )

    def rows(self, table: str) -> pd.DataFrame:
        """Return a table's rows by the keys of their cells."""
        frame = _read(self.entries[f"rows/{table}.csv"], {"number": int, **_types(table)})
        if table == "renderings":
            for name in ("truth", "guess"):
                frame[name] = [self.entries[file] for file in frame[name]]
        keys = self.cells["cell"]
        frame.insert(0, "cell", [keys[number] for number in frame.pop("number")])
        return frame


_CELL_COLUMNS = ("cell", "kind", "status", "error", "note", "seconds", "busy", "digest", "labels")


def pack_run(folder: Path) -> bytes:
    """Return the pack of a run.

    Args:
        folder: Holds `results.sqlite`.

    Raises:
        PackError: If it is not that of a run, or the code is no longer what made its rows.
    """
    results = Store(folder).results()
    if not {"scenarios", "defenses", "observations"} <= {*results.config}:
        raise PackError(f"{folder} is no folder of `leakfrontier run`: nothing else can be packed")
    config = load_config(results.config)
    trials = narrowed(plan(config), results)
    outcomes = outcomes_of(results)
    finished = results.cells["status"].isin(FINISHED).tolist()
    same = len(trials) == len(results.cells) and config.panel == results.panel
    for trial, key, done in zip(trials, results.cells["cell"], finished, strict=False):
        same = same and (trial.cell.key == key or not done)
    if not same:
        raise PackError(
            f"the rows of {folder} are not of the code as it is now: run the same command again, "
            "which runs what has changed, and pack it then"
        )
    labels = [dict(trial.cell.labels) for trial in trials]
    return write_pack(results, labels, outcomes, *portable(config))


def write_pack(
    results: Results,
    labels: Sequence[Mapping[str, Any]],
    outcomes: Mapping[str, Outcome],
    config: Mapping[str, Any],
    sources: Table,
) -> bytes:
    """Return a pack.

    Args:
        results: All rows.
        labels: The labels of every cell, in the order of `results.cells`.
        outcomes: What cells have left behind, by their keys: the same rows.
        config: The configuration, without paths of this machine.
        sources: The files that it names, by the names that it gives them.
    """
    cells = results.cells[["cell", "kind", "status", "error", "note", "seconds", "busy"]].copy()
    for name in ("error", "note"):  # tracebacks name folders of this machine
        cells[name] = [str(text or "").partition("\n")[0] for text in cells[name].fillna("")]
    cells["digest"] = [exact(outcomes.get(key, Outcome())) for key in cells["cell"]]
    cells["labels"] = [json.dumps(one) for one in labels]
    numbers = {key: number for number, key in enumerate(cells["cell"])}
    entries = {CELLS: _csv(cells), **sources}
    for name in _ROWS:
        frame = getattr(results, name)
        own = frame[[one.name for one in fields(TABLES[name])]].copy()
        own.insert(0, "number", frame["cell"].map(numbers).astype(int))
        entries[f"rows/{name}.csv"] = _csv(own)
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
    # Keys stay in their order: options have it in labels.
    entries[META] = (json.dumps(meta, indent=1) + "\n").encode()
    return _zipped(entries)


def read_pack(path: Path) -> Pack:
    """Return a pack whose checksums are right.

    Raises:
        PackError: If it is none, or not one that can be read here.
        AlteredError: If a file is not what its checksum says.
    """
    entries = _unzipped(path)
    for name in (META, CELLS, SUMS, *(f"rows/{table}.csv" for table in TABLES)):
        if name not in entries:
            raise PackError(f"{path} has no {name}: it is no pack, or a part of one")
    sums = {
        name: total
        for total, _, name in (
            line.partition("  ") for line in entries.pop(SUMS).decode().splitlines()
        )
    }
    for name in sorted({*sums, *entries}):
        if name not in sums or name not in entries or _sha256(entries[name]) != sums[name]:
            raise AlteredError(f"{path}: {name} is not what {SUMS} says; the pack was altered")
    meta = _parsed(path, entries[META])
    if meta["format"] != FORMAT:
        raise PackError(
            f"{path} has format {meta['format']}, this version of leakfrontier reads {FORMAT}"
        )
    pack = Pack(path.stem, meta, entries)
    try:
        pack.results  # noqa: B018 - whatever is wrong with a row is wrong here
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(f"{path} has rows that cannot be read: {error}") from error
    return pack


def portable(config: RunConfig) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a configuration without folders of this machine, and the files that it names.

    Users' code lies in `sources/`; their data is not in a pack, and called `data/NAME`.
    """
    methods = [*(one.model for one in config.scenarios), *config.defenses]
    methods += [defense for one in config.scenarios for defense in one.defenses]
    methods += [] if config.adversaries == "panel" else config.adversaries
    names: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for spec in dict.fromkeys(name for method in methods for name in own_code(method)):
        file = file_of(spec)
        if file is None:  # of an installed package
            continue
        folder = f"sources/{len(names)}"
        names[spec] = f"{folder}/{file.name}:{spec.rpartition(':')[2]}"
        for found in local_files(file):
            files[f"{folder}/{found.relative_to(file.parent).as_posix()}"] = found.read_bytes()
    for scenario in config.scenarios:
        for place in (scenario.dataset, str(scenario.model.options.get("id", ""))):
            if place.startswith(("/", "~")):
                names[place] = f"data/{Path(place).name}"
    moved = _renamed(config.model_dump(mode="json"), names)
    for scenario in moved["scenarios"]:
        scenario["data_folder"] = None
    return moved, files


def narrowed(trials: Sequence[Trial], results: Results) -> list[Trial]:
    """Return planned cells as they were run: on the uploads that a cascade left them."""
    attacked = results.attacks.groupby("cell")["observation"].unique()
    found: list[Trial] = []
    for trial, cell in zip(trials, rows(results.cells), strict=False):
        if isinstance(trial, AttackTrial) and cell.status in FINISHED:
            uploads = sorted(map(int, attacked.get(cell.cell, ())))
            trial = replace(trial, observations=tuple(uploads))
        found.append(trial)
    return found + list(trials[len(found) :])


def outcomes_of(results: Results) -> dict[str, Outcome]:
    """Return what every cell has left behind, by its key."""
    found: dict[str, dict[str, Any]] = {}
    for table, row_type in TABLES.items():
        casts = _types(table)
        for key, group in getattr(results, table).groupby("cell"):
            columns = [[cast(value) for value in group[name]] for name, cast in casts.items()]
            values = zip(*columns, strict=True)
            found.setdefault(str(key), {})[table] = tuple(row_type(*one) for one in values)
    return {key: Outcome(**tables) for key, tables in found.items()}


def exact(outcome: Outcome) -> str:
    """Return a digest of all rows of a cell, in all digits, without the seconds that it took."""
    tables = {}
    for table in TABLES:
        casts = _types(table)
        made = [
            [_plain(casts[name](value)) for name, value in asdict(row).items() if name != "seconds"]
            for row in getattr(outcome, table)
        ]
        tables[table] = sorted(json.dumps(row) for row in made)
    return digest(tables)


def frame_of(outcome: Outcome, table: str) -> pd.DataFrame:
    """Return the rows of one cell as a pack has them."""
    own = pd.DataFrame([asdict(row) for row in getattr(outcome, table)], columns=[*_types(table)])
    return _read(_csv(own), _types(table))


def derived(results: Results) -> dict[str, bytes]:
    """Return the tables that follow from rows."""
    frontiers = [frontier.points for frontier in results.frontiers()]
    tables = {
        "rates": results.rates(),
        "frontier": pd.concat(frontiers) if frontiers else pd.DataFrame(),
        "checks": pd.DataFrame([asdict(check) for check in results.checks()]),
    }
    return {
        f"tables/{name}.csv": _csv(tables[name].reindex(columns=columns))
        for name, columns in _TABLES.items()
    }


def environment() -> dict[str, Any]:
    """Return what rows depend on besides the configuration: versions, code and machine."""
    files = sorted(
        file for part in ("defenses", "adversaries", "evaluate") for file in _code(ROOT / part)
    )
    return {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "code": digest([(str(file.relative_to(ROOT)), digest_of(file)) for file in files]),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": cores(),
        },
    }


def _gallery(results: Results, numbers: Mapping[str, int]) -> dict[str, bytes]:
    """Return the best that passive attacks made of the first victims, under every defense."""
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
            path = f"gallery/{_sha256(body)[:16]}.{_EXTENSIONS[str(row.media)]}"
            entries[path] = body
            paths.append(path)
    table = shown[["observation", "victim", "media"]].assign(**files)
    table.insert(0, "number", shown["cell"].map(numbers).astype(int))
    return {**entries, "rows/renderings.csv": _csv(table)}


def _csv(frame: pd.DataFrame) -> bytes:
    text = frame.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
    return str(text).encode()


def _read(body: bytes, types: Mapping[str, Callable[[Any], Any]]) -> pd.DataFrame:
    """Return a table with the types of its columns; others are refused."""
    frame = pd.read_csv(io.BytesIO(body), dtype=str, keep_default_na=False)
    if [*frame.columns] != [*types]:
        raise ValueError(f"columns must be {', '.join(types)}, got {', '.join(frame.columns)}")
    for name, cast in types.items():
        frame[name] = _COLUMNS.get(cast, _COLUMNS[str])(frame[name])
    return frame


def _flags(texts: pd.Series[str]) -> pd.Series[Any]:
    if not texts.isin(["True", "False", ""]).all():
        raise ValueError(f"{texts.name} must be True, False or nothing")
    return texts.map({"True": True, "False": False, "": pd.NA}).astype("boolean")


def _bool(value: Any) -> bool | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else bool(value)


def _int(value: Any) -> int | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else int(value)


def _float(value: Any) -> float | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else float(value)


def _text(value: Any) -> str | None:  # noqa: ANN401 - a cell of a table
    return None if value is None or value is pd.NA or value != value else str(value)


def _bytes(value: Any) -> bytes:  # noqa: ANN401 - a cell of a table
    return bytes(value)


_COLUMNS: dict[Callable[[Any], Any], Callable[[Any], Any]] = {
    int: lambda texts: pd.to_numeric(texts).astype(int),
    str: lambda texts: texts,
    _int: pd.to_numeric,
    _float: lambda texts: pd.to_numeric(texts).astype(float),
    _bool: _flags,
    _text: lambda texts: texts.where(texts != "", None),
}


def _types(table: str) -> dict[str, Callable[[Any], Any]]:
    """Return what the columns of a table hold, as functions that make it so."""
    casts: dict[object, Callable[[Any], Any]] = {
        bool: _bool,
        bool | None: _bool,
        int: _int,
        int | None: _int,
        float: _float,
        float | None: _float,
        bytes: _bytes,
        str | None: _text,
    }
    hints = get_type_hints(TABLES[table])
    return {one.name: casts.get(hints[one.name], str) for one in fields(TABLES[table])}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a cell of a table
    return _sha256(value) if isinstance(value, bytes) else value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _renamed(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value


def _zipped(entries: Table) -> bytes:
    """Return an archive that depends on nothing but its entries."""
    sums = "".join(f"{_sha256(body)}  {name}\n" for name, body in sorted(entries.items()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in sorted({**entries, SUMS: sums.encode()}.items()):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            stored = name.endswith(_STORED)
            info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(info, body, compresslevel=9)
    return buffer.getvalue()


def _unzipped(path: Path) -> dict[str, bytes]:
    """Return the entries of an archive; refuse one that is damaged, too large or ill-named."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            names = [info.filename for info in infos]
            if len(infos) > MOST_ENTRIES or sum(info.file_size for info in infos) > MOST_BYTES:
                raise PackError(f"{path} is too large for a pack: nothing of it was read")
            for name in names:
                if not _is_plain(name):
                    raise PackError(f"{path} has an entry that no pack has: {name!r}")
            if len({*names}) < len(names):
                raise PackError(f"{path} has two entries of one name, which no pack has")
            return {info.filename: archive.read(info) for info in infos}
    except FileNotFoundError:
        raise PackError(f"there is no pack {path}: `leakfrontier pack DIR` makes one") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, RuntimeError) as error:
        raise PackError(f"{path} is no pack, or damaged: {error}") from error
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, PackError):
            raise
        raise PackError(f"{path} is no pack, or damaged: {error}") from error


def _is_plain(name: str) -> bool:
    """Return whether a name stays within the folder that it would be written to."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not (
        name.startswith("/") or name.endswith("/") or "\\" in name or ":" in name or ".." in parts
    )


def _parsed(path: Path, body: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(body)
        missing = {"format", "panel", "config", "notes", "versions", "machine", "code"} - {*meta}
    except (ValueError, TypeError) as error:
        raise PackError(f"{path}: {META} cannot be read: {error}") from error
    if missing:
        raise PackError(f"{path}: {META} lacks {', '.join(sorted(missing))}")
    found: dict[str, Any] = meta
    return found


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _code(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.py")


def _versions() -> Iterable[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _processor() -> str:
    """Return what the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
