"""Verifies a pack: the cells that decide its claims are run again and their rows are compared.

Some checks run no cell, and cover all cells. The cells must be those of the configuration. A
cascade must have skipped only what it may. Rates, frontier and checks must follow from the rows.

Only a new run can show that rows are genuine, but running all cells takes as long as the run
itself. So the cells of `claims` run again, and `judgement` judges each claim by them.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape as markup

from leakfrontier.adversaries import PANEL

from ..conclude.analysis import FINISHED
from ..conclude.checks import conclusion, failed_checks, of_arm
from ..conclude.labels import rows
from ..data.data import forget_digests
from ..engines.engine import LOCAL, Engine, Failure
from ..foundations.errors import OWN_FOLDER, given_by_user
from ..foundations.rows import LATER, TABLES, Outcome
from ..foundations.seeds import SEED_BITS, narrow_seeds
from ..foundations.terminal import terminal
from ..run.cascade import ReadyCell, Schedule
from ..run.cells import AttackTrial, Trial, run_trial
from ..run.config import RunConfig, named_code, received_config
from ..run.environment import environment
from ..run.probe import probe
from ..run.tuning import with_chosen
from .archive import PackError
from .claims import PackClaim, claims_of
from .judgement import Compared, Decision, Judgement, Stored, compare, judge, lacking, overall
from .leaderboard import make_settings
from .pack import MANY_UPLOADS, Pack, derived, narrowed, plan_of

_BITS = ("system", "architecture", "processor", "instructions")
_CHECKS = "tables/checks.csv"
_WORDS = {"tables/frontier.csv": ["verdict"], _CHECKS: ["text"]}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The findings about a pack.

    Attributes:
        judgements: The outcomes of the claims whose cells ran again.
        cells: The number of cells that ran again.
        problems: The problems of the pack as a whole.
        differences: Differences in versions and machine between here and the pack.
        tolerated: Whether cells differ in their digits.
        seed: The seed of the choice of cells.
    """

    judgements: tuple[Judgement, ...]
    cells: int
    problems: tuple[str, ...]
    differences: tuple[str, ...]
    tolerated: bool
    seed: int

    @property
    def decision(self) -> Decision:
        """Return the outcome of the pack as a whole."""
        return "refuted" if self.problems else overall(self.judgements)


def verify(
    pack: Pack,
    *,
    defenses: Sequence[str] = (),
    seeds: int = 3,
    more: int = 2,
    seed: int,
    trust_code: bool = False,
    data: Path | None = None,
    workers: int | None = None,
    engine: Engine = LOCAL,
    console: Console | None = None,
) -> Verification:
    """Check a whole pack, run the cells that decide its claims again, and return the findings.

    Args:
        pack: The pack.
        defenses: Labels or families of the defenses to check. Default: those with a place.
        seeds: How many seeds of each claim run again.
        more: How many attacks of each claim run again in addition, at random.
        seed: The seed of the choice. The author of the pack must not know it.
        trust_code: Whether users' Python files in the pack may be executed.
        data: A folder with the data that the configuration names by path.
        workers: Number of processes. Default: as many as the engine allows.
        engine: Where cells run.
        console: Where to show progress.

    Raises:
        PackError: If the pack cannot be verified here.
        UserError: If the pack has no defense of a name.
    """
    if not pack.comparable.removeprefix("custom (").startswith(PANEL.version):
        raise PackError(
            f"{pack.name} was made with panel {pack.panel!r}, but this is panel {PANEL.version!r}: "
            f"verify it with leakfrontier {pack.meta['versions'].get('leakfrontier', '?')} and "
            "that panel"
        )
    code = {*pack.sources, *named_code(pack.meta["config"], Path())}
    if code and not trust_code:
        raise PackError(
            f"{pack.name} contains or names code, which would be executed: read "
            f"{', '.join(sorted(code))}, and give --trust-code if you trust it"
        )
    forget_digests()
    console = terminal(quiet=True) if console is None else console
    with TemporaryDirectory(prefix=OWN_FOLDER) as place:
        config = _config(pack, Path(place), data, trust_code)
        _check_extent(pack, config)
        planned = plan_of(config)
        here = environment()
        problems = [*_not_as_planned(pack, planned), *_not_derived(pack, here)]
        if with_chosen(config, pack.results.tunings) != config:
            problems.append("its chosen settings do not follow from the rows of its tuning")
        if pack.meta["code"] == here["code"]:
            problems += _omitted_notes(pack, config, place, workers)
        if config.panel != pack.comparable:
            problems.append(f"its configuration has panel {config.panel}, not {pack.panel}")
        trials = narrowed(planned, pack.results)
        if not problems:
            problems += _not_a_cascade(pack, planned, trials, config)
        results, differences = pack.results, _differences(pack, here)
        claims: list[PackClaim] = []
        if not problems:
            claims = claims_of(
                results, placed(pack), named=defenses, seeds=seeds, more=more, seed=seed
            )
        reruns = _run(
            pack,
            trials,
            claims,
            here,
            folder=Path(place),
            workers=workers or engine.slots(),
            engine=engine,
            console=console,
        )
        judgements = judge(claims, reruns, same_place=not differences)
        return Verification(
            judgements=tuple(_with_new_tables(judgements, pack, reruns)),
            cells=len(reruns),
            problems=tuple(problems),
            differences=differences,
            tolerated=any(not one.equal for one in reruns.values()),
            seed=seed,
        )


