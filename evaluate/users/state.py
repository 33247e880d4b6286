"""Save what a defense remembers between rounds, and restore it in another process.

The saved bytes name classes but contain no code. Only classes of the defense itself, of ours, of
torch's layers and plain containers are restored. So a file from others cannot run anything.
"""

from __future__ import annotations

import collections
import io
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Defense

from ..foundations.errors import PLUGIN

_PLAIN: frozenset[type] = frozenset(
    [
        *(object, int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set),
        *(frozenset, range, slice, collections.OrderedDict, collections.defaultdict),
        *(collections.deque, collections.Counter, random.Random, torch.Size, torch.device),
        *(nn.Parameter, np.dtype),
    ]
)
_FUNCTIONS = {("copyreg", "_reconstructor")}
_LENGTH = struct.Struct("<Q")


def saved(defense: Defense) -> bytes:
    """Return a defense, with what it remembers, as bytes.

    Raises:
        ValueError: If it remembers something that cannot be saved.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    try:
        pickler.dump(defense)
    except Exception as error:  # parts of the state may raise anything
        raise ValueError(_problem(defense, "saved", error)) from error
    stream = buffer.getvalue()
    tensors = {str(place): value for place, value in enumerate(pickler.tensors)}
    return _LENGTH.pack(len(stream)) + stream + (save_tensors(tensors) if tensors else b"")


def restored(content: bytes, like: Defense) -> Defense:
    """Return a saved defense.

    Args:
        content: The bytes that `saved` returned.
        like: The same defense without its state. Its classes may be restored.

    Raises:
        ValueError: If the bytes hold anything else.
    """
    try:
        (size,) = _LENGTH.unpack_from(content)
        stream, rest = (content[_LENGTH.size :][part] for part in (slice(size), slice(size, None)))
        found = _Unpickler(stream, load_tensors(rest) if rest else {}, like).load()
        if type(found) is not type(like):
            raise ValueError(f"it is a {type(found).__name__}")
        return found
    except Exception as error:  # whatever a damaged file raises
        raise ValueError(_problem(like, "restored", error)) from error


def _problem(defense: Defense, done: str, error: Exception) -> str:
    return (
        f"what {type(defense).__name__} remembers between rounds cannot be {done}: {error}. "
        "Keep tensors, numbers, text and containers of these"
    )


class _Pickler(pickle.Pickler):
    """Names classes, and takes tensors out of the stream."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._kept: list[Tensor] = []  # keeps them alive, so that their ids are not reused

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:  # noqa: ANN401 - any value
        """Return how to find a value again; None for values that the stream holds."""
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__
        if type(value) is Tensor:
            return "tensor", self._place(value), value.requires_grad
        if isinstance(value, nn.Parameter):
            return "parameter", self._place(value), value.requires_grad
        if isinstance(value, np.ndarray):
            return "array", self._place(torch.from_numpy(np.ascontiguousarray(value)))
        if isinstance(value, Generator):
            return "generator", self._place(value.get_state())
        if isinstance(value, torch.dtype):
            return "dtype", str(value).removeprefix("torch.")
        return None

    def _place(self, value: Tensor) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self._kept.append(value)
            self.tensors.append(value.detach().cpu().contiguous().clone())
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Restores the classes of a defense and plain data, and refuses all else."""

    def __init__(self, stream: bytes, tensors: dict[str, Tensor], like: Defense) -> None:
        super().__init__(io.BytesIO(stream))
        self._tensors, self._made = tensors, dict[int, Tensor]()
        self._classes = {(c.__module__, c.__qualname__): c for c in _classes(like, set())}

    def persistent_load(self, name: Any) -> Any:  # noqa: ANN401 - any value
        """Return what `persistent_id` named."""
        match name:
            case ("class", str(module), str(qualname)):
                return self._class(module, qualname)
            case ("tensor" | "parameter" as kind, int(place), bool(slope)):
                if place not in self._made:
                    value = self._tensors[str(place)]
                    made = nn.Parameter(value, slope) if kind == "parameter" else value
                    self._made[place] = made.requires_grad_(slope)
                return self._made[place]
            case ("array", int(place)):
                return self._tensors[str(place)].numpy()
            case ("generator", int(place)):
                rng = Generator()
                rng.set_state(self._tensors[str(place)])
                return rng
            case ("dtype", str(kind)) if isinstance(getattr(torch, kind, None), torch.dtype):
                return getattr(torch, kind)
        raise ValueError(f"{name!r} is unknown")

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a function
        """Return a function of a short list."""
        if (module, name) in _FUNCTIONS:
            return super().find_class(module, name)
        return self._class(module, name)

    def _class(self, module: str, name: str) -> type:
        if (module, name) in self._classes:
            return self._classes[module, name]
        for (place, own), cls in self._classes.items():  # the same file, elsewhere
            if own == name and place.startswith(PLUGIN) and module.startswith(PLUGIN):
                return cls
        known = module.startswith(("torch.nn.modules.", "leakfrontier.defenses.", PLUGIN))
        if known and module in sys.modules:
            found = super().find_class(module, name)
            if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name):
                return found
        raise ValueError(f"{module}.{name} is not restored")


def _classes(value: object, met: set[int]) -> Iterator[type]:
    """Yield the plain classes, and all classes of a value and of what it holds."""
    yield from _PLAIN
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        yield type(one)
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, Defense):
            waiting += vars(one).values()
