"""The command that lists defenses, adversaries, datasets and so on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from inspect import getdoc, signature
from typing import Annotated

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES, Chain

from ..data.data import DATASETS, TEXTS
from ..foundations.terminal import terminal
from ..models.models import MODELS
from ..papers.tables import TABLES
from ..run.config import PRESETS, RunConfig, load_config, preset_purpose
from ..run.run import plan
from ..users.methods import PROTOCOLS, Method, Strict
from ..users.names import label
from ..world.scenario import SCENARIOS, Scenario, Training

KEYS: dict[str, type[Strict]] = {
    "a run's file": RunConfig,
    "a scenario": Scenario,
    "a scenario's training": Training,
}
"""The parts of a configuration file."""


class Listing(StrEnum):
    """Things that can be listed."""

    defenses = "defenses"
    adversaries = "adversaries"
    scenarios = "scenarios"
    datasets = "datasets"
    models = "models"
    tables = "tables"
    presets = "presets"


def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List defenses, attacks, datasets and so on, with their options."""
    columns = ("name", "size and time" if what is Listing.presets else "options", "what it is")
    _print(what.value, columns, _LISTINGS[what]())
    if what is Listing.scenarios:
        _print("protocols", ("name", "options", "what it is"), _classes(dict(PROTOCOLS)))
        for title, model in KEYS.items():
            _print(f"keys of {title}", ("key", "default", "what it is"), _keys(model))


def _print(title: str, columns: Sequence[str], rows: Iterable[tuple[str, str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    terminal().print(table)


def _classes(registry: dict[str, type]) -> Iterable[tuple[str, str, str]]:
    for name, cls in registry.items():
        options = ", ".join(_option(field) for field in fields(cls) if field.init)
        yield name, options, _summary(cls)


def _functions(registry: dict[str, Callable[..., object]]) -> Iterable[tuple[str, str, str]]:
    for name, function in registry.items():
        known = list(signature(function).parameters.values())[1:]  # the first is the input space
        options = [str(option.replace(annotation=option.empty)) for option in known]
        yield name, ", ".join(options), _summary(function)


def _scenarios() -> Iterable[tuple[str, str, str]]:
    for name, scenario in SCENARIOS.items():
        yield name, "", f"{scenario.protocol.name}, batches of {scenario.batch_size}"


def _keys(model: type[Strict]) -> Iterable[tuple[str, str, str]]:
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


def _datasets() -> Iterable[tuple[str, str, str]]:
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


def _tables() -> Iterable[tuple[str, str, str]]:
    for name, table in TABLES.items():
        yield name, f"rows 1-{len(table.rows)}", table.title


TIMES = {
    "quick": "2.5 minutes",
    "quick-text": "2 minutes",
    "standard": "4 hours",
    "full": "days",
}
"""Approximate time of each preset on two cores. `full` was never run to its end."""


def _presets() -> Iterable[tuple[str, str, str]]:
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


_LISTINGS: dict[Listing, Callable[[], Iterable[tuple[str, str, str]]]] = {
    Listing.defenses: lambda: _classes({**DEFENSES, Chain.__name__: Chain}),
    Listing.adversaries: lambda: _classes(dict(ADVERSARIES)),
    Listing.scenarios: _scenarios,
    Listing.datasets: _datasets,
    Listing.models: lambda: _functions(dict(MODELS)),
    Listing.tables: _tables,
    Listing.presets: _presets,
}
