"""Where randomness comes from: generators seeded by what their draws are for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator


def generator(*parts: object) -> Generator:
    """Return a generator seeded by a hash of what its draws are for."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return Generator().manual_seed(_seed(hashlib.sha256(text.encode()).digest()))


def fork(rng: Generator) -> Generator:
    """Return a new generator on the same device, seeded from the state of `rng`, which moves on.

    Nothing is drawn, as a draw inside `torch.func.vmap` is no single number.
    """
    digest = hashlib.sha256(rng.get_state().numpy().tobytes()).digest()
    own, forked = (_seed(half) for half in (digest[:16], digest[16:]))
    rng.manual_seed(own)
    return Generator(rng.device).manual_seed(forked)


@contextmanager
def global_draws(rng: Generator) -> Iterator[None]:
    """Let torch's own generators, of which dropout draws, depend on `rng`, which stays as it is."""
    state = b"global" + rng.get_state().numpy().tobytes()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(_seed(hashlib.sha256(state).digest()))
        yield


def _seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
