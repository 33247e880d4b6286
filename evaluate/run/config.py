"""Configurations of runs, from files, presets and mappings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from leakfrontier.adversaries import PANEL

from ..foundations.devices import Device
from ..foundations.errors import UserError
from ..foundations.plugins import trust
from ..users.methods import (
    Method,
    Number,
    Strict,
    Whole,
    adversary_grid,
    build_adversary,
    build_defense,
    check_loading,
    defense_grid,
    placed_name,
)
from ..users.names import adversary_label, family, label
from ..users.strict_yaml import load_yaml
from ..world.scenario import SCENARIOS, Scenario, own_options

_WORDS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be a mapping",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
}
"""Our messages for pydantic's error types, because its own words change with its version."""

PRESETS = ("quick", "quick-text", "standard", "full")
"""Configurations in the package. The first is the default."""


class ConfigError(UserError):
    """A configuration cannot be run. The message says what is allowed."""


class RunConfig(Strict):
    """The configuration of a run."""

    scenarios: tuple[Scenario, ...]
    """Scenarios, each a name or a mapping."""
    defenses: tuple[Method, ...]
    """Defenses. A list as an option gives one defense per value."""
    adversaries: Literal["panel"] | tuple[Method, ...] = "panel"
    """`panel`, or other adversaries, whose results are not comparable with those of the panel. A
    list as an option gives one adversary per value."""
    budget: Literal["cpu", "published"] = "cpu"
    """The effort of the panel's searches: `cpu`, or as `published`."""
    seeds: Whole = Field(default=1, ge=1, le=10_000)
    """Repetitions of everything, each with other weights, victims and noise."""
    observations: Whole = Field(default=20, ge=1)
    """Attacked uploads per seed. They are the independent units of all intervals."""
    time_limit: Number = Field(default=600, gt=0)
    """Seconds after which a cell is stopped and recorded as a timeout."""
    individual: bool = False
    """Whether every attack runs on every upload. By default, costly attacks run only on uploads
    with a victim that cheaper ones did not identify."""

    @field_validator("scenarios", mode="before")
    @classmethod
    def _named_scenarios(cls, value: Any) -> Any:  # noqa: ANN401 - any content of a file
        return [_scenario(item) for item in value] if isinstance(value, list | tuple) else value

    @field_validator("defenses")
    @classmethod
    def _valid_defenses(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        return tuple(defense_grid(value))

    @field_validator("adversaries")
    @classmethod
    def _valid_adversaries(
        cls, value: Literal["panel"] | tuple[Method, ...]
    ) -> Literal["panel"] | tuple[Method, ...]:
        return value if value == "panel" else tuple(adversary_grid(value))

    @model_validator(mode="after")
    def _different_names(self) -> RunConfig:
        named = [
            ("scenarios", [scenario.name for scenario in self.scenarios]),
            ("defenses", [label(defense) for defense in self.defenses]),
            *(("defenses", [*map(label, self.defenses_of(one))]) for one in self.scenarios),
            (
                "adversaries",
                [adversary_label(member, build_adversary(member)) for member in self.members()],
            ),
        ]
        for kind, names in named:
            if not names:
                raise ValueError(f"{kind} must hold at least one, got none")
            for name in names:
                if names.count(name) > 1:
                    advice = "give one a `title`" if kind == "scenarios" else "leave one out"
                    raise ValueError(f"two {kind} are called {name!r}: {advice}")
        return self

    @model_validator(mode="after")
    def _rates_of_defenses(self) -> RunConfig:
        for scenario in self.scenarios:
            families = {family(defense) for defense in self.defenses_of(scenario)}
            single = {label(defense) for defense in self.defenses_of(scenario)}
            for name in scenario.training.defense_lr:
                if name not in families | single:
                    raise ValueError(
                        f"training.defense_lr of {scenario.name}: the run has no defense {name!r}, "
                        f"only {', '.join(sorted(families | single))}"
                    )
        return self

    @model_validator(mode="after")
    def _tunable(self) -> RunConfig:
        for scenario in self.scenarios:
            options = scenario.tune.options if scenario.tune else {}
            defenses = self.defenses_of(scenario)
            for name in (one for one in options if "." in one):
                having = [one for one in defenses if own_options(one, [name])]
                if not having:
                    raise ValueError(f"tune.{name} of {scenario.name}: the run has no such defense")
                for defense, value in product(having, options[name]):
                    build_defense(scenario.arm(defense, {name: value})[1])
        return self

    def defenses_of(self, scenario: Scenario) -> tuple[Method, ...]:
        """Return the defenses that are evaluated in a scenario."""
        return (*self.defenses, *scenario.defenses)

    @property
    def panel(self) -> str:
        """Return the version of the panel that is stored with results."""
        if self.adversaries != "panel":
            return f"custom ({PANEL.version})"
        return PANEL.version + (", published budgets" if self.budget == "published" else "")

    def of_scenarios(self, names: Sequence[str]) -> RunConfig:
        """Return the same configuration with only some of its scenarios."""
        known = {scenario.name: scenario for scenario in self.scenarios}
        for name in names:
            if name not in known:
                raise ConfigError(f"no scenario is called {name!r}: choose from {', '.join(known)}")
        chosen = tuple(one for name, one in known.items() if name in names)
        return self.model_copy(update={"scenarios": chosen})

    def on_device(self, device: Device) -> RunConfig:
        """Return the same configuration on another device."""
        moved = (one.model_copy(update={"device": device}) for one in self.scenarios)
        return self.model_copy(update={"scenarios": tuple(moved)})

    def with_data(self, folder: Path) -> RunConfig:
        """Return the same configuration, with a folder of data for scenarios that name none."""
        placed = (
            one if one.data_folder else one.model_copy(update={"data_folder": folder.resolve()})
            for one in self.scenarios
        )
        return self.model_copy(update={"scenarios": tuple(placed)})

    def members(self) -> list[Method]:
        """Return the adversaries, with all their hyper-parameters."""
        if self.adversaries != "panel":
            return list(self.adversaries)
        members = PANEL.published if self.budget == "published" else PANEL.members
        return [
            Method(name=name, options=dict(vars(adversary))) for name, adversary in members.items()
        ]


def load_config(
    source: Path | str | Mapping[str, Any],
    extra_defenses: Sequence[object] = (),
    changes: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return a configuration from the user: a YAML file, the name of a preset, or a mapping.

    The code that it names is trusted. For configurations from others, use `received_config`.
    Paths in a file are relative to the file, all others to the current folder.

    Args:
        source: The configuration.
        extra_defenses: More defenses, each a name or a mapping as in a file.
        changes: Keys that replace those of the configuration.
    """
    content = dict(source if isinstance(source, Mapping) else _read_yaml(source))
    content |= changes or {}
    in_file = isinstance(source, Path | str) and source not in PRESETS
    folder = Path(str(source)).parent if in_file else Path()
    code = [*named_code(content, folder), *named_code({"defenses": [*extra_defenses]}, Path())]
    trust(code)
    check_loading(code, _seconds(content.get("time_limit")))
    defenses = content.get("defenses") or []
    try:
        if isinstance(defenses, list | tuple):
            content["defenses"] = [*defenses, *map(Method.model_validate, extra_defenses)]
        return _validated(content, folder)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def received_config(
    content: Mapping[str, Any], folder: Path, *, trust_code: bool = False
) -> RunConfig:
    """Return a configuration from others, in a pack or a folder of results.

    Args:
        content: The configuration.
        folder: The folder that its paths are relative to.
        trust_code: Whether the user allows the execution of the code that it names.
    """
    if trust_code:
        trust(named_code(content, folder))
    return _validated(content, folder)


def _validated(content: Mapping[str, Any], folder: Path) -> RunConfig:
    try:
        return RunConfig.model_validate(content, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def named_code(content: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the names of users' classes and functions in a configuration, valid or not."""
    scenarios = content.get("scenarios")
    spelled = [item for item in _items(scenarios) if isinstance(item, Mapping)]
    models = [item.get(part) for item in spelled for part in ("model", "protocol")]
    models += [defense for item in spelled for defense in _items(item.get("defenses"))]
    waiting = [*models, *_items(content.get("defenses")), *_items(content.get("adversaries"))]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += [item.get("name"), *_items(item.get("links"))]
        elif isinstance(item, str) and ":" in item:
            yield placed_name(item, folder)


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else math.inf


def _scenario(item: Any) -> Any:  # noqa: ANN401 - any content of a file
    if not isinstance(item, str):
        return item
    if item not in SCENARIOS:
        raise ValueError(f"unknown scenario {item!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[item]


def preset_purpose(name: str) -> str:
    """Return the purpose of a preset: the first sentence of the comment at the top of its file."""
    lines = _preset(name).splitlines()
    said = [line.removeprefix("#").strip() for line in takewhile(_is_comment, lines)]
    return " ".join(said).partition(". ")[0].rstrip(".") + "."


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def _preset(name: str) -> str:
    return files(__package__).joinpath("presets", f"{name}.yaml").read_text()


def _read_yaml(source: Path | str) -> Any:  # noqa: ANN401 - any content of a file
    if source in PRESETS:
        text = _preset(str(source))
    else:
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {source}: {error}") from error
    try:
        content = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must hold a mapping with the keys {[*RunConfig.model_fields]}")
    return content


def explain(error: ValidationError) -> str:
    """Return pydantic's findings, one line each, with their place in the file."""
    lines = []
    for finding in error.errors():
        place = ".".join(str(part) for part in finding["loc"])
        lines.append(f"{place}: {_message(finding)}" if place else _message(finding))
    return "\n".join(lines)


def _message(finding: ErrorDetails) -> str:
    if finding["type"] == "value_error":
        return str(finding["ctx"]["error"])
    if finding["type"] == "missing":
        return "must be given"
    limits = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in finding.get("ctx", {}).items()
    }
    words = _WORDS.get(finding["type"])
    message = finding["msg"] if words is None else words.format(**limits)
    return f"{message}, got {finding['input']!r}"
