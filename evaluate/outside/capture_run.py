"""Runs attacks on captured updates."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from leakfrontier.adversaries import PANEL, Threat

from ..conclude.results import Conclusions
from ..data.data import forget_digests
from ..engines.engine import LOCAL, Engine
from ..foundations.devices import Device, resolved
from ..foundations.errors import given_by_user
from ..foundations.terminal import terminal
from ..run.cells import undefended
from ..run.run import run_trials, warn
from ..run.soundness import mode_notes
from ..users.methods import Method, adversary_grid, build_adversary, placed
from ..users.names import label
from ..world.victims import candidate_count
from .capture import Description
from .capture_cells import NOT_STATED, CaptureTrial, scenario_of, world_of
from .captured import Capture, find_captures, load_capture

TIME_LIMIT = 3600.0
"""The time limit of one attack on the captures of one kind, in seconds."""


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
) -> tuple[Conclusions, bool]:
    """Attack captures. Return all rows, and whether they are scored.

    Captures with the same description are the observations of one scenario. If a capture has no
    truth, or if there is no data to draw look-alikes from, no capture is scored.

    Args:
        folder: A capture, or a folder with captures below it.
        out: Folder of the results. Cells that it already contains are not run again.
        adversaries: Attacks instead of the panel. A list as an option gives one attack per value.
        dataset: Data by name or path. Default: the dataset named in the capture.
        model: The model. Default: the model named in the capture.
        candidates: Look-alikes among which a victim must be identified, including the victim.
        data_folder: The folder of downloaded data.
        trust_code: Whether Python files in captures may be executed.
        device: The device of tensors.
        workers: Number of processes. Default: as many as the engine allows.
        engine: Where cells run.
        retry_failed: Whether to run cells again that ended in an error.
        console: Where to show progress.
    """
    forget_digests()
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
        for trial in _plan(folder, captures, _members(adversaries), scored)
    ]
    _check_worlds(trials, captures)
    notes = [*dict.fromkeys(note for one in _kinds(captures) for note in _modes(one))]
    warn(console or terminal(), notes)
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
    """Return the attacks. They must be passive, because the update already exists."""
    if not adversaries:
        return [Method(name=name, options=vars(one)) for name, one in PANEL.members.items()]
    with given_by_user():
        members = adversary_grid(adversaries)
        for method in members:
            if build_adversary(method).threat is not Threat.PASSIVE:
                raise ValueError(f"{method.name} sends its own models, but the update exists")
    return members


@dataclass(frozen=True)
class _Numbered:
    """A capture with the number of its upload."""

    number: int
    capture: Capture


def _plan(
    folder: Path, captures: Sequence[Capture], members: Sequence[Method], scored: bool
) -> Iterator[CaptureTrial]:
    """Yield the attacks on captures of each kind, and on the control if there is a truth.

    Victims whose undefended upload was captured need no other control.
    """
    groups: dict[str, list[_Numbered]] = defaultdict(list)
    for one in _numbered(captures):
        groups[_kind(one.capture.about)].append(one)
    controlled: dict[tuple[str, int], set[int]] = defaultdict(set)
    for group in groups.values():
        if _is_control(about := group[0].capture.about):
            controlled[_place(about)] |= {one.number for one in group}
    for group in groups.values():
        about = group[0].capture.about
        yield from _attacks(folder, group, members, scored, control=False)
        if scored and not _is_control(about) and about.training.clients == 1:
            known = controlled[_place(about)]
            left = [one for one in group if one.number not in known]
            known |= {one.number for one in left}
            if left:
                yield from _attacks(folder, left, members, scored, control=True)


def _attacks(
    folder: Path, group: Sequence[_Numbered], members: Sequence[Method], scored: bool, control: bool
) -> Iterator[CaptureTrial]:
    """Yield every attack on captures of one kind."""
    about, captures = group[0].capture.about, [one.capture for one in group]
    for method in members:
        for knows in _knowledge(method, about, control or _is_control(about)):
            yield CaptureTrial(
                captures=tuple(one.folder for one in captures),
                contents=tuple(one.content for one in captures),
                names=tuple(_name(folder, one.folder) for one in captures),
                observations=tuple(one.number for one in group),
                about=about,
                adversary=method,
                knows_defense=knows,
                control=control,
                scored=scored,
            )


def _numbered(captures: Iterable[Capture]) -> Iterator[_Numbered]:
    """Yield captures with the numbers of their uploads in the tables of a scenario and round.

    Uploads under the same defense have different numbers. Uploads of the same examples and weights
    under two defenses have the same number, so comparisons pair them.
    """
    numbers: dict[tuple[str, int], dict[tuple[str, int], int]] = defaultdict(dict)
    repeats: Counter[tuple[str, int, str, str]] = Counter()
    for one in captures:
        place, victims = _place(one.about), one.victims
        arm = NOT_STATED if one.about.defense is None else label(one.about.defense)
        known = numbers[place]
        again = repeats[*place, arm, victims]
        repeats[*place, arm, victims] += 1
        yield _Numbered(known.setdefault((victims, again), len(known)), one)


def _kind(about: Description) -> str:
    """Return a key that is equal for captures of one kind, independent of the paths of files."""
    methods = {"model": about.model, "protocol": about.protocol, "defense": about.defense}
    return json.dumps(
        {
            **about.model_dump(mode="json", exclude={*methods, "client", "labels"}),
            **{name: method and method.config() for name, method in methods.items()},
            "knows labels": about.labels is not None,
        },
        sort_keys=True,
    )


def _place(about: Description) -> tuple[str, int]:
    """Return the scenario and the round of captures, as in tables."""
    return scenario_of(about).name, about.round


def _is_control(about: Description) -> bool:
    return about.defense is not None and undefended(about.defense)


def _name(folder: Path, capture: Path) -> str:
    """Return the name of a capture on a page: its path from the attacked folder on."""
    root = folder.resolve() if capture.resolve() != folder.resolve() else folder.resolve().parent
    return "/".join((root.name, *capture.resolve().relative_to(root).parts))


def _knowledge(method: Method, about: Description, control: bool) -> tuple[bool, ...]:
    """Return whether the attack runs with knowledge of the defense, without it, or both."""
    if control:
        return (True,)
    if about.defense is None:
        return (False,)
    return (True, False) if build_adversary(method).simulates else (True,)


def _kinds(captures: Iterable[Capture]) -> Iterable[Capture]:
    """Return one capture of each model and mode."""
    return {(repr(one.about.model), one.about.mode): one for one in captures}.values()


def _modes(one: Capture) -> Iterator[str]:
    """Yield a note that says whether the client is assumed to have trained with dropout."""
    about = one.about
    return mode_notes(label(about.model), about.build(), about.inputs, about.mode)


def _check_worlds(trials: Iterable[CaptureTrial], captures: Sequence[Capture]) -> None:
    """Raise if the data does not fit the captures, or has too few examples of a class."""
    by_folder = {one.folder: one for one in captures}
    for trial in {trial.captures: trial for trial in trials}.values():
        with given_by_user():
            own = [by_folder[folder] for folder in trial.captures]
            world, _ = world_of(trial.scenario, trial.about, own)
            if trial.scored:
                candidate_count(world)


def _config(folder: Path, captures: Sequence[Capture]) -> dict[str, Any]:
    """Return the folders and descriptions of captures, for the page."""
    return {
        "captures": {
            str(one.folder.relative_to(folder)): one.about.model_dump(
                mode="json", exclude_defaults=True, exclude={"labels"}
            )
            for one in captures
        }
    }
