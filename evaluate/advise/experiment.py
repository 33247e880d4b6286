"""Clipping norm and learning rate under a given noise, and what they are worth: by training.

At a fixed epsilon the noise multiplier is set by sampling and steps alone. What is left is the
clipping norm, which trades bias for noise, and the learning rate. They are searched for together
by successive halving [1]: every pair for a part of the rounds, the best for all of them, and then
what is around the winner. A pair is a clipping norm and a *step size*, how far the server moves
along clipped updates: under Adam, which does not see their scale, that is its learning rate; under
SGD, the rate times the norm. Other noise asks for another step size, which is searched for at the
same clipping norm.

Whoever was best was lucky, too. Hence what is recommended is measured again, with other seeds.

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
"""Distance of the seeds of two repetitions, more than any of them uses."""


class TrainingChoice(NamedTuple):
    """What a training run can choose; without noise nothing is clipped either."""

    noise_multiplier: float
    max_norm: float
    step_size: float


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    Attributes:
        norm_factors: Clipping norms, relative to the usual norm of a gradient on public data.
        step_sizes: Step sizes of the server.
        shortening: The first stage takes the rounds divided by this.
        survivors: Settings that are trained to the end.
        seeds: Repetitions of what is reported; five make an interval over seeds.
        observations: Attacked uploads per seed.
        adversaries: The attacks.
        what_if: Whether other clipping norms and other runs are trained at the end.
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
    """Training and attacks for one question, in cells of a run's folder.

    Attributes:
        question: What is asked; its candidates are as many as the data allows.
        scenario: Data, model and the server's optimizer.
        out: Folder of the cells; what is there is not run again.
        effort: How much is tried.
        seed: Repetition: another one shares no seed with this.
        workers: Processes; by default as many as the engine has room for.
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
        """Return the clipping norms to try, around the usual one of public gradients."""
        initial = self.world.model(Defense(), seed=0)
        usual = float(gradient_norms(self.world, initial, self.clipped_examples).median())
        return [_rounded(factor * usual) for factor in self.effort.norm_factors]

    def search(self, noise_multiplier: float) -> tuple[TrainingChoice, list[AdviceRow]]:
        """Return the best setting at one noise multiplier, and the rows of all."""
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
        """Return the best setting at each of some noise multipliers, and the rows of all.

        The clipping norm stays. Of step sizes whose accuracies are within a standard error of
        the best, the smallest is taken, as it is the least likely to fail with another seed.
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

        The attacker knows the defense: to publish it must not weaken a guarantee.

        Args:
            settings: Settings that differ in their noise.
            repetition: Another `seed` than the experiment's.
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
        """Run the trials of several settings, and return what became of each."""
        self._say(f"training of {what}")
        every = [trial for several in trials.values() for trial in several]
        if not every:
            return {}
        config = self.config([TrainingChoice(0.0, 1.0, every[0].scenario.training.lr)])
        return trained(self._run(every, config), trials)

    def _run(self, trials: Sequence[Trial], config: RunConfig) -> Conclusions:
        """Run cells, each attack on every upload: the rate of the strongest is reported."""
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
        """Return the run of settings that differ in their noise; with the first's step size."""
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
        """Return what is proven and what was measured of a setting."""
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
            raise ValueError("row must be a measured one")
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
        """Return the scenario with the question's plan and a setting's learning rate."""
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
        """Return the seed of the search."""
        return range(SEED_STRIDE * self.seed, SEED_STRIDE * self.seed + 1)

    def fresh(self, repetition: int) -> range:
        """Return the seeds of what is reported."""
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
        """Return how many examples are behind what is clipped."""
        return 1 if self.question.unit == "record" else self.question.batch_size

    def _scale(self, setting: TrainingChoice) -> float:
        """Return how a learning rate depends on the clipping norm, at the same step size."""
        clips = setting.noise_multiplier and self.scenario.training.server == "sgd"
        return setting.max_norm if clips else 1.0

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False)


def _best(trained: Mapping[TrainingChoice, Trained]) -> TrainingChoice:
    return max(trained, key=lambda one: trained[one].accuracy.value)


def _around(winner: TrainingChoice, grid: Sequence[TrainingChoice]) -> list[TrainingChoice]:
    """Return what a grid leaves out around its best: step sizes between, and norms beyond."""
    norms, sizes = (sorted({one[i] for one in grid}) for i in (1, 2))
    found = [winner._replace(step_size=size) for size in between(winner.step_size, sizes)]
    if len(norms) > 1 and winner.max_norm in (norms[0], norms[-1]):
        inner = norms[1] if winner.max_norm == norms[0] else norms[-2]
        found.append(winner._replace(max_norm=_rounded(winner.max_norm**2 / inner)))
    return found


def between(size: float, grid: Sequence[float]) -> list[float]:
    """Return the sizes half a step of a grid below and above one; none where there is no grid."""
    if not len(grid) > 1:
        return []
    half = (max(grid) / min(grid)) ** (0.5 / (len(grid) - 1))
    return [_rounded(size / half), _rounded(size * half)]


def fitting(question: Question, scenario: Scenario) -> Question:
    """Return a question with no more candidates than a scenario's data has look-alikes."""
    asked = scenario.model_copy(update={"candidates": question.candidates, "batch_size": 1})
    return replace(question, candidates=candidate_count(load_world(asked)))


def _rounded(value: float) -> float:
    """Return two digits of a number, which are all that a clipping norm is good for."""
    return float(f"{value:.2g}")
