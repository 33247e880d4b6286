"""SPEAR++: exact inversion of large batches as complete dictionary learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from ..base import Adversary, Observation, Reconstruction
from . import sphere
from .disaggregation import Pool, deflate, is_exact, no_guess, pattern_starts, reconstruction
from .relu_layer import factorise, find_layer

_OPTIMIZERS: dict[str, sphere.Optimizer] = {
    "adam": sphere.adam,
    "scalar-adam": sphere.scalar_adam,
    "geoopt": sphere.geoopt_adam,
    "pgd": sphere.gradient_descent,
}
_LOSSES = ("log-sum", "l1", "log-cosh", "l4")
_STARTS = ("deflation", "uniform")
_CYCLE = ((0.1, 2.5, 1.0), (0.05, 1.0, 0.5), (0.02, 0.5, 0.1))
"""Learning rate, widest and narrowest log-sum surrogate of successive rounds. Some columns have
wide basins; others are minima only of narrow surrogates."""
_SETTLED = 3
"""If zeros are blurred, a confirmed batch is final after this many rounds without progress."""
_FEW = 8
"""Deflation nearly determines up to this many missing directions. Their starts are only polished.
"""
_JITTER = (0.0, 0.1, 0.3, 1.0)
"""Random parts of later starts, relative to their part in the complement."""


@dataclass(frozen=True)
class SPEARPlusPlus(Adversary):
    """Recover a batch exactly from the gradient of a linear layer before a ReLU [1].

    The columns of G = dL/dZ are sparse, and G = LQ with L from the singular value decomposition of
    dL/dW. The attack searches for the columns of Q as the unit vectors q with the sparsest Lq, by
    descent on a surrogate from many starts. Directions that are sparse enough form a pool. The
    sparsest independent ones become Q, and the bias gradient fixes its scale. The batch is Q^-1 R.
    Its ReLU pattern confirms it: the sparsity matching coefficient is 1 if every gradient is zero
    exactly where the output is negative.

    The paper starts a million times from uniformly random directions, and most starts find columns
    that are already known. The defaults here use the ReLU to choose better starts. A row of dL/dW
    over its bias gradient is a weighted mean of examples. The direction that vanishes where this
    mean is off is close to a column (`disaggregation.pattern_starts`). Later rounds start where
    known columns leave room for missing ones (`disaggregation.deflate`). The descent uses a log-sum
    surrogate with one second moment per coordinate. Nearly sparse directions are then polished.

    To run the paper's own procedure (plus the polish), set `loss="l1", optimizer="scalar-adam",
    starts="uniform", steps=500, initialisations=1_000_000`.

    An incomplete recovery returns the examples whose directions were found. Their `confidence`
    is the share of neurons at which gradient and output agree.

    Attributes:
        layer: Name of a linear layer. Default: the layer that sees the inputs. The attack returns
            the inputs of a deeper layer as features.
        loss: Surrogate of the l0 norm: "log-sum", "l1", "log-cosh" or "l4".
        optimizer: "adam" (one second moment per coordinate), "scalar-adam" (one for all
            coordinates, as in geoopt and the paper), "geoopt" or "pgd".
        starts: "deflation" or "uniform".
        initialisations: Largest number of starts.
        steps: Steps from each start.
        patience: The search ends after this many rounds without a new direction.

    References:
        [1] Bakarsky, Dimitrov, Baader, Vechev. "SPEAR++: Scaling Gradient Inversion via
            Sparsely-Used Dictionary Learning." 2025. https://arxiv.org/abs/2510.24200
    """

    cost: ClassVar[int] = 0

    layer: str | None = None
    loss: str = "log-sum"
    optimizer: str = "adam"
    starts: str = "deflation"
    initialisations: int = 20_000
    steps: int = 100
    patience: int = 30

    def __post_init__(self) -> None:
        for name, known in (("loss", _LOSSES), ("optimizer", _OPTIMIZERS), ("starts", _STARTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("initialisations", "steps", "patience"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the examples whose directions were found. They are exact if confidence is 1."""
        layer = find_layer(observation, self.layer)
        factors = factorise(observation, layer)
        if factors is None:
            return no_guess(observation, layer)
        exact = is_exact(observation, factors)
        pool = Pool(factors, exact=exact)
        per_round = max(100, factors.rank) if self.starts == "deflation" else 1000
        patience = self.patience if factors.rank > 1 else 1  # a single direction needs no search
        rounds, used, idle = 0, 0, 0
        while used < self.initialisations and idle < patience:
            if pool.confirmed and (exact or idle >= _SETTLED):
                break
            count = min(per_round, self.initialisations - used)
            progress = pool.add(self._candidates(pool, count, rounds, rng))
            rounds, used, idle = rounds + 1, used + count, 0 if progress else idle + 1
        return reconstruction(observation, layer, pool)

    def _candidates(self, pool: Pool, count: int, rounds: int, rng: Generator) -> Tensor:
        """Return the directions that one round of the search finds."""
        if self.starts == "uniform":
            return self._descend(pool, sphere.uniform(count, pool.factors.left, rng), rounds, rng)
        closest = _deflated_starts(pool, count, rng)
        jitter = torch.tensor(_JITTER).to(closest)[torch.arange(count) % len(_JITTER)]
        random = jitter.unsqueeze(1) * sphere.uniform(count, closest, rng)
        starts = normalize(closest + random, dim=1)
        candidates = [closest, self._descend(pool, starts, rounds, rng)]
        if pool.factors.rank - len(pool.trusted) <= _FEW:
            candidates.append(pool.polish(closest[: 2 * _FEW]))
        return torch.cat(candidates)

    def _descend(self, pool: Pool, starts: Tensor, rounds: int, rng: Generator) -> Tensor:
        """Return the end points of the descent, rounded if the surrogate is smooth."""
        left = pool.factors.left
        optimizer = _OPTIMIZERS[self.optimizer]
        if self.loss == "log-sum":
            lr, widest, narrowest = _CYCLE[rounds % len(_CYCLE)]
            spread = torch.rand(len(starts), 1, generator=rng, device=rng.device).float()
            slope = sphere.log_sum(narrowest * (widest / narrowest) ** spread.to(starts.device))
            schedule = sphere.geometric(lr, 1e-4)
            return optimizer(left.float(), starts.float(), slope, schedule, self.steps).double()
        narrow = len(left) <= 200
        slope = {
            "l1": sphere.l1,
            "log-cosh": sphere.log_cosh(300 if narrow else 500),
            "l4": sphere.negative_l4,
        }[self.loss]
        schedule = sphere.stepwise(1e-2 if self.optimizer == "pgd" else 1e-1)
        parts = [
            optimizer(left.float(), part, slope, schedule, self.steps)
            for part in starts.float().split(sphere.CHUNK)
        ]
        ends = torch.cat(parts).double()
        if self.loss == "l1":
            return ends
        smallest = int((3 if narrow else 1.5) * pool.factors.rank)
        return sphere.round_by_sampling(left, ends, smallest, rng)


def _deflated_starts(pool: Pool, count: int, rng: Generator) -> Tensor:
    """Return directions close to columns that are still missing.

    A row of L is a mixture of rows of Q^-1. The parts of known examples are subtracted from it.
    """
    factors, known = pool.factors, pool.trusted
    remainder = deflate(factors, known)
    live = factors.left[factors.live]
    rows = torch.randint(len(live), (count,), generator=rng, device=rng.device)
    mixtures = live[rows.to(live.device)]
    mixtures = mixtures - mixtures @ known.T @ remainder.rows
    return pattern_starts(factors, mixtures, remainder.basis)
