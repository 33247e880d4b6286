"""Files of the attacked uploads of a training: what the server saw, and what it did not see."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from leakfrontier.defenses import Batch, Update

from ..client.clients import Memory


@dataclass(frozen=True)
class Logged:
    """An upload as the server saw it.

    Attributes:
        round: Its round, from 1.
        clients: The clients behind it.
        model: The trained weights that they received.
        update: The upload.
    """

    round: int
    clients: tuple[int, ...]
    model: Update
    update: Update


@dataclass(frozen=True)
class Hidden:
    """What the server did not see of a client's upload.

    Attributes:
        rows: The training examples that the client used.
        trained_on: What its last local step saw of each of them.
        memory: What the client remembered before the round; a text says why it cannot be saved.
    """

    rows: Tensor
    trained_on: Batch
    memory: Memory | str


class UploadLog:
    """What the server saw of the attacked uploads, and of the same clients' uploads before."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path, 3)
        self._models: dict[str, Update] = {}

    @staticmethod
    def write(path: Path, uploads: Sequence[tuple[int, Sequence[Logged]]]) -> None:
        """Write the log.

        Args:
            path: The file.
            uploads: For each attacked upload, the attacked client, the upload and then the ones
                before it, newest first.
        """
        tensors: dict[str, Tensor] = {}
        models: dict[int, str] = {}
        about = []
        for number, (victim, several) in enumerate(uploads):
            lines: list[dict[str, Any]] = []
            for age, one in enumerate(several):
                model = models.setdefault(id(one.model), f"{len(models)}")
                tensors |= {f"model/{model}/0/{name}": value for name, value in one.model.items()}
                place = f"update/{number}/{age}"
                tensors |= {f"{place}/{name}": value for name, value in one.update.items()}
                lines.append({"round": one.round, "clients": one.clients, "model": model})
            about.append([victim, lines])
        write_tensors(path, tensors, about)

    def uploads(self, number: int) -> int:
        """Return how many uploads are logged: an attacked one, and the ones before it."""
        return len(self._about[number][1])

    def upload(self, number: int, age: int = 0) -> Logged:
        """Return an attacked upload, or one that its client sent before.

        Args:
            number: The number of the attacked upload.
            age: How many uploads the client has sent since.
        """
        line = self._about[number][1][age]
        return Logged(
            line["round"],
            tuple(line["clients"]),
            self._model(line["model"]),
            self._file.at(f"update/{number}/{age}"),
        )

    def __len__(self) -> int:
        """Return the number of attacked uploads."""
        return len(self._about)

    def victim(self, number: int) -> int:
        """Return the attacked client of an upload."""
        return int(self._about[number][0])

    @property
    def _about(self) -> list[tuple[int, list[dict[str, Any]]]]:
        return self._file.about  # type: ignore[no-any-return]

    def _model(self, name: str) -> Update:
        if name not in self._models:
            self._models[name] = self._file.at(f"model/{name}/0")
        return self._models[name]


class SecretLog:
    """What the server did not see of the attacked uploads, by round and client."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path, 2)

    @staticmethod
    def write(path: Path, secrets: Mapping[tuple[int, int], Hidden]) -> None:
        """Write the log."""
        tensors: dict[str, Tensor] = {}
        about = {}
        for (number, client), one in secrets.items():
            place = f"{number}/{client}"
            tensors[f"{place}/rows"] = one.rows
            tensors[f"{place}/inputs"], tensors[f"{place}/targets"] = one.trained_on
            if isinstance(one.memory, str):
                about[place] = one.memory
                continue
            content = bytearray(one.memory.defense)
            tensors[f"{place}/memory"] = torch.frombuffer(content, dtype=torch.uint8)
            for batch, rows in enumerate(one.memory.epoch):
                tensors[f"{place}/epoch/{batch}"] = rows
        write_tensors(path, tensors, about)

    def clients(self, number: int) -> list[int]:
        """Return the clients whose uploads of a round are logged."""
        places = (place.split("/") for place in self._file.names)
        return sorted({int(place[1]) for place in places if int(place[0]) == number})

    def __getitem__(self, key: tuple[int, int]) -> Hidden:
        """Return what was hidden of an upload, by round and client."""
        place = f"{key[0]}/{key[1]}"
        found = self._file.at(place)
        memory: Memory | str = self._file.about.get(place, "")
        if not memory:
            epoch = sorted((n for n in found if n.startswith("epoch/")), key=lambda n: int(n[6:]))
            content = bytes(found["memory"].numpy())
            memory = Memory(content, tuple(found[name] for name in epoch))
        return Hidden(found["rows"], Batch(found["inputs"], found["targets"]), memory)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: object = None) -> None:
    """Write tensors, and what JSON says about them, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    values = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    save_file(values, unfinished, {"about": json.dumps(about)})
    unfinished.replace(path)


@dataclass(frozen=True)
class _File:
    """An open file of tensors.

    Attributes:
        file: The file.
        names: The names of its tensors, by the place that they begin with.
        about: What JSON says about them.
    """

    file: Any
    names: dict[str, list[str]]
    about: Any

    def at(self, place: str) -> Update:
        """Return the tensors of a place, by the rest of their names."""
        names = self.names.get(place, [])
        return {name: self.file.get_tensor(f"{place}/{name}") for name in names}


def _opened(path: Path, parts: int) -> _File:
    """Return a file whose places have some parts. Many cells read the same one."""
    return _open(path, path.stat().st_mtime_ns, parts)


@lru_cache(maxsize=4)
def _open(path: Path, _: int, parts: int) -> _File:
    file: Any = safe_open(path, "pt")
    names: dict[str, list[str]] = {}
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        pieces = name.split("/", parts)
        names.setdefault("/".join(pieces[:-1]), []).append(pieces[-1])
    return _File(file, names, json.loads(file.metadata()["about"]))
