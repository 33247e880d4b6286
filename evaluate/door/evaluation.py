"""Evaluate defenses, attack captures, and load results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engines.engine import LOCAL, Engine
from ..foundations.devices import Device
from ..foundations.errors import UserError, given_by_user
from ..foundations.terminal import terminal
from ..outside.capture_run import attack_captures
from ..run.config import RunConfig, load_config
from ..run.run import run
from ..run.store import received_results
from ..share.pack import read_pack
from ..users.objects import given_model, in_configuration, methods_of
from ..world.scenario import Scenario
from .results import Results


def evaluate(
    *defenses: object,
    config: str | Path | Mapping[str, Any] = "quick",
    scenario: object = None,
    dataset: str | Path | None = None,
    model: object = None,
    adversaries: Sequence[object] | None = None,
    observations: int | None = None,
    seeds: int | None = None,
    only: bool = False,
    out: str | Path | None = None,
    workers: int | None = None,
    engine: Engine = LOCAL,
    device: Device | None = None,
    quiet: bool = False,
) -> Results:
    """Train under defenses, attack the uploads of clients, and return the results.

    The call runs only cells whose rows are not yet in the folder. So the same call continues an
    interrupted one.

    Args:
        defenses: Defenses to evaluate: objects, classes, names (`"TopK"`, `"file.py:Mine"`) or
            mappings (`{"name": "TopK", "ratio": [0.01, 0.1]}`). The defenses of `config` are
            evaluated too.
        config: A preset, the path of a YAML file, or a mapping with the same keys.
        scenario: Replaces the scenarios of `config`: a name, a mapping with the keys of a
            scenario, or a list of these.
        dataset: Replaces the dataset of every scenario: a name or a path.
        model: Replaces the model of every scenario: a name, a mapping, a class, a function of
            the input space, or an object. With an object, every seed starts with its weights.
        adversaries: Attacks that replace the panel, given like defenses.
        observations: Attacked uploads per seed.
        seeds: Repetitions of the whole evaluation.
        only: Whether to leave out the defenses of `config`, except the undefended control.
        out: Folder for the results. By default `runs/` and the name of `config`.
        workers: Number of processes. By default one per core.
        engine: Where cells run: this machine or a Ray cluster.
        device: Device of the tensors, as in a configuration.
        quiet: Whether to hide progress.

    Raises:
        UserError: If an argument cannot be used. The message says what to do.
    """
    with given_by_user():
        check_kinds(config=config, dataset=dataset, out=out, workers=workers, engine=engine)
        given = methods_of(several(defenses))
        changes: dict[str, Any] = {"observations": observations, "seeds": seeds}
        if adversaries is not None:
            changes["adversaries"] = methods_of(several([adversaries]))
        if only:
            control = [one for one in methods_of(["none"]) if one not in given]
            changes["defenses"] = [*control, *given]
        changes = {key: value for key, value in changes.items() if value is not None}
        source = in_configuration(config) if isinstance(config, Mapping) else config
        loaded = load_config(source, () if only else given, changes)
        scenarios = _scenarios(loaded, scenario, dataset, model)
        if scenarios != loaded.scenarios:
            parts = {name: getattr(loaded, name) for name in RunConfig.model_fields}
            loaded = load_config({**parts, "scenarios": scenarios})
    if device is not None:
        loaded = loaded.on_device(device)
    folder = Path("runs") / _name(config) if out is None else Path(out)
    console = terminal(quiet=quiet)
    found = run(loaded, folder, workers=workers, engine=engine, console=console)
    return Results.of(found, folder)


def load(path: str | Path) -> Results:
    """Return the results of a run from its folder or its pack.

    Args:
        path: A folder that `evaluate`, `attack` or a command wrote, or a pack.
    """
    check_kinds(path=path)
    place = Path(path)
    found = read_pack(place).results if place.is_file() else received_results(place)
    return Results.of(found, place.parent if place.is_file() else place)


def attack(
    captures: str | Path,
    *,
    adversaries: Sequence[object] = (),
    dataset: str | None = None,
    model: object = None,
    candidates: int = 100,
    data_folder: str | Path | None = None,
    trust_code: bool = False,
    out: str | Path | None = None,
    workers: int | None = None,
    engine: Engine = LOCAL,
    device: Device = "cpu",
    quiet: bool = False,
) -> Results:
    """Attack updates that were captured in another training, and return the results.

    Args:
        captures: A capture, or a folder with captures below it.
        adversaries: Attacks that replace the panel: objects, classes, names or mappings.
        dataset: Dataset (name or path) for look-alikes. By default the one named in the captures.
        model: Model, given as for `evaluate`. By default the one named in the captures.
        candidates: Number of look-alikes, including the victim.
        data_folder: Folder for downloads.
        trust_code: Whether Python files in the captures may run.
        out: Folder for the results. By default `runs/attack/` and the name of `captures`.
        workers: Number of processes. By default one per core.
        engine: Where cells run: this machine or a Ray cluster.
        device: Device of the tensors.
        quiet: Whether to hide progress.
    """
    check_kinds(captures=captures, dataset=dataset, out=out, workers=workers, engine=engine)
    place = Path(captures)
    folder = Path("runs") / "attack" / place.resolve().name if out is None else Path(out)
    with given_by_user():
        found, _ = attack_captures(
            place,
            folder,
            adversaries=methods_of(several([adversaries])),
            dataset=dataset,
            model=None if model is None else given_model(model),
            candidates=candidates,
            data_folder=None if data_folder is None else Path(data_folder),
            trust_code=trust_code,
            device=device,
            workers=workers,
            engine=engine,
            console=terminal(quiet=quiet),
        )
    return Results.of(found, folder)


def several(values: Iterable[object]) -> Iterator[object]:
    """Yield methods that were given one by one, or as lists."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from several(value)
        else:
            yield value


