"""The unknowns of a search for texts: places to fill, tokens to choose from, and their replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import normalize, pad

from ..base import Observation
from ..matching.label_inference import infer_targets
from ..matching.matching import Update
from ..spaces import NotApplicable, TokenSpace
from .language_prior import language_prior
from .transformer import Transformer, block_space, find_transformer


@dataclass(frozen=True)
class Texts:
    """One observation of a language model, prepared for a search.

    Attributes:
        observation: The observed update.
        space: Public facts about the tokens.
        table: The input embeddings of the vocabulary.
        known: The token at each place (sentences, length), or -1 if it is unknown.
        real: Which places are not padding.
        allowed: The tokens that unknown places may take.
        targets: The sentences' labels. None if the labels are the tokens, or unknown.
        names: The parameters whose updates are compared. The input embeddings are left out, because
            a replay on embeddings has no gradient for them.
    """

    observation: Observation
    space: TokenSpace
    table: Tensor
    known: Tensor
    real: Tensor
    allowed: Tensor
    targets: Tensor | None
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        observation: Observation,
        rng: Generator,
        lengths: Sequence[int] | None,
        *,
        use_embedding: bool,
        blocks: int | None,
    ) -> Texts:
        """Return the search problem of an observation.

        Args:
            observation: The observed update.
            rng: Source of randomness for label inference.
            lengths: Numbers of tokens of the sentences. None estimates them from the update.
            use_embedding: Whether to allow only tokens that the gradient of the embeddings shows.
                If labels are tokens, this is always so.
            blocks: Number of first blocks whose parameters are compared; None for all.

        Raises:
            NotApplicable: If there are no embeddings to search for, or no updates to compare.
        """
        transformer = find_transformer(observation)
        space, table = transformer.space, transformer.embedding
        if lengths is None:
            lengths = _lengths(observation, transformer)
        if len(lengths) != observation.batch_size or max(lengths) > space.shape[0]:
            raise ValueError(
                f"lengths must be {observation.batch_size} numbers of at most {space.shape[0]} "
                f"tokens, got {tuple(lengths)}"
            )
        next_token = space.task == "next-token"
        known, real = _places(space, torch.tensor(lengths, device=table.device))
        allowed = torch.ones(len(table), dtype=torch.bool, device=table.device)
        allowed[[t for t in (*space.special, space.padding) if t is not None]] = False
        if use_embedding or next_token:
            allowed &= _seen(observation, transformer, 2 * sum(lengths))
        return cls(
            observation,
            space,
            table,
            known,
            real,
            allowed.nonzero().flatten(),
            None if next_token else _labels(observation, rng),
            _names(observation, transformer, blocks),
        )

    @classmethod
    def at(
        cls, observation: Observation, tokens: Tensor, targets: Tensor, blocks: int | None
    ) -> Texts:
        """Return the search problem for which the given tokens are a guess."""
        transformer = find_transformer(observation)
        space, table = transformer.space, transformer.embedding
        known, real = _places(space, space.real(tokens).sum(1), tokens.shape[1])
        every = torch.arange(len(table), device=table.device)
        names = _names(observation, transformer, blocks)
        return cls(observation, space, table, known, real, every, targets, names)

    @property
    def next_token(self) -> bool:
        """Return whether the labels are the tokens themselves."""
        return self.space.task == "next-token"

    @cached_property
    def free(self) -> Tensor:
        """Return the places whose tokens are unknown."""
        return self.known < 0

    @cached_property
    def size(self) -> float:
        """Return the mean norm of the vocabulary's embeddings."""
        return float(self.table.norm(dim=1).mean())

    @property
    def scale(self) -> float:
        """Return the root mean square of an entry of an average embedding."""
        return self.size / math.sqrt(self.table.shape[1])

    @cached_property
    def observed(self) -> Update:
        """Return the observed update of the compared parameters, as a stack of one."""
        return {name: self.observation.update[name].unsqueeze(0) for name in self.names}

    @cached_property
    def language(self) -> Callable[[Tensor], Tensor] | None:
        """Return how unlikely texts are, if the observed model is a language model."""
        return language_prior(self.observation)

    @cached_property
    def _settled(self) -> Tensor:
        return self.embedded(self.known.clamp(min=0))

    @cached_property
    def _directions(self) -> Tensor:
        return normalize(self.table[self.allowed], dim=1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens; those of padding are zero."""
        return self.table[tokens] * self.real.unsqueeze(-1)

    def settled(self, inputs: Tensor) -> Tensor:
        """Return embeddings in which known tokens and padding have their own embeddings."""
        return torch.where(self.free.unsqueeze(-1), inputs, self._settled)

    def nearest(self, inputs: Tensor) -> Tensor:
        """Return the tokens whose embeddings are nearest in direction to the given vectors."""
        return torch.where(self.free, self.candidates(inputs, 1).squeeze(-1), self.known)

    def candidates(self, inputs: Tensor, count: int) -> Tensor:
        """Return the tokens whose embeddings are nearest in direction, nearest first."""
        alike = inputs @ self._directions.T
        return self.allowed[alike.topk(min(count, len(self.allowed)), dim=-1).indices]

    def labels(self, tokens: Tensor) -> Tensor:
        """Return the labels of a stack of guesses of tokens."""
        if self.targets is None:
            return tokens
        return self.targets.expand(len(tokens), -1)

    def labels_at(self, inputs: Tensor) -> Tensor:
        """Return the labels of one guess of embeddings."""
        if self.targets is not None:
            return self.targets
        return self.nearest(inputs)

    def padded(self, tokens: Tensor, length: int | None = None) -> Tensor:
        """Return tokens padded to a length (default: the length of all examples)."""
        missing = (length or self.space.shape[0]) - tokens.shape[1]
        return pad(tokens, (0, missing), value=self.space.padding or 0) if missing else tokens

    def behind(self, update: Update) -> Texts:
        """Return the same search problem for another update of the same client."""
        return replace(self, observation=replace(self.observation, update=update))

    def replay(self, inputs: Tensor, targets: Tensor) -> Update:
        """Return the client's upload for given embeddings, for the compared parameters."""
        replayed = self.observation.replay(inputs, targets, self.observation.update)
        return {name: replayed[name] for name in self.names}


def _parameter(observation: Observation, module: nn.Module) -> str | None:
    """Return the name under which a module's weight is uploaded, or None."""
    weight = module.weight
    for name, value in observation.model.named_parameters():
        if value is weight:
            return name if name in observation.update else None
    return None


def _embedding(transformer: Transformer) -> nn.Module:
    return cast(nn.Module, cast(Any, transformer.network).get_input_embeddings())


def _names(
    observation: Observation, transformer: Transformer, blocks: int | None
) -> tuple[str, ...]:
    """Return the compared parameters: those of the first blocks, and those outside of blocks."""
    embedding = _parameter(observation, _embedding(transformer))
    names = tuple(
        name
        for name in observation.update
        if name != embedding and (blocks is None or _block(name) < blocks)
    )
    if not names:
        raise NotApplicable("only the embeddings are trained, so no update can be compared")
    return names


def _block(name: str) -> int:
    """Return the block that a parameter belongs to; -1 for none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _places(space: TokenSpace, lengths: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens that are known in advance, and which places are not padding."""
    width = width or int(lengths.max())
    real = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
    known = torch.where(real, -1, space.padding or 0)
    if space.first is not None:
        known[:, 0] = space.first
    if space.last is not None:
        known[torch.arange(len(lengths)), (lengths - 1).clamp(min=0)] = space.last
    return known, real


def _labels(observation: Observation, rng: Generator) -> Tensor | None:
    try:
        return infer_targets(observation, rng)
    except NotApplicable:
        return None


def _seen(observation: Observation, transformer: Transformer, most: int) -> Tensor:
    """Return which tokens the gradient of the embeddings shows: those with the largest rows.

    A token that is neither an input nor a likely label has a row of zeros, or nearly so. If the
    output layer shares the embeddings, or noise was added, no row is exactly zero.
    """
    name = _parameter(observation, _embedding(transformer))
    if name is None:
        raise NotApplicable("the embeddings, whose gradient shows the tokens, are not uploaded")
    sizes = observation.update[name][: transformer.space.vocabulary].norm(dim=1)
    largest = sizes.topk(min(most, len(sizes)))
    seen = torch.zeros_like(sizes, dtype=torch.bool)
    seen[largest.indices[largest.values > 0]] = True
    return seen


def _lengths(observation: Observation, transformer: Transformer) -> list[int]:
    """Return the sentences' numbers of tokens, as far as the update shows them.

    The gradient of learned positions shows the longest sentence. The rank of the second block's
    gradient shows the total, because every beginning of a sentence is a separate input.
    Beginnings that sentences share count once. The other sentences share the remainder equally. If
    the model learns next tokens, last tokens are not inputs, so each sentence has one more.
    """
    space, count = transformer.space, observation.batch_size
    if space.padding is None:
        return [space.shape[0]] * count
    unseen = int(space.task == "next-token")
    positions = _positions(observation, transformer)
    longest = min(space.shape[0], (positions or space.shape[0]) + unseen)
    if count == 1 and positions is not None:
        return [longest]
    try:
        rank = block_space(observation, transformer.second.projections).rank
    except NotApplicable:
        return [longest] * count
    total = rank + count * unseen
    if count == 1:
        return [max(1 + unseen, min(longest, total))]
    if positions is None:
        longest = min(longest, -(-total // count))
    rest = max((count - 1) * (1 + unseen), min((count - 1) * longest, total - longest))
    shares = [rest // (count - 1) + (i < rest % (count - 1)) for i in range(count - 1)]
    return [longest, *shares]


def _positions(observation: Observation, transformer: Transformer) -> int | None:
    """Return how many positions have a gradient; None if positions are not learned."""
    most, words = transformer.space.shape[0], _embedding(transformer)
    for module in transformer.network.modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        if module.num_embeddings >= most:
            name = _parameter(observation, module)
            if name is not None:
                sizes = observation.update[name].norm(dim=1)
                return int((sizes > 1e-6 * sizes.max()).sum())
    return None
