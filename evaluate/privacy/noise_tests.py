"""Test whether noise is at least as large as promised. Extra noise of any kind passes all tests.

The null hypothesis is that the noise of uploads is G + E. G is N(0, 1) in units of the promised
noise, independent over entries and uploads. E is any noise that is independent of G: it may be
heavy-tailed, or equal in all uploads or all entries. A defense with more noise than promised has
this form. Each test keeps its level for every E:

- *Size*: given E, sums of squares are noncentral chi^2, which is stochastically larger than chi^2.
- *Covariance over uploads*: take the part of an upload's noise that is not a linear combination of
  earlier uploads. Given E and the earlier uploads, its squared norm is noncentral chi^2 too. Reused
  noise has no such part. Common noise in addition to new noise does not reduce it.
- *Covariance over entries*: the same holds for sums and differences of entries, in pairs that are
  fixed or chosen by another upload.
- *Shape*: the characteristic function is exp(-t^2 / 2) times that of E, whose modulus is at most 1.
  Uniform, truncated and Laplace noise of the same variance exceed exp(-t^2 / 2) somewhere. Kurtosis
  has no such limit (E may have any), so it is reported but not judged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import gammainc

from ..foundations.statistics import Floats
from .finding import Symptom

FREQUENCIES = np.linspace(1.0, 6.0, 21)
"""Arguments at which characteristic functions are evaluated."""

_SPACING = FREQUENCIES[1] - FREQUENCIES[0]

DIRECTIONS = 16
"""Directions in the complex plane along which Hoeffding's inequality bounds the deviation."""

BARE = 1e-3
"""Noise below this share of the promised noise counts as rounding."""


class MeasuredNoise:
    """Noise of uploads, in units of the promised noise.

    Attributes:
        rows: Uploads x entries. At least standard normal if the promise is kept.
        squares: Sum of squares over uploads, per entry.
    """

    def __init__(self, rows: Floats, sizes: Sequence[int]) -> None:
        self.rows: Floats = rows
        self.squares: Floats = np.square(rows).sum(axis=0)
        self.sizes, self.starts = np.array(sizes), np.cumsum([0, *sizes[:-1]])

    def scaled(self, share: float) -> MeasuredNoise:
        """Return the noise relative to another promise."""
        other = copy.copy(self)
        other.rows, other.squares = share * self.rows, share**2 * self.squares
        return other

    def sums(self, values: Floats) -> Floats:
        """Return the sum over all entries, and the sums over each tensor."""
        return np.array([values.sum(), *np.add.reduceat(values, self.starts)])

    def ratios(self) -> Floats:
        """Return the measured standard deviation, in total and per tensor."""
        ratios: Floats = np.sqrt(self.sums(self.squares) / self._freedom)
        return ratios

    @property
    def _freedom(self) -> Floats:
        return len(self.rows) * self.sums(np.ones(len(self.squares)))

    def p_values(self) -> Floats:
        """Return p-values of the promised noise, corrected for their number.

        They come from three tests: the sums of squares, in total and per tensor; Fisher's method
        over single entries, in total and per tensor; and the quietest entry. Fisher's method
        detects noise that is missing at some entries and too large at others.
        """
        entries = gammainc(len(self.rows) / 2, self.squares / 2)
        with np.errstate(divide="ignore"):
            fisher = self.sums(-2 * np.log(entries))
        p_values: Floats = np.concatenate(
            [
                stats.chi2.cdf(self.sums(self.squares), self._freedom),
                stats.chi2.sf(fisher, 2 * self._freedom / len(self.rows)),
                [len(entries) * entries.min()],
            ]
        )
        return len(p_values) * p_values

    def limit(self, level: float) -> float:
        """Return an upper confidence limit on the noise of the quietest entries."""
        most = float(self.ratios()[0]) * self.ideal_limit(level)

        def excess(log_share: float) -> float:
            p_value = float(self.scaled(math.exp(-log_share)).p_values().min())
            return math.log(max(p_value, 1e-300) / level)

        if not most > 0:
            return 0.0
        high = math.log(most) - 1e-6  # the limit for all entries together, usually the smallest
        low = high - 50
        if excess(high) >= 0:
            return most
        return math.exp(brentq(excess, low, high, xtol=1e-6)) if excess(low) > 0 else 0.0

    def ideal_limit(self, level: float) -> float:
        """Return the limit if the measured noise equals the promised noise."""
        freedom, tests = self._freedom[0], 2 * len(self._freedom) + 1
        return math.sqrt(freedom / float(stats.chi2.ppf(level / tests, freedom)))

    def groups(self) -> Iterator[Floats]:
        """Yield the rows of all entries, then those of each tensor."""
        yield self.rows
        if len(self.sizes) > 1:
            yield from np.split(self.rows, self.starts[1:], axis=1)