def check_kinds(**given: object) -> None:
    """Raise if an argument is of a kind that cannot be used. None stands for the default.

    Raises:
        UserError: It names the argument.
    """
    for name, value in given.items():
        if value is None and name != "config":
            continue
        if name == "workers":
            if not (type(value) is int and value >= 1):
                raise UserError(f"workers must be a whole number from 1, got {value!r}")
        elif name == "engine":
            if not callable(getattr(value, "execute", None)):
                raise UserError(f"engine must be an Engine such as RayEngine(...), got {value!r}")
        elif not isinstance(value, str | Path) and not (
            name == "config" and isinstance(value, Mapping)
        ):
            kinds = "a preset, a path or a mapping" if name == "config" else "a name or a path"
            raise UserError(f"{name} must be {kinds}, got {value!r}")


def _scenarios(
    config: RunConfig, scenario: object, dataset: str | Path | None, model: object
) -> tuple[Scenario, ...]:
    """Return the scenarios of a run with the given dataset and model."""
    scenarios = config.scenarios
    if scenario is not None:
        items = scenario if isinstance(scenario, list | tuple) else [scenario]
        named = {one.name: one for one in config.scenarios}
        chosen = [named.get(str(item), item) for item in items]
        chosen = [in_configuration(one) if isinstance(one, Mapping) else one for one in chosen]
        scenarios = load_config({"scenarios": chosen, "defenses": ["none"]}).scenarios
    changes: dict[str, Any] = {"dataset": None if dataset is None else str(dataset)}
    changes["model"] = None if model is None else given_model(model)
    changes = {key: value for key, value in changes.items() if value is not None}
    if not changes:
        return scenarios
    names = [name for name in Scenario.model_fields if name not in ("title", *changes)]
    kept = [{name: getattr(one, name) for name in names} for one in scenarios]
    changed = [Scenario.model_validate({**parts, **changes}) for parts in kept]
    return tuple({one.name: one for one in changed}.values())  # several may have become one


def _name(config: str | Path | Mapping[str, Any]) -> str:
    return "evaluate" if isinstance(config, Mapping) else Path(config).stem
