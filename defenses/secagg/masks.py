"""Masks of secure aggregation: keystreams of AES-128 in counter mode, added to vectors in bulk.

Vectors are processed in pieces that fit a core's cache. For each piece, the keystreams of all keys
are added before the next piece. In counter mode, a keystream can start anywhere, so each thread
takes a range of the vector. Neither the cipher nor the additions hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

Vector = NDArray[np.unsignedinteger[Any]]
"""Integers modulo 2^32 or 2^64, depending on their type."""

KEY_BYTES = 16

_BLOCK = 16
_FEWEST = 8  # minimum number of pieces for a thread
_PIECE = 2**17  # bytes: a piece, its keystream and the cipher's input fit the second-level cache


def keystream(key: bytes, like: Vector) -> Vector:
    """Return uniform elements of the ring, as many as `like` has."""
    stream = np.zeros_like(like)
    add_masks(stream, [key], [])
    return stream


def add_masks(
    vector: Vector, added: Sequence[bytes], subtracted: Sequence[bytes], threads: int = 1
) -> None:
    """Add the keystreams of some keys to a vector, in place, and subtract those of others."""
    pieces = -(-vector.nbytes // _PIECE)
    size = _PIECE // vector.itemsize
    threads = max(1, min(threads, pieces // _FEWEST))
    edges = [size * (pieces * part // threads) for part in range(threads + 1)]

    def work(part: int) -> None:
        _add_from(vector, edges[part], edges[part + 1], added, subtracted)

    if threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def _add_from(
    vector: Vector, first: int, last: int, added: Sequence[bytes], subtracted: Sequence[bytes]
) -> None:
    """Do the same for a range of the vector that begins at a cipher block."""
    block = first * vector.itemsize // _BLOCK
    streams: list[tuple[np.ufunc, CipherContext]] = [(np.add, _entered(k, block)) for k in added]
    streams += [(np.subtract, _entered(key, block)) for key in subtracted]
    zeros = memoryview(bytes(_PIECE))
    buffer = np.empty(_PIECE + _BLOCK, np.uint8)  # some versions need a spare block
    size = _PIECE // vector.itemsize
    for start in range(first, min(last, vector.size), size):
        piece = vector[start : min(start + size, last)]
        stream = buffer[: piece.nbytes].view(vector.dtype)
        for apply, cipher in streams:
            cipher.update_into(zeros[: piece.nbytes], buffer.data)
            apply(piece, stream, out=piece)


def _entered(key: bytes, block: int) -> CipherContext:
    """Return the cipher of a key, positioned at a block of its keystream."""
    return Cipher(algorithms.AES(key), modes.CTR(block.to_bytes(_BLOCK))).encryptor()
