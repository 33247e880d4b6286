"""Search for clipping norm and learning rate at a given noise, and measure the best.

At a fixed epsilon, sampling and steps alone determine the noise multiplier. Two choices remain:
the clipping norm, which trades bias for noise, and the learning rate. Successive halving [1]
searches for both together. It trains every pair for a part of the rounds, then the best pairs for
all rounds, and then pairs near the winner.

A pair is a clipping norm and a *step size*. The step size is how far the server moves along
clipped updates. Under Adam, which ignores their scale, it is the learning rate. Under SGD, it is
the rate times the norm. Other noise needs another step size; it is searched for at the same
clipping norm.

The winner of a search is partly lucky. So the recommended setting is measured again with other
seeds.

References:
    [1] Jamieson, Talwalkar. "Non-stochastic Best Arm Identification and Hyperparameter
        Optimization." AISTATS 2016. https://arxiv.org/abs/1502.07943
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape

from leakfrontier.defenses import Defense

from ..conclude.results import Conclusions
from ..engines.engine import LOCAL, Engine
from ..run.cells import AttackTrial, TrainTrial, Trial
from ..run.config import RunConfig
from ..run.probe import check_scenario
from ..run.run import plan, run_trials
from ..users.methods import Method
from ..users.names import label
from ..world.scenario import Scenario, World, load_world
from ..world.victims import candidate_count
from .clipping import gradient_norms
from .measurements import Key, Trained, attacked, trained
from .question import AdviceRow, Question, proven

SEED_STRIDE = 1000
"""Distance between the seeds of two repetitions. No repetition uses as many seeds."""


class TrainingChoice(NamedTuple):
    """The choices of a training run. Without noise, nothing is clipped."""

    noise_multiplier: float
    max_norm: float
    step_size: float


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    Attributes:
        norm_factors: Clipping norms, relative to the median gradient norm on public data.
        step_sizes: Step sizes of the server.
        shortening: The first stage trains for the rounds divided by this.
        survivors: Number of settings that are trained for all rounds.
        seeds: Repetitions of the reported settings. Five give an interval over seeds.
        observations: Attacked uploads per seed.
        adversaries: The attacks.
        what_if: Whether to train other clipping norms and other runs at the end.
    """

    norm_factors: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    step_sizes: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    shortening: int = 4
    survivors: int = 4
    seeds: int = 5
    observations: int = 8
    adversaries: Literal["panel"] | tuple[Method, ...] = "panel"
    what_if: bool = True


