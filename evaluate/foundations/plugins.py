"""Load the user's own code by name.

Code runs only if the user named it. `load_attribute` is the only place that loads code. It refuses
every name that was not passed to `trust` before. The check is by name, not by caller. So nothing in
a capture, a pack or a result folder runs, whichever process reads it.

Users name code on a command line, in their own configuration file, or in Python. Files from others
may name code only with `--trust-code`: see the callers of `trust`. Workers receive the names that
their parent trusts (`engine`). Workers on other machines receive the files too (`parcels`).

A trusted file runs in the harness's own processes and can see everything in them. A file imports
the modules beside it, as a script would. Each file has its own modules: two files may have modules
of the same name.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from .errors import PLUGIN, UserError
from .rows import digest

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
"""The folder that contains the package's top-level folders."""

_ADVICE = {
    "cannot inherit non-frozen dataclass from a frozen one": ". An adversary is frozen:\n"
    "    @dataclass(frozen=True)\n    class Mine(Adversary):",
    "cannot inherit frozen dataclass from a non-frozen one": ". A defense is not frozen:\n"
    "    @dataclass\n    class Mine(Defense):",
}
"""What to write, for errors of Python that do not say it."""

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages. Their modules are not the user's own."""


SESSION = "session-"
"""Prefix of the names of values without a file (see `by_value`)."""

_TRUSTED: set[str] = set()
_HELD: dict[str, Callable[[], object]] = {}


class UntrustedCodeError(UserError):
    """The user did not name this code. The message says what to do."""


def trust(specs: Iterable[str]) -> None:
    """Allow code to be loaded, because the user named it.

    Args:
        specs: Names as `load_attribute` takes them. Names without a colon are not code.
    """
    _TRUSTED.update(_place(spec) for spec in specs if ":" in spec)


def hold(spec: str, load: Callable[[], object]) -> None:
    """Let a name stand for a value without a file: see `by_value`."""
    _HELD[spec] = load
    trust([spec])


def trusted() -> frozenset[str]:
    """Return the names of the code that may be loaded, for worker processes."""
    return frozenset(_TRUSTED)


def is_trusted(spec: str) -> bool:
    """Return whether the user named this code."""
    return _place(spec) in _TRUSTED


def _place(spec: str) -> str:
    """Return a name that does not depend on the current folder."""
    file = file_of(spec)
    return spec if file is None else f"{file}:{spec.rpartition(':')[2]}"


def while_unedited(function: Callable[[Path], T]) -> Callable[[Path], T]:
    """Cache a function's result for a file until the file is edited."""
    kept = cache(lambda file, *_: function(file))

    @wraps(function)
    def call(file: Path) -> T:
        status = file.stat()
        return kept(file, status.st_mtime_ns, status.st_size)

    return call


def is_loaded(spec: str) -> bool:
    """Return whether the code is loaded already."""
    source, file = spec.rpartition(":")[0], file_of(spec)
    if file is None:
        return not source or spec in _HELD or source in sys.modules
    return not file.is_file() or _module_name(file) in sys.modules


