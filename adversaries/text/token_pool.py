"""Find the tokens of a vocabulary that are behind a gradient, and their positions.

The first block's input is a known function of one token, and of its position if positions are added
to embeddings. The client's tokens lie in the space that the block's gradient spans. One matrix
product measures the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .subspace import Subspace, threshold
from .transformer import Transformer

ROUNDING = 1e-4
"""Distances below this count as 0 in single precision."""

STRIKING = 5.0
"""A token stands out if it deviates from the vocabulary's median by this many robust deviations."""

LIKELY = 3.0
"""The same limit if the noise is known: few other tokens are as near, and no true one is lost."""


_FIRST = 256
"""Number of tokens measured exactly, plus four for each dimension; more if all are near."""


@dataclass(frozen=True)
class TokenPool:
    """The tokens that may have been in the batch.

    Attributes:
        tokens: Tokens for each position, nearest first. A single entry holds for all positions.
        distances: Their distances from the space.
        level: The largest distance of a token that was kept.
    """

    tokens: list[Tensor]
    distances: list[Tensor]
    level: float

    def at(self, position: int) -> Tensor:
        """Return the tokens for a position; there may be none."""
        if len(self.tokens) == 1:
            return self.tokens[0]
        return self.tokens[position] if position < len(self.tokens) else self.tokens[0][:0]


def find_tokens(view: Transformer, space: Subspace, positions: int, *, most: int) -> TokenPool:
    """Return the tokens that are much nearer to the space than the others.

    Without noise, they come before the widest gap among the smallest distances. There may be more
    of them than dimensions: a token that occurs at two positions adds the difference of these
    positions to the space, and hence all tokens of either position at the other. With noise there
    is no gap, and the tokens are those that stand out of the vocabulary.

    Args:
        view: The model.
        space: The space that the first block's gradient spans.
        positions: Number of positions to test, if positions matter.
        most: Largest number of tokens per position under noise.
    """
    energy = vocabulary_energy(view, space, positions)
    if space.noise > 0:
        return _striking(energy, most, LIKELY if space.noise_is_known else STRIKING)
    count = min(energy.numel(), _FIRST + 4 * space.rank)
    token, position, exact = _nearest(view, space, energy, count)
    while count < energy.numel() and float(exact.max()) < math.sqrt(ROUNDING):  # all are near
        count = min(energy.numel(), 4 * count)
        token, position, exact = _nearest(view, space, energy, count)
    limit = threshold(exact, most=count - 1, floor=ROUNDING)
    if not limit > 0:
        return _striking(energy, most, STRIKING)
    return _by_position(token, position, exact, exact < limit, energy.shape[1])


def _nearest(
    view: Transformer, space: Subspace, energy: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest tokens, their positions, and their exact distances."""
    nearest = energy.flatten().topk(count).indices
    token, position = nearest // energy.shape[1], nearest % energy.shape[1]
    exact = torch.empty(count, dtype=torch.float64, device=energy.device)
    for place in position.unique().tolist():
        chosen = position == place
        vectors = view.at_position(token[chosen], place, view.first.module)
        exact[chosen] = space.distance(vectors)
    return token, position, exact


def _striking(energy: Tensor, most: int, least: float) -> TokenPool:
    """Return the tokens of each position that stand out, or at least the nearest one."""
    distance = (1 - energy.double()).clamp(1e-9, 1 - 1e-9).sqrt()
    odds = (distance / (1 - distance)).log()
    middle = odds.median(0).values
    spread = 1.4826 * (odds - middle).abs().median(0).values.clamp(min=1e-12)
    nearest = odds.topk(min(most, len(odds)), dim=0, largest=False).indices
    kept = ((odds - middle) / spread).gather(0, nearest) < -least
    kept[0] = True
    position = torch.arange(energy.shape[1], device=energy.device).expand_as(nearest)
    return _by_position(
        nearest.flatten(),
        position.flatten(),
        distance.gather(0, nearest).flatten(),
        kept.flatten(),
        energy.shape[1],
    )


def _by_position(
    token: Tensor, position: Tensor, distance: Tensor, kept: Tensor, positions: int
) -> TokenPool:
    tokens, distances = [], []
    for place in range(positions):
        chosen = (kept & (position == place)).nonzero().flatten()
        chosen = chosen[distance[chosen].argsort()]
        tokens.append(token[chosen])
        distances.append(distance[chosen])
    return TokenPool(tokens, distances, float(distance[kept].max()) if kept.any() else 0.0)


def vocabulary_energy(view: Transformer, space: Subspace, positions: int) -> Tensor:
    """Return the share of every token's first-block input that lies in a space.

    The result is in single precision. Near tokens are measured again.

    Args:
        view: The model.
        space: The space that the first block's gradient spans.
        positions: Number of positions to test, if positions matter.

    Returns:
        Shares of shape (vocabulary, positions), or (vocabulary, 1) if positions do not matter.
    """
    every = torch.arange(view.space.vocabulary, device=view.device)
    if not view.absolute:
        vectors = view.at_position(every, 0, view.first.module)
        return space.energy(vectors, exact=False)[:, None]
    if isinstance(view.norm, nn.LayerNorm):
        return _factorised(view, view.norm, space, every, positions)
    columns = [
        space.energy(view.at_position(every, place, view.first.module), exact=False)
        for place in range(positions)
    ]
    return torch.stack(columns, dim=1)


def _factorised(
    view: Transformer, norm: nn.LayerNorm, space: Subspace, every: Tensor, positions: int
) -> Tensor:
    """Return the shares of all tokens at all positions from products of tokens and positions.

    A layer norm of a sum is gamma (a + b) / sigma + beta, with centred a and b. The square of its
    projection is a sum of products of a's and b's. Therefore one product of the vocabulary with the
    basis and the positions replaces one product with the basis for every position.
    """
    token = view.at_position(every, 0, norm)
    some = every[:1]
    place = torch.cat([view.at_position(some, p, norm) for p in range(positions)]) - token[:1]
    token = token - token.mean(1, keepdim=True)
    place = place - place.mean(1, keepdim=True)
    width = token.shape[1]
    scale = space.scaled(norm.weight.detach())
    shift = torch.zeros_like(scale) if norm.bias is None else space.scaled(norm.bias.detach())
    basis = (space.weights.sqrt()[:, None] * space.basis).to(token.dtype)
    right = torch.cat([basis * scale, place, place * scale**2, (shift * scale)[None]])
    projected, plain, scaled, offset = (token @ right.T).split(
        [len(basis), positions, positions, 1], dim=1
    )
    deviation = _square(token) + 2 * plain + _square(place).T
    sigma = (deviation / width + norm.eps).sqrt()
    other, constant = (place * scale) @ basis.T, basis @ shift
    inside = _square(projected) + 2 * projected @ other.T + _square(other).T
    inside = inside / sigma**2 + 2 * (projected @ constant[:, None] + other @ constant) / sigma
    whole = _square(token * scale) + 2 * scaled + _square(place * scale).T
    whole = whole / sigma**2 + 2 * (offset + place @ (shift * scale)) / sigma
    share: Tensor = (inside + constant.square().sum()) / (whole + shift.square().sum())
    return share


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True)