@dataclass(frozen=True)
class Experiment:
    """Training and attacks for one question, as cells in the folder of a run.

    Attributes:
        question: The question. Its number of candidates fits the data.
        scenario: Data, model and the server's optimizer.
        out: Folder of the cells. Stored cells are not run again.
        effort: How much is tried.
        seed: Number of the repetition. Two repetitions share no seed.
        workers: Number of processes. By default as many as the engine can run.
        engine: Where cells run.
        console: Where progress is shown.
    """

    question: Question
    scenario: Scenario
    out: Path
    effort: Effort = Effort()
    seed: int = 0
    workers: int | None = None
    engine: Engine = LOCAL
    console: Console | None = None

    def settings(self, noise_multiplier: float) -> list[TrainingChoice]:
        """Return every pair of a clipping norm and a step size at one noise multiplier."""
        pairs = product(self.norms, self.effort.step_sizes)
        return [TrainingChoice(noise_multiplier, *pair) for pair in pairs]

    @cached_property
    def norms(self) -> list[float]:
        """Return the clipping norms to try, around the median norm of public gradients."""
        initial = self.world.model(Defense(), seed=0)
        usual = float(gradient_norms(self.world, initial, self.clipped_examples).median())
        return [_rounded(factor * usual) for factor in self.effort.norm_factors]

    def search(self, noise_multiplier: float) -> tuple[TrainingChoice, list[AdviceRow]]:
        """Return the best setting at one noise multiplier, and the rows of all tried settings."""
        for note in check_scenario(self.scenario):
            self._say(f"[yellow]warning[/yellow] {escape(note)}")
        everything = self.settings(noise_multiplier)
        short = max(1, math.ceil(self.question.rounds / self.effort.shortening))
        begun = self.train(everything, self.searched, rounds=short)
        best = sorted(everything, key=lambda one: -begun[one].accuracy.value)
        finalists = self.train(best[: self.effort.survivors], self.searched)
        if around := _around(_best(finalists), everything):
            finalists |= self.train(around, self.searched)
        shorter = replace(self, question=replace(self.question, rounds=short))
        rows = [
            *(self.row(one, result, searched=True) for one, result in finalists.items()),
            *(shorter.row(one, begun[one], searched=True) for one in best if one not in finalists),
        ]
        return _best(finalists), rows

    def retune(
        self, best: TrainingChoice, noise: Sequence[float]
    ) -> tuple[list[TrainingChoice], list[AdviceRow]]:
        """Return the best setting at each noise multiplier, and the rows of all tried settings.

        The clipping norm stays. Among the step sizes within one standard error of the best
        accuracy, the smallest wins, because it is the least likely to fail with another seed.
        """
        sizes = sorted({*self.effort.step_sizes, best.step_size})
        levels = [
            [TrainingChoice(sigma, best.max_norm, size) for size in sizes]
            for sigma in noise
            if sigma != best.noise_multiplier
        ]
        tried = self.train([one for level in levels for one in level], self.searched)
        chosen = {best.noise_multiplier: best}
        for level in levels:
            most = max(tried[one].accuracy.value for one in level)
            error = math.sqrt(most * (1 - most) / self._test_examples)
            chosen[level[0].noise_multiplier] = next(
                one for one in level if tried[one].accuracy.value >= most - error
            )
        rows = [self.row(one, result, searched=True) for one, result in tried.items()]
        return [chosen[sigma] for sigma in noise], rows

    def train(
        self, settings: Sequence[TrainingChoice], seeds: range, rounds: int | None = None
    ) -> dict[TrainingChoice, Trained]:
        """Train every setting with every seed, by default for all rounds."""
        trials = {one: self.trials(one, seeds, rounds) for one in settings}
        what = f"{len(settings)} settings, {rounds or self.question.rounds} rounds"
        return self.train_all(trials, what)

    def measure(
        self, settings: Sequence[TrainingChoice], *, repetition: int | None = None
    ) -> list[AdviceRow]:
        """Train and attack settings with seeds that no search uses, and return their rows.

        The attacker knows the defense, because publishing a defense must not weaken a guarantee.

        Args:
            settings: Settings that differ in their noise.
            repetition: Replaces the `seed` of the experiment.
        """
        seeds = self.fresh(self.seed if repetition is None else repetition)
        self._say(f"training and attacks of {len(settings)} settings, with {len(seeds)} new seeds")
        trials = [
            trial
            for one in settings
            for trial in plan(self.config([one]), seeds.start)
            if not isinstance(trial, AttackTrial) or trial.knows_defense
        ]
        results = self._run(trials, self.config(settings))
        models = trained(results, {one: self.trials(one, seeds) for one in settings})
        attacks = attacked(results)
        return [
            replace(self.row(one, models[one]), **attacks[label(self.defense(one))])
            for one in settings
        ]

    def train_all(
        self, trials: Mapping[Key, Sequence[TrainTrial]], what: str
    ) -> dict[Key, Trained]:
        """Run the trials of several settings, and return the result of each."""
        self._say(f"training of {what}")
        every = [trial for several in trials.values() for trial in several]
        if not every:
            return {}
        config = self.config([TrainingChoice(0.0, 1.0, every[0].scenario.training.lr)])
        return trained(self._run(every, config), trials)

    def _run(self, trials: Sequence[Trial], config: RunConfig) -> Conclusions:
        """Run cells. Each attack sees every upload, so that the strongest one is known."""
        return run_trials(
            trials,
            self.out,
            panel=config.panel,
            config=config.model_dump(mode="json"),
            time_limit=config.time_limit,
            workers=self.workers,
            engine=self.engine,
            retry_failed=True,
            console=self.console,
        )

    def config(self, settings: Sequence[TrainingChoice]) -> RunConfig:
        """Return the run of settings that differ in their noise, with the first one's step size."""
        return RunConfig(
            scenarios=(self.scenario_for(settings[0]),),
            defenses=tuple(self.defense(one) for one in settings),
            adversaries=self.effort.adversaries,
            seeds=self.effort.seeds,
            observations=self.effort.observations,
            individual=True,
        )

    def row(
        self, setting: TrainingChoice, trained: Trained, *, searched: bool = False
    ) -> AdviceRow:
        """Return the row of a setting: proven values and measurements."""
        return replace(
            proven(self.question, setting.noise_multiplier),
            max_norm=setting.max_norm if setting.noise_multiplier else None,
            lr=self.scenario_for(setting).training.lr,
            accuracy=trained.accuracy,
            seconds=trained.seconds,
            searched=searched,
        )

    def setting(self, row: AdviceRow) -> TrainingChoice:
        """Return the setting of a measured row."""
        if row.max_norm is None or row.lr is None:
            raise ValueError("row must be a measured row with a clipping norm and a learning rate")
        setting = TrainingChoice(row.noise_multiplier, row.max_norm, row.lr)
        return setting._replace(step_size=row.lr * self._scale(setting))

    def defense(self, setting: TrainingChoice) -> Method:
        """Return the defense of a setting, as a configuration names it."""
        sigma, norm, _ = setting
        if not sigma:
            return Method(name="none")
        if self.question.unit == "client":
            return Method(
                name="ClientDP", options={"noise_multiplier": sigma, "max_update_norm": norm}
            )
        options: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": norm}
        if not self.question.poisson_sampling:
            options["poisson_sampling"] = False
        return Method(name="DPSGD", options=options)

    def scenario_for(self, setting: TrainingChoice, rounds: int | None = None) -> Scenario:
        """Return the scenario with the question's sizes and a setting's learning rate."""
        question, training = self.question, self.scenario.training
        plan = {
            "rounds": rounds or question.rounds,
            "clients": question.clients,
            "clients_per_round": question.taking_part,
            "batch_size": question.batch_size,
            "lr": setting.step_size / self._scale(setting),
        }
        change = {"training": training.model_copy(update=plan), "candidates": question.candidates}
        return self.scenario.model_copy(update={**change, "batch_size": 1, "checkpoints": (0,)})

    def trials(
        self, setting: TrainingChoice, seeds: range, rounds: int | None = None
    ) -> list[TrainTrial]:
        """Return the training runs of a setting, by default for all rounds."""
        scenario, defense = self.scenario_for(setting, rounds), self.defense(setting)
        return [TrainTrial(scenario, defense, seed) for seed in seeds]

    @property
    def searched(self) -> range:
        """Return the seed of the search (as a range)."""
        return range(SEED_STRIDE * self.seed, SEED_STRIDE * self.seed + 1)

    def fresh(self, repetition: int) -> range:
        """Return the seeds of the reported settings."""
        first = SEED_STRIDE * repetition + 1
        return range(first, first + self.effort.seeds)

    @property
    def world(self) -> World:
        """Return the scenario with its data."""
        return load_world(self.scenario)

    @property
    def _test_examples(self) -> int:
        return len(self.world.test.targets)

    @property
    def clipped_examples(self) -> int:
        """Return the number of examples per clipped gradient."""
        return 1 if self.question.unit == "record" else self.question.batch_size

    def _scale(self, setting: TrainingChoice) -> float:
        """Return the step size divided by the learning rate."""
        clips = setting.noise_multiplier and self.scenario.training.server == "sgd"
        return setting.max_norm if clips else 1.0

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False)


