"""The answer to a question about DP parameters: a table, and the words around it.

References:
    [1] Ponomareva, Hazimeh, Kurakin, Xu, Denison, McMahan, Vassilvitskii, Chien, Thakurta. "How
        to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy." JAIR 2023.
        https://arxiv.org/abs/2303.00654
    [2] Papernot, Steinke. "Hyperparameter Tuning with Renyi Differential Privacy." ICLR 2022.
        https://arxiv.org/abs/2110.03620
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
from markupsafe import escape
from scipy.stats import binom

from ..conclude.labels import number
from ..foundations.statistics import Interval, finite
from ..privacy.accounting import delta_warning
from .clipping import ClippingPoint
from .levers import Lever
from .observation_points import ObservationPoint, observation_points
from .question import AdviceRow, Question, counted
from .tables import CLIPPING_COLUMNS, COLUMNS, LEVER_COLUMNS, bounded, sigma

REASONABLE_EPSILON = 10.0
"""Epsilon up to which a guarantee is commonly called reasonable [1]."""

ALARM = 5e-4
"""p-value of a success above its bound: 5 % for a hundred attacks and rows together."""


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
        levers: What other runs would buy, beside the recommended row, or the closest.
        clipping: What other clipping norms do, all else being as in that row.
    """

    question: Question
    setting: str | None
    rows: tuple[AdviceRow, ...]
    recommended: AdviceRow | None
    reasons: tuple[str, ...]
    panel: str | None = None
    proxy: int | None = None
    asked_candidates: int | None = None
    levers: tuple[Lever, ...] = ()
    clipping: tuple[ClippingPoint, ...] = ()

    @cached_property
    def observation_points(self) -> tuple[ObservationPoint, ...]:
        """Return who sees what if the recommended noise is added on the client, or later."""
        if self.recommended is None:
            return ()
        return tuple(observation_points(self.question, self.recommended))

    @property
    def columns(self) -> dict[str, Callable[[AdviceRow], str]]:
        """Return those of `COLUMNS` that have anything to show."""
        shown = _shown(COLUMNS, self.rows)
        if len({row.rounds for row in self.rows}) < 2:
            del shown["rounds"]
        return shown

    @property
    def tables(self) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Return what else could be changed, as tables by title: headers, and rows of cells."""
        tables: dict[str, tuple[dict[str, Callable[[Any], str]], Sequence[Any]]] = {
            "What else could be changed": (_shown(LEVER_COLUMNS, self.levers), self.levers),
            "Clipping norms": (CLIPPING_COLUMNS, self.clipping),
        }
        return {
            title: ([*columns], [[column(one) for column in columns.values()] for one in shown])
            for title, (columns, shown) in tables.items()
            if shown
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what must be said along with the answer."""
        return tuple(_warnings(self))

    def __str__(self) -> str:
        titles = {
            "Recommended" if self.recommended else "Not reachable": self.reasons,
            "Warnings": self.warnings,
        }
        parts = [f"{self.question.summary}."]
        for title, texts in titles.items():
            parts += [f"\n{title}", *(f"- {text}" for text in texts)] if texts else []
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the settings, and the words around them."""
        words = f"<pre style='white-space: pre-wrap'>{escape(self)}</pre>"
        shown = [row for row in self.rows if not row.searched]
        if not shown:
            return words
        cells = [
            ["\u2192" if row is self.recommended else "", *(f(row) for f in self.columns.values())]
            for row in shown
        ]
        return str(pd.DataFrame(cells, columns=["", *self.columns]).to_html(index=False)) + words

    def document(self) -> dict[str, Any]:
        """Return the answer as one JSON document; what is infinite or absent is null."""
        question = self.question
        return {
            "question": {
                **vars(question),
                "summary": question.summary,
                "steps_per_round": question.steps_per_round,
                "steps": question.steps,
                "participations": question.participations,
                "delta": question.used_delta,
                "sample_rate": question.sample_rate,
                "adjacency": "zero-out",
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
            "levers": [lever.document() for lever in self.levers],
            "clipping": [point.document() for point in self.clipping],
        }


def _shown(
    columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]
) -> dict[str, Callable[[Any], str]]:
    """Return the columns that have anything to show."""
    return {name: cell for name, cell in columns.items() if any(cell(row) for row in rows)}


def proven_reasons(question: Question, row: AdviceRow) -> Iterator[str]:
    """Yield why a noise multiplier keeps the target, by the proofs alone."""
    noise = f"Noise multiplier {sigma(row.noise_multiplier)}"
    by = ", ".join(f"{name.upper()} {number(value)}" for name, value in row.epsilon.items())
    if question.epsilon is not None:
        start = f"{noise} is the least, rounded up, that keeps epsilon {question.epsilon:g}"
    elif question.reconstruction_success is not None:
        start = (
            f"{noise} is the least, rounded up, that keeps every reconstruction attack at "
            f"{_percent(question.reconstruction_success)}"
        )
    else:
        start = f"{noise} is the largest tested that keeps the accuracy"
    kind = "step" if question.unit == "record" else "round"
    yield (
        f"{start}. Its epsilon is {by}, for one {question.unit} that contributes or does not "
        f"(zero-out: how many {question.unit}s there are is public), at delta "
        f"{question.used_delta:.2g}, over {counted(question.counted_steps, kind)} that it is in "
        f"with probability {question.sample_rate:.3g} each. All accountants are upper bounds; "
        "PLD is the tightest."
    )
    several = question.unit == "record" and question.steps_per_round > 1
    known = "a local step that the victim is in" if several else "that the victim is in it"
    yield (
        f"Among {question.candidates} candidates, where a blind guess is right in "
        f"{_percent(question.prior)} of cases, no attack that sees all uploads of the run is right "
        f"in more than {bounded(row.run_bound)}, none that sees one upload, and knows "
        f"{known}, in more than {bounded(row.upload_bound)}, and none that does both in more than "
        f"{bounded(row.bound)}."
    )


def _warnings(advice: Advice) -> Iterator[str]:
    question, row = advice.question, advice.recommended
    if question.may_be_misread:
        yield _of_local_epochs(question, row)
    if question.taking_part < question.clients and question.max_participations is None:
        yield (
            f"Clients are chosen for {question.taking_part} places in a round, and any of them may "
            f"be chosen in all {question.rounds} rounds: that is what counts. To be chosen at "
            "random gains nothing against a server, which sees who takes part. If a limit is "
            "enforced, give it by --max-participations: less noise will do."
        )
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
            "that a client is in counts in full."
        )
        if row is not None:
            replaced = question.epsilon_of(row.noise_multiplier / 2)
            yield (
                "That a client takes part is no secret to the server; what it has, is. For one "
                f"client replaced by another, instead of zeroed out, epsilon is {number(replaced)}."
            )
    yield (
        "The guarantee is against the server only if the noise is on the upload before the server "
        "sees it: see who sees what."
    )
    if warning := delta_warning(question.used_delta, question.units):
        yield warning[0].upper() + warning[1:] + "."
    if not question.poisson_sampling:
        yield (
            "Without Poisson sampling nothing is gained by drawing batches: a record counts in "
            "full at each step that it is in. That is one per epoch, if a client works through "
            "all of its examples, shuffled, before it takes any of them again; batches that "
            "are drawn anew every round have no such bound."
        )
    if row is not None and row.epsilon["pld"] > REASONABLE_EPSILON:
        yield (
            f"Epsilon {number(row.epsilon['pld'])} is above {REASONABLE_EPSILON:g}: next to "
            "nothing is guaranteed by it; look at the bounds on reconstruction, and at what else "
            "could be changed."
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


def _of_local_epochs(question: Question, row: AdviceRow | None) -> str:
    """Return what the noise is worth if a round is a local epoch."""
    longer = replace(question, local_epochs=1)
    text = (
        "A round counts as one step with one batch. If a client trains for an epoch in every "
        f"round, as is usual with Flower and FedAvg, it takes {longer.steps:,} steps, not "
        f"{question.steps:,}"
    )
    if row is not None and row.noise_multiplier:
        try:
            epsilon = f"is {number(longer.epsilon_of(row.noise_multiplier))}"
        except ValueError:  # of more steps than are accounted for
            epsilon = "is far larger"
        text += (
            f": with noise multiplier {sigma(row.noise_multiplier)} epsilon then {epsilon}, not "
            f"{number(row.epsilon['pld'])}"
        )
    return f"{text}. Say which by --local-epochs or --local-steps."


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
                f"At noise multiplier {sigma(one.noise_multiplier)}, {one.failed} attacks crashed "
                "or ran out of time: the success is that of the others."
            )
        if one.success is not None and _refutes(one.success, one.upload_bound):
            yield (
                f"At noise multiplier {sigma(one.noise_multiplier)} the measured success, "
                f"{one.success}, is above what is proven possible, "
                f"{bounded(one.upload_bound)}: an error in the defense or in this evaluation."
            )


def _refutes(success: Interval, bound: float) -> bool:
    """Return whether a success is beyond luck if no attack exceeds a bound."""
    successes = round(success.value * success.n)
    return bool(binom.sf(successes - 1, success.n, bound) < ALARM)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
