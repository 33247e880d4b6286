"""Beginnings of sentences, with the keys and values of the first block's attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Prefixes(NamedTuple):
    """Beginnings of sequences of one length, with the first block's cached keys and values.

    Attributes:
        tokens: Tokens, of shape (n, length).
        keys: Keys of the first block's attention, (n, heads, length, size); None for length 0.
        values: Values, likewise.
    """

    tokens: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def rows(self, chosen: slice) -> Prefixes:
        """Return some of the prefixes."""
        keys, values = (None if x is None else x[chosen] for x in (self.keys, self.values))
        return Prefixes(self.tokens[chosen], keys, values)


class Extended(NamedTuple):
    """Prefixes, each with every candidate after it.

    Attributes:
        vectors: Inputs of the requested modules at the candidate, each (n, candidates, size).
        prefixes: The prefixes that were extended.
        candidates: The candidate tokens.
        keys: Keys of prefixes and candidates, (n, heads, length + candidates, size).
        values: Values, likewise.
    """

    vectors: list[Tensor]
    prefixes: Prefixes
    candidates: Tensor
    keys: Tensor
    values: Tensor

    def keep(self, row: Tensor, column: Tensor) -> Prefixes:
        """Return prefixes that are one token longer.

        Args:
            row: Indices of the prefixes that are continued.
            column: Index of the candidate that continues each.
        """
        length = self.prefixes.tokens.shape[1]
        tokens = torch.cat([self.prefixes.tokens[row], self.candidates[column, None]], dim=1)

        def longer(memory: Tensor) -> Tensor:
            newest = memory[row, :, length + column][:, :, None]
            return torch.cat([memory[row, :, :length], newest], dim=2)

        return Prefixes(tokens, longer(self.keys), longer(self.values))
