"""Errors that users can correct, separate from errors of the harness."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile, gettempdir

PLUGIN = "leakfrontier_plugin_"
"""Prefix of the module names of users' files. A hash of path and content follows."""

OWN_FOLDER = "leakfrontier-"
"""Prefix of the names of our temporary folders."""

_OURS = tuple(
    file.parents[2] / name
    for file in (Path(__file__).absolute(), Path(__file__).resolve())  # files may be links
    for name in ("adversaries", "defenses", "evaluate", "reports")
)
_PYTHONS = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class UserError(ValueError):
    """A mistake of the user. The command line shows only its message."""


@contextmanager
def given_by_user() -> Iterator[None]:
    """Turn a ValueError into a `UserError`, for options of methods, models and data."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def users_line(error: BaseException) -> str | None:
    """Return the line of a user's file that an error comes from; None if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        name, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if name.startswith(PLUGIN) or (name == "__main__" and function != "<module>"):
            return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return None


def writable(folder: Path) -> Path:
    """Return a folder for results, created if needed; raise if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder} ({error.strerror}): choose another folder"
        ) from error


def is_about_users_files(error: OSError) -> bool:
    """Return whether an error is about a user's file or about a full disk.

    Files of the package, of Python and in our temporary folders are not the user's files.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return False
    path = Path(os.fsdecode(error.filename))
    temporary = Path(gettempdir()).resolve() / OWN_FOLDER
    return not (
        any(path.absolute().is_relative_to(folder) for folder in _OURS)
        or any(path.resolve().is_relative_to(folder) for folder in (*_OURS, *_PYTHONS))
        or str(path.resolve()).startswith(str(temporary))
    )