def _best(trained: Mapping[TrainingChoice, Trained]) -> TrainingChoice:
    return max(trained, key=lambda one: trained[one].accuracy.value)


def _around(winner: TrainingChoice, grid: Sequence[TrainingChoice]) -> list[TrainingChoice]:
    """Return neighbours of the winner that the grid lacks: step sizes between, norms beyond."""
    norms, sizes = (sorted({one[i] for one in grid}) for i in (1, 2))
    found = [winner._replace(step_size=size) for size in between(winner.step_size, sizes)]
    if len(norms) > 1 and winner.max_norm in (norms[0], norms[-1]):
        inner = norms[1] if winner.max_norm == norms[0] else norms[-2]
        found.append(winner._replace(max_norm=_rounded(winner.max_norm**2 / inner)))
    return found


def between(size: float, grid: Sequence[float]) -> list[float]:
    """Return the sizes half a grid step below and above a size. None without a grid."""
    if not len(grid) > 1:
        return []
    half = (max(grid) / min(grid)) ** (0.5 / (len(grid) - 1))
    return [_rounded(size / half), _rounded(size * half)]


def fitting(question: Question, scenario: Scenario) -> Question:
    """Return a question whose candidates are at most the look-alikes in the data."""
    asked = scenario.model_copy(update={"candidates": question.candidates, "batch_size": 1})
    return replace(question, candidates=candidate_count(load_world(asked)))


def _rounded(value: float) -> float:
    """Round a clipping norm to two digits; more would not matter."""
    return float(f"{value:.2g}")
