"""How examples are distributed over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from leakfrontier.defenses import Batch

from ..foundations.examples import Data

Indices = NDArray[np.int64]
"""Positions of examples in a batch."""

Sizes = Sequence[int] | None
"""Number of examples of each client; None if they differ by at most one."""


def partition(
    batch: Batch, clients: int, scheme: str, rng: Generator, *, alpha: float = 0.5
) -> list[Batch]:
    """Return the examples of each client: see `partition_rows`."""
    rows = partition_rows(batch, clients, scheme, rng, alpha=alpha)
    return [batch.at(part) for part in rows]


def partition_rows(
    batch: Data,
    clients: int,
    scheme: str,
    rng: Generator,
    *,
    alpha: float = 0.5,
    sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return the rows of each client's examples; every example goes to exactly one client.

    Args:
        batch: The examples to distribute.
        clients: Number of clients.
        scheme: One of `PARTITIONS`.
        rng: Source of all random choices.
        alpha: Similarity of the clients for `label-skew`. Near 0, each has one class.
        sizes: Number of examples of each client. By default, they differ by at most one.
    """
    if scheme not in PARTITIONS:
        raise ValueError(f"scheme must be one of {', '.join(PARTITIONS)}, got {scheme!r}")
    if not 1 <= clients <= len(batch.targets):
        raise ValueError(
            f"clients must be from 1 to the number of examples, {len(batch.targets)}, got {clients}"
        )
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    seed = int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))
    draws = np.random.default_rng(seed)
    if sizes is not None and (len(sizes) != clients or sum(sizes) != len(batch.targets)):
        raise ValueError(
            f"sizes must be {clients} numbers that add up to {len(batch.targets)}, got {sizes}"
        )
    parts = PARTITIONS[scheme](batch, clients, sizes, draws, alpha)
    return [torch.from_numpy(draws.permutation(part)) for part in parts]


def _iid(
    batch: Data, clients: int, sizes: Sizes, draws: np.random.Generator, alpha: float
) -> list[Indices]:
    cuts = clients if sizes is None else np.cumsum(sizes)[:-1]
    return np.array_split(draws.permutation(len(batch.targets)), cuts)


def _label_skew(
    batch: Data, clients: int, sizes: Sizes, draws: np.random.Generator, alpha: float
) -> list[Indices]:
    """Give each client classes in proportions from a Dirichlet distribution, while they last.

    For each client, q ~ Dir(alpha p), where p are the class frequencies of all examples. The
    client's examples are drawn without replacement from the classes, with probabilities q.

    References:
        Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated
        Visual Classification. 2019, section 3. https://arxiv.org/abs/1909.06335
    """
    if batch.targets.dim() > 1:
        raise ValueError("label-skew needs labels, but texts for task: next-token have none")
    _, labels, left = np.unique(
        batch.targets.cpu().numpy(), return_inverse=True, return_counts=True
    )
    pools = [draws.permutation(np.flatnonzero(labels == label)) for label in range(len(left))]
    concentration = alpha * left / len(labels)
    parts = []
    each = (len(labels) + np.arange(clients)) // clients if sizes is None else sizes
    for size in each:
        taken = _draw_labels(draws.dirichlet(concentration), left, int(size), draws)
        chosen = zip(pools, left - taken, left, strict=True)
        parts.append(np.concatenate([pool[start:end] for pool, start, end in chosen]))
        left = left - taken
    return parts


def _draw_labels(
    shares: NDArray[np.float64], available: Indices, size: int, draws: np.random.Generator
) -> Indices:
    """Return how many examples to take from each class; exhausted classes are drawn again."""
    taken = np.zeros_like(available)
    while taken.sum() < size:
        weights = np.where(taken < available, shares, 0)
        if not weights.sum() > 0:
            weights = (available - taken).astype(float)
        drawn = draws.multinomial(size - taken.sum(), weights / weights.sum())
        taken = np.minimum(taken + drawn, available)
    return taken


def _feature_skew(
    batch: Data, clients: int, sizes: Sizes, draws: np.random.Generator, alpha: float
) -> list[Indices]:
    """Give each client a region of the leading principal components, with all classes.

    The examples are halved repeatedly, along one component after another. Each class has its own
    cut. So clients differ in P(x | y), but hardly in P(y).
    """
    from sklearn.utils.extmath import randomized_svd  # slow to import

    features = batch.inputs.flatten(1).cpu().float().numpy()
    centred = features - features.mean(axis=0)
    count = min(max(1, (clients - 1).bit_length()), *centred.shape)
    scores, _, _ = randomized_svd(centred, count, random_state=int(draws.integers(2**32)))
    targets = batch.targets if batch.targets.dim() == 1 else batch.targets.new_zeros(len(features))
    _, labels = np.unique(targets.cpu().numpy(), return_inverse=True)
    return _halve(np.arange(len(labels)), clients, sizes, scores, labels)


def _halve(
    indices: Indices, clients: int, sizes: Sizes, scores: NDArray[np.float32], labels: Indices
) -> list[Indices]:
    if clients == 1:
        return [indices]
    quantiles = _class_quantiles(scores[indices, 0], labels[indices])
    ordered = indices[np.argsort(quantiles, kind="stable")]
    first = clients // 2
    cut = len(indices) * first // clients if sizes is None else sum(sizes[:first])
    left, right = (None, None) if sizes is None else (sizes[:first], sizes[first:])
    turned = np.roll(scores, -1, axis=1)
    return [
        *_halve(ordered[:cut], first, left, turned, labels),
        *_halve(ordered[cut:], clients - first, right, turned, labels),
    ]


def _class_quantiles(values: NDArray[np.float32], labels: Indices) -> NDArray[np.float64]:
    """Return each value's rank among the values of its class, as a fraction."""
    order = np.lexsort((values, labels))
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    quantiles = np.empty(len(values))
    sorted_labels = labels[order]
    quantiles[order] = (np.arange(len(values)) - starts[sorted_labels] + 0.5) / counts[
        sorted_labels
    ]
    return quantiles


PARTITIONS: dict[str, Callable[[Data, int, Sizes, np.random.Generator, float], list[Indices]]] = {
    "iid": _iid,
    "label-skew": _label_skew,
    "feature-skew": _feature_skew,
}
"""Every way to distribute examples over clients, by name."""
