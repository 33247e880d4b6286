"""Defenses whose own replay would cripple an attack that knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from leakfrontier.defenses import Defense, Update


@dataclass
class FreshNoise(Defense):
    scale: float = 0.1

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {n: v + self.scale * torch.randn(v.shape, generator=rng) for n, v in update.items()}


@dataclass
class DerivedNoise(FreshNoise):
    """From a generator of its own, whose seed is secret."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return super().on_update(update, _derived(rng))


@dataclass
class PublicNoise(FreshNoise):
    def on_update(self, update: Update, rng: Generator) -> Update:
        return super().on_update(update, torch.Generator().manual_seed(7))


@dataclass
class Rounded(Defense):
    step: float = 0.01

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: (value / self.step).round() * self.step for name, value in update.items()}


@dataclass
class Float8(Defense):
    """Its gradients are cast too: the small ones of an attack are lost."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: v.to(torch.float8_e4m3fn).float() for name, v in update.items()}


@dataclass
class ThroughNumpy(Defense):
    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: torch.from_numpy(value.numpy() * 2) for name, value in update.items()}


@dataclass
class Peeking(Defense):
    """Is another function while vectorised."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        batched = torch._C._functorch.is_batchedtensor(next(iter(update.values())))
        return {name: -value if batched else value for name, value in update.items()}


@dataclass
class Subsampled(Defense):
    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        yield torch.randperm(examples, generator=rng)[: examples // 2]


@dataclass
class Elsewhere(Rounded):
    """Its replay is of another defense."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: -value for name, value in update.items()}

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        return Defense()


def _derived(rng: Generator) -> Generator:
    seed = torch.randint(2**31, (), generator=rng)
    return torch.Generator().manual_seed(int(seed))
