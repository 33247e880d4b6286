from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from leakfrontier.evaluate.foundations import errors
from leakfrontier.evaluate.foundations.errors import (
    OWN_FOLDER,
    UserError,
    given_by_user,
    is_about_users_files,
    users_line,
    writable,
)
from leakfrontier.evaluate.foundations.plugins import load_attribute
from leakfrontier.evaluate.run.config import ConfigError
from leakfrontier.evaluate.run.store import StoreError


@given_by_user()
def fail(error: Exception) -> None:
    raise error


def test_a_value_error_in_what_the_user_gave_is_the_users() -> None:
    with pytest.raises(UserError, match="ratio must be in") as caught:
        fail(ValueError("ratio must be in (0, 1], got 2"))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("error", [KeyError("ours"), ConfigError("theirs"), StoreError("theirs")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error


def test_a_line_of_the_users_is_told_from_ours(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def first(values):\n    return values[0]\n\ndef call(function):\n    function()\n"
    )
    with pytest.raises(IndexError) as theirs:
        load_attribute(f"{file}:first")([])
    assert users_line(theirs.value) == f"{file}, line 2, in first"
    with pytest.raises(ZeroDivisionError) as called:
        load_attribute(f"{file}:call")(lambda: 1 / 0)
    assert users_line(called.value) == f"{file}, line 5, in call"
    with pytest.raises(ZeroDivisionError) as ours:
        1 / 0  # noqa: B018
    assert users_line(ours.value) is None


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    folder = writable(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert not [*folder.iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to the folder .*choose another folder"):
        writable(tmp_path / "file" / "out")


def test_files_of_users_are_told_from_ours(tmp_path: Path) -> None:
    own = Path(tempfile.gettempdir()) / f"{OWN_FOLDER}abc" / "results.sqlite"
    for ours in (own, Path(errors.__file__).with_name("absent.yaml"), Path(pytest.__file__)):
        assert not is_about_users_files(PermissionError(errno.EACCES, "denied", str(ours)))
    study = tmp_path / f"{OWN_FOLDER}study" / "config.yaml"
    for theirs in (study, "relative.yaml", b"/data/cifar10"):
        assert is_about_users_files(PermissionError(errno.EACCES, "denied", theirs))


def test_an_error_without_a_file_is_ours_unless_the_disk_is_full() -> None:
    assert not is_about_users_files(OSError("a pipe of ours"))
    assert not is_about_users_files(OSError(errno.EBADF, "bad descriptor", 3))
    assert is_about_users_files(OSError(errno.ENOSPC, "no space left on device"))
