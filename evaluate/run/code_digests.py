"""A hash of the code that a cell runs. Changing the code invalidates the results it produced.

A cell's code consists of its methods, the files of its kind of cell, and all of our own modules
that these import. Only the `meaning` of code counts: moving or renaming a module, or rewording a
docstring, reruns nothing. Imports are read, not executed.

If a package only re-exports a name, the name is followed to the module that defines it. So an
attack does not depend on all others, and files that only list methods (`__init__` and the panel)
do not count. For a user's file, its imports from its own folder count as well.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leakfrontier.adversaries import Adversary
from leakfrontier.defenses import Chain, Defense

from ..foundations.by_value import is_in_hand
from ..foundations.errors import PLUGIN
from ..foundations.plugins import ROOT, file_digest, load_attribute, local_files, while_unedited
from ..users.methods import Method
from .meaning import meaning

PACKAGE = "leakfrontier"
LISTS = ("__init__.py", "panel.py")

JOINT = "evaluate/run/cells.py"
"""This file counts for all kinds of cells. Its imports count only by kind, as listed here."""

TRAINING = (
    JOINT,
    "evaluate/run/training_clients.py",
    "evaluate/run/training_server.py",
    "evaluate/world/enrolment.py",
    "evaluate/run/trained_audit.py",
    "evaluate/run/trained_inversion.py",
    "evaluate/privacy/claims.py",
)
TRAINED = (*TRAINING, "evaluate/run/trained_scenes.py")
REPLAY = (
    JOINT,
    "evaluate/client/examination.py",
    "evaluate/client/inversion.py",
    "evaluate/client/discrimination.py",
)
ATTACK = (
    *REPLAY,
    "evaluate/foundations/lazy.py",
    "evaluate/run/scenes.py",
    "evaluate/run/server.py",
)


def source_digest(path: Iterable[str], *methods: object) -> str:
    """Return a hash of the code of a cell.

    Args:
        path: The files of its kind of cell, relative to `ROOT`.
        methods: Its defense, adversary or function. A chain stands for its links.
    """
    files = {ROOT / name for name in (*path, *_used(methods))}
    files.update(file for name in {*_modules(methods)} for file in _own(name))
    return _source_digest(frozenset((file, _edition(file)) for file in files))


def factories(model: Method) -> list[object]:
    """Return the user's function that makes a model; an empty list for registered models."""
    return [load_attribute(model.name)] if ":" in model.name else []


def _modules(methods: Iterable[object]) -> Iterator[str]:
    """Yield the names of the modules that define some functions, or the classes of objects."""
    for method in methods:
        if not is_in_hand(method):  # else its name identifies it
            yield getattr(method, "__module__", type(method).__module__)
        if isinstance(method, Chain):
            yield from _modules(method.links)


def _used(methods: Iterable[object]) -> Iterator[str]:
    """Yield our files that classes in hand may use: all of the folder that they extend."""
    for method in methods:
        for base, folder in ((Defense, "defenses"), (Adversary, "adversaries")):
            if is_in_hand(method) and isinstance(method, base):
                yield from (str(one.relative_to(ROOT)) for one in (ROOT / folder).rglob("*.py"))
        if isinstance(method, Chain):
            yield from _used(method.links)


def _edition(file: Path) -> tuple[int, int]:
    """Return what changes when a file is edited, as users do in a session."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@cache
def _source_digest(files: frozenset[tuple[Path, tuple[int, int]]]) -> str:
    digests = {meaning_digest(found) for file, _ in files for found in closure(file)}
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:20]


def _own(module: str) -> frozenset[Path]:
    """Return the file of a module, and for a user's module its imports from its own folder."""
    place = getattr(sys.modules[module], "__file__", None)
    if place is None:
        return frozenset()
    first = module.partition(".")[0]
    if first == PACKAGE:
        return frozenset([Path(place)])
    top = Path(sys.modules[first].__file__ or place)  # a namespace package has no file
    packaged = top.name == "__init__.py" and not first.startswith(PLUGIN)
    return local_files(Path(place), top.parents[1] if packaged else top.parent)


def meaning_digest(file: Path) -> str:
    """Return a hash of the meaning of a file and of what it imports from our modules."""
    if file == ROOT / JOINT:
        return _alone(file)
    meant = sorted(one.meant for one in _ours(file).values())
    return hashlib.sha256("\n".join([_alone(file), *meant]).encode()).hexdigest()


@while_unedited
def _alone(file: Path) -> str:
    """Return a hash of the meaning of a file alone, without the origin of its imports."""
    try:
        text = meaning(_parsed(file), {local: one.name for local, one in _ours(file).items()})
    except (SyntaxError, ValueError):  # an extension module, or code that cannot be loaded
        return file_digest(file)
    return hashlib.sha256(text.encode()).hexdigest()


class _Import(NamedTuple):
    """A name that a file imports from our modules: its origin, and its name there."""

    origins: frozenset[Path]
    name: str

    @property
    def meant(self) -> str:
        """Return what the name stands for, independent of the name of the defining file."""
        return " ".join([*sorted(map(_alone, self.origins)), self.name])


@while_unedited
def closure(file: Path) -> frozenset[Path]:
    """Return a file and all of our files that it imports, directly or indirectly."""
    found, waiting = {file}, [] if file == ROOT / JOINT else [file]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += new
    return frozenset(found)


def imported(file: Path) -> frozenset[Path]:
    """Return our files that define what a file imports."""
    return frozenset().union(*(one.origins for one in _ours(file).values()))


@while_unedited
def _ours(file: Path) -> dict[str, _Import]:
    """Return what a file imports from our modules, by its local names."""
    found: dict[str, _Import] = {}
    for node in ast.walk(_parsed(file)) if file.suffix == ".py" else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    whole = _whole(ROOT.joinpath(*alias.name.split(".")[1:]))
                    found[alias.asname or alias.name] = _import(whole, "module")
        elif isinstance(node, ast.ImportFrom) and (place := _module(node, file)) is not None:
            for alias in node.names:
                name = "module" if [*_whole(place / alias.name)] else alias.name
                found[alias.asname or alias.name] = _import(_defining(place, alias.name), name)
    return found


def _import(origins: Iterable[Path], name: str) -> _Import:
    return _Import(frozenset(one for one in origins if one.name not in LISTS), name)


def _module(node: ast.ImportFrom, file: Path) -> Path | None:
    """Return the path of one of our modules, without a suffix; None for others."""
    parts = node.module.split(".") if node.module else []
    if node.level:
        return file.parents[node.level - 1].joinpath(*parts)
    return ROOT.joinpath(*parts[1:]) if parts[:1] == [PACKAGE] else None


def _defining(module: Path, name: str) -> Iterator[Path]:
    """Yield the files that define a name of a module. Re-exports are followed."""
    if not module.is_dir():
        yield from _whole(module)
    elif name == "*" or (module / name).is_dir() or (module / f"{name}.py").is_file():
        yield from _whole(module if name == "*" else module / name)
    elif (module / "__init__.py").is_file():
        for node in _parsed(module / "__init__.py").body:
            if isinstance(node, ast.ImportFrom):
                origin = _module(node, module / "__init__.py")
                for alias in node.names:
                    if origin is not None and name == (alias.asname or alias.name):
                        yield from _defining(origin, alias.name)


def _whole(module: Path) -> Iterator[Path]:
    """Yield the file of a module, or all modules of a package."""
    if module.is_dir():
        yield from module.glob("*.py")
    elif module.with_suffix(".py").is_file():
        yield module.with_suffix(".py")


@while_unedited
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())
