"""What is asked about DP parameters, and what is proven of each answer.

Three bounds on reconstruction stand beside each epsilon, because they answer three questions. Over
the *run*, the attacker sees every upload and does not know which of them the victim is in: secret
sampling protects it. Of *one upload* the attacker knows a step that the victim is in, as one who
inverts a gradient does: there sampling is of no help. Either may be the larger.
*Both* at once, one known upload and all others, is what no attacker exceeds; measured success is
about one upload.
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
"""What a question may ask for: exactly one of them."""

TOLERANCE = 2e-4
"""How closely a noise multiplier is calibrated, before it is rounded up."""

DIGITS = 4
"""Digits of a noise multiplier, rounded up: what is printed keeps the target, too."""

_OPTIONAL_SIZES = ("local_epochs", "local_steps", "clients_per_round", "max_participations")


@dataclass(frozen=True)
class Question:
    """A training run, and what its noise is to achieve.

    In each round that it takes part in, a client takes one local step or several, each with a batch
    of its own examples. All steps that it may take count: the server sees who takes part, so that
    being chosen at random gains nothing.

    Attributes:
        examples: Training examples of all clients together.
        batch_size: Examples that one client expects in a batch.
        rounds: Rounds of all clients.
        clients: Clients that share the examples evenly.
        local_epochs: Passes over a client's examples in one round; of them and `local_steps` one
            may be given. Without either, a round is one step.
        local_steps: Steps of a client in one round.
        clients_per_round: Clients that take part in a round; None for all.
        max_participations: Rounds that a client takes part in at most, which has to be enforced;
            None for all rounds.
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
        """Raise if clients, rounds and examples do not go together."""
        if not self.taking_part <= self.clients:
            raise ValueError(
                f"clients_per_round must be at most the {self.clients} clients, got "
                f"{self.clients_per_round}"
            )
        if not self.rounds <= self.possible_rounds:
            raise ValueError(
                f"max_participations must be at least "
                f"{-(-self.rounds * self.taking_part // self.clients)}: {self.rounds} rounds of "
                f"{self.taking_part} of {self.clients} clients cannot be filled otherwise, got "
                f"{self.max_participations}; give fewer rounds or clients_per_round"
            )
        if not self.clients <= self.examples:
            raise ValueError(f"clients must be at most the {self.examples} examples")
        if not self.batch_size <= self.share:
            raise ValueError(
                f"batch_size must be at most the {self.share} examples of a client, got "
                f"{self.batch_size}: the sample rate would be above 1"
            )

    def _check_target(self) -> None:
        """Raise if it is not clear what is protected, from whom and how well."""
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
    def taking_part(self) -> int:
        """Return how many clients take part in a round."""
        return self.clients if self.clients_per_round is None else self.clients_per_round

    @property
    def participations(self) -> int:
        """Return how many rounds a client takes part in at most."""
        most = self.rounds if self.max_participations is None else self.max_participations
        return min(self.rounds, most)

    @property
    def possible_rounds(self) -> float:
        """Return how many rounds the limit on participations leaves enough clients for."""
        if self.max_participations is None:
            return math.inf
        return self.max_participations * self.clients // self.taking_part

    @property
    def epoch_steps(self) -> int:
        """Return the steps of a pass over a client's examples; of one with more, if any has."""
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
        """Return how many steps a client takes at most."""
        return self.participations * self.steps_per_round

    @property
    def may_be_misread(self) -> bool:
        """Return whether a round was perhaps meant to be a local epoch, and not one step."""
        said = self.local_epochs is not None or self.local_steps is not None
        return self.unit == "record" and not said and self.epoch_steps > 1

    @property
    def summary(self) -> str:
        """Return what the run is, with the products that sizes could be mistaken for."""
        about = "" if self.examples % self.clients == 0 else "about "
        text = (
            f"{counted(self.clients, 'client')} x {about}{counted(self.share, 'example')} = "
            f"{counted(self.examples, 'example')} in all; "
        )
        if self.taking_part < self.clients:
            mean = self.rounds * self.taking_part / self.clients
            text += (
                f"{self.taking_part:,} of the clients in each of {counted(self.rounds, 'round')}: "
                f"a client is in {mean:.3g} on average, and in at most {self.participations:,}, "
                "which count; "
            )
        rounds = counted(self.participations, "round")
        local = counted(self.steps_per_round, "local step")
        if self.unit == "client":
            count = "counts" if self.participations == 1 else "count"
            return text + f"{rounds} of a client {count}, each as a whole with {local}"
        text += f"{rounds} x {local} = {counted(self.steps, 'step')} of a client"
        if self.counted_steps < self.steps:
            count = "counts" if self.counted_steps == 1 else "count"
            text += f"; a record is in {self.counted_steps:,} of them, which {count}"
        return text

    @property
    def counted_steps(self) -> int:
        """Return how many steps count for a record, or rounds for a client."""
        return self.schedule(1.0)[0].steps

    @property
    def noise_makers(self) -> int:
        """Return how many clients add noise that the server does not know, at the least."""
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
        """Return q, as far as it counts."""
        return self.schedule(1.0)[0].sample_rate

    def schedule(self, noise_multiplier: float) -> Schedule:
        """Return the run with this noise, as its accountants see it."""
        if self.unit == "client":
            return (client_segment(noise_multiplier, self.participations),)
        segment = record_segment(
            self.share,
            self.batch_size,
            noise_multiplier,
            self.steps,
            poisson_sampling=self.poisson_sampling,
        )
        if not self.poisson_sampling and self.steps_per_round > 1:  # epochs begin with the round
            passes = self.local_epochs or shuffled_passes(
                self.share, self.batch_size, self.steps_per_round
            )
            segment = replace(segment, steps=min(self.steps, self.participations * passes))
        return (segment,)

    def update_noise(self, noise_multiplier: float) -> float:
        """Return the noise of a round's mean update, as a standard deviation over C.

        Every client noises the sum of each batch, or its whole update; the mean is over local steps
        and clients.
        """
        if self.unit == "client":
            return noise_multiplier / math.sqrt(self.taking_part)
        return (
            noise_multiplier / self.batch_size / math.sqrt(self.taking_part * self.steps_per_round)
        )

    def bound(self, noise_multiplier: float) -> float:
        """Return the largest success of an attack on the run, one step of the victim known."""
        (segment,) = self.schedule(noise_multiplier)
        return self._known_step(segment)

    def upload_bound(self, noise_multiplier: float) -> float:
        """Return the largest success of an attack on one upload, a step of the victim known."""
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
class AdviceRow:
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


def counted(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


@lru_cache(maxsize=64)
def proven(question: Question, noise_multiplier: float) -> AdviceRow:
    """Return what is proven of a noise multiplier."""
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
