"""The blind baseline for language models: the model's own most likely sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot, pad

from ..base import Adversary, Observation, Reconstruction
from ..spaces import NotApplicable, TokenSpace
from .language_prior import Logits, next_token_logits
from .transformer import find_transformer


@dataclass(frozen=True)
class LanguageGuess(Adversary):
    """Guess the sentences that the attacked model itself finds most likely.

    Each sentence starts with a different likely first token. The model continues it by the most
    likely token at each step. It stops at an end of text, or at the length of the median public
    text. If all texts begin with the same token, the first tokens are those that follow it.
    Otherwise they are the most frequent first tokens of public texts. Without public texts, they
    are those that follow the model's beginning-of-text token.

    This is not an attack, and its success is not leakage. The rate of an attack is meaningful only
    if it is above the rates of this baseline and of `PriorGuess`.
    """

    baseline: ClassVar[bool] = True
    cost: ClassVar[int] = 0

    @torch.no_grad()
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return one likely sentence per private sentence."""
        logits = next_token_logits(observation)
        space = cast(TokenSpace, observation.space)
        beginnings = _beginnings(observation, space, logits)
        tokens = _continued(logits, beginnings, _median_length(observation, space), space)
        guess = pad(tokens, (0, space.shape[0] - tokens.shape[1]), value=_filling(space))
        return Reconstruction(guess, guess if space.task == "next-token" else observation.targets)


def _beginnings(observation: Observation, space: TokenSpace, logits: Logits) -> Tensor:
    """Return the most likely beginnings, of shape (sentences, tokens)."""
    count = observation.batch_size
    if space.first is not None:
        first = torch.full((count, 1), space.first, device=_device(observation))
        return torch.cat([first, _likeliest(logits(first[:1])[0, -1], space, count)], dim=1)
    if observation.public is not None:
        firsts = one_hot(observation.public.inputs[:, 0], space.vocabulary).sum(0).float()
        return _likeliest(firsts, space, count)
    begin = getattr(find_transformer(observation).whole.config, "bos_token_id", None)
    if begin is None:
        raise NotApplicable("it is unknown how texts begin, because there are no public texts")
    beginning = torch.full((1, 1), begin, device=_device(observation))
    return _likeliest(logits(beginning)[0, -1], space, count)


def _likeliest(scores: Tensor, space: TokenSpace, count: int) -> Tensor:
    """Return the tokens with the highest scores, of shape (count, 1); none are special."""
    scores = scores[: space.vocabulary].clone()
    scores[list(space.special)] = -torch.inf
    best = scores.topk(min(count, len(scores))).indices
    return best.repeat(-(-count // len(best)))[:count].unsqueeze(1)


def _median_length(observation: Observation, space: TokenSpace) -> int:
    if observation.public is None:
        return space.shape[0]
    return int(space.real(observation.public.inputs).sum(1).median())


def _continued(logits: Logits, tokens: Tensor, length: int, space: TokenSpace) -> Tensor:
    """Return texts continued by their most likely tokens; after an end, there is only padding."""
    ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    ends = [t for t in (*space.special, space.padding, space.last) if t is not None]
    while tokens.shape[1] < length and not ended.all():
        following = logits(tokens)[:, -1, : space.vocabulary].argmax(-1)
        ended |= torch.isin(following, following.new_tensor(ends))
        following = following.where(~ended, _filling(space))
        tokens = torch.cat([tokens, following.unsqueeze(1)], dim=1)
    return tokens


def _device(observation: Observation) -> torch.device:
    return find_transformer(observation).device


def _filling(space: TokenSpace) -> int:
    """Return the token that fills up a text; any token if there is no padding."""
    return 0 if space.padding is None else space.padding
