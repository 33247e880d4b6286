"""The unit of work and what it leaves behind: a cell, and the rows of its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

_VERSION = version("leakfrontier")

Kind = Literal["replay", "train", "attack", "table"]
Status = Literal["ok", "error", "timeout", "crash", "not needed"]
AttackOutcome = Literal["scored", "not applicable", "refused", "unscored"]
Media = Literal["image/png", "audio/wav", "tokens"]


class Medium(NamedTuple):
    """What there is to know of one of `Media`.

    Attributes:
        extension: How names of files end.
        examples: What readers call examples that are shown so.
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
        kind: `replay` tells whether a defense can be replayed, `train` gives utility and
            checkpoints, `attack` gives scores per victim, `table` those of a trial of a paper's
            table.
        config: All that the outcome depends on, as plain JSON values.
        labels: How reports name it: the columns that are joined to its rows.
        code_digest: A hash of the code that it runs, so that an edited attack is another one.
    """

    kind: Kind
    config: Mapping[str, Any]
    labels: Mapping[str, Any] = field(compare=False)
    code_digest: str = ""

    @cached_property
    def config_digest(self) -> str:
        """Return a hash of what is run, whatever its code."""
        return digest({"kind": self.kind, "config": self.config, "version": _VERSION})

    @cached_property
    def key(self) -> str:
        """Return a hash of what is run and of its code: outcomes are kept by it."""
        return digest({"identity": self.config_digest, "source": self.code_digest})


@dataclass(frozen=True)
class AttackRow:
    """What one adversary got of one victim in one observation.

    Attributes:
        observation: Index of the upload; the independent unit of all intervals.
        victim: Index of the private example within the upload.
        outcome: Whether there is a guess to score, the attack was not applicable, the client
            refused the model that it was sent, or nothing is known to score a guess by.
        reason: Why there is none.
        identified: Whether the guess is nearest to the victim among its look-alikes, or to what
            the defense made of the victim among its look-alikes treated alike.
        identified_original: The same for the private example alone.
        transformed: Whether the defense made something else of the example before training.
        counterfactual: The same for the guess of another observation: success by prior alone.
        candidates: Number of look-alikes, the victim included: chance is 1 / candidates.
        label_correct: Whether the guessed label is right; None if the attack guesses none.
        labels_granted: Whether the adversary was told the labels.
        objective: What the attack minimised, at its guess.
        objective_at_truth: The same at the private batch.
        bound: Success that the defense's guarantee lets no attack exceed, given as many guesses
            as this one made of any upload; None without a guarantee.
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
    """One metric of one victim; a score that cannot be computed has no row.

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
        refused: How often a client refused the model that it was sent, so far.
    """

    round: int
    correct: int
    total: int
    loss: float
    refused: int = 0


@dataclass(frozen=True)
class GuaranteeRow:
    """What a defense claims of one training run, and what an audit of its noise found.

    Attributes:
        epsilon: Privacy loss over the run of the client that took part most often.
        delta: The delta at which it is stated.
        unit: What is protected: `record` or `client`.
        adjacency: One of `ADJACENCIES`.
        accountant: How epsilon was computed.
        noise_multiplier: sigma that the claim amounts to; None if the noise is not Gaussian.
        sample_rate: Probability that the unit is in a step; 1 where the adversary sees who is.
        steps: Steps of that client.
        measured_noise: sigma as measured; None if it was not audited.
        audited_epsilon: What epsilon of the run is not below, by the measured noise; likewise.
        violated: Whether the audit refutes the claim; likewise.
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
    """What an adversary's replay of a defense is like, on clients whose examples are known.

    Distances are relative to the norm of the upload, and medians over clients.

    Attributes:
        uploads_differ: Whether two uploads of the same examples differ, but for their order.
        random: Whether the defense's own replay of a fixed guess does.
        residual: Distance of the defense's own replay, at the truth, from the upload.
        repeat: Distance of two uploads of the same examples.
        slope: Cosine of the slope of a replay's distance with the way to the truth.
        slope_straight_through: The same for the slope of the undefended client.
        vectorised: Whether a stack of guesses is replayed like each; None if it cannot be.
        draws: What the harness does with secret randomness: see `Mending`.
        straight_through: Whether it replaces the slope.
        one_by_one: Whether it replays one guess after the other.
        mended_residual: Distance from the upload, at the truth, after that.
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
class Rendering:
    """A private example and its reconstruction, as the gallery shows them.

    Attributes:
        observation: As in `AttackRow`.
        victim: As in `AttackRow`.
        media: What the bytes are: a PNG, a WAV file, or a JSON list of tokens' texts.
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
    """All that a cell leaves behind; written in one transaction.

    Attributes:
        busy: Seconds spent in training or in the attack itself, without the harness around it.
        status: How it ended.
        error: Why there is no result.
        note: What was warned of on the way.
    """

    attacks: tuple[AttackRow, ...] = ()
    scores: tuple[Score, ...] = ()
    utility: tuple[UtilityRow, ...] = ()
    renderings: tuple[Rendering, ...] = ()
    guarantees: tuple[GuaranteeRow, ...] = ()
    replays: tuple[ReplayRow, ...] = ()
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
}
"""The rows of each table of an `Outcome`."""


class Column(NamedTuple):
    """What a column of a table holds.

    Attributes:
        kind: `str`, `int`, `float`, `bool` or `bytes`.
        optional: Whether a value may be missing.
        allowed: The texts that it can be; any, if there are none.
    """

    kind: type
    optional: bool = False
    allowed: tuple[str, ...] = ()


@cache
def columns(row_type: type) -> Mapping[str, Column]:
    """Return the columns of a table by the annotations of its rows.

    Whatever reads or writes rows, in whatever format, takes their types from here.
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
