"""The unit of work and what it leaves behind: a cell, and the rows of its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

_VERSION = version("leakfrontier")

Kind = Literal["train", "attack"]
Status = Literal["ok", "error", "timeout", "crash"]


@dataclass(frozen=True)
class Cell:
    """One unit of work: train under a defense, or attack it.

    Attributes:
        kind: `train` gives utility and checkpoints, `attack` gives scores per victim.
        config: All that the outcome depends on, as plain JSON values.
        labels: How reports name it: the columns that are joined to its rows.
    """

    kind: Kind
    config: Mapping[str, Any]
    labels: Mapping[str, Any] = field(compare=False)

    @cached_property
    def key(self) -> str:
        """Return a hash of the kind, the full configuration and the version of this package."""
        return digest({"kind": self.kind, "config": self.config, "version": _VERSION})


@dataclass(frozen=True)
class AttackRow:
    """What one adversary got of one victim in one observation.

    Attributes:
        observation: Index of the upload; the independent unit of all intervals.
        victim: Index of the private example within the upload.
        reason: Why the attack was not applicable; None if it ran.
        psnr: Peak signal-to-noise ratio in dB, data range 1.
        ssim: Structural similarity.
        psnr_transformed: PSNR against what the defense made of the example before training;
            None if nothing.
        identified: Whether the guess is nearest to the victim among its look-alikes, or to what
            the defense made of the victim among its look-alikes treated alike.
        identified_original: The same for the private example alone.
        counterfactual: The same for the guess of another observation: success by prior alone.
        candidates: Number of look-alikes, the victim included: chance is 1 / candidates.
        label_correct: Whether the guessed label is right; None if the attack guesses none.
        labels_granted: Whether the adversary was told the labels.
        objective: What the attack minimised, at its guess.
        objective_at_truth: The same at the private batch.
        seconds: Time of the attack on this observation.
    """

    observation: int
    victim: int
    reason: str | None = None
    psnr: float | None = None
    ssim: float | None = None
    psnr_transformed: float | None = None
    identified: bool | None = None
    identified_original: bool | None = None
    counterfactual: bool | None = None
    candidates: int | None = None
    label_correct: bool | None = None
    labels_granted: bool = False
    objective: float | None = None
    objective_at_truth: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class UtilityRow:
    """Test performance of the model trained under a defense, after some rounds."""

    round: int
    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class Picture:
    """A private example and its reconstruction, as 8-bit pixels for the gallery."""

    observation: int
    victim: int
    shape: tuple[int, ...]
    truth: bytes
    guess: bytes


@dataclass(frozen=True)
class Outcome:
    """All that a cell leaves behind; written in one transaction.

    Attributes:
        busy: Seconds spent in training or in the attack itself, without the harness around it.
    """

    attacks: tuple[AttackRow, ...] = ()
    utility: tuple[UtilityRow, ...] = ()
    pictures: tuple[Picture, ...] = ()
    busy: float = 0.0
    status: Status = "ok"
    error: str = ""


def digest(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a short stable hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
