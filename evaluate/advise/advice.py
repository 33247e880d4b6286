"""The answer to a question about DP parameters: a table, and the words around it.

References:
    [1] Ponomareva, Hazimeh, Kurakin, Xu, Denison, McMahan, Vassilvitskii, Chien, Thakurta. "How
        to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy." JAIR 2023.
        https://arxiv.org/abs/2303.00654
    [2] Papernot, Steinke. "Hyperparameter Tuning with Renyi Differential Privacy." ICLR 2022.
        https://arxiv.org/abs/2110.03620
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scipy.stats import binom

from ..privacy.accounting import delta_warning, schedule_epsilon
from ..statistics import Interval
from .question import Question, Row, finite

REASONABLE_EPSILON = 10.0
"""Epsilon up to which a guarantee is commonly called reasonable [1]."""

ALARM = 5e-4
"""p-value of a success above its bound: 5 % for a hundred attacks and rows together."""


def number(value: float) -> str:
    """Return an epsilon in three digits."""
    return "inf" if value == math.inf else f"{value:.3g}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "sigma": lambda row: f"{row.noise_multiplier:.3g}",
    "C": lambda row: "" if row.max_norm is None else f"{row.max_norm:g}",
    "lr": lambda row: "" if row.lr is None else f"{row.lr:.2g}",
    "eps PLD": lambda row: number(row.epsilon["pld"]),
    "PRV": lambda row: number(row.epsilon["prv"]),
    "RDP": lambda row: number(row.epsilon["rdp"]),
    "bound, run": lambda row: f"{100 * row.run_bound:.1f} %",
    "bound, upload": lambda row: f"{100 * row.upload_bound:.1f} %",
    "bound, both": lambda row: f"{100 * row.bound:.1f} %",
    "best attack": lambda row: "" if row.success is None else str(row.success),
    "any attack": lambda row: "" if row.any_attack is None else str(row.any_attack),
    "accuracy": lambda row: "" if row.accuracy is None else str(row.accuracy),
    "s": lambda row: "" if row.seconds is None else f"{row.seconds:.0f}",
}
"""The table of an advice, column by column."""


@dataclass(frozen=True)
class ObservationPoint:
    """Where noise is added, and what the server then sees.

    Attributes:
        name: `local`, `distributed` or `central`.
        sees: What the server sees of one client.
        noise_multiplier: The noise on that.
        epsilon: What is left of the guarantee against the server.
        bound: Largest success of the server's attack on the run and one known upload.
    """

    name: str
    sees: str
    noise_multiplier: float
    epsilon: float
    bound: float


@dataclass(frozen=True)
class Advice:
    """An answer.

    Attributes:
        question: What was asked.
        setting: Dataset and model; None without measurements.
        rows: The table: settings that were measured, or noise multipliers alone.
        recommended: The setting to take; None if the target cannot be reached.
        reasons: Why, in sentences.
        panel: Version of the attacks; None without measurements.
        proxy: Examples that accuracy was measured with, if not those that were asked about.
        asked_candidates: Candidates that were asked about, of which the data may have fewer.
    """

    question: Question
    setting: str | None
    rows: tuple[Row, ...]
    recommended: Row | None
    reasons: tuple[str, ...]
    panel: str | None = None
    proxy: int | None = None
    asked_candidates: int | None = None

    @cached_property
    def observation_points(self) -> tuple[ObservationPoint, ...]:
        """Return who sees what if the recommended noise is added on the client, or later."""
        return tuple(_observation_points(self)) if self.recommended is not None else ()

    @property
    def columns(self) -> dict[str, Callable[[Row], str]]:
        """Return those of `COLUMNS` that have anything to show."""
        shown = {}
        for name, column in COLUMNS.items():
            if any(column(row) for row in self.rows):
                shown[name] = column
        return shown

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what must be said along with the answer."""
        return tuple(_warnings(self))

    def document(self) -> dict[str, Any]:
        """Return the answer as one JSON document; what is infinite or absent is null."""
        question = self.question
        return {
            "question": {
                **vars(question),
                "delta": question.used_delta,
                "sample_rate": question.sample_rate,
                "adjacency": "add/remove",
            },
            "setting": self.setting,
            "panel": self.panel,
            "recommended": None if self.recommended is None else self.recommended.document(),
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
            "observation_points": [
                {key: finite(value) for key, value in vars(point).items()}
                for point in self.observation_points
            ],
            "rows": [row.document() for row in self.rows],
        }


def proven_reasons(question: Question, row: Row) -> Iterator[str]:
    """Yield why a noise multiplier keeps the target, by the proofs alone."""
    sigma, unit = row.noise_multiplier, question.unit
    by = ", ".join(f"{name.upper()} {value:.3g}" for name, value in row.epsilon.items())
    if question.epsilon is not None:
        start = f"Noise multiplier {sigma:.3g} is the least that keeps epsilon {question.epsilon:g}"
    elif question.reconstruction_success is not None:
        start = (
            f"Noise multiplier {sigma:.3g} is the least that keeps every reconstruction attack at "
            f"{_percent(question.reconstruction_success)}"
        )
    else:
        start = f"Noise multiplier {sigma:.3g} is the largest tested that keeps the accuracy"
    yield (
        f"{start}. Its epsilon is {by}, for one {unit} added or removed, at delta "
        f"{question.used_delta:.2g}, over {question.rounds} steps that it is in with probability "
        f"{question.sample_rate:.3g} each. All accountants are upper bounds; PLD is the tightest."
    )
    yield (
        f"Among {question.candidates} candidates, where a blind guess is right in "
        f"{_percent(question.prior)} of cases, no attack that sees all uploads of the run is right "
        f"in more than {_percent(row.run_bound)}, none that sees one upload, and knows that the "
        f"victim is in it, in more than {_percent(row.upload_bound)}, and none that does both in "
        f"more than {_percent(row.bound)}."
    )


