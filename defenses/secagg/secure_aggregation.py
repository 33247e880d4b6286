"""Secure aggregation: the server learns only the sum of the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Generator, Tensor, nn

from ..base import Defense, Refused, Update
from ..vector import flatten, unflatten
from .masks import Vector
from .protocol import OtherModel, ServerView, TooFewClients, aggregate, check_enough, circular_graph
from .shamir import RandomBytes


class BeyondRange(ValueError):
    """An update has an entry that is too large for the ring."""


@dataclass
class SecureAggregation(Defense):
    """Release only the sum of a round's updates, computed under masks that cancel in it.

    Every entry is rounded at random to one of 2^`bits` - 1 levels within `clipping_range`, and then
    masked. Rounding at random keeps the sum unbiased. The clients run the protocol of [1], with key
    agreement, secret sharing and lost clients. If `neighbours` is given, they use the neighbour
    graph of [2]; see `protocol`. The sum is exact in the ring of integers modulo 2^32, or modulo
    2^64 if the sum of levels does not fit (by default from 1025 clients on). Its mean is within one
    level of the mean of the updates: 3.8e-6 by default.

    Clients refuse a round with fewer clients than the threshold, because one client alone cannot
    hide. The harness records the refusal as a result. The threshold is for `clients`. In larger
    rounds it grows in proportion. With `neighbours`, the sum must contain at least the threshold's
    share of all clients: by default more than two thirds. If clients are lost, the sum of the
    survivors is scaled up to estimate the sum of all, because the server divides by all. With
    `clients` = 1 there is no aggregation: updates are released unchanged, neither rounded nor
    masked.

    Entries are not clipped. Clipping would bias the sum and remove noise that was added before. The
    ring has room for entries beyond the range, and more if fewer clients add up: by default up to
    4096 for 2 clients, 8.2 for 1000. The client refuses larger entries.

    Secure aggregation is not differential privacy and claims none. The sum itself may reveal a
    record, especially if few clients add to it. Secure aggregation does not protect against these
    servers:

    - a server that sends different models to different clients, so that all updates but the
      victim's vanish [3], unless clients `compare_models`
    - a server that controls most of the clients
    - a server that compares the sums of rounds that share clients

    In this simulation, all secrets come from `rng`, so a round can be repeated. `rng` is not
    cryptographic. To protect real data, use `protocol` with its default, the operating system's
    randomness. Masks are made in as many threads as PyTorch uses.

    Attributes:
        clients: Number of clients whose updates are added up. 1 defends nothing.
        threshold: Number of shares that recover a client's secret. With fewer clients, nothing is
            unmasked. Default: more than two thirds of a client's neighbours and itself. It must be
            above one half. Then a server that lies about who is lost cannot get both secrets of a
            client.
        dropout: Share of clients, rounded down, that are lost before their masked update arrives.
            Below one third, enough clients remain for the default threshold. With `neighbours`, too
            few may remain, and clients then refuse the round.
        clipping_range: Every round has room for entries up to this magnitude. Together with `bits`,
            it determines the distance between levels.
        bits: There are 2^bits - 1 levels of rounding, including zero.
        neighbours: Number of clients with whom each client shares masks, even; None is all. The
            server also learns the sum of any group whose outside neighbours are all lost.
        compare_models: Whether clients compare the models that they received. Each client sends its
            neighbours a digest beside the encrypted shares. If two digests differ, the clients
            abort the round (`Refused`). The comparison assumes authenticated public keys, and one
            version of the model for all clients: clients refuse asynchronous rounds.

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
        least = max(2, holders // 2 + 1)
        if self.threshold is not None and not least <= self.threshold <= holders:
            raise ValueError(
                f"threshold must be in [{least}, {holders}], got {self.threshold}: shares of at "
                "most half would let a server that lies about who is lost unmask a client"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        left = self.clients - self._lost(self.clients)
        if self.clients > 1 and not left >= self._fewest(self.clients):
            raise ValueError(
                f"dropout must leave at least the threshold of {self._fewest(self.clients)} "
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
        """Compute a digest of every client's model, if clients compare."""
        if self.compare_models:
            digests = {model: _digest(model) for model in dict.fromkeys(models)}
            self._digests = [digests[model] for model in models]

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return only the sum of the updates; the updates if `clients` is 1.

        Raises:
            Refused: If too few clients take part or are left, if the ring has no room for an entry,
                or if clients compare and received different models.
        """
        if self.clients == 1:
            return list(updates)
        try:
            view = self.server_view(updates, rng)
        except (OtherModel, TooFewClients, BeyondRange) as reason:
            raise Refused(str(reason)) from None
        survivors = len(view.masked)
        offset = view.total.dtype.type(survivors * (self._top_level // 2))
        levels = (view.total - offset).view(f"i{view.total.itemsize}")  # negative values wrapped
        mean = torch.from_numpy(levels.astype(np.float64)) * (self.step / survivors)
        released = (mean * len(updates)).to(flatten(updates[0]))
        return [unflatten(released, like=updates[0])]

    def server_view(self, updates: Sequence[Update], rng: Generator) -> ServerView:
        """Return everything that the server holds of a round: masked uploads and their sum."""
        count = len(updates)
        check_enough(count - self._lost(count), self._fewest(count), "unmask the sum")
        order = torch.randperm(count, generator=rng, device=rng.device).tolist()
        fits = count * self._top_level < 2**32
        ring = np.dtype(np.uint32 if fits else np.uint64)
        room = min(2 ** (8 * ring.itemsize - 1) - 1, 2**53) // count  # exact in float64
        return aggregate(
            (self._quantise(update, ring, room, rng) for update in updates),
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
        """Return the number of holders of a client's shares: its neighbours and itself."""
        return count if self.neighbours is None else min(count, self.neighbours + 1)

    def _threshold(self, count: int) -> int:
        """Return how many holders of shares recover a secret."""
        return self._most_of(max(self._holders(count), self._holders(self.clients)))

    def _fewest(self, count: int) -> int:
        """Return the minimum number of clients in the sum of a round."""
        return self._most_of(max(count, self.clients))

    def _most_of(self, group: int) -> int:
        """Return the threshold, scaled from the holders of shares to a group."""
        if self.threshold is None:
            return 2 * group // 3 + 1
        return -(-self.threshold * group // self._holders(self.clients))

    def _lost(self, count: int) -> int:
        return int(self.dropout * count)

    def _draw_lost(self, count: int, rng: Generator) -> list[int]:
        drawn = torch.randperm(count, generator=rng, device=rng.device)
        lost: list[int] = drawn[: self._lost(count)].tolist()
        return lost

    def _quantise(self, update: Update, ring: DTypeLike, room: int, rng: Generator) -> Vector:
        """Return the level of every entry, rounded up or down at random without bias.

        Raises:
            BeyondRange: If an entry is more than `room` levels away from zero.

        It uses NumPy in place. PyTorch's idle threads would busy-wait while masks are made.
        """
        levels = np.concatenate([_entries(value) for value in update.values()])
        if not (np.isfinite(levels.min(initial=0)) and np.isfinite(levels.max(initial=0))):
            raise ValueError("the update has NaN or infinite values, which cannot be quantised")
        largest = max(levels.max(initial=0), -levels.min(initial=0))
        if not largest <= (room - 1) * self.step:  # rounding may add a level
            raise BeyondRange(
                f"an entry of {largest:.3g} does not fit the ring, which has room up to "
                f"{(room - 1) * self.step:.3g} for each client of this round: use a larger "
                "clipping_range, or fewer bits"
            )
        levels /= self.step
        levels += self._top_level // 2
        levels += torch.rand(
            levels.shape, generator=rng, device=rng.device, dtype=torch.float64
        ).numpy(force=True)
        np.floor(levels, out=levels)
        vector: Vector = levels.astype(np.int64).astype(ring)  # negative values wrap around
        return vector


@dataclass
class Summed(Defense):
    """The replay of secure aggregation: release the sum of the updates."""

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return only the sum."""
        names = updates[0]
        return [{name: torch.stack([u[name] for u in updates]).sum(dim=0) for name in names}]


def _entries(value: Tensor) -> NDArray[np.float64]:
    """Return the entries of a tensor of any type, as one vector."""
    if value.dtype == torch.bfloat16:  # NumPy does not support it
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
