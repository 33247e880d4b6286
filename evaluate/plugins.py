"""Objects of the user's own code, by name."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def load_attribute(spec: str) -> Any:  # noqa: ANN401
    """Return what `package.module:name` or `path/to/file.py:name` refers to.

    A file is executed once in a process, so that loading it again gives the same classes, unless
    it was edited.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ValueError(f"expected package.module:name or path/to/file.py:name, got {spec!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        own = (key for key, value in vars(module).items() if _defined_in(module, value))
        raise ValueError(f"{source} has no {name!r}; it defines {', '.join(own) or 'nothing'}")
    return getattr(module, name)


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
    content = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()
    name = f"leakfrontier_plugin_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their own module up while it is executed
    try:
        # Not by an import: bytecode on disk can be older than an edit of the same second.
        exec(compile(content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} fails when it is loaded: {reason}") from error
    return module


def _defined_in(module: ModuleType, value: object) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
