"""Tests each method once before the first cell, to report each mistake once.

Users' code runs in a worker under the time limit of the run, as in cells. Our own code is quick and
runs in this process.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import Threat
from leakfrontier.defenses import DPSGD, Batch, Chain, Defense, Plan, Refused

from ..client.client import Client, observe, release
from ..client.math_attention import math_attention
from ..engines.engine import Failure, cores, execute
from ..foundations.errors import OWN_FOLDER, UserError
from ..foundations.plugins import file_of
from ..foundations.seeds import generator
from ..users.contract import Checked, check_guarantee
from ..users.methods import Method, build_adversary, own_code
from ..users.names import label
from ..world.scenario import Scenario, World, load_world
from ..world.victims import candidate_count, check_sizes
from . import soundness
from .cells import AttackTrial
from .config import ConfigError, RunConfig
from .soundness import EXAMPLES, Work

ROUNDS = 3
"""The number of uploads that decide whether a defense changes nothing."""


@dataclass(frozen=True)
class Trying:
    """One test: of a scenario's model and data, or of a method on them.

    Attributes:
        scenario: The scenario.
        kind: What is tested.
        method: The defense or adversary; for a scenario, its model.
        work: The work of a cell, to estimate its time.
    """

    scenario: Scenario
    kind: Literal["scenario", "defense", "adversary"]
    method: Method
    work: Work | None = None

    @property
    def is_own(self) -> bool:
        """Return whether it runs code of the user."""
        return bool(own_code(self.method) or own_code(self.scenario.model))

    @property
    def name(self) -> str:
        """Return its name in messages."""
        if self.kind == "scenario":
            return f"scenario {self.scenario.name}"
        return f"{self.kind} {label(self.method)} on {self.scenario.name}"


def probe(config: RunConfig, workers: int | None = None, *, timed: bool = True) -> list[str]:
    """Test all scenarios and methods of a run, and return the warnings.

    Args:
        config: The run.
        workers: Largest number of processes for users' code. Default: one per core.
        timed: Whether to estimate the time of cells. Only these warnings depend on the machine.

    Raises:
        ConfigError: If any test fails. The message names each failure.
    """
    tasks, notes = _tasks(config, _work(config) if timed else None), []
    failures: list[tuple[int, str]] = []  # by the task's place
    with closing(_results(tasks, workers or cores(), config.time_limit)) as results:
        for task, result in results:
            if not isinstance(result, Failure):
                notes += result
                continue
            failures.append((tasks.index(task), _reason(result, config.time_limit)))
            if task.kind == "scenario":
                # Methods cannot be tested on a broken model.
                failures = failures[-1:]
                break
    lines: dict[tuple[str, str], str] = {}  # one for all options and scenarios
    for place, reason in sorted(failures):
        lines.setdefault((tasks[place].method.name, reason), f"{tasks[place].name}: {reason}")
    if lines:
        raise ConfigError("\n".join(lines.values()))
    for scenario in config.scenarios:
        try:
            check_sizes(load_world(scenario), config.observations, config.defenses_of(scenario))
        except ValueError as error:
            raise ConfigError(f"scenario {scenario.name}: {error}") from error
    return list(dict.fromkeys(notes))


def check_scenario(scenario: Scenario) -> list[str]:
    """Return the warnings about a scenario. Raise if all of its cells would fail."""
    task = Trying(scenario, "scenario", scenario.model)
    result = _tried(task)
    if isinstance(result, Failure):
        raise ConfigError(f"{task.name}: {result.message}")
    return result


def check_defense(scenario: Scenario, method: Method) -> None:
    """Raise if a defense of the user cannot be used in a scenario."""
    task = Trying(scenario, "defense", method)
    result = _tried(task) if own_code(method) else []
    if isinstance(result, Failure):
        raise UserError(f"{task.name}: {result.message}")


def _results(
    tasks: Sequence[Trying], workers: int, time_limit: float
) -> Generator[tuple[Trying, list[str] | Failure], None, None]:
    for task in tasks:
        if not task.is_own:
            yield task, _tried(task)
    own = [task for task in tasks if task.is_own]
    if own:
        with closing(execute(_tried, own, workers=workers, time_limit=time_limit)) as done:
            yield from ((one.task, one.result) for one in done)


def _reason(failure: Failure, time_limit: float) -> str:
    if failure.kind == "timeout":
        return f"did not finish within the time limit of {time_limit:g} s, on a single upload"
    return failure.message


def _tasks(config: RunConfig, work: Work | None) -> list[Trying]:
    return [
        *(Trying(scenario, "scenario", scenario.model, work) for scenario in config.scenarios),
        *(
            Trying(scenario, "defense", defense)
            for scenario in config.scenarios
            for defense in _different(config.defenses_of(scenario))
        ),
        *(
            Trying(scenario, "adversary", adversary)
            for scenario in config.scenarios
            for adversary in config.members()
            if own_code(adversary)
        ),
    ]


def _work(config: RunConfig) -> Work:
    """Return the work of the longest search by gradients."""
    replays = {"": 0}
    for method in config.members():
        adversary = build_adversary(method)
        if adversary.simulates and adversary.threat is Threat.PASSIVE:
            steps = getattr(adversary, "iterations", 0) * getattr(adversary, "restarts", 0)
            replays[method.name] = steps
    search = max(replays, key=lambda name: replays[name])
    return Work(config.observations, search, replays[search], config.time_limit)


def _different(defenses: Sequence[Method]) -> list[Method]:
    """Return the first of each group of similar defenses."""
    return [*{_alike(defense): defense for defense in reversed(defenses)}.values()][::-1]


def _alike(method: Method) -> str:
    """Return a key that is equal for our defenses that differ only in numbers."""
    options = {
        name: value
        for name, value in method.options.items()
        if ":" in method.name or isinstance(value, bool) or not isinstance(value, int | float)
    }
    return f"{method.name} {options} {[*map(_alike, method.links)]}"


def _tried(task: Trying) -> list[str] | Failure:
    """Run one test. Return its warnings, or the failure."""
    try:
        with math_attention():  # as in cells
            return _try(task)
    except Exception as error:  # users' code may raise anything
        return Failure("error", _explained(error, task))


def _explained(error: Exception, task: Trying) -> str:
    """Return the message of an error; for an unexpected one, with the line in the user's code."""
    if isinstance(error, ValueError):
        return str(error)
    own = [*own_code(task.method), *own_code(task.scenario.model)]
    folders = {str(file.parent) for file in map(file_of, own) if file is not None}
    every = traceback.extract_tb(error.__traceback__)
    frames = [one for one in every if str(Path(one.filename).parent) in folders]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _try(task: Trying) -> list[str]:
    world = load_world(task.scenario)
    if task.kind == "scenario":
        candidate_count(world)
        return [*soundness.notes(world, task.work)]
    if task.kind == "adversary":
        _try_adversary(task)
        return []
    if task.is_own:
        return [*_try_defense(world, task.method)]
    _try_ours(world, world.defense(task.method))
    return []


