"""A question about DP parameters, and the proven facts about each answer.

Each epsilon comes with three bounds on reconstruction, for three kinds of attackers:

- *run*: The attacker sees every upload, but does not know which of them the victim is in. Secret
  sampling protects the victim.
- *one upload*: The attacker knows a step that the victim is in, like an attacker who inverts a
  gradient. Sampling does not help. Either of these bounds may be the larger.
- *both*: The attacker knows one such upload and sees all others. No attacker exceeds this bound.

Measured success is about one upload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from scipy.optimize import brentq

from leakfrontier.defenses.pld import shuffled_passes

from ..foundations.errors import UserError
from ..foundations.statistics import Interval, finite, rounded_up
from ..privacy.accounting import (
    ACCOUNTANTS,
    NOISE_RANGE,
    Schedule,
    Segment,
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
from ..privacy.bounds import Bounds

TARGETS = ("epsilon", "reconstruction_success", "min_accuracy")
"""Possible targets. A question has exactly one of them."""

TOLERANCE = 2e-4
"""Relative precision of a noise multiplier, before it is rounded up."""

DIGITS = 4
"""Digits of a noise multiplier. It is rounded up, so the printed value keeps the target."""

_OPTIONAL_SIZES = ("local_epochs", "local_steps", "clients_per_round", "max_participations")


@dataclass(frozen=True)
class Question:
    """A training run, and the target for its noise.

    A client takes one or more local steps in each of its rounds. Each step uses a batch of the
    client's examples. All steps that a client may take count. The server sees who takes part, so
    random choice of clients gives no protection.

    Attributes:
        examples: Training examples of all clients together.
        batch_size: Expected number of examples in a client's batch.
        rounds: Rounds of the whole training.
        clients: Clients, which share the examples evenly.
        local_epochs: Passes over a client's examples in one round. Give this or `local_steps`.
            Without either, a round is one step.
        local_steps: Steps of a client in one round.
        clients_per_round: Clients that take part in a round. None for all.
        max_participations: Largest number of rounds of one client. The deployment must enforce
            it. None for all rounds.
        unit: What is protected: one `record` (DP-SGD), or all data of a `client`.
        delta: Failure probability. None for a default that fits the number of units.
        candidates: N, the number of candidates among which an attacker must find the right one.
            A blind guess succeeds with probability 1 / N.
        poisson_sampling: Whether batches are Poisson samples. Otherwise epochs are shuffled: a
            record is in one batch of each epoch, and this step counts in full.
        dropout: Share of clients that may drop out of a round. It matters only for distributed
            noise, like `colluders`.
        colluders: Share of clients that may tell the server their noise.
        epsilon: Target: the largest epsilon, by PLD.
        reconstruction_success: Target: the largest success of an attacker who knows one upload
            that the victim is in and sees all others.
        min_accuracy: Target: the least test accuracy. Needs data.
    """

    examples: int
    batch_size: int
    rounds: int
    clients: int = 1
    local_epochs: int | None = None
    local_steps: int | None = None
    clients_per_round: int | None = None
    max_participations: int | None = None
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
        self._check_sizes()
        self._check_shares()
        self._check_target()

    def _check_sizes(self) -> None:
        for name in ("examples", "batch_size", "rounds", "clients", *_OPTIONAL_SIZES):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_SIZES:
                continue
            if not (value >= 1 and value % 1 == 0):
                raise ValueError(f"{name} must be a positive whole number, got {value}")
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("give local_epochs or local_steps, not both")

    def _check_shares(self) -> None:
        """Raise if clients, rounds and examples do not fit each other."""
        if not self.taking_part <= self.clients:
            raise ValueError(
                f"clients_per_round must be at most the {self.clients} clients, got "
                f"{self.clients_per_round}"
            )
        if not self.rounds <= self.possible_rounds:
            raise ValueError(
                f"max_participations must be at least "
                f"{-(-self.rounds * self.taking_part // self.clients)}, got "
                f"{self.max_participations}: {self.rounds} rounds with {self.taking_part} of "
                f"{self.clients} clients need more. Or give fewer rounds or clients_per_round"
            )
        if not self.clients <= self.examples:
            raise ValueError(f"clients must be at most the {self.examples} examples")
        if not self.batch_size <= self.share:
            raise ValueError(
                f"batch_size must be at most the {self.share} examples of a client, got "
                f"{self.batch_size}: the sample rate would be above 1"
            )

    def _check_target(self) -> None:
        """Raise if unit, delta, candidates, shares or target are invalid."""
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
        """Return the name of the target, one of `TARGETS`."""
        return next(name for name in TARGETS if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        """Return the value of the target."""
        return float(getattr(self, self.target))

    @property
    def share(self) -> int:
        """Return the number of examples of one client, rounded down."""
        return self.examples // self.clients

    @property
    def taking_part(self) -> int:
        """Return how many clients take part in a round."""
        return self.clients if self.clients_per_round is None else self.clients_per_round

    @property
    def participations(self) -> int:
        """Return the largest number of rounds of one client."""
        most = self.rounds if self.max_participations is None else self.max_participations
        return min(self.rounds, most)

    @property
    def possible_rounds(self) -> float:
        """Return the largest number of rounds that the limit on participations permits."""
        if self.max_participations is None:
            return math.inf
        return self.max_participations * self.clients // self.taking_part

    @property
    def epoch_steps(self) -> int:
        """Return the steps of a pass over the examples of the largest client."""
        largest_share = -(-self.examples // self.clients)
        return -(-largest_share // self.batch_size)

    @property
    def steps_per_round(self) -> int:
        """Return how many steps a client takes in a round."""
        if self.local_epochs is not None:
            return self.local_epochs * self.epoch_steps
        return self.local_steps or 1

    @property
    def steps(self) -> int:
        """Return the largest number of steps of one client."""
        return self.participations * self.steps_per_round

    @property
    def may_be_misread(self) -> bool:
        """Return whether the user may have meant a local epoch per round, and not one step."""
        said = self.local_epochs is not None or self.local_steps is not None
        return self.unit == "record" and not said and self.epoch_steps > 1

    @property
    def summary(self) -> str:
        """Return the sizes of the run with their products, to prevent confusion between them."""
        about = "" if self.examples % self.clients == 0 else "about "
        text = (
            f"{counted(self.clients, 'client')} x {about}{counted(self.share, 'example')} = "
            f"{counted(self.examples, 'example')} in all; "
        )
        if self.taking_part < self.clients:
            mean = self.rounds * self.taking_part / self.clients
            text += (
                f"{self.taking_part:,} of the clients in each of {counted(self.rounds, 'round')}: "
                f"a client is in {mean:.3g} on average and in at most {self.participations:,} "
                "(these count); "
            )
        rounds = counted(self.participations, "round")
        local = counted(self.steps_per_round, "local step")
        if self.unit == "client":
            count = "counts" if self.participations == 1 else "count"
            return text + f"{rounds} of a client {count} as a whole, each with {local}"
        text += f"{rounds} x {local} = {counted(self.steps, 'step')} of a client"
        if self.counted_steps < self.steps:
            count = "counts" if self.counted_steps == 1 else "count"
            text += f"; a record is in {self.counted_steps:,} of them, which {count}"
        return text

    @property
    def counted_steps(self) -> int:
        """Return how many steps (unit record) or rounds (unit client) count."""
        return self.schedule(1.0)[0].steps

    @property
    def noise_makers(self) -> int:
        """Return the least number of clients whose noise the server does not know."""
        count = self.taking_part
        gone = math.ceil(self.dropout * count) + math.ceil(self.colluders * count)
        return max(0, count - gone)

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
        """Return q, the sampling probability that counts."""
        return self.schedule(1.0)[0].sample_rate

    def schedule(self, noise_multiplier: float) -> Schedule:
        """Return the run with this noise as a schedule for the accountants."""
        if self.unit == "client":
            return (client_segment(noise_multiplier, self.participations),)
        segment = record_segment(
            self.share,
            self.batch_size,
            noise_multiplier,
            self.steps,
            poisson_sampling=self.poisson_sampling,
        )
        if not self.poisson_sampling and self.steps_per_round > 1:  # each round starts a new epoch
            passes = self.local_epochs or shuffled_passes(
                self.share, self.batch_size, self.steps_per_round
            )
            segment = replace(segment, steps=min(self.steps, self.participations * passes))
        return (segment,)

    def update_noise(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise in a round's mean update, divided by C.

        Every client adds noise to the sum of each batch (unit record) or to its whole update
        (unit client). The mean is over local steps and clients.
        """
        if self.unit == "client":
            return noise_multiplier / math.sqrt(self.taking_part)
        return (
            noise_multiplier / self.batch_size / math.sqrt(self.taking_part * self.steps_per_round)
        )

    def bound(self, noise_multiplier: float) -> float:
        """Return the largest success of an attack on the run that knows one step of the victim."""
        (segment,) = self.schedule(noise_multiplier)
        return self._known_step(segment)

    def upload_bound(self, noise_multiplier: float) -> float:
        """Return the largest success of an attack on one upload that knows a step of the victim."""
        (segment,) = replace(self, rounds=1, max_participations=None).schedule(noise_multiplier)
        return self._known_step(segment)

    def _known_step(self, segment: Segment) -> float:
        known = replace(segment, sample_rate=1.0, steps=1)
        others = (replace(segment, steps=segment.steps - 1),) if segment.steps > 1 else ()
        return Bounds((known, *others)).reconstruction(self.prior)

    def epsilon_of(self, noise_multiplier: float) -> float:
        """Return the epsilon of a noise multiplier, by PLD."""
        return _epsilon(self.schedule(noise_multiplier), self.used_delta)

    def noise_for(self, epsilon: float) -> float:
        """Return the least noise multiplier (with `DIGITS` digits) that keeps an epsilon by PLD."""

        def loose(sigma: float) -> float:
            return rough_epsilon(self.schedule(sigma), self.used_delta)

        try:
            guess = least_noise("epsilon", epsilon, loose, tolerance=0.01)
        except Unreachable:  # by RDP, which is fast but loose
            guess = least_noise("epsilon", epsilon, self.epsilon_of)
        return rounded_up(noise_near(guess, epsilon, self.epsilon_of), DIGITS)

    def least_noise(self) -> float:
        """Return the least noise multiplier that keeps the target, if the target needs no data.

        Raises:
            Unreachable: If no noise does. The message names the closest value.
        """
        if self.epsilon is not None:
            return self.noise_for(self.epsilon)
        if self.reconstruction_success is None:
            raise UserError("a target accuracy has to be measured: give a model or a dataset")
        target = self.reconstruction_success
        return rounded_up(least_noise("a reconstruction success of", target, self.bound), DIGITS)


