"""SOMP: text from the gradients of large batches, by matching pursuit over sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize

from ..base import Adversary, Observation, Reconstruction
from ..spaces import NotApplicable
from .diverse_beams import Candidate, Search, search
from .gradient_atoms import pursue, sentence_atoms
from .sentence_ends import Ending, find_endings, sentence_of
from .sentence_growth import Limit, Probe, Sentence, echoes, grow, verified, without_echoes
from .subspace import Subspace, row_space
from .token_pool import TokenPool, find_tokens, vocabulary_energy
from .transformer import Transformer, block_spaces, find_transformer, is_causal


class Aggregation(NamedTuple):
    """Parameters that depend on the batch size: Table 5 of the paper."""

    pool: int
    active: int  # one in this many heads is used
    sparse: int  # one in this many feed-forward parts is used
    width: int
    groups: int


TABLE_5 = {
    1: Aggregation(960, 4, 6, 2, 1),
    4: Aggregation(1600, 4, 6, 4, 4),
    8: Aggregation(2400, 3, 4, 6, 8),
    16: Aggregation(3200, 3, 4, 12, 16),
}

_UNEXPLAINED = 0.1
"""If no sentence is missing, at most this share of the upload's norm is unexplained."""

_PREFIXES = 64
"""Largest number of beginnings of sentences that are candidates of the pursuit."""


