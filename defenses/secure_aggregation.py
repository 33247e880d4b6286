"""Secure aggregation: the server learns the sum of the updates and nothing else of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Generator, Tensor, nn

from .base import Defense, Refused, Update
from .secagg_masks import Vector
from .secagg_protocol import OtherModel, ServerView, aggregate, circular_graph
from .secagg_shamir import RandomBytes
from .vector import flatten, unflatten


@dataclass
class SecureAggregation(Defense):
    """Release only the sum of a round's updates, computed under masks that cancel in it.

    Every update is clipped to `clipping_range`, rounded at random to one of 2^`bits` - 1 levels,
    so that the sum is unbiased, and masked. The protocol of [1] is played for real, with key
    agreement, secret sharing and lost clients, on the neighbours of [2] where `neighbours` is
    given; see `secagg_protocol`. The sum is exact in the ring of integers modulo 2^32, or modulo
    2^64 where the sum of levels does not fit (by default from 1025 clients on). Its mean is
    within one level of the mean of the clipped updates: 3.8e-6 by default.

    A round has as many clients as take part, whatever `clients`; the threshold keeps its ratio.
    Where clients are lost, the sum of the survivors is scaled up to estimate that of all, by
    which the server divides. One client alone has nothing to hide in: with `clients` = 1, or in
    a round of one, updates are released as they are, neither rounded nor masked.

    It is no differential privacy, and makes no claim of it: the sum itself may reveal a record,
    the more so the fewer clients add to it. It does not hold against a server that sends
    different models to different clients, so that all but the victim's update vanish [3], unless
    they `compare_models`; that makes up most of the clients; or that compares the sums of rounds
    that share clients.
    Entries beyond the clipping range are cut off silently, so the range must fit the updates.

    In this simulation all secrets are drawn from `rng`, so that a round can be repeated. `rng` is
    not cryptographic: to protect real data, use `secagg_protocol` with its default, the operating
    system's randomness. Masks are made in as many threads as PyTorch uses.

    Attributes:
        clients: Clients whose updates are added up. 1 defends nothing.
        threshold: Shares that recover a client's secret, and clients below which nothing is
            unmasked; by default more than two thirds of a client's neighbours and itself. Above
            one half, no server can get both of a client's secrets by lying about who is lost.
        dropout: Share of clients, rounded down, that are lost before their masked update
            arrives. Below one third, it never falls below the default threshold; with
            `neighbours` it may, and the round then raises `TooFewClients`.
        clipping_range: Largest magnitude of an entry.
        bits: Levels of rounding are 2^bits - 1, zero among them.
        neighbours: Clients with whom each client shares masks, an even number; None is all. The
            server also learns the sum of any group whose neighbours outside are all lost.
        compare_models: Whether clients send each neighbour a digest of the model that they were
            sent, beside the encrypted shares, and give the round up where two differ: `Refused`.
            It assumes that their public keys are known to be theirs, and that all train on one
            version of the model: asynchronous rounds are refused.

    References:
        [1] Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. "Practical
            Secure Aggregation for Privacy-Preserving Machine Learning." CCS 2017.
            https://eprint.iacr.org/2017/281
        [2] Bell, Bonawitz, Gascón, Lepoint, Raykova. "Secure Single-Server Aggregation with
            (Poly)Logarithmic Overhead." CCS 2020. https://eprint.iacr.org/2020/704
        [3] Pasquini, Francati, Ateniese. "Eluding Secure Aggregation in Federated Learning via
            Model Inconsistency." CCS 2022. https://arxiv.org/abs/2111.07380
    """

    clients: int = 8
    threshold: int | None = None
    dropout: float = 0.0
    clipping_range: float = 8.0
    bits: int = 22
    neighbours: int | None = None
    compare_models: bool = False
    _digests: list[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.clients >= 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if self.neighbours is not None and not (self.neighbours >= 2 and self.neighbours % 2 == 0):
            raise ValueError(f"neighbours must be even and at least 2, got {self.neighbours}")
        holders = self._holders(self.clients)
        if self.threshold is not None and not 2 <= self.threshold <= holders:
            raise ValueError(f"threshold must be in [2, {holders}], got {self.threshold}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        left = self.clients - self._lost(self.clients)
        if self.clients > 1 and not left >= self._threshold(self.clients):
            raise ValueError(
                f"dropout must leave at least the threshold of {self._threshold(self.clients)} "
                f"clients, got {self.dropout}, which leaves {left}"
            )
        if not 0 < self.clipping_range < math.inf:
            raise ValueError(
                f"clipping_range must be positive and finite, got {self.clipping_range}"
            )
        if not 2 <= self.bits <= 32:
            raise ValueError(f"bits must be in [2, 32], got {self.bits}")

    @property
    def stochastic(self) -> bool:
        """Return whether updates are rounded at random."""
        return self.clients > 1

    @property
    def strength(self) -> float:
        """Return the number of clients behind one sum."""
        return self.clients

    @property
    def cohort(self) -> int:
        """Return the number of clients behind one sum."""
        return self.clients

    @property
    def step(self) -> float:
        """Return the distance between two levels of rounding."""
        return 2 * self.clipping_range / self._top_level

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Let every client take a digest of its model, if they compare."""
        if self.compare_models:
            digests = {model: _digest(model) for model in dict.fromkeys(models)}
            self._digests = [digests[model] for model in models]

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return the sum of the updates alone, or the updates if each client is on its own."""
        if self.clients == 1 or len(updates) == 1:
            return list(updates)
        try:
            view = self.server_view(updates, rng)
        except OtherModel as found:
            raise Refused(str(found)) from None
        survivors = len(view.masked)
        levels = torch.from_numpy(view.total.astype(np.float64))
        mean = (levels - survivors * (self._top_level // 2)) * (self.step / survivors)
        released = (mean * len(updates)).to(flatten(updates[0]))
        return [unflatten(released, like=updates[0])]

    def server_view(self, updates: Sequence[Update], rng: Generator) -> ServerView:
        """Return all that the server holds of a round: every masked upload, and their sum."""
        count = len(updates)
        order = torch.randperm(count, generator=rng, device=rng.device).tolist()
        fits = count * self._top_level < 2**32
        ring = np.uint32 if fits else np.uint64
        return aggregate(
            (self._quantise(update, ring, rng) for update in updates),
            circular_graph(order, self.neighbours),
            self._threshold(count),
            lost_before_masking=self._draw_lost(count, rng),
            digests=self._digests,
            randbytes=_bytes_from(rng),
            threads=torch.get_num_threads(),
        )

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the sum without rounding."""
        return Summed()

    @property
    def _top_level(self) -> int:
        return (1 << self.bits) - 2  # even, so that zero is a level and zeros stay zeros

    def _holders(self, count: int) -> int:
        """Return who holds shares of a client's secrets: its neighbours and itself."""
        return count if self.neighbours is None else min(count, self.neighbours + 1)

    def _threshold(self, count: int) -> int:
        holders = self._holders(count)
        if self.threshold is None:
            return 2 * holders // 3 + 1
        return max(2, math.ceil(self.threshold * holders / self._holders(self.clients)))

    def _lost(self, count: int) -> int:
        return int(self.dropout * count)

    def _draw_lost(self, count: int, rng: Generator) -> list[int]:
        drawn = torch.randperm(count, generator=rng, device=rng.device)
        lost: list[int] = drawn[: self._lost(count)].tolist()
        return lost

    def _quantise(self, update: Update, ring: DTypeLike, rng: Generator) -> Vector:
        """Return the level of every entry, rounded up or down at random without bias.

        In NumPy, and in place: PyTorch's threads would wait busily where masks are made next.
        """
        levels = np.concatenate([_entries(value) for value in update.values()])
        if not (np.isfinite(levels.min(initial=0)) and np.isfinite(levels.max(initial=0))):
            raise ValueError("the update has NaN or infinite values, which cannot be quantised")
        np.clip(levels, -self.clipping_range, self.clipping_range, out=levels)
        levels /= self.step
        levels += self._top_level // 2
        levels += torch.rand(
            levels.shape, generator=rng, device=rng.device, dtype=torch.float64
        ).numpy(force=True)
        np.floor(levels, out=levels)
        np.clip(levels, 0, self._top_level, out=levels)  # the ends may be just outside of it
        vector: Vector = levels.astype(ring)
        return vector


@dataclass
class Summed(Defense):
    """Release the sum of the updates: what can be replayed of secure aggregation."""

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return the sum alone."""
        names = updates[0]
        return [{name: torch.stack([u[name] for u in updates]).sum(dim=0) for name in names}]


def _entries(value: Tensor) -> NDArray[np.float64]:
    """Return the entries of a tensor of any type, in a row."""
    if value.dtype == torch.bfloat16:  # which NumPy does not know
        value = value.float()
    return value.numpy(force=True).astype(np.float64).ravel()


def _digest(model: nn.Module) -> bytes:
    """Return a digest of a model's names and values."""
    digest = sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _bytes_from(rng: Generator) -> RandomBytes:
    def draw(count: int) -> bytes:
        values = torch.randint(256, (count,), dtype=torch.uint8, generator=rng, device=rng.device)
        return values.cpu().numpy().tobytes()

    return draw
