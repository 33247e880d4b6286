"""Epsilon of the (subsampled) Gaussian mechanism, shared by the defenses that claim one."""

import math

from .base import Plan


def gaussian_epsilon(noise_multiplier: float, plan: Plan, accountant: str = "PLD") -> float:
    """Return epsilon of a plan's steps; infinite without noise.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        plan: Steps, sample rate and delta.
        accountant: `PLD` (dp-accounting), or `PRV` (Opacus; an upper bound). Opacus's `gdp` is
            an approximation that can be too low, and is not offered.
    """
    if not noise_multiplier:
        return math.inf
    if accountant == "PLD":
        return _pld(noise_multiplier, plan)
    if accountant == "PRV":
        return _prv(noise_multiplier, plan)
    raise ValueError(f"accountant must be PLD or PRV, got {accountant!r}")


def _pld(noise_multiplier: float, plan: Plan) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld

    step = PoissonSampledDpEvent(plan.sample_rate, GaussianDpEvent(noise_multiplier))
    accountant = pld.PLDAccountant().compose(SelfComposedDpEvent(step, plan.steps))
    return float(accountant.get_epsilon(plan.delta))


def _prv(noise_multiplier: float, plan: Plan) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, plan.sample_rate, plan.steps)]
    return float(accountant.get_epsilon(plan.delta))


def concentrated_epsilon(rho: float, plan: Plan) -> float:
    """Return epsilon of a plan's steps, each of them rho-zCDP, by Renyi differential privacy.

    The sample rate is ignored, which is an upper bound: zCDP does not say what sampling gains.
    """
    if rho == math.inf:
        return math.inf
    from dp_accounting import SelfComposedDpEvent, ZCDpEvent, rdp

    accountant = rdp.RdpAccountant().compose(SelfComposedDpEvent(ZCDpEvent(rho), plan.steps))
    return float(accountant.get_epsilon(plan.delta))