def _observation_points(advice: Advice) -> Iterator[ObservationPoint]:
    question, row = advice.question, advice.recommended
    if row is None:
        return
    sigma, clients = row.noise_multiplier, question.clients
    yield ObservationPoint(
        "local",
        "an upload that the client itself has noised; this is what the table is about",
        sigma,
        row.epsilon["pld"],
        row.bound,
    )
    if clients > 1 and sigma:
        part = sigma / math.sqrt(clients)
        yield ObservationPoint(
            "distributed",
            f"only the sum of {clients} uploads, each with 1/sqrt({clients}) of the noise: as good "
            "as local and far more accurate. If secure aggregation is bypassed, what stands here",
            part,
            schedule_epsilon(question.schedule(part), question.used_delta),
            question.bound(part),
        )
    yield ObservationPoint(
        "central",
        "uploads in the clear, since the server itself adds the noise: the guarantee is against "
        "those who see the model alone, none against the server",
        0.0,
        math.inf,
        1.0,
    )


def _warnings(advice: Advice) -> Iterator[str]:
    question, row = advice.question, advice.recommended
    yield (
        "Tuning on private data costs privacy that no epsilon here counts: every setting tried is "
        "one more release. Choose C and the learning rate on public or proxy data, or account for "
        "the search (Papernot and Steinke, ICLR 2022)."
    )
    if question.unit == "record":
        yield (
            "The unit is one record: who has several is protected the less, the more they are; and "
            "what all records of a client have in common is not protected."
        )
    else:
        yield (
            "The unit is a client with all that it has. A server sees who takes part: every round "
            "counts in full."
        )
        if row is not None:
            replaced = schedule_epsilon(
                question.schedule(row.noise_multiplier / 2), question.used_delta
            )
            yield (
                "That a client takes part is no secret to the server; what it has, is. For one "
                f"client replaced by another, instead of removed, epsilon is {number(replaced)}."
            )
    yield (
        "The guarantee is against the server only if the noise is on the upload before the server "
        "sees it: see who sees what."
    )
    if warning := delta_warning(question.used_delta, question.units):
        yield warning[0].upper() + warning[1:] + "."
    if not question.poisson_sampling:
        yield (
            "Without Poisson sampling the accountants' amplification does not apply: shuffled "
            "batches count with a sample rate of 1, and with half of their noise, since another "
            "record takes the place of one that is removed."
        )
    if row is not None and row.epsilon["pld"] > REASONABLE_EPSILON:
        yield (
            f"Epsilon {row.epsilon['pld']:.3g} is above {REASONABLE_EPSILON:g}: next to nothing "
            "is guaranteed by it; look at the bounds on reconstruction instead."
        )
    if any(not one.noise_multiplier for one in advice.rows):
        yield "Without noise (sigma 0) epsilon is infinite, however small the clipping norm is."
    if advice.setting is None:
        yield (
            "Nothing was measured: the clipping norm, the learning rate and the accuracy depend on "
            "model and data, which --model and --dataset give."
        )
        return
    yield from _measured_warnings(advice)


def _measured_warnings(advice: Advice) -> Iterator[str]:
    question = advice.question
    yield (
        "Measured success is that of these attacks on one upload of one example, of an untrained "
        "model, the candidates being look-alikes with the victim's label. Compare it with the "
        "bound for one upload. No attack here combines the uploads of a run, as the bound for the "
        "run allows for: a low success proves nothing about such an attack, the bound does."
    )
    yield (
        "The settings were compared on the same test examples that accuracy is reported on, with "
        "other seeds; its interval does not cover that choice."
    )
    norms = {one.max_norm for one in advice.rows if one.searched and one.max_norm is not None}
    chosen = advice.rows[1].max_norm
    if len(norms) > 1 and chosen in (min(norms), max(norms)):
        side = "smallest" if chosen == min(norms) else "largest"
        yield f"The clipping norm {chosen:g} is the {side} tried: beyond it may be a better one."
    if advice.proxy is not None:
        yield (
            f"Accuracy was measured with {advice.proxy} examples where {question.examples} were "
            "asked about: more data usually gives more."
        )
    if advice.asked_candidates is not None and advice.asked_candidates > question.candidates:
        yield (
            f"{advice.asked_candidates} candidates were asked about, but a class of this data has "
            f"{question.candidates} look-alikes: all bounds and rates are for these."
        )
    control = advice.rows[0].success
    if control is not None and not control.low > question.prior:
        yield (
            "Even undefended no attack is shown to beat a blind guess: that they fail with noise "
            "proves nothing here."
        )
    for one in advice.rows:
        if one.failed:
            yield (
                f"At noise multiplier {one.noise_multiplier:.3g}, {one.failed} attacks crashed or "
                "ran out of time: the success is that of the others."
            )
        if one.success is not None and _refutes(one.success, one.upload_bound):
            yield (
                f"At noise multiplier {one.noise_multiplier:.3g} the measured success, "
                f"{one.success}, is above what is proven possible, "
                f"{_percent(one.upload_bound)}: an error in the defense or in this evaluation."
            )


def _refutes(success: Interval, bound: float) -> bool:
    """Return whether a success is beyond luck if no attack exceeds a bound."""
    successes = round(success.value * success.n)
    return bool(binom.sf(successes - 1, success.n, bound) < ALARM)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