def load_attribute(spec: str) -> Any:  # noqa: ANN401
    """Return the object that `package.module:name` or `path/to/file.py:name` names.

    A process executes a file once, so loading it again gives the same classes. If the file, or a
    file that it imports from its folder, was edited, it is executed again.

    Raises:
        UntrustedCodeError: If the user did not name the code.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ValueError(f"expected package.module:name or path/to/file.py:name, got {spec!r}")
    if spec in _HELD:
        return _HELD[spec]()
    if spec.startswith(SESSION):
        raise UserError(
            f"{name} was defined in a notebook or a script that is not running here. Run that "
            "again, or write it into a file and name it as file.py:name"
        )
    if not is_trusted(spec):
        raise UntrustedCodeError(
            f"{spec} is code that a file names, not you. It is executed only with --trust-code: "
            "read it first (in Python: leakfrontier.evaluate.foundations.plugins.trust)"
        )
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        own = (key for key, value in vars(module).items() if _defined_in(module, value))
        raise ValueError(f"{source} has no {name!r}; it defines {', '.join(own) or 'nothing'}")
    return getattr(module, name)


def file_of(spec: str) -> Path | None:
    """Return the file of `path/to/file.py:name`; None for other names."""
    source = spec.rpartition(":")[0]
    return Path(source).expanduser().resolve() if source.endswith(".py") else None


def _load_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise ValueError(
            f"cannot import {name} ({error}); install it, or give the path of its .py file"
        ) from error


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)  # first, because other finders would find the files too
    module = module_from_spec(_spec(name, path, package=True))
    sys.modules[name] = module  # dataclasses look up their module while it is executed
    try:
        _Loader(name, str(path)).exec_module(module)
    except (Exception, SystemExit) as error:
        for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
            del sys.modules[loaded]
        reason = f"{type(error).__name__}: {error}{_ADVICE.get(str(error), '')}"
        raise ValueError(f"{path} fails when it is loaded: {reason}") from error
    return module


def _module_name(path: Path) -> str:
    digest = hashlib.sha256(f"{path} {digest_with_imports(path)}".encode()).hexdigest()
    return f"{PLUGIN}{digest[:16]}"


class _Loader(SourceFileLoader):
    """Executes a user's file, or a file beside it. Its imports search its folder first."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the current file. Bytecode may predate an edit in the same second."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the file with its own `__import__`."""
        own = {**vars(builtins), "__import__": _importer(module.__name__.partition(".")[0])}
        vars(module)["__builtins__"] = own
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds modules beside a user's file. They are named as if the file were their package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module of a user's folder; None for other modules."""
        if path is None or not fullname.startswith(PLUGIN):
            return None
        for folder in map(Path, path):
            place = folder / fullname.rpartition(".")[2]
            if (place / "__init__.py").is_file():
                return _spec(fullname, place / "__init__.py", package=True)
            if place.with_suffix(".py").is_file():
                return _spec(fullname, place.with_suffix(".py"), package=False)
            if place.is_dir():
                spec = ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [str(place)]
                return spec
        return None


_FINDER = _Finder()


def _spec(name: str, file: Path, *, package: bool) -> ModuleSpec:
    spec = ModuleSpec(name, _Loader(name, str(file)), origin=str(file), is_package=package)
    spec.has_location = True
    if package:
        spec.submodule_search_locations = [str(file.parent)]
    return spec


def _importer(plugin: str) -> Callable[..., ModuleType]:
    """Return the `__import__` of a user's file, which searches the file's folder first."""

    def importing(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        first = name.partition(".")[0]
        if level or not _is_beside(plugin, first):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        # Import it like `from . import name` in the file itself.
        found = builtins.__import__(f"{plugin}.{name}", globals, locals, fromlist or (), 0)
        return found if fromlist else getattr(found, first)

    return importing


def _is_beside(plugin: str, name: str) -> bool:
    """Return whether a user's folder has a module. Folders without `__init__.py` come last."""
    folder = Path(sys.modules[plugin].__file__ or "").parent
    if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return True
    if not (folder / name).is_dir():
        return False
    try:
        elsewhere = find_spec(name)
    except (ImportError, ValueError):
        return False
    return elsewhere is None or elsewhere.origin is None


def digest_with_imports(file: Path) -> str:
    """Return a hash of a user's file and of the files of its folder that it imports."""
    parts = sorted((str(found.relative_to(file.parent)), found) for found in local_files(file))
    digest = hashlib.sha256()
    for name, found in parts:
        content = found.read_bytes()  # never cached: an edit in the same second counts
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def local_files(file: Path, folder: Path | None = None) -> frozenset[Path]:
    """Return a user's file and all files that it imports from its folder, also indirectly.

    Imports are read, not executed.

    Args:
        file: The file.
        folder: Where to look up its absolute imports. Default: the folder of the file.
    """
    folder = file.parent if folder is None else folder
    found, waiting = {file}, [] if folder.name in INSTALLED else [file]
    while waiting:
        importing = waiting.pop()
        for level, parts in _imports(importing.read_bytes()):
            base = importing.parents[level - 1] if level else folder
            new = {*_files(base, parts)} - found
            found |= new
            waiting += new
    return frozenset(found)


def _files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files below a folder that the import of a dotted name executes."""
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                yield file


@cache
def _imports(content: bytes) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return the level and the parts of every name that a file imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # loading the file reports the error
        return ()
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            found += [(node.level, (*module, alias.name)) for alias in node.names]
    return tuple(found)


@while_unedited
def file_digest(file: Path) -> str:
    """Return a hash of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def package_digest() -> str:
    """Return a hash of the package's source, without the reports."""
    parts = ("defenses", "adversaries", "evaluate")
    files = sorted(file for part in parts for file in (ROOT / part).rglob("*.py"))
    return digest([(file.relative_to(ROOT).as_posix(), file_digest(file)) for file in files])


def _defined_in(module: ModuleType, value: object) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
