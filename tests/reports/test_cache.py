from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from leakfrontier.reports import cache
from leakfrontier.reports.cache import cached


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache, which is not there yet."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


def never() -> bytes:
    raise AssertionError("it was made again")


def test_the_same_inputs_are_made_once() -> None:
    assert cached(lambda: b"first", "svg", "a") == b"first"
    assert cached(never, "svg", "a") == b"first"
    assert cached(lambda: b"other", "svg", "b") == b"other"
    assert cached(lambda: b"joined", "svga") == b"joined"


def test_another_version_makes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cached(lambda: b"old", "a")
    monkeypatch.setattr(cache, "version", lambda _: "99")
    assert cached(lambda: b"new", "a") == b"new"


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda content: content[:-1], lambda c: b"x" + c]
)
def test_a_damaged_file_is_made_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    cached(lambda: b"content", "a")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert cached(lambda: b"again", "a") == b"again"
    assert cached(never, "a") == b"again"


def test_without_a_folder_everything_is_made(folder: Path) -> None:
    folder.parent.touch()
    for content in (b"first", b"second"):
        assert cached(lambda content=content: content, "a") == content  # type: ignore[misc]


def test_the_oldest_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    for age, name in enumerate("cba"):
        cached(name.encode, name)
        newest = max(folder.iterdir(), key=lambda file: file.stat().st_ctime_ns)
        os.utime(newest, (age, age))
    assert len([*folder.iterdir()]) == 2
    assert cached(never, "a") == b"a"
    assert cached(lambda: b"again", "c") == b"again"


def test_it_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached(lambda: b"content", "a")
    assert len([*(tmp_path / "leakfrontier").iterdir()]) == 1