def size(noise: MeasuredNoise, level: float, needs: str) -> Symptom:
    """Test whether noise is smaller than promised: in total, in a tensor or at some entries."""
    if not (noise.squares > BARE**2 * len(noise.rows)).any():
        return Symptom(0.0, "repeated uploads have no noise, or the same noise", 0.0, 0.0)
    p_values, ratios, limit = noise.p_values(), noise.ratios(), noise.limit(level)
    worst, p_value = int(p_values.argmin()), float(p_values.min())
    if p_value < level and worst >= len(ratios):
        words = f"some entries have at most {limit:.3f} of the noise that {needs}"
        return Symptom(p_value, words, limit, limit)
    ratio = float(ratios[worst if p_value < level else 0])
    return Symptom(p_value, f"the noise is {ratio:.3f} of what {needs}", limit, ratio)


def quiet_uploads(noise: MeasuredNoise) -> Symptom:
    """Test whether any single upload has too little noise."""
    squares, entries = np.square(noise.rows).sum(axis=1), noise.rows.shape[1]
    p_values = stats.chi2.cdf(squares, entries)
    p_value = len(p_values) * float(p_values.min())
    share = math.sqrt(float(squares.min()) / entries)
    return Symptom(p_value, f"an upload has only {share:.2g} of the noise that it needs")


def innovations(noise: MeasuredNoise) -> Symptom:
    """Test whether every upload has the promised amount of new noise, in total and per tensor."""
    groups = [_innovations(group) for group in noise.groups() if group.shape[1] >= 2]
    p_values, shares = zip(*groups, strict=True) if groups else ((1.0,), (1.0,))
    worst = int(np.argmin(p_values))
    words = (
        f"noise is used again: in some upload, only {math.sqrt(shares[worst]):.2g} of the needed "
        "noise is new"
    )
    return Symptom(len(p_values) * p_values[worst], words, math.sqrt(shares[worst]))


def _innovations(rows: Floats) -> tuple[float, float]:
    """Return the p-value of the promised new noise in all rows, and the smallest new variance.

    The Gram-Schmidt remainders are the diagonal of a Cholesky factor. Each p-value holds given the
    earlier rows, and Fisher's method combines them.
    """
    count, entries = rows.shape
    count = min(count, entries)  # further rows are always combinations of these
    products = rows[:count] @ rows[:count].T
    ridge = 1e-12 * max(float(np.trace(products)) / count, 1e-300)
    rest = np.square(np.diagonal(np.linalg.cholesky(products + ridge * np.eye(count))))
    freedom = entries - np.arange(count)
    with np.errstate(divide="ignore"):
        logarithms = stats.chi2.logcdf(rest, freedom)
    together = float(stats.chi2.sf(-2 * logarithms.sum(), 2 * count))
    least = count * math.exp(max(float(logarithms.min()), -700.0))
    return 2 * min(together, least), float((rest / freedom).min())


def shared_entries(noise: MeasuredNoise) -> Symptom:
    """Test whether entries share noise: neighbours, and entries that are alike in one upload."""
    rows = noise.rows
    orders = [(np.arange(rows.shape[1]), rows), (np.abs(rows[0]).argsort(), rows[1:])]
    p_values = [
        _fisher((ordered[:, :-1:2] + sign * ordered[:, 1::2]) / math.sqrt(2))
        for order, tested in orders
        if len(tested) >= 2
        for shift in (0, 1)
        for ordered in [_even(tested[:, order[shift:]])]
        if ordered.shape[1] >= 2
        for sign in (-1, 1)
    ]
    p_value = 2 * len(p_values) * min(p_values, default=1.0)
    return Symptom(p_value, "entries share their noise: some differences have too little")


def _even(rows: Floats) -> Floats:
    return rows[:, : rows.shape[1] // 2 * 2]


def _fisher(rows: Floats) -> float:
    """Return the p-value of the promised noise in disjoint columns: together, or the quietest."""
    with np.errstate(divide="ignore"):
        logarithms = np.log(gammainc(len(rows) / 2, np.square(rows).sum(axis=0) / 2))
    together = float(stats.chi2.sf(-2 * logarithms.sum(), 2 * len(logarithms)))
    least = len(logarithms) * math.exp(max(float(logarithms.min()), -700.0))
    return min(together, least)


def shape(rows: Floats) -> Symptom:
    """Test by the characteristic function whether noise is Gaussian, with or without extra noise.

    Args:
        rows: Noise of single uploads. Sums of many uploads would always look Gaussian.
    """
    values = rows.ravel()
    # Frequencies are evenly spaced, so a product replaces the costly exponential.
    waves, step = np.exp(1j * FREQUENCIES[0] * values), np.exp(1j * _SPACING * values)
    found = np.empty(len(FREQUENCIES))
    for index in range(len(found)):
        found[index] = abs(waves.mean())
        waves *= step
    excess = np.maximum(found - np.exp(-(FREQUENCIES**2) / 2), 0) * math.cos(math.pi / DIRECTIONS)
    p_values = DIRECTIONS * np.exp(-len(values) * excess**2 / 2)
    worst = int(p_values.argmin())
    kurtosis = float(stats.kurtosis(values, fisher=False))
    words = (
        f"the noise is not Gaussian: its characteristic function at {FREQUENCIES[worst]:.2f} is "
        f"{found[worst]:.3f}, but at most {math.exp(-(FREQUENCIES[worst] ** 2) / 2):.3f} is "
        f"possible (kurtosis {kurtosis:.2f}, Gaussian 3)"
    )
    return Symptom(min(1.0, len(p_values) * float(p_values[worst])), words)
