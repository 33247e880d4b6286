"""Archives of packs: the same bytes for the same entries, and what is wrong with one is seen."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packing import rewritten

from leakfrontier.evaluate.share import archive
from leakfrontier.evaluate.share.archive import SUMS, AlteredError, PackError, unzipped, zipped

ENTRIES = {"pack.json": b"{}\n", "rows/attacks.csv": b"True\n", "gallery/a.png": b"pixels"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return an archive that tests may spoil."""
    path = tmp_path / "pack.zip"
    path.write_bytes(zipped(ENTRIES))
    return path


def test_entries_come_back(path: Path) -> None:
    assert unzipped(path, ["pack.json"]) == ENTRIES


def test_bytes_depend_on_nothing_but_the_entries() -> None:
    assert zipped(dict(reversed(ENTRIES.items()))) == zipped(ENTRIES)
    assert zipped({**ENTRIES, "pack.json": b"{ }\n"}) != zipped(ENTRIES)


def _edited(entries: dict[str, bytes]) -> None:
    entries["rows/attacks.csv"] = b"False\n"


def _sum_edited(entries: dict[str, bytes]) -> None:
    first = b"1" if entries[SUMS].startswith(b"0") else b"0"
    entries[SUMS] = first + entries[SUMS][1:]


def _one_more(entries: dict[str, bytes]) -> None:
    entries["rows/more.csv"] = b""


def _one_less(entries: dict[str, bytes]) -> None:
    del entries["rows/attacks.csv"]


@pytest.mark.parametrize("edit", [_edited, _sum_edited, _one_more, _one_less])
def test_alterations_are_seen(path: Path, edit: Callable[..., None]) -> None:
    rewritten(path, edit)
    with pytest.raises(AlteredError, match="the pack was altered"):
        unzipped(path, ["pack.json"])


@pytest.mark.parametrize(
    "name", ["../outside.csv", "/etc/passwd", "sources/../../x.py", "C:\\x", "folder/"]
)
def test_names_stay_inside(path: Path, name: str) -> None:
    rewritten(path, lambda entries: entries.update({name: b""}))
    with pytest.raises(PackError, match="an entry that no pack has"):
        unzipped(path, ["pack.json"])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_are_not_given_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("pack.json", "{}")
    with pytest.raises(PackError, match="two entries of one name"):
        unzipped(path, ["pack.json"])


def test_what_is_no_pack(path: Path) -> None:
    whole = path.read_bytes()
    with pytest.raises(PackError, match="there is no pack"):
        unzipped(path.with_name("absent.zip"), [])
    for content in (whole[: len(whole) // 2], b"text"):
        path.write_bytes(content)
        with pytest.raises(PackError, match="not a pack, or damaged"):
            unzipped(path, [])
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")
    with pytest.raises(PackError, match=r"has no pack\.json"):
        unzipped(path, ["pack.json"])
    with pytest.raises(PackError, match="has no SHA256SUMS"):
        unzipped(path, [])


@pytest.mark.parametrize("limit", ["MOST_ENTRIES", "MOST_BYTES"])
def test_what_is_too_large_is_not_read(
    path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, limit, 3)
    with pytest.raises(PackError, match="too large for a pack"):
        unzipped(path, ["pack.json"])
