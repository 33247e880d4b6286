"""What a task sends to another machine and what it returns. The machines share no disk.

A cell refers to users' files, data and captures by their paths, and to its models' checkpoints by
the folder of its run. A parcel names these files. Where it is opened, the files are in other
places, and the cell's paths are replaced. A cell's key contains no folder, so it stays the same.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from ..foundations.by_value import pickled, receive
from ..foundations.plugins import is_trusted, trust

T = TypeVar("T")

DOWNLOAD = "download:"
"""Prefix of the name of a dataset whose download travels."""


@dataclass(frozen=True)
class Bundle:
    """Files that travel together.

    Attributes:
        name: The name under which it is stored. Equal content has an equal name.
        files: Where each file is, by its name within the bundle.
    """

    name: str
    files: Mapping[str, Path]

    def read(self) -> bytes:
        """Return all files as one archive."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, path in self.files.items():
                archive.writestr(name, path.read_bytes())
        return buffer.getvalue()


Files = Iterator[tuple[str, tuple[Bundle, str]]]
"""For each file: the path by which a task knows it, its bundle, and its name in the bundle."""


class Traveller:
    """A part of a task that lists the files and the code that it names.

    Attributes:
        download: The field with the folder of downloads, and the field with the dataset's name.
    """

    download: ClassVar[tuple[str, str] | None] = None

    def files(self) -> Files:
        """Yield the files that it names itself. Its parts list their own."""
        return iter(())

    def code(self) -> Sequence[str]:
        """Return the code that it names itself, as `load_attribute` takes it."""
        return ()

    def needed(self, folder: Path) -> Iterator[Path]:
        """Yield the files that it needs from the folder of its run."""
        return iter(())


@dataclass(frozen=True)
class Parcel:
    """A task and what it needs.

    Attributes:
        task: The pickled task, the names of its trusted code, and values without a file.
        bundles: Bundles by the path by which the task knows them, each with a name within the
            bundle. An empty name stands for the whole bundle.
        checkpoints: Files of the run's folder, by their names there.
        folder: The folder of the run, as the task knows it; None if it has none.
    """

    task: bytes
    bundles: Mapping[str, tuple[Bundle, str]] = field(default_factory=dict)
    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    folder: str | None = None


def pack(task: object) -> Parcel:
    """Return a task with everything that it needs."""
    if not (isinstance(task, tuple) and len(task) == 2 and isinstance(task[1], Path)):
        return Parcel(pickle.dumps((task, (), {})))
    trial, folder = task
    needed = trial.needed(folder) if isinstance(trial, Traveller) else ()
    kept = {str(path.relative_to(folder)): path for path in needed}
    code = _code_of(trial)
    return Parcel(
        pickle.dumps((task, code, pickled(code))), dict(_bundles(trial)), kept, str(folder)
    )


def open_parcel(task: bytes, places: Mapping[str, str]) -> Any:  # noqa: ANN401 - any task
    """Return a task for a machine where files are in other places.

    Args:
        task: The pickled task, the names of its trusted code, and values without a file.
        places: From the paths that the task knows to the actual paths.
    """
    found, code, values = pickle.loads(task)
    found, code = _moved((found, code), places)
    trust(code)
    receive(values)
    return found


def _code_of(value: object) -> tuple[str, ...]:
    """Return the trusted code that a part of a task names."""
    own = value.code() if isinstance(value, Traveller) else ()
    parts = (name for part in _parts(value).values() for name in _code_of(part))
    return (*filter(is_trusted, own), *parts)


def _bundles(value: object) -> Files:
    """Yield the files that a part of a task names."""
    if isinstance(value, Traveller):
        yield from value.files()
    for part in _parts(value).values():
        yield from _bundles(part)


def _parts(value: object) -> dict[str, Any]:
    """Return the parts of an object that may name files."""
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
    """Return an object with its paths replaced by the actual ones."""
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
    for name in ("cell",):  # the worker compares this key with the key of its own code
        if name in vars(value):
            vars(found)[name] = vars(value)[name]
    return found  # type: ignore[no-any-return]


def _downloaded(value: object, places: Mapping[str, str]) -> dict[str, Path]:
    """Return where a part of a task finds its download, if the download has travelled."""
    keys = value.download if isinstance(value, Traveller) else None
    if keys is None:
        return {}
    folder, dataset = keys
    place = places.get(f"{DOWNLOAD}{getattr(value, dataset)}")
    return {} if place is None else {folder: Path(place)}
