"""The unit of work, a cell, and the rows of its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

_VERSION = version("leakfrontier")

Kind = Literal["tune", "replay", "train", "attack", "table"]
Status = Literal["ok", "error", "timeout", "crash", "not needed"]
AttackOutcome = Literal["scored", "not applicable", "refused", "unscored"]
Media = Literal["image/png", "audio/wav", "tokens"]


class Medium(NamedTuple):
    """Properties of one of `Media`.

    Attributes:
        extension: Extension of file names.
        examples: The word that readers use for such examples.
    """

    extension: str
    examples: str


MEDIA: dict[Media, Medium] = {
    "image/png": Medium("png", "images"),
    "audio/wav": Medium("wav", "sound"),
    "tokens": Medium("json", "texts"),
}


@dataclass(frozen=True)
class Cell:
    """One unit of work: train under a defense, or attack it.

    Attributes:
        kind: `tune` trains to choose settings. `replay` tests whether a defense can be replayed.
            `train` gives utility and
            checkpoints. `attack` gives scores per victim. `table` gives scores of one trial of a
            paper's table.
        config: Everything that the outcome depends on, as plain JSON values.
        labels: How reports name the cell. These columns are joined to its rows.
        code_digest: A hash of the code that the cell runs. Editing an attack changes it.
    """

    kind: Kind
    config: Mapping[str, Any]
    labels: Mapping[str, Any] = field(compare=False)
    code_digest: str = ""

    @cached_property
    def config_digest(self) -> str:
        """Return a hash of the configuration, without the code."""
        return digest({"kind": self.kind, "config": self.config, "version": _VERSION})

    @cached_property
    def key(self) -> str:
        """Return a hash of the configuration and the code. Outcomes are stored under it."""
        return digest({"identity": self.config_digest, "source": self.code_digest})


@dataclass(frozen=True)
class AttackRow:
    """What one adversary recovered of one victim in one observation.

    Attributes:
        observation: Index of the upload, which is the independent unit of all intervals.
        victim: Index of the private example within the upload.
        outcome: Whether there is a guess to score. Otherwise, the attack was not applicable, the
            client refused the model, or there is nothing to score a guess against.
        reason: Why there is no guess.
        identified: Whether the guess is nearest to the victim among its look-alikes. If the defense
            transforms examples, also whether it is nearest to the transformed victim among the
            transformed look-alikes.
        identified_original: The same for the private example only.
        transformed: Whether the defense changed the example before training.
        counterfactual: The same for a guess of another observation: success by prior alone.
        candidates: Number of look-alikes, including the victim. Chance is 1 / candidates.
        label_correct: Whether the guessed label is right; None if the attack guesses none.
        labels_granted: Whether the adversary was told the labels.
        objective: The objective that the attack minimised, at its guess.
        objective_at_truth: The same objective at the private batch.
        bound: Success that no attack can exceed under the defense's guarantee, with as many
            guesses of any upload as this attack made; None without a guarantee.
        seconds: Time of the attack on this observation.
    """

    observation: int
    victim: int
    outcome: AttackOutcome = "scored"
    reason: str | None = None
    identified: bool | None = None
    identified_original: bool | None = None
    transformed: bool = False
    counterfactual: bool | None = None
    candidates: int | None = None
    label_correct: bool | None = None
    labels_granted: bool = False
    objective: float | None = None
    objective_at_truth: float | None = None
    bound: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Score:
    """One metric of one victim. A score that cannot be computed has no row.

    Attributes:
        observation: As in `AttackRow`.
        victim: As in `AttackRow`.
        metric: Its name, as in `Modality.scores`.
        value: Its value.
    """

    observation: int
    victim: int
    metric: str
    value: float


@dataclass(frozen=True)
class UtilityRow:
    """Test performance of the model trained under a defense, after some rounds.

    Attributes:
        round: Rounds of training so far.
        correct: Correct predictions.
        total: Predictions.
        loss: Mean loss.
        refused: How often clients have refused the model so far.
    """

    round: int
    correct: int
    total: int
    loss: float
    refused: int = 0


@dataclass(frozen=True)
class GuaranteeRow:
    """What a defense claims for one training run, and what an audit of its noise found.

    Attributes:
        epsilon: Privacy loss over the run, for the client that took part most often.
        delta: The delta at which epsilon is stated.
        unit: The unit that is protected: `record` or `client`.
        adjacency: One of `ADJACENCIES`.
        accountant: How epsilon was computed.
        noise_multiplier: sigma that corresponds to the claim; None if the noise is not Gaussian.
        sample_rate: Probability that a step contains the unit; 1 if the adversary sees who is in.
        steps: Number of steps of that client.
        measured_noise: Measured sigma; None if it was not audited.
        audited_epsilon: Lower bound of the run's epsilon, from the measured noise; None likewise.
        violated: Whether the audit refutes the claim; None likewise.
        finding: The audit's verdict in words, or why there is none.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str
    noise_multiplier: float | None
    sample_rate: float
    steps: int
    measured_noise: float | None = None
    audited_epsilon: float | None = None
    violated: bool | None = None
    finding: str = ""

    def with_audit(
        self,
        finding: str,
        *,
        violated: bool | None = None,
        measured_noise: float | None = None,
        audited_epsilon: float | None = None,
    ) -> GuaranteeRow:
        """Return the row with the findings of an audit."""
        return replace(
            self,
            finding=finding,
            violated=violated,
            measured_noise=measured_noise,
            audited_epsilon=audited_epsilon,
        )


