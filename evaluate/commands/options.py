"""What the commands share: options, and how they name a defense, data and a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from torch import nn

from leakfrontier.defenses import Defense

from ..conclude.checks import conclusion, overall
from ..conclude.results import Results
from ..engines.engine import LOCAL, Engine
from ..engines.ray_engine import RayEngine
from ..foundations.devices import Device, resolved
from ..foundations.errors import UserError, given_by_user
from ..foundations.plugins import trust
from ..run.probe import check_defense
from ..users.methods import LOADING, Method, check_loading, own_code
from ..users.names import label
from ..users.strict_yaml import load_yaml
from ..world.scenario import Scenario, World, load_world

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
    """Return what to measure with.

    BatchNorm becomes GroupNorm, without which no example's gradient can be clipped by itself.
    """
    given: dict[str, Any] = {"dataset": dataset, "data_folder": data}
    if model is not None:
        given["model"] = Method.model_validate(method_from(model, "--model"))
        users_own(given["model"])
    known = {key: value for key, value in given.items() if value is not None}
    return Scenario(**known, replace_batch_norm=True)


def method_from(text: str, option: str) -> object:
    """Return a method as a configuration file would hold it."""
    try:
        return load_yaml(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not a valid YAML mapping: {error}") from error


def users_own(*methods: Method) -> None:
    """Trust the code that a command line names, and see that it can be loaded."""
    code = [name for method in methods for name in own_code(method)]
    trust(code)
    check_loading(code, LOADING)


@given_by_user()
def defense_from(text: str) -> Method:
    """Return the one configuration of a defense that a command is about."""
    method = Method.model_validate(method_from(text, "the defense"))
    users_own(method)
    configurations = method.grid()
    if len(configurations) != 1:
        raise UserError(
            f"one configuration is asked about, and the lists in {text} make "
            f"{len(configurations)}: give single values"
        )
    return configurations[0]


def loaded(scenario: Scenario, method: Method, seed: int) -> tuple[World, Defense, nn.Module]:
    """Return the data, the defense and the model that a command is about."""
    try:
        world = load_world(scenario)
        defense = world.defense(method)
        model = world.model(defense, seed)
        check_defense(scenario, method)
        return world, defense, model
    except UserError:
        raise
    except Exception as error:  # mistakes in someone's data, class or factory
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{label(method)} on {scenario.name}: {reason}") from error


def writable(folder: Path) -> Path:
    """Return a folder for results, made if it was not there; refuse one that cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder} ({error.strerror}): choose another --out folder"
        ) from error


def conclude(console: Console, results: Results) -> None:
    """Print whether the evaluation can be trusted; one that cannot ends with exit code 1."""
    checks = results.checks()
    console.print(conclusion(checks), soft_wrap=True, highlight=False, markup=False)
    if overall(checks) == "fail":
        raise typer.Exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """Print a path that can be copied."""
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)