@dataclass(frozen=True)
class SOMP(Adversary):
    """SOMP: find a pool of tokens, build sentences, and choose those that explain the upload.

    Stage I scores the vocabulary by the spans of the first block's gradients, head by head. Stage
    II decodes sentences by the spans of the second block's gradients, with the model's own
    next-token scores and in groups that differ. Stage III treats the gradient of each sentence as
    an atom. It chooses at most a batch of atoms by orthogonal matching pursuit.

    The paper has no public code and leaves many details open. This implementation decides them as
    follows:

    - As printed, a token's query is projected onto a space in the head's own dimensions. That space
      is full as soon as there are as many tokens as dimensions. Here the block's input is projected
      onto the row space of the head's gradient.
    - All heads stacked, with keys and values, give DAGER's test. It is stronger than any part of
      them while there are fewer tokens than the model's width, with or without noise. Stage II
      keeps the continuations that this test allows. With `stacked` geometry, stage I uses it
      instead of scores. If the space is full, scores rank tokens and sentences.
    - If the size of the noise is known, as for changes of weights, stage II is DAGER's: greedy
      prefixes, verified as a whole, and clustered.
    - DAGER's greedy sentences are candidates too, because beams lose true sentences under noise. If
      noise leaves no gap between true and other vectors, every continuation below the high limit is
      followed, and every prefix is a candidate. The pursuit suffers least from noise of all three
      stages, because its products average over all entries.
    - Informative heads are those with the largest gradients. The tokens for a position are those of
      the pool. Position 0 has no query gradient, so the tokens of the stacked test are added.
    - The feed-forward scores compare normalised inputs with parts of its first layer's gradient.
    - If the second block's space is full, sentences are compared at the output layer of the first
      block's feed-forward layer. That layer has more inputs than the model's width, so its
      gradient does not span a full space. True inputs have more of their norm in it than others.
      This is an extension of the paper.
    - Beam widths are per group: as printed, W / G is below 1 at batch sizes of 8 and 16. Between
      two columns of Table 5, the larger batch size applies. Groups avoid tokens that earlier groups
      chose at the same step. Repetitions are those of trigrams.
    - The language model is used only if geometry leaves more sentences than beams. Distances are in
      units of their spread, like its scores. As printed, fluency would outweigh them.
    - Lengths are not fixed: a sentence ends where nothing continues it. The last block reveals the
      last token under a next-token loss, and whether a sentence also ends earlier.
    - Sentences are clustered by ROUGE-L of tokens, greedily from the best. This is done only if
      geometry has not verified them one by one, because near copies may both be true.
    - Atoms are the gradients of the first two blocks' projections. Labels are those that the last
      block shows, or else class 0 for all. Amounts are penalised for atoms and an upload of norm 1.
      They count repeated sentences.

    Attributes:
        geometry: Geometry of stage I: `stacked` or `headwise`.
        pool: Number of tokens to keep; None for Table 5.
        width: Beams per group; None for Table 5.
        groups: Groups of beams; None for Table 5.
        alignment: lambda_1, weight of a token's mean distance from informative heads' spaces.
        consistency: lambda_2, weight of the deviation of these distances.
        sparsity: lambda_3, weight of the share of small feed-forward scores.
        language: beta_LM, weight of the language model.
        diversity: lambda_div, penalty for tokens that earlier groups chose.
        repetition: lambda_ng, penalty for repeated trigrams.
        ridge: lambda of the pursuit.
        tolerance: epsilon of the pursuit, as a share of the upload's norm.
        cluster: ROUGE-L from which two sentences count as one.
        matching: Whether stage III chooses sentences. Otherwise the best-scored ones are taken.

    References:
        Li, Li. "SOMP: Scalable Gradient Inversion for Large Language Models via Subspace-Guided
        Orthogonal Matching Pursuit." 2026. https://arxiv.org/abs/2603.16761 (Algorithms 1 to 3,
        Tables 4 and 5)
    """

    cost: ClassVar[int] = 1

    geometry: Literal["stacked", "headwise"] = "stacked"
    pool: int | None = None
    width: int | None = None
    groups: int | None = None
    alignment: float = 0.8
    consistency: float = 0.5
    sparsity: float = 0.5
    language: float = 0.33
    diversity: float = 0.15
    repetition: float = 0.2
    ridge: float = 1e-3
    tolerance: float = 1e-4
    cluster: float = 0.8
    matching: bool = True

    def __post_init__(self) -> None:
        if self.geometry not in ("stacked", "headwise"):
            raise ValueError(f"geometry must be 'stacked' or 'headwise', got {self.geometry!r}")
        for name in ("pool", "width", "groups"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("alignment", "consistency", "sparsity", "language", "diversity", "repetition"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        for name in ("ridge", "tolerance", "cluster"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the sentences. See `Adversary`."""
        view = find_transformer(observation)
        if not is_causal(view):
            raise NotApplicable("the model is an encoder: its sentences cannot be grown by tokens")
        first, second = block_spaces(view, observation)
        if not first.rank or not second.rank:
            raise NotApplicable("no part of the gradient is above the noise")
        table = TABLE_5[min(size for size in TABLE_5 if size >= min(observation.batch_size, 16))]
        pool = self._pool(view, observation, first, table)
        decoded = self._decoded(view, observation, second, pool, table, rng)
        return self._chosen(view, observation, decoded)

    @staticmethod
    def _heads(view: Transformer, table: Aggregation) -> int:
        return -(-view.heads // table.active)

    def _pool(
        self, view: Transformer, observation: Observation, first: Subspace, table: Aggregation
    ) -> TokenPool:
        """Stage I: return the tokens near the spaces of the first block."""
        size, length = self.pool or table.pool, view.positions
        sure = None
        if not first.saturated:
            sure = find_tokens(view, first, length, most=size)
            if self.geometry == "stacked":
                return sure
        heads = head_spaces(observation, view, self._heads(view, table))
        shares = [vocabulary_energy(view, head, length) for head in heads]
        far = (1 - torch.stack(shares).clamp(max=1)).sqrt()
        cost = self.alignment * far.mean(0) + self.consistency * far.std(0, correction=0)
        tokens, distances = [], []
        for place in range(cost.shape[1]):
            nearest = cost[:, place].topk(min(4 * size, len(cost)), largest=False).indices
            scores = cost[nearest, place] - self.sparsity * _sparsity(
                view, observation, nearest, place, -(-view.heads // table.sparse)
            )
            kept = nearest[scores.topk(min(size, len(scores)), largest=False).indices]
            if sure is not None:
                kept = torch.cat([sure.at(place), kept[~torch.isin(kept, sure.at(place))]])
            tokens.append(kept)
            distances.append(far.mean(0)[kept, place].double())
        return TokenPool(tokens, distances, 0.0 if sure is None else sure.level)

    def _decoded(
        self,
        view: Transformer,
        observation: Observation,
        second: Subspace,
        pool: TokenPool,
        table: Aggregation,
        rng: Generator,
    ) -> _Decoded:
        """Stage II: return sentences of these tokens near the second block's space."""
        probe = Probe.of(view, observation, second)
        limit = Limit.of(view, probe, pool, rng, causal=True)
        geometry = _Geometry(limit, second.saturated)
        greedy: list[Sentence] = []
        if not geometry.full:
            greedy = grow(view, probe, pool, limit, observation.batch_size)
        if geometry.verifies:
            greedy = verified(view, observation, pool, greedy, rng)
            found = sorted((Candidate(*sentence) for sentence in greedy), key=_score)
        else:
            beams = self._beams(view, observation, probe, geometry, pool, table)
            found = [*(Candidate(*sentence) for sentence in greedy), *beams]
        if geometry.full or geometry.verifies:
            found = self._clusters(found)
        return _Decoded(found, [sentence.tokens for sentence in greedy], geometry)

    def _beams(
        self,
        view: Transformer,
        observation: Observation,
        probe: Probe,
        geometry: _Geometry,
        pool: TokenPool,
        table: Aggregation,
    ) -> list[Candidate]:
        """Return what diverse beams find; if the space is full, they use the next best one."""
        how = Search(
            self.width or table.width,
            self.groups or table.groups,
            self.language,
            self.diversity,
            self.repetition,
        )
        limit = geometry.limit

        def any_of(tokens: Tensor, distances: Tensor) -> Tensor:
            return torch.ones_like(distances, dtype=torch.bool)

        def near(tokens: Tensor, distances: Tensor) -> Tensor:
            again = echoes(tokens, pool.at(tokens.shape[1])) & (not view.absolute)
            new = distances.masked_fill(again, torch.inf)
            close = limit.accepts(new, how.beams) if limit.clear else new < limit.high
            return close | (again & (distances < limit.low) & (not limit.noisy))

        if geometry.full:
            module, distance = _soft(view, observation, self._heads(view, table))
            return search(view, module, distance, any_of, pool, how)
        return search(view, probe.module, probe.space.distance, near, pool, how)

    def _clusters(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the best sentence of each cluster."""
        kept: list[Candidate] = []
        for candidate in found:
            if all(_rouge_l(candidate.tokens, other.tokens) < self.cluster for other in kept):
                kept.append(candidate)
        return kept

    def _chosen(
        self, view: Transformer, observation: Observation, decoded: _Decoded
    ) -> Reconstruction:
        """Stage III: return the few sentences whose gradients explain the upload."""
        endings = _endings(view, observation, decoded)
        inputs = view.padded([sentence_of(view, ending) for ending in endings])
        labels = torch.tensor([ending.label for ending in endings], device=view.device)
        targets = inputs if view.space.task == "next-token" else labels
        size = observation.batch_size
        if not self.matching:
            return Reconstruction(inputs[:size])
        layers = [
            layer
            for block in (view.first, view.second)
            for layer in block.projections
            if layer.name in observation.update
        ]
        selection = pursue(
            sentence_atoms(view, observation, layers, inputs, targets),
            [layer.gradient(observation) for layer in layers],
            most=size,
            ridge=self.ridge,
            tolerance=self.tolerance,
        )
        total = sum(abs(amount) for amount in selection.amounts) or 1.0
        guesses = [*selection.chosen]
        if selection.residual < _UNEXPLAINED:  # otherwise amounts are not counts
            for chosen, amount in zip(selection.chosen, selection.amounts, strict=True):
                guesses += [chosen] * (round(size * abs(amount) / total) - 1)
        guesses = guesses[:size]  # copies come after all other sentences
        certainty = max(0.0, 1 - selection.residual)
        sure = [certainty * endings[chosen].fit for chosen in guesses]
        return Reconstruction(
            inputs=inputs[guesses],
            targets=None if view.space.task == "next-token" else labels[guesses],
            objective=selection.residual,
            confidence=torch.tensor(sure),
        )


@dataclass(frozen=True)
class _Geometry:
    """How well distances from the second block's space tell true sentences from others.

    Attributes:
        limit: Which distances count as zero.
        full: Whether the space is full, so distances carry no information.
    """

    limit: Limit
    full: bool

    @property
    def verifies(self) -> bool:
        """Return whether noise is known and leaves a gap; sentences are then verified whole."""
        return self.limit.noisy and self.limit.clear and not self.full

    @property
    def vague(self) -> bool:
        """Return whether there is no gap, so sentences may be too long."""
        return not (self.limit.clear or self.full)


class _Decoded(NamedTuple):
    """The sentences of stage II.

    Attributes:
        sentences: All of them, best first.
        greedy: Those of greedy growth.
        geometry: The geometry that found them.
    """

    sentences: Sequence[Candidate]
    greedy: Sequence[tuple[int, ...]]
    geometry: _Geometry


def _endings(view: Transformer, observation: Observation, decoded: _Decoded) -> list[Ending]:
    """Return the candidates of the pursuit: sentences with their ends and labels."""
    noisy = decoded.geometry.limit.noisy
    longest = [sentence.tokens for sentence in without_echoes(decoded.sentences, view)]
    endings = find_endings(view, observation, longest)
    if endings is None:
        endings = [Ending(tokens, 0, 1.0, 1.0, True) for tokens in longest]
    if noisy:  # noise looks like ends within a sentence
        endings = [ending for ending in endings if ending.leaf]
    place = {tokens: index for index, tokens in enumerate(longest)}
    endings.sort(key=lambda ending: place.get(ending.prefix, len(place)))
    alone = [] if noisy else decoded.greedy  # read off separately, as if there were no others
    if {*alone} != {*longest}:
        endings += find_endings(view, observation, alone) or []
    if decoded.geometry.vague:
        endings += _beginnings(view, longest)
    once = {(ending.prefix, ending.label): ending for ending in reversed(endings)}
    return [*reversed(once.values())]  # the first reading counts


def head_spaces(observation: Observation, view: Transformer, count: int) -> list[Subspace]:
    """Return the row spaces of the query gradients of the heads with the largest gradients."""
    heads = _query_heads(observation, view, view.first.projections[0].name)
    largest = heads.square().sum((1, 2)).topk(min(count, len(heads))).indices
    spaces = [row_space(head) for head in heads[largest]]
    return [space for space in spaces if space.rank] or [row_space(heads.flatten(0, 1))]


def _query_heads(observation: Observation, view: Transformer, name: str) -> Tensor:
    """Return the gradient of queries, (heads, size, width); they come first in fused layers."""
    layer = next(
        layer
        for block in (view.first, view.second)
        for layer in block.projections
        if layer.name == name
    )
    if name not in observation.update:
        raise NotApplicable(f"the queries are frozen, so the update does not contain {name}")
    gradient = layer.gradient(observation)
    config = cast(Any, view.network).config
    size = int(getattr(config, "head_dim", None) or config.hidden_size // view.heads)
    return gradient[: view.heads * size].reshape(view.heads, size, -1)


def _sparsity(
    view: Transformer, observation: Observation, tokens: Tensor, position: int, count: int
) -> Tensor:
    """Return each token's share of small feed-forward scores in the sparsest parts."""
    layers = [layer for layer in view.first.up if layer.name in observation.update]
    if not layers:
        return torch.zeros(len(tokens), device=tokens.device)
    vectors = normalize(view.at_position(tokens, position, view.first.module), dim=1)
    scores = (vectors @ layers[0].gradient(observation).T).abs()
    parts = scores[:, : scores.shape[1] // view.heads * view.heads].view(
        len(tokens), view.heads, -1
    )
    small = 0.5 * parts.median(0).values.median(1).values[None, :, None]
    return (parts <= small).float().mean(2).topk(count, dim=1).values.mean(1)


def _soft(
    view: Transformer, observation: Observation, heads: int
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return the module and the distance that compare sentences if the second space is full."""
    down = view.first.down
    if down.name in observation.update:
        wide = row_space(down.gradient(observation))
        if wide.rank and not wide.saturated:
            return down.module, partial(wide.distance, exact=False)  # no distance is near 0
    queries = _query_heads(observation, view, view.second.projections[0].name)
    largest = queries.square().sum((1, 2)).topk(heads).indices
    spaces = [row_space(head) for head in queries[largest]]

    def distance(vectors: Tensor) -> Tensor:
        return torch.stack([space.distance(vectors) for space in spaces]).mean(0)

    return view.second.module, distance


def _beginnings(view: Transformer, sentences: Sequence[tuple[int, ...]]) -> list[Ending]:
    """Return the beginnings of sentences, at most `_PREFIXES` of them, as endings."""
    once = dict.fromkeys(s[:end] for s in sentences for end in range(len(s), 1, -1))
    if view.space.task == "next-token":
        return [Ending(s[:-1], s[-1], 1.0, 1.0, True) for s in [*once][:_PREFIXES]]
    return [Ending(s, 0, 1.0, 1.0, True) for s in [*once][:_PREFIXES]]


def _score(candidate: Candidate) -> float:
    return candidate.score


def _rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the F-measure of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        previous = row
        row = [0]
        for place, match in enumerate(other):
            row.append(previous[place] + 1 if token == match else max(previous[place + 1], row[-1]))
    return 2 * row[-1] / max(1, len(one) + len(other))