@dataclass(frozen=True)
class AdviceRow:
    """One setting, with its proven bounds and its measurements.

    Attributes:
        noise_multiplier: sigma.
        epsilon: Epsilon by each accountant. Infinite without noise.
        run_bound: Largest success of an attack on the run: gamma(kappa).
        upload_bound: Largest success of an attack on one upload that the victim is in.
        bound: Largest success of an attack on both.
        rounds: Rounds of the run that these values describe.
        max_norm: C, the clipping norm. None without measurements or without clipping.
        lr: The server's learning rate.
        accuracy: Test accuracy with a prediction interval for one more run. Unless `searched`,
            its seeds were not used to choose C and lr.
        success: Share of uploads that the strongest attack identified. `upload_bound` limits it.
            The interval is corrected for the choice among the attacks.
        strongest: The strongest attack. None if no attack identified any upload.
        any_attack: Share of uploads that at least one attack identified. It may exceed the bound,
            which limits a single guess.
        failed: Number of attacks that crashed or ran out of time. Their success is unknown.
        seconds: Time of one training run.
        searched: Whether the row belongs to the search, which uses one seed.
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
        """Return the row as JSON values. Infinite or missing values are null."""
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


def counted(number: int, what: str) -> str:
    """Return a number with its noun, e.g. `1 step` or `2 steps`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


@lru_cache(maxsize=64)
def proven(question: Question, noise_multiplier: float) -> AdviceRow:
    """Return the row of a noise multiplier with its proven values."""
    schedule = question.schedule(noise_multiplier)
    return AdviceRow(
        noise_multiplier,
        epsilons(schedule, question.used_delta)
        if noise_multiplier
        else dict.fromkeys(ACCOUNTANTS, math.inf),
        run_bound=Bounds(schedule).reconstruction(question.prior),
        upload_bound=question.upload_bound(noise_multiplier),
        bound=question.bound(noise_multiplier),
        rounds=question.rounds,
    )


@lru_cache(maxsize=256)
def _epsilon(schedule: Schedule, delta: float) -> float:
    return schedule_epsilon(schedule, delta)


def noise_near(guess: float, target: float, risk: Callable[[float], float]) -> float:
    """Return the least noise multiplier, up to `TOLERANCE`, whose risk is at most a target.

    A good guess, such as the noise of another accountant, saves evaluations.
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
