"""Options that several commands share, and functions that read them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..foundations.errors import UserError, given_by_user

if TYPE_CHECKING:
    from ..conclude.results import Conclusions
    from ..engines.engine import Engine
    from ..foundations.devices import Device
    from ..users.methods import Method
    from ..world.scenario import Scenario

Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder of full datasets in torchvision's layout, e.g. with MNIST/raw or "
        "cifar-10-batches-py. Missing ones are downloaded to it.",
        envvar="LEAKFRONTIER_DATA",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")
]


class DeviceName(StrEnum):
    """Names of devices."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"

    @property
    def device(self) -> Device:
        """Return the device as a configuration names it."""
        return self.value


class EngineName(StrEnum):
    """Names of engines, which run the cells."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    EngineName,
    typer.Option("--engine", help="Where to run cells. `ray` needs the extra `ray` installed."),
]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster address, e.g. `auto`. Default: start a local cluster."),
]
DeviceOption = Annotated[
    DeviceName | None,
    typer.Option("--device", help="Device of the tensors. Default: as configured, else cpu."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DefenseText = Annotated[
    str,
    typer.Argument(
        help="The defense: a name, FILE.py:Class, or a mapping with options such as "
        "'{name: DPSGD, noise_multiplier: 1.0}'."
    ),
]


def engine_from(name: EngineName, address: str | None) -> Engine:
    """Return the engine that runs the cells."""
    from ..engines.engine import LOCAL
    from ..engines.ray_engine import RayEngine

    if name is EngineName.ray:
        return RayEngine(address)
    if address is not None:
        raise UserError("--address is the address of a Ray cluster: give --engine ray as well")
    return LOCAL


@given_by_user()
def device_from(name: DeviceName | None, engine: EngineName) -> Device:
    """Return the device. Check that this machine has it if cells run here."""
    from ..foundations.devices import resolved

    device: Device = "cpu" if name is None else name.device
    if engine is EngineName.local:
        resolved(device)
    return device


@given_by_user()
def scenario_from(dataset: str | None, model: str | None, data: Path | None) -> Scenario:
    """Return the scenario that the options of a command describe."""
    from ..door.auditing import measured_scenario

    return measured_scenario(dataset, model and method_from(model, "--model"), data)


def method_from(text: str, option: str) -> object:
    """Return a method as in a configuration file: a name or a mapping."""
    from ..users.strict_yaml import load_yaml

    try:
        return load_yaml(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not a valid YAML mapping: {error}") from error


def defense_from(text: str) -> Method:
    """Return the defense of a command. Raise if its lists give several configurations."""
    from ..door.auditing import one_configuration

    return one_configuration(method_from(text, "the defense"))


def conclude(console: Console, results: Conclusions) -> None:
    """Print whether the evaluation can be trusted. Exit with code 1 if it cannot."""
    from ..conclude.checks import conclusion, overall

    checks = results.checks()
    console.print(conclusion(checks), soft_wrap=True, highlight=False, markup=False)
    if overall(checks) == "fail":
        raise typer.Exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """Print a path in one line, ready to copy."""
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)
