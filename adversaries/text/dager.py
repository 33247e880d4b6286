"""Exact text from the gradients of the first two blocks' attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from ..spaces import NotApplicable, TokenSpace
from .sentence_ends import Ending, find_endings, sentence_of
from .sentence_growth import Limit, Probe, Sentence, grow, sentences_of, verified
from .subspace import Subspace
from .token_pool import TokenPool, find_tokens
from .transformer import (
    Transformer,
    block_gradient,
    block_spaces,
    find_transformer,
    is_causal,
    most_inputs,
)

_COMPLETE = 0.95
"""Share of the second block's dimensions that sentences account for if none is missing."""


@dataclass(frozen=True)
class DAGER(Adversary):
    """DAGER: the inputs of a linear layer span its gradient's rows, so wrong ones are seen at once.

    Tokens (and positions, where these are added) are kept if the first block's input that they
    make lies in the span of its query, key and value gradients. From them, a decoder's sentences
    are grown: a token is appended if the second block's input at it, a function of the prefix
    alone, lies in the span of the second block's gradients. An encoder's sentences are tested as
    a whole. Exact while fewer different tokens and prefixes are behind the upload than the model
    is wide; no prior, no labels and no lengths are needed.

    Where we read the paper and its code in our own way:

    - Gradients of queries, keys and values are stacked: alone, queries miss a sequence's first
      token, keys without rotation span only differences, grouped keys and values have few rows.
    - Ranks are at the last gap of the singular values above rounding errors (`subspace`), and
      thresholds where distances grow most steeply, between those of kept tokens and those of
      random ones: the published ones are absolute, and depend on the scale of the gradient, the
      precision and the protocol.
    - Of a decoder's prefix only the newest position is tested, and only its newest token runs
      through the block: causality leaves the others as they were.
    - Growth stops when as many prefixes are accepted as the second block's rank.
    - The last token under a next-token loss, sentences that begin others and sentences that occur
      twice are in no span; they come from the last block (`sentence_ends`). The published
      evaluation leaves them out.
    - An encoder's candidates beyond `combinations` are searched by changing one token at a time
      from random starts; the published code draws at random.
    - Under noise, directions are weighted by their share of signal, and tokens and sentences are
      kept that stand out of the vocabulary.
    - A change of weights has the noise of their rounding, and an upload of 16 bits that of its own.
      Its size is known for every entry: rows and columns are divided by it first. Prefixes are
      then compared at the way out of the first block's attention, where contexts differ most, and
      sentences are verified in the second block (`verified`). The published code trains in double
      precision instead.

    Attributes:
        rank_cutoff: Directions that are left out of a space that is full, the weakest first; the
            published code has 20. None to refuse.
        tolerance: Singular values below this share of the largest may be zero: they are if a gap
            is above them.
        pool: Most tokens for one position under noise.
        combinations: Most combinations of tokens that are tested for one length of an encoder's
            sentences; the published code has 10^7.

    References:
        Petrov, Dimitrov, Baader, Mueller, Vechev. "DAGER: Exact Gradient Inversion for Large
        Language Models." NeurIPS 2024. https://arxiv.org/abs/2405.15586 (Theorem 5.1,
        Algorithms 1 and 2)
    """

    cost: ClassVar[int] = 0

    rank_cutoff: int | None = None
    tolerance: float = 1e-7
    pool: int = 400
    combinations: int = 20_000

    def __post_init__(self) -> None:
        if self.rank_cutoff is not None and not self.rank_cutoff >= 1:
            raise ValueError(f"rank_cutoff must be at least 1, got {self.rank_cutoff}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be in (0, 1), got {self.tolerance}")
        for name in ("pool", "combinations"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the sentences; see `Adversary`."""
        view = find_transformer(observation)
        spaces = block_spaces(view, observation, tolerance=self.tolerance)
        first, second = (
            self._usable(space, most_inputs(observation), place)
            for space, place in zip(spaces, ("first", "second"), strict=True)
        )
        pool = find_tokens(view, first, view.positions, most=self.pool)
        if not sum(len(tokens) for tokens in pool.tokens):
            raise NotApplicable("no token of the vocabulary is in the span of the gradient")
        causal = is_causal(view)
        probe = Probe.of(view, observation, second)
        limit = Limit.of(view, probe, pool, rng, causal=causal)
        if causal:
            found = grow(view, probe, pool, limit, observation.batch_size)
            if limit.noisy:
                found = verified(view, observation, pool, found, rng)
        else:
            found = _search(view, probe, pool, limit, observation, self.combinations, rng)
        return rebuilt(view, observation, found, limit, second)

    def _usable(self, space: Subspace, inputs: int, place: str) -> Subspace:
        """Return a space that tells vectors apart.

        Raises:
            NotApplicable: If it holds nothing, or everything.
        """
        if not space.rank:
            raise NotApplicable(
                f"nothing of the {place} block's gradient is above the noise"
                if space.noise > 0
                else f"the {place} block's gradient is zero"
            )
        if not space.saturated:
            return space
        if self.rank_cutoff is None:
            raise NotApplicable(f"the rank is saturated: {why_full(space, inputs, place)}")
        return space.without(self.rank_cutoff)


def why_full(space: Subspace, inputs: int, place: str) -> str:
    """Return why a block's gradient spans everything, given how many inputs it can have."""
    spans = f"the {place} block's gradient spans all {space.width} dimensions"
    if inputs < space.width:
        return (
            f"{spans}, but at most {inputs} tokens are behind the upload: noise, compression or an "
            "adaptive optimizer has filled it"
        )
    return f"{spans}, and as many tokens may be behind the upload ({inputs})"


def _search(
    view: Transformer,
    probe: Probe,
    pool: TokenPool,
    limit: Limit,
    observation: Observation,
    combinations: int,
    rng: Generator,
) -> list[Sentence]:
    """Return an encoder's sentences, the nearest first."""
    found: list[Sentence] = []
    for length in _lengths(pool, view.space):
        columns = [pool.at(place)[: observation.batch_size] for place in range(length)]
        if view.space.last is not None:
            columns[-1] = torch.tensor([view.space.last], device=view.device)
        if any(not len(column) for column in columns):
            break
        tried = []
        for guess in _guesses(columns, combinations, rng):
            distances = probe.distance(view, guess).mean(1)
            tried += sentences_of(guess, distances * length)
        if math.prod(len(column) for column in columns) > combinations:
            tried = _climb(view, probe, columns, tried, observation.batch_size)
        found += tried
    if not found:
        raise NotApplicable("no place where a sentence may end shows in the span of the gradient")
    found.sort(key=lambda sentence: sentence.distance)
    distances = torch.tensor([sentence.distance for sentence in found], dtype=torch.float64)
    near = limit.accepts(distances, observation.batch_size).nonzero().flatten().tolist()
    return [found[place] for place in near or [0]][: observation.batch_size]


def _lengths(pool: TokenPool, space: TokenSpace) -> list[int]:
    """Return the lengths that sentences may have: where the last token of all is possible."""
    return [
        place + 1
        for place in range(len(pool.tokens))
        if len(pool.at(place))
        and (space.last is None or bool((pool.at(place) == space.last).any()))
    ]


def _guesses(columns: Sequence[Tensor], most: int, rng: Generator) -> Iterator[Tensor]:
    """Yield all combinations of tokens if there are few, or else random ones."""
    count = math.prod(len(column) for column in columns)
    if count <= most:
        index = torch.arange(count)
        sizes = [len(column) for column in columns]
        digits = []
        for size in reversed(sizes):
            digits.append(index % size)
            index = index // size
        picks = torch.stack(digits[::-1], dim=1)
    else:
        picks = torch.stack(
            [torch.randint(len(column), (min(most, 512),), generator=rng) for column in columns], 1
        )
    rows = torch.stack(
        [column[pick.to(column.device)] for column, pick in zip(columns, picks.T, strict=True)], 1
    )
    yield from rows.split(2048)


def _climb(
    view: Transformer,
    probe: Probe,
    columns: Sequence[Tensor],
    tried: Sequence[Sentence],
    batch_size: int,
) -> list[Sentence]:
    """Return sentences from the best random ones by changing one token at a time."""
    starts = sorted(tried, key=lambda sentence: sentence.distance)[: 8 * batch_size]
    current = torch.tensor([sentence.tokens for sentence in starts], device=view.device)
    score = torch.tensor([s.distance for s in starts], dtype=torch.float64, device=view.device)
    for _ in range(4):
        before = score
        for place, column in enumerate(columns):
            changed = current.repeat_interleave(len(column), 0)
            changed[:, place] = column.repeat(len(current))
            distances = probe.distance(view, changed).mean(1)
            score, best = distances.view(len(current), -1).min(1)
            current = current.clone()
            current[:, place] = column[best]
        if torch.equal(score, before):
            break
    return sentences_of(current, score * len(columns))


def rebuilt(
    view: Transformer,
    observation: Observation,
    found: Sequence[Sentence],
    limit: Limit,
    second: Subspace,
) -> Reconstruction:
    """Return the batch that sentences make, with what no span says of them.

    A guess is as certain as it is near, compared with random vectors; less so if the sentences
    have fewer prefixes than the second block's space has dimensions, so that some are missing.
    Then how often each occurs is unknown, too, and there are no copies. The objective is the share
    of the second block's gradient that the sentences do not span.
    """
    share = explained_share([sentence.tokens for sentence in found], second)
    sure = {s.tokens: share * max(0.0, 1 - s.distance / max(limit.high, 1e-12)) for s in found}
    endings = find_endings(view, observation, [*sure]) if is_causal(view) else None
    once: list[tuple[float, tuple[int, ...]]] = []
    again: list[tuple[float, tuple[int, ...]]] = []  # copies leave room for other sentences first
    for ending in endings or []:
        if limit.noisy and not ending.leaf:
            continue  # a beginning's count is a difference of weights, and noise is as large
        nearest = max(sure[s] for s in sure if s[: len(ending.prefix)] == ending.prefix)
        once.append((nearest * _trust(ending), sentence_of(view, ending)))
        again += once[-1:] * (round(ending.count) - 1 if share > _COMPLETE else 0)
    if endings is None:  # then the last tokens are missing where they are labels
        lost = view.space.task == "next-token"
        once = [(c * len(tokens) / (len(tokens) + lost), tokens) for tokens, c in sure.items()]
    ranked = (sorted(part, key=lambda guess: -guess[0]) for part in (once, again))
    guesses = [*chain(*ranked)][: observation.batch_size]
    gradient = block_gradient(observation, view.second.projections)
    return Reconstruction(
        inputs=view.padded([tokens for _, tokens in guesses]),
        objective=_unexplained(view, gradient, [*sure]),
        confidence=torch.tensor([certainty for certainty, _ in guesses]),
    )


def explained_share(sentences: Sequence[tuple[int, ...]], second: Subspace) -> float:
    """Return the share of the second block's dimensions that prefixes of sentences account for."""
    prefixes = {s[:end] for s in sentences for end in range(1, len(s) + 1)}
    return min(1.0, len(prefixes) / max(1, second.rank))


def _trust(ending: Ending) -> float:
    return min(1.0, ending.fit) if ending.leaf else min(1.0, ending.fit, ending.count)


def _unexplained(
    view: Transformer, gradient: Tensor, sentences: Sequence[tuple[int, ...]]
) -> float | None:
    """Return the share of a gradient's squared norm outside the span of sentences' vectors."""
    vectors = [
        view.sequences(torch.tensor([tokens], device=view.device), [view.second.module])[0][0]
        for tokens in sentences
    ]
    if not vectors:
        return None
    basis = torch.linalg.qr(torch.cat(vectors).double().T).Q
    wide = gradient.double()
    outside = wide - (wide @ basis) @ basis.T
    return float(outside.square().sum() / wide.square().sum().clamp(min=1e-300))
