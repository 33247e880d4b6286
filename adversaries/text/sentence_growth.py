"""Grow a decoder's sentences token by token inside the span of a layer's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..base import Observation
from .subspace import Subspace, threshold
from .token_pool import ROUNDING, TokenPool
from .transformer import Transformer, block_space

_STRANGERS = 256
"""Number of random sequences. They show how far unrelated vectors are from a space."""

_UNEVEN = 5.0
"""Under noise, typical true vectors are about this many times as far as the nearest one."""

_STRANGE = 4
"""Largest number of tokens in a random sequence."""


class Sentence(NamedTuple):
    """A sequence whose prefixes are all near the second block's space.

    Attributes:
        tokens: Its tokens.
        distance: Their mean distance from the space.
    """

    tokens: tuple[int, ...]
    distance: float


class Probe(NamedTuple):
    """Where prefixes are compared: the module whose inputs are read, and its gradient's space."""

    module: nn.Module
    space: Subspace

    @classmethod
    def of(cls, view: Transformer, observation: Observation, second: Subspace) -> Probe:
        """Return the second block, or, under known noise, the output layer of first attention.

        The output of attention for a token depends only on its context. The second block's input
        is mostly the token itself, so noise hides the context there first.
        """
        out = view.first.out
        if second.noise_is_known and out is not None and out.name in observation.update:
            space = block_space(observation, [out])
            if space.rank and not space.saturated:
                return cls(out.module, space)
        return cls(view.second.module, second)

    def distance(self, view: Transformer, tokens: Tensor) -> Tensor:
        """Return the distances of whole sequences of one length, token by token."""
        return self.space.distance(view.sequences(tokens, [self.module])[0])


@dataclass(frozen=True)
class Limit:
    """Which distances from the space of a probe count as zero.

    Attributes:
        low: Size of a zero distance after rounding and drift.
        high: Distance that hardly any unrelated vector falls below.
        noisy: Whether there is noise of known size. Distances of true vectors then vary.
    """

    low: float
    high: float
    noisy: bool

    @classmethod
    def of(
        cls, view: Transformer, probe: Probe, pool: TokenPool, rng: Generator, *, causal: bool
    ) -> Limit:
        """Measure the limits on the tokens that were kept, and on random sequences.

        For a decoder, only the last token of a sequence counts: in a small vocabulary, first tokens
        often belong to a true sentence. Under noise, the nearest first token shows what is near.
        """
        length = min(_STRANGE, view.positions)
        strangers = torch.randint(view.space.vocabulary, (_STRANGERS, length), generator=rng)
        distances = probe.distance(view, strangers.to(view.device))
        high = float((distances[:, -1] if causal else distances.flatten()).quantile(0.02))
        level = pool.level
        noisy = probe.space.noise_is_known
        if causal and noisy:
            level = _UNEVEN * float(probe.distance(view, pool.at(0)[:, None]).min())
        return cls(max(ROUNDING, min(level, high)), high, noisy)

    @property
    def clear(self) -> bool:
        """Return whether there is a gap between `low` and `high`."""
        return self.low < 0.1 * self.high

    @property
    def middle(self) -> float:
        """Return the geometric mean of `low` and `high`."""
        return math.sqrt(self.low * self.high)

    def accepts(self, distances: Tensor, most: int) -> Tensor:
        """Return which distances count as zero; at most `most` can."""
        gap = threshold(distances, most=most, floor=self.low)
        least = min(3 * self.low, self.middle)
        return distances < min(max(gap, least), 0.5 * (self.middle + self.high))


