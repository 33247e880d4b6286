"""Runs all cells of a configuration and stores their rows. It shows progress and can resume."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..conclude.results import Conclusions
from ..data.data import forget_digests
from ..engines.engine import LOCAL, Done, Engine, Failure
from ..engines.progress import Progress
from ..foundations.devices import resolved
from ..foundations.errors import given_by_user
from ..foundations.rows import Outcome
from ..foundations.terminal import terminal
from ..users.methods import Method, build_adversary
from ..users.names import label
from ..world.scenario import Scenario
from .cascade import ReadyCell, Schedule, Victim
from .cells import AttackTrial, ReplayTrial, TrainTrial, Trial, run_trial, undefended
from .config import ConfigError, RunConfig, load_config
from .probe import probe
from .store import Store, other_configuration
from .tuning import tuning_plan, with_chosen

_Arm = tuple[str, str, int]
"""The names of a scenario and of a defense, and a seed."""

__all__ = ["ConfigError", "RunConfig", "load_config", "plan", "run", "run_trials"]


def plan(config: RunConfig, first_seed: int = 0) -> list[Trial]:
    """Return the cells of a run, with all uploads. A cascade may skip some of them later."""
    replays: list[Trial] = []
    training: list[Trial] = []
    attacks: list[Trial] = []
    for scenario in config.scenarios:
        arms = [scenario.arm(defense) for defense in config.defenses_of(scenario)]
        replays += [ReplayTrial(*arm) for arm in arms if not undefended(arm[1])]
        for seed in range(first_seed, first_seed + config.seeds):
            for arm in arms:
                training.append(TrainTrial(*arm, seed, config.observations))
                attacks += _attacks(config, *arm, seed)
    return [*tuning_plan(config), *replays, *training, *attacks]


def run(
    config: RunConfig,
    out: Path,
    *,
    workers: int | None = None,
    engine: Engine = LOCAL,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Conclusions:
    """Run all cells that `out` does not contain yet, and return all rows.

    Args:
        config: The configuration.
        out: Folder of the results. An interrupted run in it is continued.
        workers: Number of processes. Default: as many as the engine allows.
        engine: Where cells run: `LOCAL`, or `ray_engine.RayEngine(...)`.
        retry_failed: Whether to run cells again that ended in an error.
        console: Where to show progress. Default: the terminal.
    """
    forget_digests()
    console = terminal() if console is None else console
    if engine is LOCAL:  # other machines may have other devices
        for scenario in config.scenarios:
            with given_by_user():
                resolved(scenario.device)
    notes = probe(config, workers)
    warn(console, [*notes, *_replaced(out, config)])

    def concluded(config: RunConfig, trials: Sequence[Trial]) -> Conclusions:
        return run_trials(
            trials,
            out,
            panel=config.panel,
            config=config.model_dump(mode="json"),
            notes=notes,
            cascade=not config.individual,
            time_limit=config.time_limit,
            workers=workers,
            engine=engine,
            retry_failed=retry_failed,
            console=console,
        )

    if tunings := tuning_plan(config):
        config = with_chosen(config, concluded(config, tunings).tunings)
    return concluded(config, plan(config))


def warn(console: Console, notes: Iterable[str]) -> None:
    """Print warnings."""
    for note in notes:
        console.print(f"[yellow]warning[/yellow] {escape(note)}", highlight=False, soft_wrap=True)


def _replaced(out: Path, config: RunConfig) -> Iterator[str]:
    """Yield a warning if the folder contains results of another configuration."""
    names = other_configuration(out, config.model_dump(mode="json"))
    if names := [name for name in names if name != "time_limit"]:
        yield (
            f"{out} contains results of another configuration: {', '.join(names)} differ. "
            "report.html will show only this configuration. The other rows stay in the folder, and "
            "running that configuration again shows them. To keep both pages, choose another --out "
            "folder"
        )


def run_trials(
    trials: Sequence[Trial],
    out: Path,
    *,
    panel: str,
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    cascade: bool = False,
    time_limit: float = math.inf,
    workers: int | None = None,
    engine: Engine = LOCAL,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Conclusions:
    """Run the given cells that `out` does not contain yet, and return the rows of all of them.

    Args:
        trials: The cells, for example those of `plan`.
        out: As for `run`.
        panel: Version of the panel. All cells of a folder must share it.
        config: The configuration to store in the folder.
        notes: Earlier warnings, to store in the folder.
        cascade: Whether attacks skip the uploads that others have broken (see `cascade`).
        time_limit: Seconds after which a cell is stopped.
        workers: As for `run`.
        engine: As for `run`.
        retry_failed: As for `run`.
        console: As for `run`.
    """
    forget_digests()
    store = Store(out, create=True)
    cells = [trial.cell for trial in trials]
    workers = workers or engine.slots()
    with store.occupied():
        store.begin(panel, config, cells, notes)
        with Progress(cells, workers=workers, console=console) as progress:
            agenda = _Agenda(trials, store, progress, cascade=cascade, retry_failed=retry_failed)
            if tasks := agenda.tasks:
                for done in engine.execute(
                    run_trial, tasks, workers=workers, time_limit=time_limit
                ):
                    agenda.conclude(done)
    return store.results()


class _Queue(deque[tuple[Trial, Path]]):
    """Cells that can run now. It reports the start of each cell."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def popleft(self) -> tuple[Trial, Path]:
        """Return the next cell, which starts."""
        task = super().popleft()
        self._progress.start(task[0].cell)
        return task