def _try_ours(world: World, defense: Defense) -> None:
    """Call those hooks of our own defense that may not suit the data or the model."""
    (share,), rng = _shares(world, 1), generator("probe")
    trained_on = defense.on_batch(share, rng)
    if not _overrides(defense, "on_model", "gradient"):
        return
    model = world.model(defense, seed=0)
    for link in _links(defense):
        # Skip DPSGD: Opacus takes seconds to import, and supports all layers of our models.
        if _overrides(link, "gradient") and not isinstance(link, DPSGD):
            link.gradient(model, world.modality.loss, trained_on, rng)


def _links(defense: Defense) -> tuple[Defense, ...]:
    return defense.links if isinstance(defense, Chain) else (defense,)


def _overrides(defense: Defense, *hooks: str) -> bool:
    """Return whether a defense, or a link of a chain, overrides one of some hooks."""
    return any(
        getattr(type(link), hook) is not getattr(Defense, hook)
        for link in _links(defense)
        for hook in hooks
    )


def _try_adversary(task: Trying) -> None:
    """Attack one undefended upload."""
    attack = AttackTrial(
        scenario=task.scenario,
        defense=Method(name="none"),
        adversary=task.method,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=(0,),
        pictures=0,
    )
    with tempfile.TemporaryDirectory(prefix=OWN_FOLDER) as folder:
        attack.run(Path(folder))


