"""What is asked about DP parameters, and what is proven of each answer.

Three bounds on reconstruction stand beside each epsilon, because they answer three questions. Over
the *run*, the attacker sees every upload and does not know which of them the victim is in: secret
sampling protects it. Of *one upload* the attacker knows that the victim is in it, as one who
inverts a gradient does: sampling is of no help, and there is one step. Either may be the larger.
*Both* at once, one known upload and all others, is what no attacker exceeds; measured success is
about one upload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import cache, lru_cache
from typing import Any

from scipy.optimize import brentq

from ..errors import UserError
from ..privacy.accounting import (
    ACCOUNTANTS,
    NOISE_RANGE,
    Schedule,
    Unit,
    Unreachable,
    client_segment,
    default_delta,
    epsilons,
    least_noise,
    record_segment,
    rough_epsilon,
    schedule_epsilon,
)
from ..privacy.bounds import Bounds, reconstruction
from ..statistics import Interval

TARGETS = ("epsilon", "reconstruction_success", "min_accuracy")
"""What a question may ask for: exactly one of them."""

TOLERANCE = 2e-4
"""How closely a noise multiplier is calibrated, before it is rounded up."""

DIGITS = 4
"""Digits of a noise multiplier, rounded up: what is printed keeps the target, too."""


@dataclass(frozen=True)
class Question:
    """A training run, and what its noise is to achieve.

    Every client takes part in every round, so that the count of its steps is exact. Each round it
    draws a batch of its own examples.

    Attributes:
        examples: Training examples of all clients together.
        batch_size: Examples that one client expects in a batch.
        rounds: Rounds, each of which is one step.
        clients: Clients that share the examples evenly.
        unit: What is protected: one `record` (DP-SGD), or all that a `client` has.
        delta: Failure probability; None for a default that suits the number of units.
        candidates: N, among how many an attacker has to find the right one: a blind guess
            succeeds with probability 1 / N.
        poisson_sampling: Whether batches are Poisson samples. Of shuffled epochs, a record is in
            one batch each: as many steps count, in full.
        dropout: Share of clients that may be lost in a round; it matters to noise that clients
            add together, as do the next.
        colluders: Share of clients that may tell the server their noise.
        epsilon: The largest epsilon, by PLD.
        reconstruction_success: The largest probability of reconstruction, by an attacker who
            knows one upload that the victim is in, and sees all others.
        min_accuracy: The least test accuracy; needs data.
    """

    examples: int
    batch_size: int
    rounds: int
    clients: int = 1
    unit: Unit = "record"
    delta: float | None = None
    candidates: int = 100
    poisson_sampling: bool = True
    dropout: float = 0.1
    colluders: float = 0.1
    epsilon: float | None = None
    reconstruction_success: float | None = None
    min_accuracy: float | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size", "rounds", "clients"):
            if not (getattr(self, name) >= 1 and getattr(self, name) % 1 == 0):
                raise ValueError(
                    f"{name} must be a positive whole number, got {getattr(self, name)}"
                )
        if not self.clients <= self.examples:
            raise ValueError(f"clients must be at most the {self.examples} examples")
        if not self.batch_size <= self.share:
            raise ValueError(
                f"batch_size must be at most the {self.share} examples of a client, got "
                f"{self.batch_size}: the sample rate would be above 1"
            )
        if self.unit not in ("record", "client"):
            raise ValueError(f"unit must be record or client, got {self.unit!r}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        if not self.candidates >= 2:
            raise ValueError(f"candidates must be at least 2, got {self.candidates}")
        for name in ("dropout", "colluders"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(TARGETS)} must be given, got {', '.join(given) or None}"
            )
        largest = math.inf if self.epsilon is not None else 1
        if not 0 < self.value < largest:
            raise ValueError(f"{given[0]} must be in (0, {largest}), got {self.value}")

    @property
    def target(self) -> str:
        """Return which of `TARGETS` is asked for."""
        return next(name for name in TARGETS if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        """Return what the target must keep to."""
        return float(getattr(self, self.target))

    @property
    def share(self) -> int:
        """Return the examples of one client; of the one with fewer, if they do not divide."""
        return self.examples // self.clients

    @property
    def noise_makers(self) -> int:
        """Return how many clients add noise that the server does not know, at the least."""
        gone = math.ceil(self.dropout * self.clients) + math.ceil(self.colluders * self.clients)
        return max(0, self.clients - gone)

    @property
    def units(self) -> int:
        """Return how many records, or clients, are protected."""
        return self.examples if self.unit == "record" else self.clients

    @property
    def used_delta(self) -> float:
        """Return delta, or its default."""
        return self.delta or default_delta(self.units)

    @property
    def prior(self) -> float:
        """Return kappa, the success of a blind guess."""
        return 1 / self.candidates

    @property
    def sample_rate(self) -> float:
        """Return q, as far as it counts."""
        return self.schedule(1.0)[0].sample_rate

    def schedule(self, noise_multiplier: float) -> Schedule:
        """Return the run with this noise, as its accountants see it."""
        if self.unit == "client":
            return (client_segment(noise_multiplier, self.rounds),)
        return (
            record_segment(
                self.share,
                self.batch_size,
                noise_multiplier,
                self.rounds,
                poisson_sampling=self.poisson_sampling,
            ),
        )

    def update_noise(self, noise_multiplier: float) -> float:
        """Return the noise of a round's mean update, as a standard deviation over C.

        Every client noises the sum of its batch, or its whole update; the server takes the mean.
        """
        parts = self.batch_size if self.unit == "record" else 1
        return noise_multiplier / parts / math.sqrt(self.clients)

    def bound(self, noise_multiplier: float) -> float:
        """Return the largest success of an attack on the run, one upload of the victim known."""
        (segment,) = self.schedule(noise_multiplier)
        known = replace(segment, sample_rate=1.0, steps=1)
        others = (replace(segment, steps=segment.steps - 1),) if segment.steps > 1 else ()
        return Bounds((known, *others)).reconstruction(self.prior)

    def epsilon_of(self, noise_multiplier: float) -> float:
        """Return the epsilon of a noise multiplier, by PLD."""
        return _epsilon(self.schedule(noise_multiplier), self.used_delta)

    def noise_for(self, epsilon: float) -> float:
        """Return the least noise multiplier of `DIGITS` that keeps an epsilon, by PLD."""

        def loose(sigma: float) -> float:
            return rough_epsilon(self.schedule(sigma), self.used_delta)

        try:
            guess = least_noise("epsilon", epsilon, loose, tolerance=0.01)
        except Unreachable:  # by RDP, which is fast, but not the last word
            guess = least_noise("epsilon", epsilon, self.epsilon_of)
        return rounded_up(noise_near(guess, epsilon, self.epsilon_of), DIGITS)

    def least_noise(self) -> float:
        """Return the least noise multiplier of `DIGITS` that keeps a target which needs no data.

        Raises:
            Unreachable: If none does; it says the closest that can be reached.
        """
        if self.epsilon is not None:
            return self.noise_for(self.epsilon)
        if self.reconstruction_success is None:
            raise UserError("an accuracy can only be kept where it can be measured: give a model")
        target = self.reconstruction_success
        return rounded_up(least_noise("a reconstruction success of", target, self.bound), DIGITS)


@dataclass(frozen=True)
class Row:
    """One setting: what is proven of it, and what was measured.

    Attributes:
        noise_multiplier: sigma.
        epsilon: Epsilon by accountant; infinite without noise.
        run_bound: Largest success of an attack on the run: gamma(kappa).
        upload_bound: Largest success of an attack on one upload that the victim is in.
        bound: Largest success of an attack on both.
        rounds: Rounds of which all this is said.
        max_norm: C, the clipping norm; None where nothing was measured, or clipped.
        lr: The server's learning rate.
        accuracy: Test accuracy, and where that of one more run will be; over seeds that had no
            part in choosing C and lr, unless `searched`.
        success: Share of uploads that the strongest attack identified: what `upload_bound` is
            about. The interval allows for the choice among the attacks.
        strongest: That attack; None if no attack identified any.
        any_attack: Share that any attack identified. Several attacks are several guesses, so that
            this may exceed a bound on one.
        failed: Attacks that crashed or ran out of time, whose success is not known.
        seconds: Time of one training run.
        searched: Whether the row is of the search, with one seed.
    """

    noise_multiplier: float
    epsilon: Mapping[str, float]
    run_bound: float
    upload_bound: float
    bound: float
    rounds: int
    max_norm: float | None = None
    lr: float | None = None
    accuracy: Interval | None = None
    success: Interval | None = None
    strongest: str | None = None
    any_attack: Interval | None = None
    failed: int = 0
    seconds: float | None = None
    searched: bool = False

    def document(self) -> dict[str, Any]:
        """Return the row as JSON values; what is infinite or absent is null."""
        intervals = {
            name: None
            if (interval := getattr(self, name)) is None
            else {key: finite(value) for key, value in vars(interval).items()}
            for name in ("accuracy", "success", "any_attack")
        }
        return {
            **vars(self),
            "epsilon": {name: finite(value) for name, value in self.epsilon.items()},
            **intervals,
        }


@lru_cache(maxsize=64)
def proven(question: Question, noise_multiplier: float) -> Row:
    """Return what is proven of a noise multiplier."""
    schedule = question.schedule(noise_multiplier)
    return Row(
        noise_multiplier,
        epsilons(schedule, question.used_delta)
        if noise_multiplier
        else dict.fromkeys(ACCOUNTANTS, math.inf),
        run_bound=Bounds(schedule).reconstruction(question.prior),
        upload_bound=reconstruction(question.prior, 1.0, noise_multiplier, 1),
        bound=question.bound(noise_multiplier),
        rounds=question.rounds,
    )


@lru_cache(maxsize=256)
def _epsilon(schedule: Schedule, delta: float) -> float:
    return schedule_epsilon(schedule, delta)


def noise_near(guess: float, target: float, risk: Callable[[float], float]) -> float:
    """Return the least noise multiplier, to `TOLERANCE`, whose risk is at most a target.

    With few evaluations if the guess is good, such as the noise of another accountant.
    """
    floor = math.log(NOISE_RANGE[0])

    @cache
    def excess(log_sigma: float) -> float:
        return math.log(min(max(risk(math.exp(log_sigma)), 1e-300), 1e300) / target)

    low = high = max(math.log(guess), floor)
    step = 0.02
    if excess(high) > 0:
        while excess(high := high + step) > 0:
            low, step = high, 4 * step
    else:
        while excess(low := max(low - step, floor)) <= 0:
            if low == floor:
                return NOISE_RANGE[0]
            high, step = low, 2 * step
    root = float(brentq(excess, low, high, xtol=TOLERANCE / 2))
    while excess(root) > 0:
        root += TOLERANCE / 2
    return math.exp(root)


def rounded_up(value: float, digits: int) -> float:
    """Return the least number of some digits that is not below a value."""
    if not 0 < value < math.inf:
        return value
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(value)))


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value as JSON can hold it: what is infinite is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
