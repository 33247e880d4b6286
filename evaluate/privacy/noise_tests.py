"""Is noise at least what is promised? Tests that extra noise, of whatever kind, never fails.

What uploads have beyond their mean is tested against the hypothesis G + E: G is N(0, 1), in units
of the promised noise, and independent over entries and uploads; E is anything that is independent
of G, be it heavy-tailed, the same in every upload or in every entry. A defense with more noise
than it promises is such a sum. Each test here keeps its level for every E:

- *Size*: given E, sums of squares are noncentral chi^2, which is stochastically larger than chi^2.
- *Covariance over uploads*: the part of one upload's noise that is no combination of those before
  it has a squared norm that, given E and those before, is noncentral chi^2 too. Noise that is
  used again has none; common noise on top of new noise takes nothing away.
- *Covariance over entries*: so are sums and differences of entries, in pairs that are fixed, or
  chosen by another upload.
- *Shape*: the characteristic function is exp(-t^2 / 2) times that of E, whose modulus is at most 1.
  Uniform, truncated and Laplace noise of the same variance exceed exp(-t^2 / 2) somewhere. Kurtosis
  has no such limit (E may have any), and is told, not judged.
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
"""Where characteristic functions are looked at."""

_SPACING = FREQUENCIES[1] - FREQUENCIES[0]

DIRECTIONS = 16
"""Directions of the plane in which their deviation is bounded, by Hoeffding's inequality."""

BARE = 1e-3
"""Share of the promised noise below which an entry's is taken for rounding."""


class MeasuredNoise:
    """Noise of uploads, in units of what is promised.

    Attributes:
        rows: Uploads x entries; at least standard normal if the promise is kept.
        squares: Their sums of squares, per entry.
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
        """Return sums over all entries, and over those of each tensor."""
        return np.array([values.sum(), *np.add.reduceat(values, self.starts)])

    def ratios(self) -> Floats:
        """Return the standard deviation as measured, in all and in each tensor."""
        ratios: Floats = np.sqrt(self.sums(self.squares) / self._freedom)
        return ratios

    @property
    def _freedom(self) -> Floats:
        return len(self.rows) * self.sums(np.ones(len(self.squares)))

    def p_values(self) -> Floats:
        """Return p-values that there is as much noise as promised, corrected for their number.

        In all and in each tensor, from the sums of squares; likewise, from the p-values of single
        entries by Fisher's method, which sees noise that is missing at some entries and too large
        at others; and the quietest entry's.
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
        """Return an upper confidence limit of the noise of the quietest entries."""
        most = float(self.ratios()[0]) * self.ideal_limit(level)

        def excess(log_share: float) -> float:
            p_value = float(self.scaled(math.exp(-log_share)).p_values().min())
            return math.log(max(p_value, 1e-300) / level)

        if not most > 0:
            return 0.0
        high = math.log(most) - 1e-6  # the limit for all entries together: mostly the least
        low = high - 50
        if excess(high) >= 0:
            return most
        return math.exp(brentq(excess, low, high, xtol=1e-6)) if excess(low) > 0 else 0.0

    def ideal_limit(self, level: float) -> float:
        """Return the limit for noise that is measured exactly as promised."""
        freedom, tests = self._freedom[0], 2 * len(self._freedom) + 1
        return math.sqrt(freedom / float(stats.chi2.ppf(level / tests, freedom)))

    def groups(self) -> Iterator[Floats]:
        """Yield the rows of all entries, and of those of each tensor."""
        yield self.rows
        if len(self.sizes) > 1:
            yield from np.split(self.rows, self.starts[1:], axis=1)


def size(noise: MeasuredNoise, level: float, needs: str) -> Symptom:
    """Test whether there is less noise than promised: in all, in a tensor, or at some entries."""
    if not (noise.squares > BARE**2 * len(noise.rows)).any():
        return Symptom(0.0, "repeated uploads have no noise, or the same noise", 0.0, 0.0)
    p_values, ratios, limit = noise.p_values(), noise.ratios(), noise.limit(level)
    worst, p_value = int(p_values.argmin()), float(p_values.min())
    if p_value < level and worst >= len(ratios):
        words = f"some entries have no more than {limit:.3f} of the noise that {needs}"
        return Symptom(p_value, words, limit, limit)
    ratio = float(ratios[worst if p_value < level else 0])
    return Symptom(p_value, f"the noise is {ratio:.3f} of what {needs}", limit, ratio)


def quiet_uploads(noise: MeasuredNoise) -> Symptom:
    """Test whether some uploads have less noise than others: which of them is not asked."""
    squares, entries = np.square(noise.rows).sum(axis=1), noise.rows.shape[1]
    p_values = stats.chi2.cdf(squares, entries)
    p_value = len(p_values) * float(p_values.min())
    share = math.sqrt(float(squares.min()) / entries)
    return Symptom(p_value, f"an upload has only {share:.2g} of the noise that it needs")


def innovations(noise: MeasuredNoise) -> Symptom:
    """Test whether every upload has as much new noise as promised, in all and in each tensor."""
    groups = [_innovations(group) for group in noise.groups() if group.shape[1] >= 2]
    p_values, shares = zip(*groups, strict=True) if groups else ((1.0,), (1.0,))
    worst = int(np.argmin(p_values))
    words = (
        f"noise is used again: only {math.sqrt(shares[worst]):.2g} of what is needed is new in "
        "some upload"
    )
    return Symptom(len(p_values) * p_values[worst], words, math.sqrt(shares[worst]))


def _innovations(rows: Floats) -> tuple[float, float]:
    """Return the p-value that rows have as much new noise as promised, and the least variance.

    Their Gram-Schmidt remainders are the diagonal of a Cholesky factor; Fisher's method combines
    the p-values, each of which holds given the rows before it.
    """
    count, entries = rows.shape
    count = min(count, entries)  # any others are combinations of these, whatever the noise
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
    """Test whether entries share their noise: neighbours, and those that one upload has alike."""
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
    return Symptom(p_value, "entries share their noise: differences of some have less than is due")


def _even(rows: Floats) -> Floats:
    return rows[:, : rows.shape[1] // 2 * 2]


def _fisher(rows: Floats) -> float:
    """Return the p-value that columns, which are disjoint, have their noise: all, or the least."""
    with np.errstate(divide="ignore"):
        logarithms = np.log(gammainc(len(rows) / 2, np.square(rows).sum(axis=0) / 2))
    together = float(stats.chi2.sf(-2 * logarithms.sum(), 2 * len(logarithms)))
    least = len(logarithms) * math.exp(max(float(logarithms.min()), -700.0))
    return min(together, least)


def shape(rows: Floats) -> Symptom:
    """Test whether noise is Gaussian, or that and more, by its characteristic function.

    Args:
        rows: Noise of single uploads: of sums of many, any would be Gaussian.
    """
    values = rows.ravel()
    # Frequencies are evenly spaced: a product each, which costs far less than a power.
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
        f"{found[worst]:.3f}, at most {math.exp(-(FREQUENCIES[worst] ** 2) / 2):.3f} is possible "
        f"(kurtosis {kurtosis:.2f}, Gaussian 3)"
    )
    return Symptom(min(1.0, len(p_values) * float(p_values[worst])), words)
