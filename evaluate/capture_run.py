"""A run against captured updates: which attacks on which of them, and their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from leakfrontier.adversaries import PANEL, Threat

from .capture import Description
from .capture_cells import CaptureTrial, world_of
from .captured import Capture, find_captures, load_capture
from .cells import undefended
from .data import forget_fingerprints
from .devices import Device, resolved
from .engine import LOCAL, Engine
from .errors import given_by_user
from .methods import Method, build_adversary, placed
from .results import Results
from .run import run_trials, warn
from .scenario import label
from .soundness import mode_notes
from .victims import candidate_count

TIME_LIMIT = 3600.0
"""Seconds that one attack on the captures of one kind may take."""


def attack_captures(
    folder: Path,
    out: Path,
    *,
    adversaries: Sequence[Method] = (),
    dataset: str | None = None,
    model: Method | None = None,
    candidates: int = 100,
    data_folder: Path | None = None,
    trust_code: bool = False,
    device: Device = "cpu",
    workers: int | None = None,
    engine: Engine = LOCAL,
    retry_failed: bool = False,
    console: Console | None = None,
) -> tuple[Results, bool]:
    """Attack captures, and return all rows and whether they are scores.

    Captures that are alike in all but their content are the observations of one scenario. If one
    has no truth, or there is no data to draw look-alikes from, none is scored.

    Args:
        folder: A capture, or a folder with captures below it.
        out: Folder of the results; what is there is not run again.
        adversaries: Attacks in place of the panel.
        dataset: Data by name or path, in place of what captures name.
        model: The model, in place of what captures name.
        candidates: Look-alikes among which a victim must be identified, the victim included.
        data_folder: Where downloaded data is kept.
        trust_code: Whether Python files that captures bring along may be executed.
        device: Where tensors live.
        workers: Processes; by default as many as the engine has room for.
        engine: Where cells run.
        retry_failed: Whether cells that ended in an error are run again.
        console: Where progress is shown.
    """
    forget_fingerprints()
    if engine is LOCAL:
        with given_by_user():
            resolved(device)
    if dataset is not None:
        found = placed(dataset, Path())
        dataset = found if Path(found).exists() else dataset
    captures = [
        load_capture(path, trust_code=trust_code, dataset=dataset, model=model)
        for path in find_captures(folder)
    ]
    scored = all(one.truth is not None and one.about.dataset is not None for one in captures)
    trials = [
        replace(trial, candidates=candidates, data_folder=data_folder, device=device)
        for trial in _plan(captures, _members(adversaries), scored)
    ]
    _check_worlds(trials, captures)
    notes = [*dict.fromkeys(note for one in _kinds(captures) for note in _modes(one))]
    warn(console or Console(), notes)
    return (
        run_trials(
            trials,
            out,
            panel=f"custom ({PANEL.version})" if adversaries else PANEL.version,
            config=_config(folder, captures),
            notes=notes,
            time_limit=TIME_LIMIT,
            workers=workers,
            engine=engine,
            retry_failed=retry_failed,
            console=console,
        ),
        scored,
    )


def _members(adversaries: Sequence[Method]) -> list[Method]:
    """Return the attacks; a captured update was made, so that only a passive server is left."""
    if not adversaries:
        return [Method(name=name, options=vars(one)) for name, one in PANEL.members.items()]
    for method in adversaries:
        with given_by_user():
            if build_adversary(method).threat is not Threat.PASSIVE:
                raise ValueError(f"{method.name} sends models of its own, and the update is made")
    return list(adversaries)


def _plan(
    captures: Sequence[Capture], members: Sequence[Method], scored: bool
) -> Iterator[CaptureTrial]:
    """Yield the attacks on captures of each kind, and on the control where there is a truth."""
    groups: dict[tuple[str, bool], list[Capture]] = defaultdict(list)
    for one in captures:
        kind = one.about.model_dump_json(exclude={"client", "labels"})
        groups[kind, one.about.labels is None].append(one)
    for group in groups.values():
        about = group[0].about
        is_control = about.defense is not None and undefended(about.defense)
        may_control = scored and not is_control and about.training.clients == 1
        for control in (False, True) if may_control else (False,):
            for method in members:
                for knows in _knowledge(method, about, control or is_control):
                    yield CaptureTrial(
                        captures=tuple(one.folder for one in group),
                        contents=tuple(one.content for one in group),
                        about=about,
                        adversary=method,
                        knows_defense=knows,
                        control=control,
                        scored=scored,
                    )


def _knowledge(method: Method, about: Description, control: bool) -> tuple[bool, ...]:
    """Return whether the attack is run with knowledge of the defense, without it, or both."""
    if control:
        return (True,)
    if about.defense is None:
        return (False,)
    return (True, False) if build_adversary(method).simulates else (True,)


def _kinds(captures: Iterable[Capture]) -> Iterable[Capture]:
    """Return one capture of each model and mode."""
    return {(repr(one.about.model), one.about.mode): one for one in captures}.values()


def _modes(one: Capture) -> Iterator[str]:
    """Yield whether the client of a capture is taken to have trained with dropout."""
    about = one.about
    return mode_notes(label(about.model), about.build(), about.inputs, about.mode)


def _check_worlds(trials: Iterable[CaptureTrial], captures: Sequence[Capture]) -> None:
    """Raise if the data does not fit captures, or has too few examples of a class."""
    by_folder = {one.folder: one for one in captures}
    for trial in {trial.captures: trial for trial in trials}.values():
        with given_by_user():
            own = [by_folder[folder] for folder in trial.captures]
            world, _ = world_of(trial.scenario, trial.about, own)
            if trial.scored:
                candidate_count(world)


def _config(folder: Path, captures: Sequence[Capture]) -> dict[str, Any]:
    """Return what the page records: where captures are, and how they came about."""
    return {
        "captures": {
            str(one.folder.relative_to(folder)): one.about.model_dump(
                mode="json", exclude_defaults=True, exclude={"labels"}
            )
            for one in captures
        }
    }
