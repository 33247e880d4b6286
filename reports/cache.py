"""A cache on disk for drawings and scripts that take long to make.

A file is named by a digest of everything that it was made from, so it is never out of date. Only
the fonts of this machine are left out. A file that is damaged or cannot be written is made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

VARIABLE = "LEAKFRONTIER_CACHE"
"""The environment variable that names another folder."""

MOST_FILES = 200
"""The oldest files beyond this number are removed."""

_DIGEST = sha256().digest_size


def cached(make: Callable[[], bytes], *inputs: str) -> bytes:
    """Return what `make` returns. Read it from the cache if it was made from the same inputs.

    Args:
        make: Makes the content with vl-convert, of whatever version is installed.
        inputs: Everything else that the content depends on.
    """
    name = sha256(repr((version("vl-convert-python"), *inputs)).encode()).hexdigest()
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        content = (_folder() / name).read_bytes()
        if sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return content[_DIGEST:]
    made = make()
    with suppress(OSError, RuntimeError):
        _store(_folder() / name, sha256(made).digest() + made)
    return made


def _folder() -> Path:
    usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(usual) / "leakfrontier")


def _store(path: Path, content: bytes) -> None:
    """Write a file atomically, and remove the oldest files if there are too many."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with NamedTemporaryFile(dir=path.parent, delete=False) as partial:
        partial.write(content)
    Path(partial.name).replace(path)
    files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for file in files[: max(0, len(files) - MOST_FILES)]:
        file.unlink(missing_ok=True)
