"""A run: from a configuration to cells, from cells to rows, with progress and resumption."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leakfrontier.adversaries import PANEL
from leakfrontier.defenses import Defense

from .cells import AttackTrial, TrainTrial, Trial, run_trial
from .engine import Done, Failure, execute
from .methods import Method, Strict, build_adversary, build_defense
from .results import Results
from .rows import Outcome
from .scenario import SCENARIOS, Scenario, label, load_world
from .scoring import candidates
from .store import Store

PRESETS = ("quick", "full")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what is allowed."""


class RunConfig(Strict):
    """What to evaluate.

    Attributes:
        scenarios: Names of `SCENARIOS`, or scenarios spelled out.
        defenses: Defenses; an option that is a list stands for one defense per value.
        adversaries: `panel`, or the adversaries to take instead (then not comparable).
        seeds: Repetitions of everything, with other weights, victims and noise.
        observations: Attacked uploads per seed: the independent units of all intervals.
        time_limit: Seconds after which one cell is given up and recorded as such.
    """

    scenarios: tuple[Scenario, ...]
    defenses: tuple[Method, ...]
    adversaries: Literal["panel"] | tuple[Method, ...] = "panel"
    seeds: int = Field(default=1, ge=1)
    observations: int = Field(default=20, ge=1)
    time_limit: float = Field(default=600, gt=0)

    @field_validator("scenarios", mode="before")
    @classmethod
    def _named_scenarios(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        return [_scenario(item) for item in value] if isinstance(value, list | tuple) else value

    @field_validator("defenses")
    @classmethod
    def _valid_defenses(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        expanded = tuple(method for item in value for method in item.grid())
        for method in expanded:
            build_defense(method)
        return expanded

    @field_validator("adversaries")
    @classmethod
    def _valid_adversaries(
        cls, value: Literal["panel"] | tuple[Method, ...]
    ) -> Literal["panel"] | tuple[Method, ...]:
        for method in () if value == "panel" else value:
            build_adversary(method)
        return value

    @model_validator(mode="after")
    def _different_names(self) -> RunConfig:
        named = {
            "scenarios": [scenario.name for scenario in self.scenarios],
            "defenses": [label(defense) for defense in self.defenses],
            "adversaries": [member.name.rpartition(":")[2] for member in self.members()],
        }
        for kind, names in named.items():
            if not names:
                raise ValueError(f"{kind} must hold at least one, got none")
            for name in names:
                if names.count(name) > 1:
                    advice = "give one a `title`" if kind == "scenarios" else "leave one out"
                    raise ValueError(f"two {kind} are called {name!r}: {advice}")
        return self

    @property
    def panel(self) -> str:
        """Return the version that results carry."""
        return PANEL.version if self.adversaries == "panel" else f"custom ({PANEL.version})"

    def members(self) -> list[Method]:
        """Return the adversaries, with all their hyper-parameters."""
        if self.adversaries != "panel":
            return list(self.adversaries)
        return [
            Method(name=name, options=dict(vars(adversary)))
            for name, adversary in PANEL.members.items()
        ]


def load_config(
    source: Path | str | Mapping[str, Any], extra_defenses: Sequence[object] = ()
) -> RunConfig:
    """Return a configuration from a YAML file, the name of a preset, or a mapping.

    Args:
        source: The configuration.
        extra_defenses: More defenses, each a name or a mapping as in a file.
    """
    content = dict(source if isinstance(source, Mapping) else _read_yaml(source))
    defenses = content.get("defenses") or []
    if isinstance(defenses, list | tuple):
        content["defenses"] = [*defenses, *extra_defenses]
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def plan(config: RunConfig, first_seed: int = 0) -> list[Trial]:
    """Return the cells of a run: training first, since attacks on checkpoints need it."""
    training: list[Trial] = []
    attacks: list[Trial] = []
    for scenario in config.scenarios:
        for seed in range(first_seed, first_seed + config.seeds):
            for defense in config.defenses:
                training.append(TrainTrial(scenario, defense, seed))
                attacks += _attacks(config, scenario, defense, seed)
    return training + attacks


def run(
    config: RunConfig,
    out: Path,
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Results:
    """Run what is not yet in `out`, and return all rows.

    Args:
        config: What to evaluate.
        out: Folder of the results; a run that was interrupted there is continued.
        workers: Processes; by default one per core.
        retry_failed: Whether cells that ended in an error are run again.
        console: Where progress is shown; by default the terminal.
    """
    for scenario in config.scenarios:
        check_scenario(scenario)
    return run_trials(
        plan(config),
        config,
        out,
        workers=workers,
        retry_failed=retry_failed,
        console=console,
    )


def run_trials(
    trials: Sequence[Trial],
    config: RunConfig,
    out: Path,
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Results:
    """Run those of some cells that are not yet in `out`, and return the rows of all of them.

    Args:
        trials: The cells; what `plan` returns, or a choice of one's own.
        config: What the folder records as their configuration; it sets panel and time limit.
        out: As for `run`, and so are the others.
        workers: See `run`.
        retry_failed: See `run`.
        console: See `run`.
    """
    store = Store(out, create=True)
    store.begin(config.panel, config.model_dump(mode="json"), [trial.cell for trial in trials])
    finished = store.finished(failed=not retry_failed)
    waiting = [trial for trial in trials if trial.cell.key not in finished]
    with _Progress(waiting, len(trials), workers or _cores(), console) as progress:
        for wave in _waves(waiting):
            tasks = [(trial, out.resolve()) for trial in wave]
            for done in execute(
                run_trial, tasks, workers=workers or _cores(), time_limit=config.time_limit
            ):
                trial = done.task[0]
                store.write(trial.cell.key, _outcome(done), done.seconds)
                progress.advance(trial, done)
    return store.results()


def check_scenario(scenario: Scenario) -> None:
    """Raise what would make every cell of a scenario fail."""
    try:
        world = load_world(scenario)
        world.model(Defense(), seed=0)
        candidates(world)
    except Exception as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"scenario {scenario.name}: {reason}") from error


def _attacks(
    config: RunConfig, scenario: Scenario, defense: Method, seed: int
) -> Iterator[AttackTrial]:
    """Yield the attacks on one arm.

    One that replays the client is run with and without knowledge of the defense; against the
    undefended client these are the same.
    """
    for checkpoint in scenario.checkpoints:
        for adversary in config.members():
            both = build_adversary(adversary).simulates and defense.name != "none"
            for knows_defense in (True, False) if both else (True,):
                yield AttackTrial(
                    scenario,
                    defense,
                    adversary,
                    knows_defense,
                    seed,
                    checkpoint,
                    config.observations,
                )


def _waves(trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    """Yield groups of cells of which each needs only what earlier groups left behind."""
    waves: tuple[list[Trial], list[Trial]] = ([], [])
    for trial in trials:
        waves[isinstance(trial, AttackTrial) and trial.checkpoint > 0].append(trial)
    yield from (wave for wave in waves if wave)


def _outcome(done: Done[tuple[Trial, Path], Outcome]) -> Outcome:
    if isinstance(done.result, Failure):
        error = "\n".join(filter(None, [done.result.message, done.result.details]))
        return Outcome(status=done.result.kind, error=error)
    return done.result


class _Progress:
    """A bar over cells, with the time left estimated from like cells that are done."""

    def __init__(
        self, waiting: Sequence[Trial], total: int, workers: int, console: Console | None
    ) -> None:
        self._workers = workers
        self._left = list(waiting)
        self._seconds: dict[object, list[float]] = defaultdict(list)
        self._failures = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        done = total - len(waiting)
        self._task = self._bar.add_task("cells", total=total, completed=done, left="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, trial: Trial, done: Done[tuple[Trial, Path], Outcome]) -> None:
        """Count a cell as done."""
        self._left.remove(trial)
        self._seconds[_alike(trial)].append(done.seconds)
        self._failures += isinstance(done.result, Failure)
        text = f"about {_duration(self._estimate())} left" if self._left else ""
        if self._failures:
            text += f"  ({self._failures} failed)"
        self._bar.update(self._task, advance=1, left=text)

    def _estimate(self) -> float:
        known = [value for values in self._seconds.values() for value in values]
        overall = sum(known) / len(known)
        means = {key: sum(values) / len(values) for key, values in self._seconds.items()}
        return sum(means.get(_alike(trial), overall) for trial in self._left) / self._workers


def _alike(trial: Trial) -> object:
    """Return what the duration of a cell mostly depends on."""
    adversary = trial.adversary.name if isinstance(trial, AttackTrial) else "training"
    return trial.scenario.name, adversary


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _scenario(item: Any) -> Any:  # noqa: ANN401 - whatever the file holds
    if not isinstance(item, str):
        return item
    if item not in SCENARIOS:
        raise ValueError(f"unknown scenario {item!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[item]


def _read_yaml(source: Path | str) -> Any:  # noqa: ANN401 - whatever the file holds
    if source in PRESETS:
        text = files(__package__).joinpath("presets", f"{source}.yaml").read_text()
    else:
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {source}: {error}") from error
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 13th month
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a mapping with the keys {[*RunConfig.model_fields]}")
    return content


def _explain(error: ValidationError) -> str:
    """Return pydantic's findings, one line each, with the place in the file."""
    lines = []
    for finding in error.errors():
        place = ".".join(str(part) for part in finding["loc"])
        lines.append(f"{place}: {_message(finding)}" if place else _message(finding))
    return "\n".join(lines)


def _message(finding: ErrorDetails) -> str:
    if finding["type"] == "value_error":
        return str(finding["ctx"]["error"])
    message = finding["msg"].replace("valid tuple", "list")
    return message if finding["type"] == "missing" else f"{message}, got {finding['input']!r}"
