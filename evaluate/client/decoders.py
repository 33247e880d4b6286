"""Maps from uploads back to the undefended update, fitted on public examples.

A defense that only hides an update blunts attacks and protects nobody. A server that knows the
clients' code can run it on public examples and learn to undo it. Each map here is one way to undo
a defense. It never uses `replay` or `unguarded`. It is fitted on some clients and judged on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
"""Maps pairs x entries of what is seen to the update, entry by entry."""

Fit = Callable[[Tensor, Tensor, Sequence[int]], Map]
"""Fits a map: what is seen and the update, both pairs x entries, and the sizes of parameters."""

WINDOW = 12
"""Number of adjacent bits of an entry that are looked up together."""

ENTRIES = 2**13
"""Entries on which maps are judged that treat entries one by one: a random sample."""

MOST_ENTRIES = 2**18
"""Above this number of entries, no permutation is sought, because it takes too long."""

RANKED = 4
"""Pairs whose ranks identify the entries of a permutation, and pairs that judge it."""

LEAST_CLIENTS = 4
"""Maps need two clients to be fitted on, and two to be judged on."""

_BITS = 32
_STARTS = (0, 4, 8, 11, 16, 20)
_TINY = 1e-30


@dataclass(frozen=True)
class Histories:
    """What the server saw of several clients, and what undefended clients would have sent.

    Attributes:
        uploads: Clients x rounds x entries.
        updates: The undefended updates of the same clients and rounds.
        sizes: Number of entries of each parameter, in their order.
    """

    uploads: Tensor
    updates: Tensor
    sizes: Sequence[int]

    def sampled(self) -> Histories:
        """Return a public sample of the entries, if there are many."""
        entries = self.uploads.shape[-1]
        if entries <= ENTRIES:
            return self
        rng = torch.Generator().manual_seed(0)
        chosen = torch.randperm(entries, generator=rng)[:ENTRIES].sort().values
        ends = torch.tensor([0, *self.sizes]).cumsum(0)
        counts = torch.searchsorted(chosen, ends).diff().tolist()
        chosen = chosen.to(self.uploads.device)
        return Histories(self.uploads[..., chosen], self.updates[..., chosen], counts)

    def halves(self) -> tuple[Histories, Histories]:
        """Return the clients that maps are fitted on, and those that they are judged on."""
        half = len(self.uploads) // 2
        return (
            replace(self, uploads=self.uploads[:half], updates=self.updates[:half]),
            replace(self, uploads=self.uploads[half:], updates=self.updates[half:]),
        )

    def seen(self, view: View) -> Tensor:
        """Return what a view shows in every round but the first: pairs x entries."""
        return view.show(self.uploads[:, :-1], self.uploads[:, 1:]).flatten(0, 1)

    def sought(self, lag: int) -> Tensor:
        """Return the updates that were made `lag` rounds ago, for every round but the first."""
        last = self.updates.shape[1] - lag
        return self.updates[:, 1 - lag : last].flatten(0, 1)


@dataclass(frozen=True)
class View:
    """What a map sees of the last two uploads of a client.

    Attributes:
        name: How messages call it.
        show: Maps the upload before the last one, and the last one.
        rounds: Number of uploads that it needs.
    """

    name: str
    show: Callable[[Tensor, Tensor], Tensor]
    rounds: int = 2


LAST = View("upload", lambda _, last: last, rounds=1)
VIEWS = (
    LAST,
    View("difference of two uploads", lambda before, last: last - before),
    View("sum of two uploads", lambda before, last: last + before),
)


@dataclass(frozen=True)
class Decoder:
    """A way to undo a defense.

    Attributes:
        name: What it does, in words.
        view: What it sees.
        lag: How many rounds ago the update was made that it recovers.
        fit: Fits it.
        recovered: Share of the energy of updates that it recovers, for clients that it was not
            fitted on.
        map: The fitted map.
    """

    name: str
    view: View
    lag: int
    fit: Fit
    recovered: float
    map: Map

    @property
    def needs_history(self) -> bool:
        """Return whether it needs more than the upload that holds the update."""
        return self.lag > 0 or self.view.rounds > 1

    def fitted_on(self, histories: Histories) -> Decoder:
        """Return the decoder, fitted on all entries and all clients."""
        seen, sought = histories.seen(self.view), histories.sought(self.lag)
        return replace(self, map=self.fit(seen, sought, histories.sizes))

    def decode(self, uploads: Sequence[Tensor]) -> Tensor:
        """Return the update, given the uploads of a client up to now: the last one comes last."""
        if len(uploads) < self.view.rounds:
            raise ValueError(f"{self.name} needs {self.view.rounds} uploads, got {len(uploads)}")
        before = uploads[-2] if len(uploads) > 1 else torch.zeros_like(uploads[-1])
        return self.map(self.view.show(before, uploads[-1])[None])[0]


def best_decoder(histories: Histories) -> Decoder:
    """Return the decoder that recovers most. It may be fitted on a sample of entries."""
    return max(decoders(histories), key=lambda one: one.recovered)


def decoders(histories: Histories, *, of_one: bool = False) -> Iterator[Decoder]:
    """Yield every decoder, fitted on half of the clients and judged on the others.

    Args:
        histories: What the server saw.
        of_one: Whether only decoders of single uploads are wanted.
    """
    clients, rounds, _ = histories.uploads.shape
    if clients < LEAST_CLIENTS or rounds < 2:
        raise ValueError(
            f"decoders need at least {LEAST_CLIENTS} clients in 2 rounds, got {clients} in {rounds}"
        )
    sampled = histories.sampled()
    for name, view, lag, fit in _ways(sampled.halves()[0]):
        if of_one and (lag or view is not LAST):
            continue
        part = histories if fit is _permuted else sampled
        if part.uploads.shape[-1] > MOST_ENTRIES:
            continue
        own, others = part.halves()
        known, pairs = own.sought(lag), slice(RANKED if fit is _permuted else None)
        found = fit(own.seen(view), known, part.sizes)
        share = recovery(found(others.seen(view)[pairs]), others.sought(lag)[pairs], known)
        yield Decoder(name, view, lag, fit, share, found)


def _combination(own: Histories) -> View:
    """Return the sum of the last upload and a multiple of the one before that fits best."""
    before, last = (own.uploads[:, part].double() for part in (slice(-1), slice(1, None)))
    seen = torch.stack([last.flatten(), before.flatten()], 1)
    size = seen.square().sum(0).sqrt().clamp(min=_TINY)
    found = torch.linalg.pinv(seen / size) @ own.sought(0).double().flatten() / size
    share = float((found[1] / found[0]).nan_to_num(0.0, 0.0, 0.0))
    return View("combination of two uploads", lambda before, last: last + share * before)


def plain_recovery(histories: Histories) -> float:
    """Return the share of the energy that uploads show by the size of their entries.

    The best map counts that keeps the order of a parameter's entries, or that sees only their sign,
    exponent and leading bits. An honest defense that rounds, clips or adds noise leaves no more
    than this.

    Args:
        histories: What attacks are shown. It may differ from what the server saw in training.
    """
    own, others = histories.sampled().halves()
    known, sought = own.sought(0), others.sought(0)
    maps = (fit(own.seen(LAST), known, own.sizes) for fit in _ORDERLY)
    return max(recovery(one(others.seen(LAST)), sought, known) for one in maps)


def recovery(estimates: Tensor, updates: Tensor, known: Tensor) -> float:
    """Return the share of updates' energy that estimates explain beyond a blind guess.

    All updates count alike, however large they are, except those of no examples. The blind guess is
    zero or the mean of known updates, whichever is nearer.
    """
    energies = updates.double().square().sum(1)
    weights = (energies > 0) / energies.clamp(min=_TINY)

    def missed(guess: Tensor) -> Tensor:
        return (weights * (updates - guess).double().square().sum(1)).sum()

    blind = torch.minimum(missed(known.mean(0)), missed(torch.zeros_like(known[0])))
    share = 1 - missed(estimates) / blind.clamp(min=_TINY)
    return max(0.0, float(share.nan_to_num(0.0)))


def remaining_noise(histories: Histories) -> float:
    """Return the energy of the noise in the sum of all uploads, relative to fresh noise.

    Here, everything in an upload is noise that is not the update. The result is 1 if the noise of
    every round is drawn anew. It is near 0 if later noise cancels earlier noise, and above 1 if
    noise repeats. It is 1 without noise.
    """
    uploads, updates = histories.uploads.double(), histories.updates.double()
    noise = uploads - _factor(updates, uploads) * updates
    fresh = noise.square().sum()
    if fresh <= NEGLIGIBLE * uploads.square().sum():
        return 1.0
    return float(noise.sum(1).square().sum() / fresh)


NEGLIGIBLE = 0.05
"""Share of the uploads' energy below which noise hides nothing."""


