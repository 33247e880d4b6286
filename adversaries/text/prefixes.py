"""Beginnings of sentences, and what the first block's attention remembers of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Prefixes(NamedTuple):
    """Beginnings of sequences, all of one length, and what the first block remembers of them.

    Attributes:
        tokens: (n, length).
        keys: Of the first block's attention: (n, heads, length, size); None for length 0.
        values: The same.
    """

    tokens: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def rows(self, chosen: slice) -> Prefixes:
        """Return some of them."""
        keys, values = (None if x is None else x[chosen] for x in (self.keys, self.values))
        return Prefixes(self.tokens[chosen], keys, values)


class Extended(NamedTuple):
    """Prefixes, each with every candidate after it.

    Attributes:
        vectors: What the modules asked for are given at the candidate: (n, candidates, size) each.
        prefixes: What was extended.
        candidates: The tokens.
        keys: Of prefixes and candidates: (n, heads, length + candidates, size).
        values: The same.
    """

    vectors: list[Tensor]
    prefixes: Prefixes
    candidates: Tensor
    keys: Tensor
    values: Tensor

    def keep(self, row: Tensor, column: Tensor) -> Prefixes:
        """Return prefixes that are one token longer.

        Args:
            row: Which prefixes are continued.
            column: By which of the candidates.
        """
        length = self.prefixes.tokens.shape[1]
        tokens = torch.cat([self.prefixes.tokens[row], self.candidates[column, None]], dim=1)

        def longer(memory: Tensor) -> Tensor:
            newest = memory[row, :, length + column][:, :, None]
            return torch.cat([memory[row, :, :length], newest], dim=2)

        return Prefixes(tokens, longer(self.keys), longer(self.values))
