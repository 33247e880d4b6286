"""The order of a run's cells, and the uploads on which attacks run.

A run is a cascade, as in AutoAttack [1]. The attacks on one arm (scenario, defense, seed,
checkpoint) run in stages, exact and cheap ones first. A later stage attacks only the uploads with a
victim that is not identified yet. An active server can do all that a passive one can, so its
attacks come last. The worst case over all attacks is the same as if each had attacked every upload.

References:
    [1] Croce, Hein. "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse
        Parameter-free Attacks." ICML 2020. https://arxiv.org/abs/2003.01690
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from leakfrontier.adversaries import Adversary, Threat

from ..foundations.rows import Cell
from ..users.methods import build_adversary
from .cells import AttackTrial, TrainTrial, Trial, undefended

Victim = tuple[int, int, bool]
"""An upload, one of its victims, and whether it was identified."""


class ReadyCell(NamedTuple):
    """A cell that can run now, and the planned cell that it replaces."""

    trial: Trial
    planned: Cell


class Schedule:
    """Says which cells can run when others have finished.

    Attacks on a checkpoint wait for its training. Attacks of a stage wait for earlier stages. All
    attacks run on all uploads of the undefended control. Without a cascade, they do so on every
    arm.
    """

    def __init__(self, trials: Sequence[Trial], *, cascade: bool = False) -> None:
        self._free = [trial for trial in trials if not isinstance(trial, AttackTrial)]
        self._arms: dict[_Place, _Arm] = {}
        stages: dict[_Place, dict[_Stage, list[AttackTrial]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for trial in trials:
            if isinstance(trial, AttackTrial):
                stages[_place(trial)][_stage(trial) if cascade else _FIRST].append(trial)
        for place, found in stages.items():
            self._arms[place] = _Arm([found[stage] for stage in sorted(found)])

    def start(self) -> list[ReadyCell]:
        """Return the cells that wait for no other."""
        trained = {_training(trial) for trial in self._free if isinstance(trial, TrainTrial)}
        steps = [ReadyCell(trial, trial.cell) for trial in self._free]
        for (*training, checkpoint), arm in self._arms.items():
            if checkpoint == 0 or tuple(training) not in trained:
                steps += arm.next_stage()
        return steps

    def after(self, trial: Trial, victims: Iterable[Victim]) -> list[ReadyCell]:
        """Return the cells that can run after another has finished.

        Args:
            trial: The finished cell, as in its `ReadyCell`.
            victims: The attacked victims; none if the cell failed.
        """
        if isinstance(trial, AttackTrial):
            return self._arms[_place(trial)].after(trial, victims)
        if not isinstance(trial, TrainTrial):
            return []
        waiting = (
            arm
            for (*training, checkpoint), arm in self._arms.items()
            if checkpoint and tuple(training) == _training(trial)
        )
        return [step for arm in waiting for step in arm.next_stage()]


@dataclass
class _Arm:
    """The attacks on one model, by stage, and the victims identified so far."""

    stages: list[list[AttackTrial]]
    running: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)
    identified: set[tuple[int, int]] = field(default_factory=set)

    def next_stage(self) -> list[ReadyCell]:
        if not self.stages:
            return []
        stage = self.stages.pop(0)
        self.running = len(stage)
        return [ReadyCell(self._narrowed(trial), trial.cell) for trial in stage]

    def after(self, trial: AttackTrial, victims: Iterable[Victim]) -> list[ReadyCell]:
        self.running -= 1
        if _counts(build_adversary(trial.adversary)):
            for upload, victim, identified in victims:
                self.seen.add((upload, victim))
                if identified:
                    self.identified.add((upload, victim))
        return [] if self.running else self.next_stage()

    def _narrowed(self, trial: AttackTrial) -> AttackTrial:
        """Return the attack without the uploads whose victims are all identified."""
        adversary = build_adversary(trial.adversary)
        if not _counts(adversary):
            return trial
        closed = {upload for upload, _ in self.seen} - {
            upload for upload, _ in self.seen - self.identified
        }
        left = tuple(i for i in trial.observations if i not in closed)
        if left and adversary.pooled:  # its results depend on the other uploads
            return trial
        return replace(trial, observations=left)


_Place = tuple[str, str, int, int]
_Stage = tuple[int, int, bool]
_FIRST = (0, 0, False)


def _counts(adversary: Adversary) -> bool:
    """Return whether later attacks may skip the victims that this attack identifies.

    A blind guess shows no leakage, and an attack with candidates knows more than others.
    """
    return not (adversary.baseline or adversary.needs_candidates)


def _stage(trial: AttackTrial) -> _Stage:
    adversary = build_adversary(trial.adversary)
    if undefended(trial.defense) or not _counts(adversary):
        return _FIRST
    return [*Threat].index(adversary.threat), adversary.cost, not trial.knows_defense


def _training(trial: TrainTrial | AttackTrial) -> tuple[str, str, int]:
    return trial.scenario.model_dump_json(), trial.defense.model_dump_json(), trial.seed


def _place(trial: AttackTrial) -> _Place:
    return *_training(trial), trial.checkpoint
