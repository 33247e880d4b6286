"""What a task takes along to another machine, and what it sends back: no disk is shared.

A cell knows its users' files, data and captures by their paths, and its models' checkpoints by the
folder of its run. A parcel names the files behind them; where it is opened, they lie elsewhere,
and the cell is told so. A cell's key knows no folder, so that it is the same there.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from .capture_cells import CaptureTrial
from .cells import AttackTrial, TrainTrial, attackable
from .data import DATASETS, DOWNLOADS, downloads, example_files, fingerprint
from .methods import Method, build_protocol, own_code
from .papers.table import TableTrial, find_data
from .plugins import content_of, file_of, is_trusted, local_files, trust
from .pretrained import fingerprint as model_fingerprint
from .scenario import Scenario

T = TypeVar("T")

DOWNLOAD = "download:"
"""Before the name of a dataset whose download travels."""


@dataclass(frozen=True)
class Bundle:
    """Files that travel together.

    Attributes:
        name: What it is stored by: the same for the same content.
        files: Where each is, by its name within the bundle.
    """

    name: str
    files: Mapping[str, Path]

    def read(self) -> bytes:
        """Return all files, in one."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, path in self.files.items():
                archive.writestr(name, path.read_bytes())
        return buffer.getvalue()


@dataclass(frozen=True)
class Parcel:
    """A task and what it needs.

    Attributes:
        task: The pickled task, and the code in it that the user trusts.
        bundles: Files, by the path that the task knows them by; the second is their name within
            the bundle, nothing for all of it.
        checkpoints: Files of the run's folder, by their names there.
        folder: The folder of the run, as the task knows it; None if it has none.
    """

    task: bytes
    bundles: Mapping[str, tuple[Bundle, str]] = field(default_factory=dict)
    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    folder: str | None = None


def pack(task: object) -> Parcel:
    """Return a task with all that it needs."""
    if not (isinstance(task, tuple) and len(task) == 2 and isinstance(task[1], Path)):
        return Parcel(pickle.dumps((task, ())))
    trial, folder = task
    kept = {str(path.relative_to(folder)): path for path in _checkpoints(trial, folder)}
    return Parcel(pickle.dumps((task, _code_of(trial))), dict(_bundles(trial)), kept, str(folder))


def open_parcel(task: bytes, places: Mapping[str, str]) -> Any:  # noqa: ANN401 - any task
    """Return a task for a machine where files are elsewhere.

    Args:
        task: The pickled task, and the code in it that the user trusts.
        places: From the paths that the task knows to where these are.
    """
    found, code = _moved(pickle.loads(task), places)
    trust(code)
    return found


def _code_of(value: object) -> tuple[str, ...]:
    """Return the trusted code that a part of a task names."""
    own = own_code(value) if isinstance(value, Method) else []
    parts = (name for part in _parts(value).values() for name in _code_of(part))
    return (*filter(is_trusted, own), *parts)


def _checkpoints(trial: object, folder: Path) -> Iterator[Path]:
    if isinstance(trial, AttackTrial) and trial.checkpoint:
        training = TrainTrial(trial.scenario, trial.defense, trial.seed)
        protocol = build_protocol(trial.scenario.protocol)
        for version in attackable([trial.checkpoint], protocol):
            path = training.checkpoint(folder, version)
            if path.exists():  # else training failed, as the cell will say
                yield path


def _bundles(value: object) -> Iterator[tuple[str, tuple[Bundle, str]]]:
    """Yield the files that a part of a task names."""
    if isinstance(value, Method):
        file = file_of(value.name)
        if file is not None and file.is_file():
            yield value.name.rpartition(":")[0], (_code(file), file.name)
        place = str(value.options.get("id", ""))  # of a model of transformers, in a folder
        if value.name == "hf" and Path(place).expanduser().exists():
            yield place, _pretrained(Path(place).expanduser(), place)
    if isinstance(value, Scenario):
        yield from _data(value.dataset, value.data_folder)
    if isinstance(value, TableTrial):
        name, folder = find_data(value.dataset, value.data)
        if name in DATASETS:
            yield from _data(name, folder)
        else:
            yield str(value.data), (_examples(name, value.dataset), "")
    if isinstance(value, CaptureTrial):
        yield from _data(value.dataset_name, value.data_folder)
        for folder, content in zip(value.captures, value.contents, strict=True):
            files = {
                str(one.relative_to(folder)): one for one in folder.rglob("*") if one.is_file()
            }
            yield str(folder), (Bundle(f"capture-{content[:64]}", files), "")
    for part in _parts(value).values():
        yield from _bundles(part)


