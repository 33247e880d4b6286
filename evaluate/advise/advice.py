"""The answer to a question about DP parameters: a table, reasons and warnings.

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
"""p-value below which a success refutes its bound. 100 tests at this level give 5 % in total."""


@dataclass(frozen=True, repr=False)
class Advice:
    """The answer to a question.

    Attributes:
        question: The question.
        setting: Dataset and model. None without measurements.
        rows: The table: measured settings, or noise multipliers without measurements.
        recommended: The recommended setting. None if the target cannot be reached.
        reasons: Sentences that explain the recommendation.
        panel: Version of the attack panel. None without measurements.
        proxy: Number of examples used to measure accuracy, if it differs from the question's.
        asked_candidates: Number of candidates in the question. The data may have fewer.
        levers: Effects of other changes to the run, relative to the recommended (or closest) row.
        clipping: Effects of other clipping norms, with all else as in that row.
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
        """Return what the server sees, depending on where the recommended noise is added."""
        if self.recommended is None:
            return ()
        return tuple(observation_points(self.question, self.recommended))

    @property
    def columns(self) -> dict[str, Callable[[AdviceRow], str]]:
        """Return the non-empty columns of `COLUMNS`."""
        shown = _shown(COLUMNS, self.rows)
        if len({row.rounds for row in self.rows}) < 2:
            del shown["rounds"]
        return shown

    @property
    def tables(self) -> dict[str, tuple[list[str], list[list[str]]]]:
        """Return tables of other changes: title -> headers and rows of cells."""
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
        """Return the warnings that belong to the answer."""
        return tuple(_warnings(self))

    def __repr__(self) -> str:
        return str(self)

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
        """Return the HTML for notebooks: the table, reasons and warnings."""
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
        """Return the answer as one JSON document. Infinite or missing values are null."""
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
    """Return the non-empty columns."""
    return {name: cell for name, cell in columns.items() if any(cell(row) for row in rows)}


def proven_reasons(question: Question, row: AdviceRow) -> Iterator[str]:
    """Yield the proven reasons why a noise multiplier keeps the target."""
    noise = f"Noise multiplier {sigma(row.noise_multiplier)}"
    by = ", ".join(f"{name.upper()} {number(value)}" for name, value in row.epsilon.items())
    if question.epsilon is not None:
        start = f"{noise} is the smallest (rounded up) that keeps epsilon {question.epsilon:g}"
    elif question.reconstruction_success is not None:
        start = (
            f"{noise} is the smallest (rounded up) that keeps every reconstruction attack at or "
            f"below {_percent(question.reconstruction_success)}"
        )
    else:
        start = f"{noise} is the largest tested one that keeps the accuracy"
    kind = "step" if question.unit == "record" else "round"
    yield (
        f"{start}. Its epsilon is {by}, at delta {question.used_delta:.2g}. It protects one "
        f"{question.unit} that contributes or does not (zero-out: the number of {question.unit}s "
        f"is public). It counts {counted(question.counted_steps, kind)}; the {question.unit} is in "
        f"each with probability {question.sample_rate:.3g}. All accountants give upper bounds, and "
        "PLD is the tightest."
    )
    several = question.unit == "record" and question.steps_per_round > 1
    known = "knows a local step of the victim" if several else "knows that the victim is in it"
    yield (
        f"Among {question.candidates} candidates, a blind guess is right in "
        f"{_percent(question.prior)} of cases. An attacker who sees all uploads of the run is "
        f"right in at most {bounded(row.run_bound)}. One who sees one upload and {known} is right "
        f"in at most {bounded(row.upload_bound)}. One who has both is right in at most "
        f"{bounded(row.bound)}."
    )


