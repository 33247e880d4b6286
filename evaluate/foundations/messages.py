"""Plain messages between processes: tensors by name, and JSON. Nothing in them is code."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

_LENGTH = struct.Struct("<Q")


def packed(tensors: Mapping[str, Tensor], about: object = None) -> bytes:
    """Return tensors, and what JSON says about them, as bytes."""
    text = json.dumps(about).encode()
    values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return b"".join([_LENGTH.pack(len(text)), text, save(values) if values else b""])


def unpacked(content: bytes) -> tuple[dict[str, Tensor], Any]:
    """Return what `packed` was given.

    Raises:
        ValueError: If the bytes are no such message.
    """
    try:
        (size,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + size
        rest = content[end:]
        return load(rest) if rest else {}, json.loads(content[_LENGTH.size : end])
    except Exception as error:  # safetensors raises its own kinds
        raise ValueError(f"a message is damaged: {error}") from error
