"""The observed model as a language model: how likely a text is, independent of the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from ..base import Observation, in_evaluation
from ..spaces import NotApplicable, TokenSpace
from .transformer import Transformer, find_transformer

Logits = Callable[[Tensor], Tensor]
"""Maps tokens (n, length) to the logits of the next tokens: (n, length, vocabulary)."""

_SENTENCES_AT_ONCE = 16
_KNOWING = 0.9  # a model knows language if its surprise is below this share of uniform guessing
_PUBLIC = 16  # number of public texts on which a language model is tested


def next_token_logits(observation: Observation) -> Logits:
    """Return the observed model as a language model.

    A classifier on a decoder is also one if its family ties the output layer to the embeddings: the
    embeddings then replace the missing output layer. Many models expect a token that begins or ends
    a text before it. If such a token makes public texts more likely, it is put before every text.

    Raises:
        NotApplicable: If the model is not a language model.
    """
    transformer = find_transformer(observation)
    logits, space = _logits(observation, transformer), transformer.space
    if observation.public is None:
        return logits
    texts = observation.public.inputs[:_PUBLIC]
    config = cast(Any, transformer.whole).config
    marks = {getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")}
    usable = sorted(mark for mark in marks if isinstance(mark, int) and mark < space.vocabulary)
    readings = [logits, *(_after(mark, logits) for mark in usable)]
    return min(readings, key=lambda reading: float(_surprise(reading, space)(texts).mean()))


def _after(mark: int, logits: Logits) -> Logits:
    """Return a language model that puts a token before every text."""
    return lambda tokens: logits(pad(tokens, (1, 0), value=mark))[:, 1:]


def _logits(observation: Observation, transformer: Transformer) -> Logits:
    if transformer.space.task == "next-token":
        return observation.model
    if not _causal(transformer):
        raise NotApplicable("the model is an encoder, not a language model")
    if not getattr(cast(Any, transformer.whole).config, "tie_word_embeddings", False):
        raise NotApplicable("the model classifies, and its output layer for tokens is not known")

    def logits(tokens: Tensor) -> Tensor:
        with in_evaluation(transformer.network):
            hidden = transformer.network(input_ids=tokens, use_cache=False).last_hidden_state
        return cast(Tensor, hidden) @ transformer.embedding.T

    return logits


@torch.no_grad()
def _causal(transformer: Transformer) -> bool:
    """Return whether a token's hidden state does not depend on later tokens."""
    pairs = torch.tensor([[0, 0], [0, 1]], device=transformer.device) % transformer.space.vocabulary
    with in_evaluation(transformer.network):
        hidden = cast(Tensor, transformer.network(input_ids=pairs).last_hidden_state)
    return torch.allclose(hidden[0, 0], hidden[1, 0], atol=1e-5)


def language_prior(observation: Observation) -> Callable[[Tensor], Tensor] | None:
    """Return how unlikely the observed model finds texts; None if it is not a language model.

    The prior maps tokens (n, length) to the mean cross-entropy of the tokens after the first, (n,).
    A model knows no language if it finds public texts hardly more likely than uniform guessing.
    """
    try:
        logits = next_token_logits(observation)
    except NotApplicable:
        return None
    space = cast(TokenSpace, observation.space)
    surprise = _surprise(logits, space)
    if observation.public is not None:
        texts = observation.public.inputs[:_PUBLIC]
        if not float(surprise(texts).mean()) < _KNOWING * math.log(space.vocabulary):
            return None
    return surprise


def _surprise(logits: Logits, space: TokenSpace) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def surprise(tokens: Tensor) -> Tensor:
        parts = tokens.split(_SENTENCES_AT_ONCE)
        return torch.cat([_cross_entropy(logits(part), part, space.real(part)) for part in parts])

    return surprise


def _cross_entropy(logits: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    counted = real[:, 1:]
    return -(chosen * counted).sum(1) / counted.sum(1).clamp(min=1)


@torch.no_grad()
def draw_sentences(logits: Logits, known: Tensor, allowed: Tensor, rng: Generator) -> Tensor:
    """Draw sentences of allowed tokens from the language model.

    Args:
        logits: The language model.
        known: Tokens that are known in advance, and -1 at places to fill.
        allowed: The tokens that may be drawn. The first token of a text is drawn uniformly.
        rng: Source of all randomness.
    """
    tokens = known.clone()
    even = torch.ones(len(known), len(allowed))
    for place in range(known.shape[1]):
        parts = tokens[:, :place].split(_SENTENCES_AT_ONCE) if place else []
        chances = [logits(part)[:, -1, allowed].softmax(-1).cpu() for part in parts]
        drawn = torch.multinomial(torch.cat(chances) if place else even, 1, generator=rng)
        free = known[:, place] < 0
        tokens[free, place] = allowed[drawn.squeeze(1)][free]
    return tokens
