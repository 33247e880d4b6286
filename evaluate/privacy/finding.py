"""The common form of the findings of audits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

SIGNIFICANCE = 1e-5
"""Probability of a false alarm of an audit of noise, clipping or sampling (all its tests)."""

CANARY_SIGNIFICANCE = 1e-3
"""The same for audits with canaries, whose limits are already cautious."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The finding of an audit.

    Attributes:
        method: Name of the audit.
        claimed: Claimed epsilon.
        lower_bound: Lower confidence limit of the true epsilon, if the audit gives one. The
            module of the audit names the confidence. It holds jointly for all announced
            repetitions.
        ceiling: Mean `lower_bound` of a perfect implementation.
        p_value: Probability of a finding at least as bad if the claim holds.
        violated: Whether the claim is refuted.
        words: The finding, in words.
        measured_noise: Measured noise multiplier. Only from residual noise.
    """

    method: str
    claimed: float
    lower_bound: float = math.nan
    ceiling: float = math.nan
    p_value: float
    violated: bool
    words: str
    measured_noise: float = math.nan

    @property
    def finding(self) -> str:
        """Return the finding, with its p-value if it refutes the claim."""
        return f"{self.words} (p = {self.p_value:.1g})" if self.violated else self.words

    @property
    def verdict(self) -> str:
        """Return the finding and what it means for the claim."""
        return f"{'violated' if self.violated else 'no violation found'}: {self.finding}"


class Symptom(NamedTuple):
    """The result of one test of an audit: p-value, words and measured noise."""

    p_value: float
    words: str
    noise: float = math.nan  # upper confidence limit, relative to the promised noise
    measured: float = math.nan


def most_damning(findings: Sequence[Audit]) -> Audit:
    """Return the worst repetition of one audit, with its p-value corrected for their number.

    Bounds and verdicts are already corrected if the number was announced as `runs`.
    """
    worst = min(findings, key=lambda finding: finding.p_value)
    return replace(worst, p_value=min(1.0, len(findings) * worst.p_value))


def compared(bound: float, claimed: float, ceiling: float, *, violated: bool) -> str:
    """Return the comparison of a lower bound with the claim, in words."""
    words = f"epsilon is at least {bound:.2f} (claimed: {claimed:.2f})"
    return words if violated else f"{words}; a perfect implementation would show {ceiling:.2f}"
