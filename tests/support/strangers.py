"""Files from others: a small run, its pack and a capture, and ways to spoil them."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from packing import rewritten
from rich.console import Console

from leakfrontier.adversaries import ImageSpace
from leakfrontier.evaluate.engines import engine
from leakfrontier.evaluate.engines.engine import Done, Failure
from leakfrontier.evaluate.outside.capture import Description, write_capture
from leakfrontier.evaluate.run import probe
from leakfrontier.evaluate.run.run import load_config, run
from leakfrontier.evaluate.run.store import FILE_NAME
from leakfrontier.evaluate.share.pack import pack_run
from leakfrontier.evaluate.users import methods

CONFIG: dict[str, Any] = {
    "scenarios": [
        {
            "title": "small",
            "dataset": "digits",
            "model": {"name": "mlp", "width": 8},
            "protocol": {"name": "FedAvg", "epochs": 1, "batch_size": 4, "lr": 0.1},
            "defenses": [{"name": "Chain", "links": [{"name": "TopK", "ratio": 0.5}, "SignSGD"]}],
            "candidates": 5,
            "checkpoints": [0],
            "training": {"rounds": 1, "clients": 2, "batch_size": 4},
        }
    ],
    "defenses": ["none"],
    "adversaries": ["PriorGuess", "LinearLeakage"],
    "observations": 2,
}
SECONDS = 30
"""After which a command hangs."""

Edit = Callable[[Path], object]
Place = tuple[str | int, ...]


def at_once(
    function: Callable[[Any], Any], tasks: Iterable[Any], **_: object
) -> Iterator[Done[Any, Any]]:
    """Do tasks here, where a test sees what they do; one that fails harms no other."""
    waiting = tasks if hasattr(tasks, "popleft") else [*tasks]
    while waiting:
        task = waiting.popleft() if hasattr(waiting, "popleft") else waiting.pop(0)
        try:
            yield Done(task, function(task), 0.0)
        except Exception as error:
            yield Done(task, Failure("error", f"{type(error).__name__}: {error}"), 0.0)


@contextmanager
def without_workers() -> Iterator[None]:
    """Let nothing run in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine, methods, probe):
            patch.setattr(module, "execute", at_once)
        yield


@contextmanager
def no_hang() -> Iterator[None]:
    """Stop what takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hangs: more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def write_files(root: Path) -> None:
    """Write `run` (a folder of results), `run.zip` (its pack) and `capture`."""
    with without_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("leakfrontier.evaluate.run.run.probe", lambda *_: [])
        run(load_config(CONFIG), root / "run", workers=1, console=Console(quiet=True))
        shutil.rmtree(root / "run" / "checkpoints", ignore_errors=True)
        (root / "run.zip").write_bytes(pack_run(root / "run"))
    about = Description.model_validate(
        {
            "model": {"name": "mlp", "width": 8},
            "space": ImageSpace((1, 8, 8), 10),
            "batch_size": 1,
            "protocol": {"name": "FedAvg", "epochs": 1, "batch_size": 1, "lr": 0.1},
            "defense": {"name": "Chain", "links": [{"name": "TopK", "ratio": 0.5}, "SignSGD"]},
            "labels": [3],
            "dataset": "digits",
            "client": "someone",
        }
    )
    model = about.build()
    update = {name: value.detach() for name, value in model.named_parameters()}
    truth = torch.zeros(1, 1, 8, 8), torch.tensor([3])
    folder, weights = root / "capture", model.state_dict()
    write_capture(folder, about, weights=weights, update=update, truth=truth)


def leaves(value: object, place: Place = ()) -> Iterator[Place]:
    """Yield where a JSON document has values that are neither lists nor objects."""
    inner: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield place
    for key, part in inner:
        yield from leaves(part, (*place, key))


def with_value(document: Any, place: Place, value: object) -> Any:  # noqa: ANN401 - any document
    """Return a document with another value in one place."""
    if not place:
        return value
    changed = document.copy()
    changed[place[0]] = with_value(document[place[0]], place[1:], value)
    return changed


def in_capture(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Return an edit of `capture.json`; a text is written as it is."""

    def edit(root: Path) -> None:
        path = root / "capture" / "capture.json"
        path.write_text(_text(change(json.loads(path.read_text()))))

    return edit


def in_pack(change: Callable[[dict[str, bytes]], object]) -> Edit:
    """Return an edit of a pack's entries, by one who knows how checksums work."""

    def edited(entries: dict[str, bytes]) -> None:
        change(entries)

    return lambda root: rewritten(root / "run.zip", edited, sums=True)


def in_meta(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Return an edit of `pack.json`; a text is written as it is."""

    def changed(entries: dict[str, bytes]) -> None:
        entries["pack.json"] = _text(change(json.loads(entries["pack.json"]))).encode()

    return in_pack(changed)


def in_labels(change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Return an edit of the labels of every attack in a folder of results."""

    def edit(root: Path) -> None:
        with database(root) as found:
            cells = found.execute("SELECT cell, labels FROM plan WHERE kind = 'attack'").fetchall()
            for cell, text in cells:
                new = _text(change(json.loads(text)))
                found.execute("UPDATE plan SET labels = ? WHERE cell = ?", (new, cell))

    return edit


def in_store(*statements: str) -> Edit:
    """Return an edit of a folder's results by SQL."""

    def edit(root: Path) -> None:
        with database(root) as found:
            for statement in statements:
                found.execute(statement)

    return edit


@contextmanager
def database(root: Path) -> Iterator[sqlite3.Connection]:
    """Open the results of the folder."""
    with closing(sqlite3.connect(root / "run" / FILE_NAME)) as found, found:
        yield found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
