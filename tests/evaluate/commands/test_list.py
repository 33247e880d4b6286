from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES
from leakfrontier.evaluate.commands.listings import TIMES
from leakfrontier.evaluate.data.data import DATASETS
from leakfrontier.evaluate.models.models import MODELS
from leakfrontier.evaluate.papers.tables import TABLES
from leakfrontier.evaluate.run.config import PRESETS, RunConfig, load_config
from leakfrontier.evaluate.run.run import plan
from leakfrontier.evaluate.users.methods import Strict
from leakfrontier.evaluate.world.scenario import SCENARIOS, Scenario, Training

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Return the command line, in a narrow terminal."""
    return partial(command, columns=80)


@pytest.mark.parametrize(
    ("what", "registry"),
    [
        ("defenses", DEFENSES),
        ("adversaries", ADVERSARIES),
        ("scenarios", SCENARIOS),
        ("datasets", DATASETS),
        ("models", MODELS),
        ("tables", TABLES),
        ("presets", dict.fromkeys(PRESETS)),
    ],
)
def test_lists_every_name(command: Command, what: str, registry: dict[str, object]) -> None:
    code, output, _ = command("list", what)
    listed = {line.strip("│ ").partition(" ")[0] for line in output.splitlines()}
    assert code == 0
    assert set(registry) <= listed


@pytest.mark.parametrize(
    ("model", "defaults"),
    [
        (RunConfig, {"scenarios": "required", "adversaries": "panel", "time_limit": "600"}),
        (Scenario, {"title": "", "model": "mlp", "checkpoints": "[150]", "public_data": "true"}),
        (Training, {"server": "adam", "lr": "0.005", "clients_per_round": "16"}),
    ],
)
def test_lists_every_key_with_its_default_and_meaning(
    command: Command, model: type[Strict], defaults: dict[str, str]
) -> None:
    lines = command("list", "scenarios", columns=700)[1].splitlines()
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in lines if "│" in line]
    for name, field in model.model_fields.items():
        assert field.description
        meaning = " ".join(field.description.split())
        (default,) = (row[1] for row in rows if (row[0], row[2]) == (name, meaning))
        assert defaults.get(name, default) == default


def test_lists_what_presets_are_for_and_what_they_take(command: Command) -> None:
    code, output, errors = command("list", "presets", columns=300)
    assert code == 0, errors
    assert {*TIMES} == {*PRESETS}
    for name in PRESETS:
        config = load_config(name)
        (line,) = (one for one in output.splitlines() if one.strip("│ ").startswith(f"{name} "))
        assert f"{len(config.scenarios)} scenario" in line
        assert f"{len(plan(config)):,} cells; {TIMES[name]}" in line
    for said in ("6 defenses", "All five families of defenses", "fashion-mini/mlp, 4 examples"):
        assert said in output


def test_lists_options_and_their_defaults(command: Command) -> None:
    assert "error_feedback=True" in command("list", "defenses")[1]
    assert "width=200" in command("list", "models")[1]


def test_what_cannot_be_listed_is_refused_with_what_can(command: Command) -> None:
    code, _, errors = command("list", "attacks")
    assert code == 2
    assert "'defenses', 'adversaries', 'scenarios'" in " ".join(errors.replace("│", " ").split())
