"""What audits find, in one form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

SIGNIFICANCE = 1e-5
"""Chance of a false alarm of a test of noise, clipping or sampling, its parts together."""

CANARY_SIGNIFICANCE = 1e-3
"""The same where canaries are told from none, whose limits are cautious by themselves."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found.

    Attributes:
        method: The test.
        claimed: Epsilon that the defense claims.
        lower_bound: What the true epsilon is not below, where the test says so: at the confidence
            that its module names, which the bounds of all announced repetitions keep together.
        ceiling: What `lower_bound` would be, on average, for a perfect implementation.
        p_value: Chance of a finding as bad as this, or worse, if the claim held.
        violated: Whether the claim is refuted.
        words: What was found.
        measured_noise: The noise multiplier as measured; residual noise alone.
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
        """Return what was found, with its p-value if that refutes the claim."""
        return f"{self.words} (p = {self.p_value:.1g})" if self.violated else self.words

    @property
    def verdict(self) -> str:
        """Return the finding, with what it means for the claim."""
        return f"{'violated' if self.violated else 'no violation found'}: {self.finding}"


class Symptom(NamedTuple):
    """One test of an audit: its p-value, and the noise that it leaves of the promised one."""

    p_value: float
    words: str
    noise: float = math.nan  # an upper confidence limit, relative to the promise
    measured: float = math.nan


def most_damning(findings: Sequence[Audit]) -> Audit:
    """Return the worst of one test's repetitions, its p-value corrected for their number.

    Bounds and verdicts are already, if the number was announced as `runs`.
    """
    worst = min(findings, key=lambda finding: finding.p_value)
    return replace(worst, p_value=min(1.0, len(findings) * worst.p_value))


def compared(bound: float, claimed: float, ceiling: float, *, violated: bool) -> str:
    """Return a lower bound beside the claim, in words."""
    words = f"epsilon is at least {bound:.2f}, where {claimed:.2f} is claimed"
    return words if violated else f"{words}; a perfect implementation would show {ceiling:.2f}"
