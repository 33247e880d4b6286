"""What the commands share: options, and how they name a defense, data and a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..conclude.checks import conclusion, overall
from ..conclude.results import Conclusions
from ..door.auditing import measured_scenario, one_configuration
from ..engines.engine import LOCAL, Engine
from ..engines.ray_engine import RayEngine
from ..foundations.devices import Device, resolved
from ..foundations.errors import UserError, given_by_user
from ..users.methods import Method
from ..users.strict_yaml import load_yaml
from ..world.scenario import Scenario

Data = Annotated[
    Path | None,
    typer.Option(help="Where downloads are kept.", envvar="LEAKFRONTIER_DATA"),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")]


class DeviceName(StrEnum):
    """Where tensors live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"

    @property
    def device(self) -> Device:
        """Return the device as a configuration has it."""
        return self.value


class EngineName(StrEnum):
    """Where cells run."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    EngineName, typer.Option("--engine", help="Where cells run: `ray` needs the extra of its name.")
]
Address = Annotated[
    str | None,
    typer.Option(help="Of a Ray cluster, as in `auto`; one of this machine alone by default."),
]
DeviceOption = Annotated[
    DeviceName | None, typer.Option("--device", help="Where tensors live; as configured, or cpu.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DefenseText = Annotated[
    str,
    typer.Argument(
        help="The defense: FILE.py:Class, a name, or with options '{name: DPSGD, "
        "noise_multiplier: 1.0}'."
    ),
]


def engine_from(name: EngineName, address: str | None) -> Engine:
    """Return where cells run."""
    if name is EngineName.ray:
        return RayEngine(address)
    if address is not None:
        raise UserError("--address is of a Ray cluster: give --engine ray as well")
    return LOCAL


@given_by_user()
def device_from(name: DeviceName | None, engine: EngineName) -> Device:
    """Return where tensors live; of other machines it is not known what they have."""
    device: Device = "cpu" if name is None else name.device
    if engine is EngineName.local:
        resolved(device)
    return device


@given_by_user()
def scenario_from(dataset: str | None, model: str | None, data: Path | None) -> Scenario:
    """Return what to measure with, from what a command line says."""
    return measured_scenario(dataset, model and method_from(model, "--model"), data)


def method_from(text: str, option: str) -> object:
    """Return a method as a configuration file would hold it."""
    try:
        return load_yaml(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not a valid YAML mapping: {error}") from error


def defense_from(text: str) -> Method:
    """Return the one configuration of a defense that a command is about."""
    return one_configuration(method_from(text, "the defense"))


def conclude(console: Console, results: Conclusions) -> None:
    """Print whether the evaluation can be trusted; one that cannot ends with exit code 1."""
    checks = results.checks()
    console.print(conclusion(checks), soft_wrap=True, highlight=False, markup=False)
    if overall(checks) == "fail":
        raise typer.Exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """Print a path that can be copied."""
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)
