"""What the command `list` lists: a name, its options or size, and what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from inspect import getdoc, signature

from pydantic.fields import FieldInfo

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES, Chain

from ..data.data import DATASETS, TEXTS
from ..models.models import MODELS
from ..papers.tables import TABLES
from ..run.config import PRESETS, RunConfig, load_config, preset_purpose
from ..run.run import plan
from ..users.methods import Method, Strict
from ..users.names import label
from ..world.scenario import SCENARIOS, Scenario, Training

Line = tuple[str, str, str]

KEYS: dict[str, type[Strict]] = {
    "a run's file": RunConfig,
    "a scenario": Scenario,
    "a scenario's training": Training,
}
"""The parts of a configuration file."""


def class_lines(registry: dict[str, type]) -> Iterable[Line]:
    """Return the name, the options and the summary of each class."""
    for name, cls in registry.items():
        options = ", ".join(_option(field) for field in fields(cls) if field.init)
        yield name, options, _summary(cls)


def _functions(registry: dict[str, Callable[..., object]]) -> Iterable[Line]:
    for name, function in registry.items():
        known = list(signature(function).parameters.values())[1:]  # the first is the input space
        options = [str(option.replace(annotation=option.empty)) for option in known]
        yield name, ", ".join(options), _summary(function)


def _scenarios() -> Iterable[Line]:
    for name, scenario in SCENARIOS.items():
        yield name, "", f"{scenario.protocol.name}, batches of {scenario.batch_size}"


def key_lines(model: type[Strict]) -> Iterable[Line]:
    """Return the keys of a part of a configuration, their defaults and meanings."""
    for name, field in model.model_fields.items():
        yield name, _default(field), " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    """Return a default as in a configuration file."""
    if field.is_required():
        return "required"
    if isinstance(field.default, Method):
        return label(field.default)
    known = field.default is not None and not isinstance(field.default, Strict)
    return json.dumps(field.default).strip('"') if known else ""


def _datasets() -> Iterable[Line]:
    for name in DATASETS:
        embedded = name in ("fashion-mini", "digits")
        yield name, "", "comes with the package" if embedded else "downloaded by torchvision"
    for name in TEXTS:
        yield name, "", "texts that come with the package"
    yield (
        "a folder",
        "",
        "images or WAV files in one subfolder per class, optionally split into train/ and test/",
    )
    yield (
        "a .jsonl file",
        "",
        "one text and its label per line; or a folder with train.jsonl and test.jsonl",
    )
    yield (
        "hub:ID",
        "",
        "texts from the Hugging Face hub; hub:ID@CONFIGURATION chooses a configuration",
    )


def _tables() -> Iterable[Line]:
    for name, table in TABLES.items():
        yield name, f"rows 1-{len(table.rows)}", table.title


TIMES = {
    "quick": "6 minutes",
    "quick-text": "2 minutes",
    "standard": "4 hours",
    "full": "days",
}
"""Approximate time of each preset on two cores. `full` was never run to its end."""


def _presets() -> Iterable[Line]:
    for name in PRESETS:
        config = load_config(name)
        named = [one.name for one in config.scenarios]
        defenses = {label(one) for scene in config.scenarios for one in config.defenses_of(scene)}
        size = (
            f"{len(named)} {_plural('scenario', named)}, {len(defenses)} defenses, "
            f"{len(plan(config)):,} cells; {TIMES[name]} on two cores"
        )
        yield name, size, f"{preset_purpose(name)} Scenarios: {'; '.join(named)}."


def _plural(word: str, things: Sequence[object]) -> str:
    return word if len(things) == 1 else f"{word}s"


def _option(field: Field[object]) -> str:
    return field.name if field.default is MISSING else f"{field.name}={field.default!r}"


def _summary(thing: object) -> str:
    return (getdoc(thing) or "").partition("\n")[0]


LISTINGS: dict[str, Callable[[], Iterable[Line]]] = {
    "defenses": lambda: class_lines({**DEFENSES, Chain.__name__: Chain}),
    "adversaries": lambda: class_lines(dict(ADVERSARIES)),
    "scenarios": _scenarios,
    "datasets": _datasets,
    "models": lambda: _functions(dict(MODELS)),
    "tables": _tables,
    "presets": _presets,
}
"""The lines of each list, by its name."""
