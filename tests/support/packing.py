"""Packs of made-up runs, and packs that were tampered with."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from synthetic import make_results

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.store import Store
from leakfrontier.evaluate.share.pack import write_pack
from leakfrontier.evaluate.share.packed_rows import outcomes_of

_NOT_LABELS = ("cell", "kind", "status", "error", "note", "seconds", "busy")


def packed(results: Conclusions, path: Path) -> Path:
    """Write the pack of results, whatever made them."""
    names = [name for name in results.cells if name not in _NOT_LABELS]
    labels: list[dict[str, Any]] = []
    for _, cell in results.cells.iterrows():
        known = {name: cell[name] for name in names}
        labels.append({k: _plain(v) for k, v in known.items() if not _absent(v)})
    path.write_bytes(write_pack(results, labels, outcomes_of(results), results.config, {}))
    return path


def make_pack(folder: Path, name: str = "made-up", **options: Any) -> tuple[Conclusions, Path]:  # noqa: ANN401
    """Return made-up results, as `make_results` writes them to a folder, and their pack."""
    results = make_results(folder, **options)
    return results, packed(Store(folder).results(), folder / f"{name}.zip")


def rewritten(path: Path, edit: Callable[[dict[str, bytes]], None], *, sums: bool = False) -> None:
    """Write a pack again with other entries; with `sums`, by one who knows how checksums work."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    edit(entries)
    if sums:
        del entries["SHA256SUMS"]
        lines = [f"{hashlib.sha256(body).hexdigest()}  {n}\n" for n, body in entries.items()]
        entries["SHA256SUMS"] = "".join(lines).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in entries.items():
            archive.writestr(name, body)


def _absent(value: Any) -> bool:  # noqa: ANN401 - any label
    return not isinstance(value, dict | list) and bool(pd.isna(value))


def _plain(value: Any) -> Any:  # noqa: ANN401 - any label
    return value.item() if hasattr(value, "item") else value
