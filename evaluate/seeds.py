"""Where randomness comes from: generators seeded by what their draws are for."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Generator


def generator(*parts: object) -> Generator:
    """Return a generator seeded by a hash of what its draws are for."""
    text = json.dumps(parts, sort_keys=True, default=str)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(seed)


def fork(rng: Generator) -> Generator:
    """Return a new generator on the same device, seeded from `rng`."""
    seed = torch.randint(2**62, (), generator=rng, device=rng.device)
    return Generator(rng.device).manual_seed(int(seed))
