"""Archives of packs. The same entries give the same bytes, and every entry has a checksum.

Reading executes nothing. It rejects archives that are damaged, too large or altered, or that have
unsafe names.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..foundations.errors import UserError

SUMS = "SHA256SUMS"
MOST_ENTRIES, MOST_BYTES = 20_000, 2**28
"""The limits of an archive. Larger ones are rejected unread."""

_STORED = ("png", "wav")  # compression does not help


class PackError(UserError):
    """A file is not a pack, or cannot be used. The message says why."""


class AlteredError(PackError):
    """A pack does not match its checksums."""


def zipped(entries: Mapping[str, bytes]) -> bytes:
    """Return an archive that depends only on its entries."""
    sums = "".join(f"{sha256(body)}  {name}\n" for name, body in sorted(entries.items()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in sorted({**entries, SUMS: sums.encode()}.items()):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            stored = name.endswith(_STORED)
            info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(info, body, compresslevel=9)
    return buffer.getvalue()


def unzipped(path: Path, needed: Iterable[str]) -> dict[str, bytes]:
    """Return the entries of an archive after a check of their checksums.

    Args:
        path: The archive.
        needed: Names that every pack has.

    Raises:
        PackError: If it is not a pack, or cannot be read.
        AlteredError: If an entry does not match its checksum.
    """
    entries = _entries(path)
    for name in (*needed, SUMS):
        if name not in entries:
            raise PackError(f"{path} has no {name}: it is not a pack, or only a part of one")
    sums_text = entries.pop(SUMS).decode(errors="replace")
    lines = (line.partition("  ") for line in sums_text.splitlines())
    sums = {name: total for total, _, name in lines}
    for name in sorted({*sums, *entries}):
        if name not in sums or name not in entries or sha256(entries[name]) != sums[name]:
            raise AlteredError(f"{path}: {name} does not match {SUMS}; the pack was altered")
    return entries


def sha256(body: bytes) -> str:
    """Return the SHA-256 checksum of some bytes."""
    return hashlib.sha256(body).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(path: Path) -> dict[str, bytes]:
    """Return the entries of an archive. Raise if it is damaged, too large or has unsafe names."""
    if path.exists() and not path.is_file():
        raise PackError(f"{path} is not a file: `leakfrontier pack DIR` makes a pack")
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            names = [info.filename for info in infos]
            if len(infos) > MOST_ENTRIES or sum(info.file_size for info in infos) > MOST_BYTES:
                raise PackError(f"{path} is too large for a pack and was not read")
            for name in names:
                if not _is_plain(name):
                    raise PackError(f"{path} has an entry that no pack has: {name!r}")
            if len({*names}) < len(names):
                raise PackError(f"{path} has two entries of one name, which no pack has")
            return {info.filename: archive.read(info) for info in infos}
    except FileNotFoundError:
        raise PackError(f"there is no pack {path}: `leakfrontier pack DIR` makes one") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, RuntimeError) as error:
        raise PackError(f"{path} is not a pack, or damaged: {error}") from error
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, PackError):
            raise
        raise PackError(f"{path} is not a pack, or damaged: {error}") from error


def _is_plain(name: str) -> bool:
    """Return whether a name stays inside the folder to which it would be extracted."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not (
        name.startswith("/") or name.endswith("/") or "\\" in name or ":" in name or ".." in parts
    )
