"""EDA: train on texts with words swapped or deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .base import Batch, Defense


@dataclass
class EDA(Defense):
    """Change every text at random before each step: swap words, or delete words.

    One of two operations is drawn for each text of n tokens. The first swaps two random tokens,
    round(alpha n) times and at least once. The second deletes every token with probability alpha,
    but never all of them. The other two operations of the paper replace and insert synonyms. They
    are left out because they need a thesaurus of one language. If the targets are next tokens,
    they are those of the changed text.

    There is no formal guarantee, and the authors intend none. An attack recovers the changed text,
    which contains most words of the private one. A replay changes nothing, because guesses are of
    the text that was trained on.

    Attributes:
        alpha: Share of a text to change, in [0, 1]. 0 changes nothing. The paper uses 0.1.
        padding: The token that fills up texts at their end. It stays there. It is 0 for tokenizers
            of words and characters.

    References:
        Wei, Zou. "EDA: Easy Data Augmentation Techniques for Boosting Performance on Text
        Classification Tasks." EMNLP 2019. https://arxiv.org/abs/1901.11196
    """

    alpha: float = 0.1
    padding: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")

    @property
    def stochastic(self) -> bool:
        """Return whether anything is changed."""
        return self.alpha > 0

    @property
    def strength(self) -> float:
        """Return alpha."""
        return self.alpha

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return the changed texts, with their labels or as their own targets."""
        if not self.alpha or not len(batch.inputs):
            return batch
        if batch.inputs.is_floating_point() or batch.inputs.dim() != 2:
            raise ValueError(
                "EDA changes texts (rows of tokens), got inputs of shape "
                f"{tuple(batch.inputs.shape)} and {batch.inputs.dtype}"
            )
        inputs = torch.stack([self._changed(text, rng) for text in batch.inputs])
        own = batch.targets.shape == batch.inputs.shape
        return Batch(inputs, inputs if own else batch.targets)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return a client that changes nothing."""
        return Defense()

    def _changed(self, text: Tensor, rng: Generator) -> Tensor:
        """Return one text with words swapped or deleted."""
        real = (text != self.padding).nonzero()
        count = int(real[-1]) + 1 if len(real) else 0
        if count < 2:
            return text
        if torch.rand((), generator=rng) < 0.5:
            order = torch.arange(count)
            for _ in range(max(1, round(self.alpha * count))):
                pair = torch.randperm(count, generator=rng)[:2]
                order[pair] = order[pair.flip(0)]
        else:
            order = (torch.rand(count, generator=rng) >= self.alpha).nonzero().flatten()
            if not len(order):
                order = torch.randint(count, (1,), generator=rng)
        changed = torch.full_like(text, self.padding)
        changed[: len(order)] = text[order.to(text.device)]
        return changed