def placed(pack: Pack) -> set[tuple[str, int, str]]:
    """Return the defenses that have a place against any server."""
    return {
        (setting.name, setting.checkpoint, str(row.defense))
        for setting in make_settings([pack])
        for row in rows(setting.table)
        if pd.notna(row.place)
    }


def _config(pack: Pack, folder: Path, data: Path | None, trust_code: bool) -> RunConfig:
    """Return the configuration of a pack. Its code and data are put into a folder."""
    for name, body in pack.sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    if data is not None:
        (folder / "data").symlink_to(data.resolve())
    config = received_config(pack.meta["config"], folder, trust_code=trust_code)
    named = [scenario.dataset for scenario in config.scenarios]
    named += [str(scenario.model.options.get("id", "")) for scenario in config.scenarios]
    for name in named:
        place = name.removeprefix(f"{folder}/")
        if place.startswith("data/") and not (folder / place).exists():
            raise PackError(
                f"{pack.name} needs data that it does not contain: give --data with a folder that "
                f"has {place.removeprefix('data/')!r}"
            )
    return config if data is None else config.with_data(data)


def _check_extent(pack: Pack, config: RunConfig) -> None:
    """Raise if a configuration asks for more than the pack contains, before it is planned."""
    arms = sum(
        (config.seeds + (one.tune.budget if one.tune and one.tune.chosen else 0))
        * len(config.defenses_of(one))
        for one in config.scenarios
    )
    uploads = max(MANY_UPLOADS, len(pack.results.attacks))
    if arms > len(pack.cells) or config.observations > uploads:
        raise PackError(
            f"{pack.name} has a configuration of {arms:,} trainings and {config.observations:,} "
            f"uploads, but only {len(pack.cells):,} cells with {len(pack.results.attacks):,} "
            "attacked uploads"
        )


