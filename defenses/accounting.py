"""Epsilon of the (subsampled) Gaussian mechanism, shared by the defenses that claim one."""

import math

import numpy as np

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
    from dp_accounting import (
        GaussianDpEvent,
        PoissonSampledDpEvent,
        SelfComposedDpEvent,
        get_epsilon_gaussian,
        pld,
    )

    if plan.sample_rate == 1:  # the steps compose to one, whose epsilon has a closed form
        with np.errstate(divide="ignore"):  # in an intermediate logarithm
            return float(get_epsilon_gaussian(noise_multiplier / plan.steps**0.5, plan.delta))
    step = PoissonSampledDpEvent(plan.sample_rate, GaussianDpEvent(noise_multiplier))
    # The default width, unless losses are so large that this would take gigabytes.
    width = max(1e-4, 1e-5 / noise_multiplier**2)
    accountant = pld.PLDAccountant(value_discretization_interval=width)
    return float(accountant.compose(SelfComposedDpEvent(step, plan.steps)).get_epsilon(plan.delta))


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