def _factor(given: Tensor, sought: Tensor) -> Tensor:
    """Return the factor that brings one tensor nearest to another."""
    return (given * sought).sum() / given.square().sum().clamp(min=_TINY)


def _per_parameter(seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit one factor per parameter."""
    parts = zip(seen.split([*sizes], -1), sought.split([*sizes], -1), strict=True)
    factors = torch.cat([_factor(*part).expand(part[0].shape[-1]) for part in parts])
    return lambda new: factors * new


def _per_entry(seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit one factor per entry."""
    wide = seen.double()  # squares of small entries vanish in single precision
    factors = (wide * sought).sum(0) / wide.square().sum(0).clamp(min=_TINY**2)
    return lambda new: (factors * new).to(new.dtype)


def _monotone(seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit one monotone function per parameter: entries of equal rank belong together."""
    parts = zip(seen.split([*sizes], -1), sought.split([*sizes], -1), strict=True)
    tables = [(a.flatten().sort().values, b.flatten().sort().values) for a, b in parts]

    def decode(new: Tensor) -> Tensor:
        parts = zip(new.split([*sizes], -1), tables, strict=True)
        return torch.cat([_of_equal_rank(part, *table) for part, table in parts], -1)

    return decode


def _of_equal_rank(values: Tensor, ranked: Tensor, targets: Tensor) -> Tensor:
    """Return the target whose rank is that of each value. Ties have the middle of their ranks."""
    if not len(targets):
        return values
    values = values.contiguous()
    first, last = (torch.searchsorted(ranked, values, right=right) for right in (False, True))
    return targets[((first + last) // 2).clamp(max=len(targets) - 1)]


def _looked_up(start: int, seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit a table: the mean of the update for each value of some bits of an entry."""
    keys, values = _bits(seen, start).flatten(), sought.flatten()
    empty = torch.zeros(2**WINDOW, dtype=values.dtype, device=values.device)
    count = empty.index_add(0, keys, torch.ones_like(values))
    table = empty.index_add(0, keys, values) / (count + 0.5)  # rare values count less
    return lambda new: table[_bits(new, start)]


def _bits(values: Tensor, start: int) -> Tensor:
    whole = torch.bitwise_and(_as_integers(values).long(), 2**_BITS - 1)
    return torch.bitwise_and(torch.bitwise_right_shift(whole, start), 2**WINDOW - 1)


def _flipped(seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit a mask per entry: the bits in which upload and update mostly differ."""
    different = torch.bitwise_xor(_as_integers(seen), _as_integers(sought))
    mask = torch.zeros_like(different[0])
    for bit in range(_BITS):
        mostly = ((different >> bit) & 1).sum(0) * 2 > len(different)
        mask |= mostly.int() << bit
    return lambda new: torch.bitwise_xor(_as_integers(new), mask).view(torch.float32)


def _as_integers(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)


def _permuted(seen: Tensor, sought: Tensor, sizes: Sequence[int]) -> Map:
    """Fit a permutation of all entries, then a monotone function. Ranks identify entries."""
    seen, sought = seen[:RANKED], sought[:RANKED]
    order, places = (_signature(one).argsort(stable=True) for one in (seen, sought))
    source = torch.empty_like(places)
    source[places] = order
    after = _monotone(seen[:, source], sought, [seen.shape[-1]])
    return lambda new: after(new[..., source])


def _signature(values: Tensor) -> Tensor:
    """Return a number for each entry, made of its ranks in all rows."""
    weights = torch.linspace(1.0, 2.0, len(values), dtype=torch.float64).sqrt()[:, None]
    signature: Tensor = (weights.to(values.device) * _ranks(values)).sum(0)
    return signature


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each entry in its row. Equal entries have equal ranks."""
    return torch.stack([torch.searchsorted(row.sort().values, row) for row in values]).double()


_SMOOTH: dict[str, Fit] = {
    "a factor per parameter": _per_parameter,
    "a factor per entry": _per_entry,
    "a monotone function": _monotone,
}
_OF_BITS: dict[str, Fit] = {
    **{
        f"a table of bits {start} to {start + WINDOW - 1}": partial(_looked_up, start)
        for start in _STARTS
    },
    "flipped bits": _flipped,
    "a permutation": _permuted,
}


_ORDERLY: tuple[Fit, ...] = (
    _per_parameter,
    _monotone,
    lambda seen, sought, sizes: _monotone(seen, sought, [sum(sizes)]),
    partial(_looked_up, _STARTS[-1]),
)


def _ways(own: Histories) -> Iterator[tuple[str, View, int, Fit]]:
    """Yield every way to undo a defense: its name, what it sees, its lag and its fit."""
    for lag in (0, 1):
        late = " of the next round" if lag else ""
        for view in VIEWS if lag else (*VIEWS, _combination(own)):
            for name, fit in (_SMOOTH | (_OF_BITS if view is LAST else {})).items():
                yield f"{name} of the {view.name}{late}", view, lag, fit
