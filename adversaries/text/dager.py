"""DAGER: exact text from the gradients of the first two blocks' attention."""

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
"""If no sentence is missing, sentences explain this share of the second block's dimensions."""


@dataclass(frozen=True)
class DAGER(Adversary):
    """DAGER: test whether tokens and prefixes lie in the span of the gradients of attention.

    The inputs of a linear layer span the rows of its gradient, so wrong inputs are detected at
    once. A token (with its position, if positions are added) is kept if its input to the first
    block lies in the span of the block's query, key and value gradients. A decoder's sentences are
    grown from these tokens. A token is appended if the second block's input at it, a function of
    the prefix alone, lies in the span of the second block's gradients. An encoder's sentences are
    tested as a whole. The attack is exact while the upload has fewer different tokens and prefixes
    than the model's width. It needs no prior, no labels and no lengths.

    This attack differs from the paper and its code as follows:

    - Gradients of queries, keys and values are stacked. Alone, queries miss a sequence's first
      token, keys without rotation span only differences, and grouped keys and values have few rows.
    - Ranks are at the last gap of the singular values above rounding errors (`subspace`).
      Thresholds are where distances grow most steeply, between kept and random tokens. The
      published ones are absolute: they depend on the scale of the gradient, the precision and the
      protocol.
    - For a decoder's prefix, only the newest position is tested, and only its newest token runs
      through the block. Causality leaves the others unchanged.
    - Growth stops when the number of accepted prefixes reaches the second block's rank.
    - Three facts are in no span: the last token under a next-token loss, sentences that are the
      beginning of others, and repeated sentences. They come from the last block (`sentence_ends`).
      The published evaluation leaves them out.
    - If an encoder has more candidates than `combinations`, they are searched from random starts by
      changing one token at a time. The published code draws them at random.
    - Under noise, directions are weighted by their share of signal. Tokens and sentences are kept
      if they stand out of the vocabulary.
    - A change of weights has the noise of their rounding, and an upload of 16 bits has its own
      rounding noise. The size of this noise is known for every entry: rows and columns are first
      divided by it. Prefixes are then compared at the output layer of the first block's attention,
      where contexts differ most. Sentences are verified in the second block (`verified`). The
      published code trains in double precision instead.

    Attributes:
        rank_cutoff: Number of weakest directions to leave out if a space is full. The published
            code leaves out 20. None refuses such uploads.
        tolerance: Singular values below this share of the largest may be zero. They are zero if
            there is a gap above them.
        pool: Largest number of tokens per position under noise.
        combinations: Largest number of token combinations to test for one length of an encoder's
            sentences. The published code tests 10^7.

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
        """Return the sentences. See `Adversary`."""
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
        """Return a space that can tell vectors apart.

        Raises:
            NotApplicable: If the space is empty or full.
        """
        if not space.rank:
            raise NotApplicable(
                f"no part of the {place} block's gradient is above the noise"
                if space.noise > 0
                else f"the {place} block's gradient is zero"
            )
        if not space.saturated:
            return space
        if self.rank_cutoff is None:
            raise NotApplicable(f"the rank is saturated: {why_full(space, inputs, place)}")
        return space.without(self.rank_cutoff)


def why_full(space: Subspace, inputs: int, place: str) -> str:
    """Return why a block's gradient spans everything, given its largest number of inputs."""
    spans = f"the {place} block's gradient spans all {space.width} dimensions"
    if inputs < space.width:
        return (
            f"{spans}, but at most {inputs} tokens are behind the upload: noise, compression or an "
            "adaptive optimizer has filled the rest"
        )
    return f"{spans}, and up to {inputs} tokens may be behind the upload"


def _search(
    view: Transformer,
    probe: Probe,
    pool: TokenPool,
    limit: Limit,
    observation: Observation,
    combinations: int,
    rng: Generator,
) -> list[Sentence]:
    """Return an encoder's sentences, nearest first."""
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
        raise NotApplicable("the span of the gradient shows no place where a sentence may end")
    found.sort(key=lambda sentence: sentence.distance)
    distances = torch.tensor([sentence.distance for sentence in found], dtype=torch.float64)
    near = limit.accepts(distances, observation.batch_size).nonzero().flatten().tolist()
    return [found[place] for place in near or [0]][: observation.batch_size]


def _lengths(pool: TokenPool, space: TokenSpace) -> list[int]:
    """Return the possible lengths of sentences: where the last token of all texts is possible."""
    return [
        place + 1
        for place in range(len(pool.tokens))
        if len(pool.at(place))
        and (space.last is None or bool((pool.at(place) == space.last).any()))
    ]


def _guesses(columns: Sequence[Tensor], most: int, rng: Generator) -> Iterator[Tensor]:
    """Yield all combinations of tokens if there are few, or random ones otherwise."""
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
    """Improve the best random sentences by changing one token at a time."""
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
    """Return the batch that the sentences form, with the facts that no span shows.

    The confidence of a guess grows as its distance falls, relative to random vectors. It is lower
    if the sentences have fewer prefixes than the second block's space has dimensions, because some
    sentences are then missing. In that case the number of repetitions is unknown too, and no
    copies are returned. The objective is the share of the second block's gradient that the
    sentences do not span.
    """
    share = explained_share([sentence.tokens for sentence in found], second)
    sure = {s.tokens: share * max(0.0, 1 - s.distance / max(limit.high, 1e-12)) for s in found}
    endings = find_endings(view, observation, [*sure]) if is_causal(view) else None
    once: list[tuple[float, tuple[int, ...]]] = []
    again: list[tuple[float, tuple[int, ...]]] = []  # copies come after all other sentences
    for ending in endings or []:
        if limit.noisy and not ending.leaf:
            continue  # the count of a beginning is a difference of weights, as small as the noise
        nearest = max(sure[s] for s in sure if s[: len(ending.prefix)] == ending.prefix)
        once.append((nearest * _trust(ending), sentence_of(view, ending)))
        again += once[-1:] * (round(ending.count) - 1 if share > _COMPLETE else 0)
    if endings is None:  # the last tokens are then missing if they are labels
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
    """Return the share of the second block's dimensions that prefixes of sentences explain."""
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