def _warnings(advice: Advice) -> Iterator[str]:
    question, row = advice.question, advice.recommended
    if question.may_be_misread:
        yield _of_local_epochs(question, row)
    if question.taking_part < question.clients and question.max_participations is None:
        yield (
            f"{question.taking_part} clients take part in a round, and one client may be chosen in "
            f"all {question.rounds} rounds. The accounting assumes this. Random choice of clients "
            "gives no protection against the server, because it sees who takes part. If you "
            "enforce a limit, give it as --max-participations: then less noise suffices."
        )
    yield (
        "Tuning on private data costs privacy, and no epsilon here counts it: each tried setting "
        "is one more release. Choose C and the learning rate on public or proxy data, or account "
        "for the search (Papernot and Steinke, ICLR 2022)."
    )
    if question.unit == "record":
        yield (
            "The guarantee protects one record. A person with several records is protected less. "
            "Facts that all records of a client share are not protected."
        )
    else:
        yield (
            "The guarantee protects all data of one client. The server sees who takes part, so "
            "each round of a client counts in full."
        )
        if row is not None:
            replaced = question.epsilon_of(row.noise_multiplier / 2)
            yield (
                "The server knows which clients take part; the guarantee hides their data. If one "
                "client is replaced by another instead of zeroed out, epsilon is "
                f"{number(replaced)}."
            )
    yield (
        "The guarantee holds against the server only if noise is added before the server sees the "
        'upload. Compare the cases under "Who sees what".'
    )
    if warning := delta_warning(question.used_delta, question.units):
        yield warning[0].upper() + warning[1:] + "."
    if not question.poisson_sampling:
        yield (
            "Without Poisson sampling, random batches give no extra protection: each step with a "
            "record counts in full. This advice assumes one such step per epoch: a client shuffles "
            "its examples and uses all of them before it uses one again. If you draw batches anew "
            "in every round, this advice does not hold."
        )
    if row is not None and row.epsilon["pld"] > REASONABLE_EPSILON:
        yield (
            f"Epsilon {number(row.epsilon['pld'])} is above {REASONABLE_EPSILON:g} and guarantees "
            'next to nothing. Look at the bounds on reconstruction and at "What else could be '
            'changed".'
        )
    if any(not one.noise_multiplier for one in advice.rows):
        yield "Without noise (sigma 0), epsilon is infinite for every clipping norm."
    if advice.setting is None:
        yield (
            "Nothing was measured. The clipping norm, the learning rate and the accuracy depend on "
            "model and data: give --model and --dataset to measure them."
        )
        return
    yield from _measured_warnings(advice)


def _of_local_epochs(question: Question, row: AdviceRow | None) -> str:
    """Return the warning about the case that a round is a local epoch."""
    longer = replace(question, local_epochs=1)
    text = (
        "A round counts as one step with one batch. With Flower and FedAvg, a client usually "
        f"trains for an epoch in every round. Then it takes {longer.steps:,} steps, not "
        f"{question.steps:,}"
    )
    if row is not None and row.noise_multiplier:
        try:
            epsilon = f"is {number(longer.epsilon_of(row.noise_multiplier))}"
        except ValueError:  # too many steps to account for
            epsilon = "is far larger"
        text += (
            f", and epsilon with noise multiplier {sigma(row.noise_multiplier)} {epsilon}, not "
            f"{number(row.epsilon['pld'])}"
        )
    return f"{text}. Give --local-epochs or --local-steps to say which."


def _measured_warnings(advice: Advice) -> Iterator[str]:
    question = advice.question
    yield (
        "These attacks saw one upload of one example from an untrained model. The candidates were "
        "look-alikes with the victim's label. Compare the measured success with the bound for one "
        "upload. No attack here combines the uploads of a run. A low success proves nothing about "
        "attacks that do; only the bound for the run limits them."
    )
    yield (
        "The search compared settings with other seeds, but on the same test examples as the "
        "reported accuracy. The interval of the accuracy does not cover that choice."
    )
    norms = {one.max_norm for one in advice.rows if one.searched and one.max_norm is not None}
    chosen = advice.rows[1].max_norm
    if len(norms) > 1 and chosen in (min(norms), max(norms)):
        side = "smallest" if chosen == min(norms) else "largest"
        yield f"The clipping norm {chosen:g} is the {side} tried. A better one may lie beyond it."
    if advice.proxy is not None:
        yield (
            f"Accuracy was measured with {advice.proxy} examples, but the question is about "
            f"{question.examples}. More data usually gives a higher accuracy."
        )
    if advice.asked_candidates is not None and advice.asked_candidates > question.candidates:
        yield (
            f"The question is about {advice.asked_candidates} candidates, but a class of this data "
            f"has {question.candidates} look-alikes. All bounds and rates are for "
            f"{question.candidates}."
        )
    control = advice.rows[0].success
    if control is not None and not control.low > question.prior:
        yield (
            "Even without a defense, no attack is significantly better than a blind guess. So "
            "their failure with noise proves nothing here."
        )
    for one in advice.rows:
        if one.failed:
            yield (
                f"At noise multiplier {sigma(one.noise_multiplier)}, {one.failed} attacks crashed "
                "or ran out of time. The success is that of the other attacks."
            )
        if one.success is not None and _refutes(one.success, one.upload_bound):
            yield (
                f"At noise multiplier {sigma(one.noise_multiplier)}, the measured success "
                f"{one.success} is above the proven bound {bounded(one.upload_bound)}. The defense "
                "or this evaluation contains an error."
            )


def _refutes(success: Interval, bound: float) -> bool:
    """Return whether a success is significantly above a bound."""
    successes = round(success.value * success.n)
    return bool(binom.sf(successes - 1, success.n, bound) < ALARM)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