class _Agenda:
    """The queue of cells that can run now. Each finished cell may add others.

    Some arms (scenario, defense, seed) run first, each to its end, so that the time left is known
    early: undefended ones, which show what each attack costs, and a random third of the others,
    which show what a cascade spares. The order changes no result.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        store: Store,
        progress: Progress,
        *,
        cascade: bool,
        retry_failed: bool,
    ) -> None:
        self.tasks = _Queue(progress)
        self._store, self._progress = store, progress
        self._early = _early_arms(trials)
        self._finished = store.finished(failed=not retry_failed)
        self._victims = store.victims() if cascade else {}
        self._schedule = Schedule(trials, cascade=cascade)
        self._admit(self._schedule.start())

    def conclude(self, done: Done[tuple[Trial, Path], Outcome]) -> None:
        """Store the outcome of a cell, and add the cells that can run now."""
        trial, outcome = done.task[0], _outcome(done)
        self._store.write(trial.cell.key, outcome, done.seconds)
        self._progress.advance(trial.cell, outcome.status, done.seconds)
        self._admit(self._schedule.after(trial, _victims(outcome)))

    def _admit(self, steps: Iterable[ReadyCell]) -> None:
        """Queue cells. Cells that are already stored may allow others at once."""
        possible, narrowed = deque(steps), []
        ready: list[tuple[Trial, Path]] = []
        while possible:
            trial, planned = possible.popleft()
            key = trial.cell.key
            if key != planned.key:
                narrowed.append((planned, trial.cell))
            not_needed = key not in self._finished and _nothing_left(trial)
            if not_needed:
                self._store.write(key, Outcome(status="not needed"), 0.0)
                self._finished.add(key)
            self._progress.admit(trial.cell, planned)
            if key in self._finished:
                self._progress.advance(trial.cell)
                possible += self._schedule.after(trial, self._victims.get(key, ()))
            else:
                ready.append((trial, self._store.folder))
        early = [task for task in ready if _arm(task[0]) in self._early]
        early.sort(key=lambda task: self._early[_arm(task[0])])
        others = [task for task in ready if _arm(task[0]) not in self._early]
        self.tasks.extendleft(reversed(early))
        self.tasks.extendleft(task for task in others if isinstance(task[0], ReplayTrial))
        self.tasks.extend(task for task in others if not isinstance(task[0], ReplayTrial))
        if narrowed:
            self._store.replace(narrowed)


def _arm(trial: Trial) -> _Arm | None:
    if not isinstance(trial, TrainTrial | AttackTrial):
        return None
    return trial.scenario.name, label(trial.defense), trial.seed


def _early_arms(trials: Iterable[Trial]) -> dict[_Arm | None, int]:
    """Return the places of the arms that run first."""
    controls, others = dict[_Arm, None](), dict[_Arm, None]()
    for trial in trials:
        if isinstance(trial, AttackTrial) and (arm := _arm(trial)) is not None:
            (controls if undefended(trial.defense) else others)[arm] = None
    first = min((seed for *_, seed in controls), default=0)
    early = [arm for arm in controls if arm[-1] == first]
    early += Random(0).sample([*others], len(others) // 3)
    return {arm: place for place, arm in enumerate(early)}


def _attacks(
    config: RunConfig, scenario: Scenario, defense: Method, seed: int
) -> Iterator[AttackTrial]:
    """Yield the attacks on one arm.

    An attack that replays the client runs with and without knowledge of the defense. Against an
    undefended client it runs once, because both are the same.
    """
    for checkpoint in scenario.checkpoints:
        for adversary in config.members():
            both = build_adversary(adversary).simulates and not undefended(defense)
            for knows_defense in (True, False) if both else (True,):
                yield AttackTrial(
                    scenario=scenario,
                    defense=defense,
                    adversary=adversary,
                    knows_defense=knows_defense,
                    seed=seed,
                    checkpoint=checkpoint,
                    observations=tuple(range(config.observations)),
                    logged=config.observations if checkpoint else None,
                )


def _outcome(done: Done[tuple[Trial, Path], Outcome]) -> Outcome:
    if isinstance(done.result, Failure):
        error = "\n".join(filter(None, [done.result.message, done.result.details]))
        return Outcome(status=done.result.kind, error=error)
    return done.result


def _victims(outcome: Outcome) -> list[Victim]:
    return [(row.observation, row.victim, bool(row.identified)) for row in outcome.attacks]


def _nothing_left(trial: Trial) -> bool:
    return isinstance(trial, AttackTrial) and not trial.observations
