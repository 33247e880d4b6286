"""Where randomness comes from.

In a simulation, generators are seeded by what their draws are for, so that every row can be made
again. Noise that leaves a simulation comes from the operating system: see `system_draws`.

Torch's `manual_seed` uses only the low 32 bits of a seed on the CPU. Whoever sees some noise can
try all of them, and two of many generators draw the same. The generators made here have their
whole state from a hash of at least 128 bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Generator

SEED_BITS = 128
"""Bits that a generator's state depends on, at least."""

_HEADER, _WORDS = 24, 624  # bytes before the Mersenne Twister's words, and the number of these
_NARROW: ContextVar[bool] = ContextVar("narrow", default=False)


class SystemGenerator(Generator):
    """A generator whose whole state comes from the operating system; its forks are such, too.

    Within `system_draws`, it serves as a key only: draws come from a cryptographic stream. No two
    draw the same: its copies, and those of a process that forks, have states of their own.
    """

    _all: ClassVar[WeakSet[SystemGenerator]] = WeakSet()

    def __new__(cls) -> SystemGenerator:
        """Return a generator that nobody can reproduce."""
        own = super().__new__(cls)
        reseed(own)
        cls._all.add(own)
        return own

    def clone_state(self) -> SystemGenerator:
        """Return another generator: the same draws twice would give each other away."""
        return SystemGenerator()

    def __copy__(self) -> SystemGenerator:
        return SystemGenerator()

    def __deepcopy__(self, memo: object) -> SystemGenerator:
        return SystemGenerator()

    def __reduce__(self) -> tuple[type[SystemGenerator], tuple[()]]:  # type: ignore[override]
        return SystemGenerator, ()

    @classmethod
    def reseed_all(cls) -> None:
        """Give all generators other states, as a process must that was forked."""
        for one in cls._all:
            reseed(one)


os.register_at_fork(after_in_child=SystemGenerator.reseed_all)


def reseed(rng: Generator) -> None:
    """Give a generator another state, from the operating system."""
    _set_state(rng, os.urandom(32))


def generator(*parts: object) -> Generator:
    """Return a generator whose state is a hash of what its draws are for."""
    text = json.dumps(parts, sort_keys=True, default=str)
    rng = Generator()
    _set_state(rng, hashlib.sha256(text.encode()).digest())
    return rng


def fork(rng: Generator) -> Generator:
    """Return a new generator on the same device, from the state of `rng`, which moves on.

    Nothing is drawn, as a draw inside `torch.func.vmap` is no single number.
    """
    if isinstance(rng, SystemGenerator):
        return SystemGenerator()
    digest = hashlib.sha256(rng.get_state().numpy().tobytes()).digest()
    forked = Generator(rng.device)
    for one, half in ((rng, digest[:16]), (forked, digest[16:])):
        _set_state(one, half)
    return forked


def copied(rng: Generator) -> Generator:
    """Return a generator that draws what `rng` would, which stays as it is."""
    if isinstance(rng, SystemGenerator):
        raise ValueError("what the operating system seeds cannot be drawn twice")
    same = Generator(rng.device)
    same.set_state(rng.get_state())
    return same


@contextmanager
def global_draws(rng: Generator) -> Iterator[None]:
    """Seed torch's global generators (used by dropout) from `rng`, which stays as it is."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        seed_globally(rng)
        yield


def seed_globally(rng: Generator) -> None:
    """Seed torch's global generators from `rng`, which stays as it is."""
    digest = hashlib.sha256(b"global" + rng.get_state().numpy().tobytes()).digest()
    torch.manual_seed(_seed(digest))  # for all devices
    _set_state(torch.default_generator, digest)


@contextmanager
def narrow_seeds() -> Iterator[None]:
    """Draw as versions did that seeded generators with 32 bits, to make their rows again."""
    token = _NARROW.set(True)
    try:
        yield
    finally:
        _NARROW.reset(token)


def _set_state(rng: Generator, digest: bytes) -> None:
    """Set the whole state of a generator; those of other devices take no more than 63 bits."""
    rng.manual_seed(_seed(digest))
    if rng.device.type != "cpu" or _NARROW.get():
        return
    words = np.frombuffer(hashlib.shake_256(digest).digest(4 * _WORDS), dtype=np.uint32)
    state = rng.get_state()
    state[_HEADER : _HEADER + 8 * _WORDS] = torch.from_numpy(words.astype(np.uint64).view(np.uint8))
    rng.set_state(state)


def _seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