def _not_as_planned(pack: Pack, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield problems if the cells of a pack are not those of its configuration."""
    cells = pack.cells
    if len(cells) != len(trials):
        yield f"its configuration asks for {len(trials)} cells, but it has {len(cells)}"
        return
    for number, trial in enumerate(trials):
        if json.loads(json.dumps(trial.cell.labels)) != cells["labels"][number]:
            yield f"cell {number} is not {_what(trial)}, which its configuration asks for"
            return
    if not cells["cell"].is_unique:
        yield "two of its cells have the same key"
    with_rows = {key for table in TABLES for key in pack.rows(table)["cell"]}
    for cell, trial in zip(rows(cells), trials, strict=True):
        if cell.status != "ok" and cell.cell in with_rows:  # these rows would never be checked
            yield f"{_what(trial)} has the status {cell.status!r}, but also rows"
            return
        if cell.status == "not needed" and not isinstance(trial, AttackTrial):
            yield f"{_what(trial)} has the status 'not needed', but is not an attack"
            return


def _not_derived(pack: Pack, here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a pack that do not follow from its rows.

    Other code may use other words for verdicts and answers, and ask more questions. Nothing is
    derived from these.
    """
    same_code = pack.meta["code"] == here["code"]
    for name, body in derived(pack.results).items():
        given = pack.entries.get(name, b"")
        words = [] if same_code else _WORDS.get(name, [])
        if given != body and not _nearly(
            given, body, words, more=not same_code and name == _CHECKS
        ):
            yield f"{name} does not follow from its rows"
    asked = {*pd.read_csv(io.BytesIO(pack.entries.get(_CHECKS, b"name\n")))["name"]}
    own = conclusion(one for one in pack.results.checks() if one.name in asked)
    if pack.meta.get("conclusion", own) != own:
        yield f"its conclusion does not follow from its rows, which give {own!r}"


def _omitted_notes(
    pack: Pack, config: RunConfig, folder: str, workers: int | None
) -> Iterator[str]:
    """Yield the warnings about a configuration that a pack of the same code does not contain.

    Args:
        pack: The pack.
        config: Its configuration.
        folder: The folder of its code and data here. Warnings that name it have other words.
        workers: Number of processes.
    """
    with given_by_user():
        notes = probe(config, workers, timed=False)
    for note in notes:
        if folder not in note and note not in pack.meta["notes"]:
            yield f"its notes lack a warning: {note}"


def _nearly(given: bytes, own: bytes, words: list[str], *, more: bool) -> bool:
    """Return whether two tables differ only in the last digits of numbers and in `words`.

    Args:
        given: The table of a pack.
        own: The table that its rows give.
        words: Columns that may differ.
        more: Whether the second may have rows of other names.
    """
    try:
        a, b = (pd.read_csv(io.BytesIO(body)).drop(columns=words) for body in (given, own))
        if more:
            b = b[b["name"].isin(a["name"])].reset_index(drop=True)
        pd.testing.assert_frame_equal(a, b, rtol=1e-3)
    except (AssertionError, ValueError):
        return False
    return True


def _not_a_cascade(
    pack: Pack, planned: Sequence[Trial], ran: Sequence[Trial], config: RunConfig
) -> list[str]:
    """Return a problem if a cell skipped uploads that it should have attacked.

    The rows of the other cells decide this. Cells that come after a failed one are not checked.
    """
    schedule = Schedule(planned, cascade=not config.individual)
    numbers = {trial.cell.key: number for number, trial in enumerate(planned)}
    attacks = pack.results.attacks
    victims: dict[str, list[tuple[int, int, bool]]] = {
        str(key): [
            (int(o), int(v), bool(i) if pd.notna(i) else False)
            for o, v, i in zip(own["observation"], own["victim"], own["identified"], strict=True)
        ]
        for key, own in attacks.groupby("cell")
    }
    waiting: list[ReadyCell] = schedule.start()
    while waiting:
        step = waiting.pop()
        number = numbers[step.planned.key]
        if pack.cells["status"][number] not in FINISHED:
            continue
        left, attacked = (
            len(getattr(one, "observations", ())) for one in (step.trial, ran[number])
        )
        if step.trial.cell.config != ran[number].cell.config:
            return [
                f"{_what(step.trial)} ran on {attacked} uploads, and not on the {left} that other "
                "attacks left"
            ]
        waiting += schedule.after(step.trial, victims.get(str(pack.cells["cell"][number]), ()))
    return []


def _run(
    pack: Pack,
    trials: Sequence[Trial],
    claims: Sequence[PackClaim],
    here: Mapping[str, Any],
    *,
    folder: Path,
    workers: int,
    engine: Engine,
    console: Console,
) -> dict[int, Compared]:
    """Run the cells of claims again, trainings first, and return the comparisons."""
    chosen = sorted({number for claim in claims for number in claim.chosen})
    numbers = {trials[number].cell.key: number for number in chosen}
    run = run_trial if pack.meta.get("seed_bits") == SEED_BITS else _run_narrowly
    found: dict[int, Compared] = {}
    for first in (True, False):  # attacks need the checkpoints of trainings
        stage = [trials[n] for n in chosen if (trials[n].cell.kind == "train") == first]
        tasks = [(trial, folder) for trial in stage]
        for done in (
            engine.execute(run, tasks, workers=workers, time_limit=math.inf) if tasks else ()
        ):
            number = numbers[done.task[0].cell.key]
            stored = _stored(pack, number, done.task[0], here)
            outcome = done.result
            failed = isinstance(outcome, Failure)
            one = compare(stored, outcome.message if isinstance(outcome, Failure) else outcome)
            found[number] = one
            colour = "red" if failed else "green" if one.equal else "yellow"
            word = "failed" if failed else "equal" if one.equal else "differs"
            reason = ", ".join(one.unequal) or one.failure
            console.print(
                f"[{colour}]{word}[/{colour}] "
                f"{markup(stored.what + (f' ({reason})' if reason else ''))}",
                highlight=False,
                soft_wrap=True,
            )
    return found


def _with_new_tables(
    judgements: Sequence[Judgement], pack: Pack, reruns: Mapping[int, Compared]
) -> Iterator[Judgement]:
    """Yield judgements. Tables that a pack lacks confirm nothing if they make a check fail."""
    known, results = pack.results, pack.results
    for table in LATER:
        found = [
            one.rows[table].assign(cell=known.cells["cell"][number])
            for number, one in reruns.items()
            if one.rows is not None and table in lacking(one.stored)
        ]
        if found:
            added = known.cells.merge(pd.concat(found), on="cell")
            frame = pd.concat([getattr(known, table), added])
            results = replace(results, **{table: frame[getattr(known, table).columns]})
    for one in judgements:
        place = one.claim.scenario, one.claim.defense
        before, after = (failed_checks(of_arm(r.checks(), *place)) for r in (known, results))
        if results is not known and after != before and one.decision == "confirmed":
            reason = f"with tables that the pack lacks, its evaluation fails its checks ({after})"
            one = replace(one, decision="undecided", reasons=(reason,))
        yield one


def _run_narrowly(task: tuple[Trial, Path]) -> Outcome:
    """Run a cell of a pack from the time when seeds had 32 bits."""
    with narrow_seeds():
        return run_trial(task)


def _stored(pack: Pack, number: int, trial: Trial, here: Mapping[str, Any]) -> Stored:
    """Return a cell of a pack, with the description of the trial that runs it again."""
    cell, labels = pack.cells.iloc[number], trial.cell.labels
    key = str(cell["cell"])
    attack = str(labels.get("adversary", ""))
    if attack and not labels["knows_defense"]:
        attack += " without knowledge of the defense"
    return Stored(
        what=_what(trial),
        kind=trial.cell.kind,
        scenario=str(labels["scenario"]),
        defense=str(labels["defense"]),
        attack=attack,
        seed=int(labels["seed"]),
        rows={table: _rows(pack, table, key) for table in TABLES},
        digest=str(cell["digest"]),
        same_code=trial.cell.key == key or pack.meta["code"] == here["code"],
    )


def _rows(pack: Pack, table: str, key: str) -> pd.DataFrame:
    every = pack.rows(table)
    return every[every["cell"] == key].drop(columns="cell")


def _differences(pack: Pack, here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences in versions and machine from the pack that may change results."""
    there = pack.meta
    pairs = [(name, other, here["versions"].get(name)) for name, other in there["versions"].items()]
    pairs += [(name, there["machine"].get(name), here["machine"][name]) for name in _BITS]
    return tuple(f"{name} {other} (here {own})" for name, other, own in pairs if other != own)


def _what(trial: Trial) -> str:
    """Return a description of a cell."""
    labels, kind = trial.cell.labels, trial.cell.kind
    place = f"{labels['defense']}, {labels['scenario']}, seed {labels['seed']}"
    if kind == "attack":
        return f"{labels['adversary']} against {place}, round {labels['checkpoint']}"
    words = {"replay": "replay of", "tune": "tuning under"}
    return f"{words.get(kind, 'training under')} {place}"
