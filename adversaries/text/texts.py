"""What a search for texts is about: places to fill, tokens to choose from, and their replay."""

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
    """One observation of a language model, read once.

    Attributes:
        observation: What was seen.
        space: What is known of tokens.
        table: The input embeddings of the vocabulary.
        known: The token at each place (sentences, length): -1 where it is sought.
        real: Which places are no padding.
        allowed: The tokens that may be sought.
        targets: The sentences' labels; None if they are their tokens, or not known.
        names: The parameters whose updates are compared: all but the input embeddings, to which
            a replay on embeddings is blind.
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
        """Return what is to be found behind an observation.

        Args:
            observation: What was seen.
            rng: Source of what label inference draws.
            lengths: The sentences' numbers of tokens, if they are known; or else they are
                estimated from the update.
            use_embedding: Whether only tokens that the gradient of the embeddings shows are
                allowed. Where labels are tokens, this is always so.
            blocks: How many of the first blocks' parameters are compared; None for all.

        Raises:
            NotApplicable: If there are no embeddings to search for, or nothing to compare.
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
        """Return what certain tokens would be a guess of."""
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
        """Return the places whose tokens are sought."""
        return self.known < 0

    @cached_property
    def size(self) -> float:
        """Return the mean norm of the vocabulary's embeddings."""
        return float(self.table.norm(dim=1).mean())

    @property
    def scale(self) -> float:
        """Return the root mean square of an entry of such an embedding."""
        return self.size / math.sqrt(self.table.shape[1])

    @cached_property
    def observed(self) -> Update:
        """Return the observed update of the parameters that are compared, as a stack of one."""
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
        """Return the embeddings of tokens; padding has none."""
        return self.table[tokens] * self.real.unsqueeze(-1)

    def settled(self, inputs: Tensor) -> Tensor:
        """Return embeddings with those of known tokens and of padding put in their places."""
        return torch.where(self.free.unsqueeze(-1), inputs, self._settled)

    def nearest(self, inputs: Tensor) -> Tensor:
        """Return the tokens whose embeddings point the same way as some vectors."""
        return torch.where(self.free, self.candidates(inputs, 1).squeeze(-1), self.known)

    def candidates(self, inputs: Tensor, count: int) -> Tensor:
        """Return the tokens whose embeddings are nearest in direction, the nearest first."""
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
        """Return tokens filled up to a length: by default, that of all examples."""
        missing = (length or self.space.shape[0]) - tokens.shape[1]
        return pad(tokens, (0, missing), value=self.space.padding or 0) if missing else tokens

    def behind(self, update: Update) -> Texts:
        """Return the same texts, sought behind another update of the same client."""
        return replace(self, observation=replace(self.observation, update=update))

    def replay(self, inputs: Tensor, targets: Tensor) -> Update:
        """Return what the client would upload of embeddings, of the parameters compared."""
        replayed = self.observation.replay(inputs, targets, self.observation.update)
        return {name: replayed[name] for name in self.names}


def _parameter(observation: Observation, module: nn.Module) -> str | None:
    """Return the name under which the weight of a module is uploaded, if it is."""
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
    """Return the parameters that are compared: of the first blocks, and outside of blocks."""
    embedding = _parameter(observation, _embedding(transformer))
    names = tuple(
        name
        for name in observation.update
        if name != embedding and (blocks is None or _block(name) < blocks)
    )
    if not names:
        raise NotApplicable("nothing but the embeddings is trained")
    return names


def _block(name: str) -> int:
    """Return which block a parameter belongs to; -1 for none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _places(space: TokenSpace, lengths: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens that are known beforehand, and which places are no padding."""
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

    A token that is neither an input nor a likely label has a row of zeros, or nearly so; where
    the output layer shares the embeddings, or noise was added, no row is exactly zero.
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

    The gradient of learned positions shows the longest; the rank of the second block's, of which
    every beginning of a sentence is an input of its own, shows the sum, but for beginnings that
    sentences share. The others share what remains. When next tokens are learned, last tokens are
    no inputs: one more for each.
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
    """Return how many positions have a gradient; None where they are not learned."""
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
