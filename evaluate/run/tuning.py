"""Tuning: trainings on validation examples that choose settings, before the evaluation.

The rule is the same for the control and for every defense. The combinations of the listed values
are put in a fixed random order and cut at the budget. If there are fewer combinations than the
budget, they are repeated with more seeds. So all arms have the same number of trainings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from pydantic import JsonValue

from ..conclude.tuned import chosen_settings
from ..foundations.rows import Cell, Outcome, TuningRow
from ..foundations.seeds import generator
from ..users.methods import Method, build_defense
from ..world.enrolment import enrol
from ..world.scenario import Scenario, load_world, own_options
from .cells import labels_of, own_code_of
from .code_digests import TRAINED, source_digest
from .config import RunConfig
from .trained_scenes import clients_of
from .training_clients import TrainingClients
from .training_server import Order

FIRST_SEED = 2**20
"""The first seed of tuning. It is above all seeds of evaluations."""

PATH = (*TRAINED, "evaluate/run/tuning.py")


@dataclass(frozen=True)
class TuneTrial:
    """Train with some settings under a defense, and evaluate on the validation examples.

    Attributes:
        scenario: The scenario with these settings.
        defense: The defense with these settings.
        seed: The seed of the training.
        uploads: Number of attacked uploads of the evaluation, on which clients depend.
        number: The place of the settings in the order in which they are tried.
        settings: The settings, as a JSON object.
    """

    scenario: Scenario
    defense: Method
    seed: int
    uploads: int
    number: int
    settings: str

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {
            "scenario": self.scenario.config(),
            "defense": self.defense.config(),
            "seed": self.seed,
            "uploads": self.uploads,
            "number": self.number,
            "settings": self.settings,
        }
        labels = {**labels_of(self.scenario, self.defense), "seed": self.seed}
        code = source_digest(PATH, build_defense(self.defense), *own_code_of(self.scenario))
        return Cell("tune", config, labels, code)

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of all draws. It excludes the settings, so accuracies are paired."""
        return (self.scenario.paired_config(), self.seed)

    def run(self, folder: Path) -> Outcome:
        """Train without logging uploads, and evaluate the trained model once."""
        world = load_world(self.scenario)
        defense, settings = world.defense(self.defense), self.scenario.training
        enrolment = enrol(world, self.seed, self.uploads)
        model = world.model(defense, self.seed)
        training = TrainingClients(
            clients_of(world, defense, model, enrolment),
            enrolment.rows,
            model,
            Order(
                scenario=self.scenario,
                draws=self.draws,
                weights=enrolment.weights,
                lr=settings.lr_under(self.defense),
                evaluated=frozenset([settings.rounds]),
                saved={},
                logged=frozenset(),
                invited=enrolment.invited(world, self.uploads, attacked=False),
                tuning=True,
            ),
        )
        start = time.perf_counter()
        training.run(settings.rounds)
        (last,) = training.utility()
        row = TuningRow(self.number, self.settings, last.correct, last.total, last.loss)
        return Outcome(tunings=(row,), busy=time.perf_counter() - start)


def tuning_plan(config: RunConfig) -> list[TuneTrial]:
    """Return the trainings that tune settings."""
    return [
        trial
        for scenario in config.scenarios
        for defense in config.defenses_of(scenario)
        for trial in _trainings(scenario, defense, config.observations)
    ]


def with_chosen(config: RunConfig, tunings: pd.DataFrame) -> RunConfig:
    """Return a configuration with the settings that tuning chose."""
    scenarios = []
    for one in config.scenarios:
        if one.tune is not None:
            chosen = chosen_settings(tunings, one.name)
            one = one.model_copy(update={"tune": one.tune.model_copy(update={"chosen": chosen})})
        scenarios.append(one)
    return config.model_copy(update={"scenarios": tuple(scenarios)})


def combinations(scenario: Scenario, defense: Method) -> list[dict[str, JsonValue]]:
    """Return the settings that are tried under a defense, in their order."""
    tune = scenario.tune
    if tune is None:
        return []
    own = {*own_options(defense, tune.options)}
    options = {name: v for name, v in tune.options.items() if "." not in name or name in own}
    every = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    rng = generator("tuning", json.dumps(every, sort_keys=True))
    order = torch.randperm(len(every), generator=rng).tolist()
    return [every[place] for place in order[: max(1, tune.budget // tune.seeds)]]


def _trainings(scenario: Scenario, defense: Method, uploads: int) -> Iterator[TuneTrial]:
    tried = combinations(scenario, defense)
    for number in range(scenario.tune.budget if scenario.tune and tried != [{}] else 0):
        again, place = divmod(number, len(tried))
        arm, tuned = scenario.arm(defense, tried[place])
        yield TuneTrial(arm, tuned, FIRST_SEED + again, uploads, place, json.dumps(tried[place]))
