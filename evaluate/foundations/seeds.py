"""Sources of randomness.

In a simulation, generators are seeded by the purpose of their draws, so that every row can be
reproduced. Noise that leaves a simulation comes from the operating system: see `system_draws`.

Torch's `manual_seed` uses only the low 32 bits of a seed on the CPU. An observer of some noise can
try all of them, and among many generators two may draw the same. The generators made here derive
their whole state from a hash of at least 128 bits.
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
"""Minimum number of bits that determine a generator's state."""

_HEADER, _WORDS = 24, 624  # bytes before the Mersenne Twister's words, and number of words
_SEEDED = Generator().manual_seed(0).get_state().numpy()  # its first 8 bytes are the seed
_NARROW: ContextVar[bool] = ContextVar("narrow", default=False)


class SystemGenerator(Generator):
    """A generator whose whole state comes from the operating system. So do its forks.

    Within `system_draws`, it is only a key: draws come from a cryptographic stream. No two such
    generators draw the same numbers. Copies get new states, also in a forked process.
    """

    _all: ClassVar[WeakSet[SystemGenerator]] = WeakSet()

    def __new__(cls) -> SystemGenerator:
        """Return a generator that nobody can reproduce."""
        own = super().__new__(cls)
        reseed(own)
        cls._all.add(own)
        return own

    def clone_state(self) -> SystemGenerator:
        """Return a new generator. Repeated draws would reveal each other."""
        return SystemGenerator()

    def __copy__(self) -> SystemGenerator:
        return SystemGenerator()

    def __deepcopy__(self, memo: object) -> SystemGenerator:
        return SystemGenerator()

    def __reduce__(self) -> tuple[type[SystemGenerator], tuple[()]]:  # type: ignore[override]
        return SystemGenerator, ()

    @classmethod
    def reseed_all(cls) -> None:
        """Give all generators new states, which a forked process must do."""
        for one in cls._all:
            reseed(one)


os.register_at_fork(after_in_child=SystemGenerator.reseed_all)


def reseed(rng: Generator) -> None:
    """Give a generator a new state from the operating system."""
    _set_state(rng, os.urandom(32))


def generator(*parts: object) -> Generator:
    """Return a generator whose state is a hash of the purpose of its draws."""
    text = json.dumps(parts, sort_keys=True, default=str)
    rng = Generator()
    _set_state(rng, hashlib.sha256(text.encode()).digest())
    return rng


def fork(rng: Generator) -> Generator:
    """Return a new generator on the same device, from the state of `rng`, which advances.

    Nothing is drawn, because a draw inside `torch.func.vmap` is not a single number.
    """
    if isinstance(rng, SystemGenerator):
        return SystemGenerator()
    digest = hashlib.sha256(rng.get_state().numpy().tobytes()).digest()
    forked = Generator(rng.device)
    for one, half in ((rng, digest[:16]), (forked, digest[16:])):
        _set_state(one, half)
    return forked


def copied(rng: Generator) -> Generator:
    """Return a generator that draws what `rng` would draw, without advancing `rng`."""
    if isinstance(rng, SystemGenerator):
        raise ValueError("a generator seeded by the operating system cannot be copied")
    same = Generator(rng.device)
    same.set_state(rng.get_state())
    return same


@contextmanager
def global_draws(rng: Generator) -> Iterator[None]:
    """Seed torch's global generators (used by dropout) from `rng` without advancing it."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        seed_globally(rng)
        yield


def seed_globally(rng: Generator) -> None:
    """Seed torch's global generators from `rng` without advancing it."""
    digest = hashlib.sha256(b"global" + rng.get_state().numpy().tobytes()).digest()
    if torch.cuda.device_count() or torch.backends.mps.is_available():
        torch.manual_seed(_seed(digest))  # seeds all devices, which is slow
    _set_state(torch.default_generator, digest)


def global_states() -> list[torch.Tensor]:
    """Return the states of torch's global generators."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def set_global_states(states: list[torch.Tensor]) -> None:
    """Put torch's global generators back to some states."""
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def narrow_seeds() -> Iterator[None]:
    """Draw like older versions, which seeded generators with 32 bits, to reproduce their rows."""
    token = _NARROW.set(True)
    try:
        yield
    finally:
        _NARROW.reset(token)


def _set_state(rng: Generator, digest: bytes) -> None:
    """Set the whole state of a generator. On other devices, only 63 bits are possible."""
    if rng.device.type != "cpu" or _NARROW.get():
        rng.manual_seed(_seed(digest))
        return
    words = np.frombuffer(hashlib.shake_256(digest).digest(4 * _WORDS), dtype=np.uint32)
    state = _SEEDED.copy()
    state[:8] = np.frombuffer(_seed(digest).to_bytes(8, "little"), dtype=np.uint8)
    state[_HEADER : _HEADER + 8 * _WORDS] = words.astype(np.uint64).view(np.uint8)
    rng.set_state(torch.from_numpy(state))


def _seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