def _try_defense(world: World, method: Method) -> Iterator[str]:
    """Call every hook of a defense, as a run does, and yield warnings."""
    defense = world.defense(method)
    name = type(defense).__name__
    _check_values(defense, name)
    model = defense.on_model(world.model(Defense(), seed=0))
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}.on_model must return a model, got {type(model).__name__}")
    try:
        Checked(replace(defense)).on_receive(model, copy.deepcopy(model))
    except Refused:
        return  # in cells, this is a result
    client, rng = world.client(defense, model), generator("probe", method.config())
    for rows in Checked(replace(defense)).batches(4 * EXAMPLES, EXAMPLES, 1, rng):
        if not ((rows >= 0) & (rows < 4 * EXAMPLES)).all():
            raise ValueError(f"{name}.batches must yield numbers below {4 * EXAMPLES}, got {rows}")
    shares = _shares(world, defense.cohort)
    (upload, *_) = observe(client, shares, world.threat(knows_defense=True), rng)
    if not own_code(method):
        return
    _check_replay(defense, upload.observation.update, name)
    upload.observation.simulate(*upload.truth)
    likelihood = upload.observation.log_likelihood
    if likelihood is not None:
        _check_likelihood(likelihood(upload.observation.update, upload.observation.update), name)
    check_guarantee(name, defense.guarantee(Plan(1, 1.0, 1e-5)))
    if _is_idle(client, world):
        yield (
            f"{label(method)} changes nothing: its uploads are those of an undefended client, bit "
            "for bit"
        )


def _shares(world: World, clients: int) -> list[Batch]:
    """Return a few examples for each client. They repeat if the data has too few."""
    rows = torch.arange(clients * EXAMPLES).remainder(len(world.train.targets))
    return [world.train.at(part) for part in rows.split(EXAMPLES)]


def _check_values(defense: Defense, name: str) -> None:
    """Raise if a property has a value of the wrong type."""
    if not isinstance(defense, Defense):
        raise ValueError(f"for_space must return a Defense, got {name}")
    if not (isinstance(defense.cohort, int) and defense.cohort >= 1):
        raise ValueError(f"{name}.cohort must be a whole number from 1, got {defense.cohort!r}")
    if not isinstance(defense.strength, int | float | None):
        raise ValueError(f"{name}.strength must be a number or None, got {defense.strength!r}")


def _check_replay(defense: Defense, observed: Mapping[str, Tensor], name: str) -> None:
    replayed = replace(defense).replay(observed)
    if not isinstance(replayed, Defense):
        raise ValueError(f"{name}.replay must return a Defense, got {type(replayed).__name__}")


def _check_likelihood(value: object, name: str) -> None:
    if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}.log_likelihood must return one number, as a tensor, got {shape}")


def _is_idle(client: Client, world: World) -> bool:
    """Return whether a defense of the user has no effect."""
    defense = client.defense
    if defense.cohort > 1 or _overrides(defense, "on_model", "on_receive", "guarantee"):
        return False
    defended, plain = (replace(client, defense=one) for one in (replace(defense), Defense()))
    for number in range(ROUNDS):
        share = _shares(world, ROUNDS)[number]
        first, second = (
            release([one], [share], generator("idle", number))[0] for one in (defended, plain)
        )
        if not all(torch.equal(first[name], second[name]) for name in second):
            return False
    return True