def grow(
    view: Transformer, probe: Probe, pool: TokenPool, limit: Limit, batch_size: int
) -> list[Sentence]:
    """Return a decoder's sentences: prefixes near the space that no token continues.

    There are never more different prefixes of one length than examples. If positions are
    rotations, a repeated first token has the same output of the first block as the token alone,
    because attention finds the same value everywhere. Such a prefix is as near as the token and
    carries no information. Without noise, it is still followed, because another token may come
    after it. With noise it is not: the more often a token is repeated, the less another token
    changes its attention.
    """
    prefixes, totals = view.no_prefix(), torch.zeros(1, dtype=torch.float64, device=view.device)
    found: list[Sentence] = []
    space, accepted = probe.space, 0
    for position in range(view.positions):
        candidates = pool.at(position)
        if not len(candidates) or (accepted >= space.rank and not limit.noisy):
            break
        extended = view.extend(prefixes, candidates, [probe.module])
        distances = space.distance(extended.vectors[0])
        repeated = echoes(prefixes.tokens, candidates) & (not view.absolute)
        near = limit.accepts(distances.masked_fill(repeated, torch.inf), batch_size)
        if position == 0:
            near.view(-1)[distances.argmin()] = True  # there is at least one sentence
        row, column = near.nonzero(as_tuple=True)
        sums = totals[row] + distances[row, column]
        best = sums.argsort()[:batch_size]
        row, column, sums = row[best], column[best], sums[best]
        accepted += len(row)
        ended = torch.ones(len(prefixes.tokens), dtype=torch.bool, device=row.device)
        ended[row] = False
        found += sentences_of(prefixes.tokens[ended], totals[ended])
        followed = repeated & (distances < limit.high) & (not limit.noisy)
        again, place = followed.nonzero(as_tuple=True)
        row, column = torch.cat([row, again]), torch.cat([column, place])
        sums = torch.cat([sums, totals[again] + distances[again, place]])
        if not len(row):
            break
        prefixes, totals = extended.keep(row, column), sums
    return without_echoes([*found, *sentences_of(prefixes.tokens, totals)], view)


def verified(
    view: Transformer,
    observation: Observation,
    pool: TokenPool,
    found: Sequence[tuple[tuple[int, ...], float]],
    rng: Generator,
) -> list[Sentence]:
    """Cut each sentence where it leaves the space of the second block's feed-forward layer.

    In that layer, contexts have mixed twice, so noise hides a wrong context less than before.
    The test needs two blocks, so it is applied only to whole sentences.
    """
    layers = [layer for layer in view.second.up if layer.name in observation.update]
    space = block_space(observation, layers) if layers else None
    if space is None or not space.rank or space.saturated:
        return [Sentence(*sentence) for sentence in found]
    probe = Probe(layers[0].module, space)
    limit = Limit.of(view, probe, pool, rng, causal=True)
    cut = []
    for tokens, _ in found:
        distances = probe.distance(view, torch.tensor([tokens], device=view.device))[0]
        far = (distances > limit.middle).nonzero().flatten().tolist()
        end = max(1, far[0] if far else len(tokens))
        cut.append(Sentence(tokens[:end], float(distances[:end].mean())))
    return without_echoes(cut, view)


def echoes(tokens: Tensor, candidates: Tensor) -> Tensor:
    """Return which candidates only repeat the single token of a prefix."""
    if not tokens.shape[1]:
        return torch.zeros(1, len(candidates), dtype=torch.bool, device=candidates.device)
    same = (tokens == tokens[:, :1]).all(1, keepdim=True)
    return same & (candidates == tokens[:, :1])


def without_echoes(
    sentences: Sequence[tuple[tuple[int, ...], float]], view: Transformer
) -> list[Sentence]:
    """Return each sentence once, without those that are the beginning of another.

    A sentence that only repeats its first token is cut to that token. See `grow`.
    """
    once: dict[tuple[int, ...], float] = {}
    for tokens, distance in sentences:
        echo = not view.absolute and len({*tokens}) == 1
        once.setdefault(tokens[:1] if echo else tokens, distance)
    return [
        Sentence(tokens, distance)
        for tokens, distance in once.items()
        if not any(other != tokens and other[: len(tokens)] == tokens for other in once)
    ]


def sentences_of(tokens: Tensor, totals: Tensor) -> list[Sentence]:
    """Return rows of tokens as sentences, given the sums of their distances."""
    if not tokens.shape[1]:
        return []
    rows = zip(tokens.tolist(), totals.tolist(), strict=True)
    return [Sentence(tuple(row), total / len(row)) for row, total in rows]
