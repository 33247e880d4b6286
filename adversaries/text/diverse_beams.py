"""Build sentences from a pool of tokens by a beam search in groups that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..base import in_evaluation
from .prefixes import Prefixes
from .token_pool import TokenPool
from .transformer import Transformer


class Candidate(NamedTuple):
    """A sentence and its score; lower is better."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Search:
    """Parameters of the search for sentences.

    Attributes:
        width: Beams per group.
        groups: Number of groups.
        language: Weight of the language model's score, standardised over the pool.
        diversity: Penalty for a token that an earlier group has chosen at the same position.
        repetition: Penalty for a last trigram that the sentence already contains.
    """

    width: int
    groups: int
    language: float
    diversity: float
    repetition: float

    @property
    def beams(self) -> int:
        """Return the number of beams of all groups."""
        return self.width * self.groups


Geometry = Callable[[Tensor], Tensor]
"""Maps vectors to their distances."""


def search(
    view: Transformer,
    module: nn.Module,
    geometry: Geometry,
    allowed: Callable[[Tensor, Tensor], Tensor],
    pool: TokenPool,
    how: Search,
) -> list[Candidate]:
    """Return sentences, best first.

    The score of a token is its geometric distance, in units of the spread over all continuations of
    the step, minus the language model's standardised score. A sentence's score is the mean over its
    tokens. Without these units, fluent sentences would beat true ones wherever distances differ
    only a little. The language model is used only if more continuations are allowed than there are
    beams.

    Args:
        view: The model.
        module: The module whose inputs are compared.
        geometry: Returns the distances of these inputs.
        allowed: Maps the tokens of prefixes and the distances of their continuations to which
            continuations may be chosen.
        pool: The tokens.
        how: The parameters of the search.
    """
    prefixes, fluency = view.no_prefix(), Fluency(view)
    totals = torch.zeros(1, dtype=torch.float64, device=view.device)
    group = torch.full((1,), -1, device=view.device)
    found: list[Candidate] = []
    for position in range(view.positions):
        tokens = pool.at(position)
        if not len(tokens):
            break
        extended = view.extend(prefixes, tokens, [module])
        distances = geometry(extended.vectors[0])
        open_to = allowed(prefixes.tokens, distances)
        if position == 0 and not open_to.any():
            open_to.view(-1)[distances.argmin()] = True
        spread = distances.std().nan_to_num(1.0).clamp(min=1e-6)
        sums = totals[:, None] + distances / spread
        if int(open_to.sum()) > how.beams:
            sums = sums - how.language * fluency.scores(prefixes.tokens, tokens)
            row, column, group = _in_groups(prefixes.tokens, tokens, sums, open_to, group, how)
        else:
            row, column = open_to.nonzero(as_tuple=True)
            group = group[row]
        ended = torch.ones(len(prefixes.tokens), dtype=torch.bool, device=row.device)
        ended[row] = False
        found += _candidates(prefixes.tokens[ended], totals[ended])
        if not len(row):
            prefixes = Prefixes(prefixes.tokens[:0])
            break
        prefixes, totals = extended.keep(row, column), sums[row, column]
        fluency.keep(row)
    found += _candidates(prefixes.tokens, totals[: len(prefixes.tokens)])
    return sorted(found, key=lambda candidate: candidate.score)


def _candidates(tokens: Tensor, totals: Tensor) -> list[Candidate]:
    if not tokens.shape[1]:
        return []
    rows = zip(tokens.tolist(), totals.tolist(), strict=True)
    return [Candidate(tuple(row), total / len(row)) for row, total in rows]


def _in_groups(
    prefixes: Tensor, tokens: Tensor, sums: Tensor, allowed: Tensor, group: Tensor, how: Search
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows and columns that the groups keep, one group after the other."""
    scores = sums / (prefixes.shape[1] + 1)
    scores = scores + how.repetition * _repeats(prefixes, tokens)
    scores = scores.masked_fill(~allowed, torch.inf)
    taken = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    rows, columns, groups = [], [], []
    for number in range(how.groups):
        mine = (group == number) | (group < 0)
        own = (scores + how.diversity * taken).masked_fill(~mine[:, None], torch.inf)
        best = own.flatten().topk(min(how.width, own.numel()), largest=False)
        index = best.indices[best.values.isfinite()]
        row, column = index // len(tokens), index % len(tokens)
        scores[row, column] = torch.inf  # no other group may choose the same
        taken[column] = True
        rows.append(row)
        columns.append(column)
        groups.append(torch.full_like(row, number))
    return torch.cat(rows), torch.cat(columns), torch.cat(groups)


def _repeats(prefixes: Tensor, tokens: Tensor) -> Tensor:
    """Return which continuations repeat a trigram of their prefix."""
    repeated = torch.zeros(len(prefixes), len(tokens), dtype=torch.bool, device=tokens.device)
    for row, prefix in enumerate(prefixes.tolist()):
        last = prefix[-2:]
        after = [
            prefix[place + 2]
            for place in range(len(prefix) - 2)
            if prefix[place : place + 2] == last
        ]
        if after:
            repeated[row] = torch.isin(tokens, torch.tensor(after, device=tokens.device))
    return repeated


class Fluency:
    """Language-model scores of continuations, with a cache for growing prefixes."""

    def __init__(self, view: Transformer) -> None:
        from transformers import DynamicCache  # slow to import

        self.view, self.memory = view, DynamicCache()

    def keep(self, rows: Tensor) -> None:
        """Keep some of the prefixes; each may be kept more than once."""
        self.memory.reorder_cache(rows)

    @torch.no_grad()
    def scores(self, prefixes: Tensor, tokens: Tensor) -> Tensor:
        """Return the products of the last hidden state with token embeddings, standardised.

        The state before a token predicts it. Nothing predicts the first token.
        """
        count, length = prefixes.shape
        if not length:
            return torch.zeros(count, len(tokens), dtype=torch.float64, device=tokens.device)
        head = cast(Any, self.view.whole).get_output_embeddings()
        matrix = self.view.embedding if head is None else head.weight
        new = prefixes[:, self.memory.get_seq_length() :]
        with in_evaluation(self.view.network):
            states = self.view.network(
                input_ids=new, past_key_values=self.memory, use_cache=True
            ).last_hidden_state
        scores: Tensor = (states[:, -1] @ matrix[tokens].T).double()
        deviation = scores.std(1, keepdim=True).nan_to_num(1.0).clamp(min=1e-6)
        return (scores - scores.mean(1, keepdim=True)) / deviation