def _code(file: Path) -> Bundle:
    files = {str(found.relative_to(file.parent)): found for found in local_files(file)}
    return Bundle(f"code-{content_of(file)}", files)


def _pretrained(path: Path, id: str) -> tuple[Bundle, str]:
    """Return the files of a model, in a folder or in one file."""
    files = [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]
    bundle = Bundle(f"model-{model_fingerprint(id)}", {f"{path.name}/{f.name}": f for f in files})
    return bundle, f"{path.name}/{path.name}" if path.is_file() else path.name


def _data(dataset: str, folder: Path | None) -> Iterator[tuple[str, tuple[Bundle, str]]]:
    """Yield data by path, or what was downloaded; what comes with the package is there."""
    if dataset not in DATASETS:
        path = Path(dataset).expanduser()
        if path.exists():
            yield dataset, (_examples(dataset, path.resolve().name), path.resolve().name)
        return
    place = (folder or DOWNLOADS).expanduser()
    if files := {str(path.relative_to(place)): path for path in downloads(dataset, place)}:
        yield DOWNLOAD + dataset, (Bundle(f"download-{dataset}", files), "")


def _examples(dataset: str, name: str) -> Bundle:
    """Return the examples at a path, in a folder of some name."""
    path = Path(dataset).expanduser().resolve()
    files = {f"{name}/{one.relative_to(path)}": one for one in example_files(path)}
    return Bundle(f"data-{fingerprint(dataset)}", files if path.is_dir() else {name: path})


def _parts(value: object) -> dict[str, Any]:
    """Return what an object is made of, where it may name files."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return {str(index): part for index, part in enumerate(value)}
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value) if one.init}
    return {}


def _moved(value: T, places: Mapping[str, str]) -> T:
    """Return an object whose paths are where they are now."""
    found: Any = value
    if isinstance(value, str | Path):
        source, colon, attribute = str(value).rpartition(":")
        if str(value) in places:
            found = places[str(value)] if isinstance(value, str) else Path(places[str(value)])
        elif colon and source in places:
            found = f"{places[source]}:{attribute}"
        return found  # type: ignore[no-any-return]
    parts = _parts(value)
    moved = {name: _moved(part, places) for name, part in parts.items()}
    changed = {name: part for name, part in moved.items() if part is not parts[name]}
    changed |= _downloaded(value, places)
    if not changed:
        return value
    if isinstance(value, tuple):
        return type(value)(moved.values())
    if isinstance(value, dict):
        return moved  # type: ignore[return-value]
    if isinstance(value, BaseModel):
        return value.model_copy(update=changed)
    found = replace(value, **changed)  # type: ignore[type-var]
    for name in ("cell",):  # whoever runs it compares the key with that of its own code
        if name in vars(value):
            vars(found)[name] = vars(value)[name]
    return found  # type: ignore[no-any-return]


def _downloaded(value: object, places: Mapping[str, str]) -> dict[str, Path]:
    """Return where a part of a task finds its download, if that has travelled."""
    keys = {
        Scenario: ("data_folder", "dataset"),
        CaptureTrial: ("data_folder", "dataset_name"),
        TableTrial: ("data", "dataset"),
    }
    key, name = keys.get(type(value), ("", ""))
    place = places.get(f"{DOWNLOAD}{getattr(value, name, '')}") if key else None
    return {} if place is None else {key: Path(place)}