@dataclass(frozen=True)
class ReplayRow:
    """Quality of an adversary's replay of a defense, on clients whose examples are known.

    Distances are relative to the norm of the upload. They are medians over clients.

    Attributes:
        uploads_differ: Whether two uploads of the same examples differ, apart from their order.
        random: Whether two replays of a fixed guess by the defense differ.
        residual: Distance between the upload and the defense's own replay of the true examples.
        repeat: Distance between two uploads of the same examples.
        slope: Cosine between the slope of a replay's distance and the direction to the truth.
        slope_straight_through: The same for the slope of the undefended client.
        vectorised: Whether a stack of guesses is replayed like single guesses; None if it cannot
            be stacked.
        draws: How the harness treats secret randomness: see `Mending`.
        straight_through: Whether the harness replaces the slope.
        one_by_one: Whether the harness replays one guess at a time.
        mended_residual: Distance from the upload at the true examples, after these repairs.
    """

    uploads_differ: bool
    random: bool
    residual: float
    repeat: float
    slope: float
    slope_straight_through: float
    vectorised: bool | None
    draws: str
    straight_through: bool
    one_by_one: bool
    mended_residual: float


@dataclass(frozen=True)
class ProbeRow:
    """What uploads still hold of the undefended update, measured on public examples.

    Shares are of the energy of updates beyond a blind guess, for clients that nothing was fitted
    on.

    Attributes:
        decoded: Share that the best decoder recovers.
        plain: Share that the attacked uploads show as they are, up to one factor.
        decoder: What the best decoder does.
        needs_history: Whether it needs more than the upload that holds the update.
        remaining_noise: Energy of the noise in a sum of uploads, relative to fresh noise.
        contrast: How much nearer a replay is to the upload at the truth than at other examples,
            from 0 (no nearer) to 1.
        ideal_contrast: The same for an undefended client, and the upload or the decoded upload.
        unguarded: Distance between uploads of the client and of its `unguarded` copy.
        repeat: Largest distance between two uploads of the same examples.
        nearer: Share of other examples whose replay is farther from the upload than the truth's.
        preferred: Share of them that `log_likelihood` finds less likely than the truth; None if the
            defense has none.
    """

    decoded: float
    plain: float
    decoder: str
    needs_history: bool
    remaining_noise: float
    contrast: float = 1.0
    ideal_contrast: float = 0.0
    unguarded: float = 0.0
    repeat: float = 0.0
    nearer: float = 1.0
    preferred: float | None = None


@dataclass(frozen=True)
class TuningRow:
    """Performance on the validation examples of a training with some of the tuned settings.

    Attributes:
        attempt: The place of these settings in the order in which they are tried.
        settings: The settings, as a JSON object.
        correct: Correct predictions.
        total: Predictions.
        loss: Mean loss.
    """

    attempt: int
    settings: str
    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class Rendering:
    """A private example and its reconstruction, as the gallery shows them.

    Attributes:
        observation: As in `AttackRow`.
        victim: As in `AttackRow`.
        media: Format of the bytes: a PNG, a WAV file, or a JSON list of tokens' texts.
        truth: The private example.
        guess: The reconstruction.
    """

    observation: int
    victim: int
    media: Media
    truth: bytes
    guess: bytes


@dataclass(frozen=True)
class Outcome:
    """Everything that a cell produces. It is written in one transaction.

    Attributes:
        busy: Seconds spent in training or in the attack itself, without the harness around it.
        status: How the cell ended.
        error: Why there is no result.
        note: Warnings during the run.
    """

    attacks: tuple[AttackRow, ...] = ()
    scores: tuple[Score, ...] = ()
    utility: tuple[UtilityRow, ...] = ()
    renderings: tuple[Rendering, ...] = ()
    guarantees: tuple[GuaranteeRow, ...] = ()
    replays: tuple[ReplayRow, ...] = ()
    probes: tuple[ProbeRow, ...] = ()
    tunings: tuple[TuningRow, ...] = ()
    busy: float = 0.0
    status: Status = "ok"
    error: str = ""
    note: str = ""


TABLES: dict[str, type] = {
    "attacks": AttackRow,
    "scores": Score,
    "utility": UtilityRow,
    "renderings": Rendering,
    "guarantees": GuaranteeRow,
    "replays": ReplayRow,
    "probes": ProbeRow,
    "tunings": TuningRow,
}
"""The rows of each table of an `Outcome`."""

CHANGED_MODEL = " (the defense changed the model)"
"""The end of the reason why an attack does not apply, if the defense has changed the model."""

LATER = ("probes", "tunings")
"""Tables that folders and packs of older versions lack. They are then empty."""


class Column(NamedTuple):
    """Type of a column of a table.

    Attributes:
        kind: `str`, `int`, `float`, `bool` or `bytes`.
        optional: Whether a value may be missing.
        allowed: The allowed texts; empty allows any text.
    """

    kind: type
    optional: bool = False
    allowed: tuple[str, ...] = ()


@cache
def columns(row_type: type) -> Mapping[str, Column]:
    """Return the columns of a table, from the annotations of its rows.

    All code that reads or writes rows, in any format, takes their types from here.
    """
    hints = get_type_hints(row_type)
    return {one.name: _column(hints[one.name]) for one in fields(row_type)}


def _column(hint: Any) -> Column:  # noqa: ANN401 - a type
    if get_origin(hint) is Literal:
        return Column(str, allowed=get_args(hint))
    parts = get_args(hint) or (hint,)
    (kind,) = (part for part in parts if part is not type(None))
    return Column(kind, optional=type(None) in parts)


def digest(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a short stable hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
