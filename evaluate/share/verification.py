"""Verifies a pack: some of its cells are run again and their rows are compared.

Some checks run no cell, and cover all cells. The cells must be those of the configuration. A
cascade must have skipped only what it may. Rates, frontier and checks must follow from the rows.

Only a new run can show that rows are genuine, but running all cells takes as long as the run
itself. So a few cells are chosen at random after the pack was published. If k of n cells were
altered and m are run again, all alterations escape with probability C(n - k, m) / C(n, m).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape as markup
from scipy import stats

from leakfrontier.adversaries import PANEL

from ..conclude.analysis import FINISHED
from ..conclude.labels import rows
from ..data.data import forget_digests
from ..engines.engine import LOCAL, Engine, Failure
from ..foundations.errors import OWN_FOLDER
from ..foundations.rows import TABLES, Outcome
from ..foundations.seeds import SEED_BITS, narrow_seeds
from ..foundations.statistics import sign_test
from ..foundations.terminal import terminal
from ..run.cascade import ReadyCell, Schedule
from ..run.cells import AttackTrial, ReplayTrial, TrainTrial, Trial, run_trial
from ..run.config import RunConfig, named_code, received_config
from ..run.environment import environment
from .archive import PackError
from .pack import MANY_UPLOADS, Pack, derived, narrowed, plan_of
from .packed_rows import frame_of, rows_digest

TOLERANCE = (
    "the same uploads scored, refused and not applicable; no significant difference in who is "
    "identified (exact sign test over uploads, p < 0.01; it misses up to 7 altered uploads of a "
    "cell); test accuracy within 3 points; epsilon within 1 %; the same verdict of audits"
)
"""The requirements on rows from another version or another kind of processor."""

_LEAST_P, _POINTS, _EPSILON, _SHARE = 0.01, 0.03, 0.01, 0.1
_BITS = ("system", "architecture", "processor", "instructions")
_SAME = ("uploads_differ", "random", "draws", "straight_through", "one_by_one")
_CHECKS = "tables/checks.csv"
_WORDS = {"tables/frontier.csv": ["verdict"], _CHECKS: ["text"]}

RerunVerdict = Literal["equal", "within tolerance", "different", "failed"]


@dataclass(frozen=True)
class Rerun:
    """The comparison of one cell that was run again.

    Attributes:
        what: A description of the cell.
        verdict: How its rows compare; `failed` if it could not be run again.
        reason: The differences.
    """

    what: str
    verdict: RerunVerdict
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The findings about a pack.

    Attributes:
        cells: The number of cells with rows. The choice is among these.
        chosen: The number of cells that were chosen at random.
        reruns: The comparisons of these cells, and of the trainings that they needed.
        problems: The problems of the pack as a whole.
        differences: Differences in versions and machine between here and the pack.
        seed: The seed of the choice.
    """

    cells: int
    chosen: int
    reruns: tuple[Rerun, ...]
    problems: tuple[str, ...]
    differences: tuple[str, ...]
    seed: int

    @property
    def passed(self) -> bool:
        """Return whether no problem and no different cell was found."""
        bad = [one for one in self.reruns if one.verdict in ("different", "failed")]
        return not bad and not self.problems


def escape_probability(cells: int, altered: int, checked: int) -> float:
    """Return the probability that no altered cell is among the checked ones."""
    if not 0 <= altered <= cells or not 0 <= checked <= cells:
        raise ValueError(
            f"altered and checked must be in [0, cells = {cells}], got {altered} and {checked}"
        )
    return float(stats.hypergeom.pmf(0, cells, altered, checked))


def choose(cells: Sequence[int], count: int, seed: int) -> list[int]:
    """Return a uniformly random choice of cells."""
    rng = np.random.default_rng(seed)
    return sorted(rng.permutation(np.array(cells, dtype=int))[:count].tolist())


def verify(
    pack: Pack,
    *,
    cells: int = 10,
    seed: int,
    trust_code: bool = False,
    data: Path | None = None,
    workers: int | None = None,
    engine: Engine = LOCAL,
    console: Console | None = None,
) -> Verification:
    """Check a whole pack, run some of its cells again, and return the findings.

    Args:
        pack: The pack.
        cells: How many cells to run again. The trainings that they need are added.
        seed: The seed of the choice. The author of the pack must not know it.
        trust_code: Whether users' Python files in the pack may be executed.
        data: A folder with the data that the configuration names by path.
        workers: Number of processes. Default: as many as the engine allows.
        engine: Where cells run.
        console: Where to show progress.

    Raises:
        PackError: If the pack cannot be verified here.
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
        if config.panel != pack.comparable:
            problems.append(f"its configuration has panel {config.panel}, not {pack.panel}")
        trials = narrowed(planned, pack.results)
        if not problems:
            problems += _not_a_cascade(pack, planned, trials, config)
        done = pack.cells["status"] == "ok"
        pool = [number for number in range(len(trials)) if done[number]] if not problems else []
        chosen = choose(pool, cells, seed)
        slots = workers or engine.slots()
        reruns = _run(
            pack,
            trials,
            chosen,
            here,
            folder=Path(place),
            workers=slots,
            engine=engine,
            console=console,
        )
        return Verification(
            cells=len(pool),
            chosen=len(chosen),
            reruns=tuple(reruns),
            problems=tuple(problems),
            differences=_differences(pack, here),
            seed=seed,
        )


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
    return config


def _check_extent(pack: Pack, config: RunConfig) -> None:
    """Raise if a configuration asks for more than the pack contains, before it is planned."""
    arms = config.seeds * sum(len(config.defenses_of(one)) for one in config.scenarios)
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
    chosen: Sequence[int],
    here: Mapping[str, Any],
    *,
    folder: Path,
    workers: int,
    engine: Engine,
    console: Console,
) -> Iterator[Rerun]:
    """Run cells again, with the trainings that they need, and yield the comparisons."""
    numbers = {trial.cell.key: number for number, trial in enumerate(trials)}
    needed = [
        TrainTrial(trial.scenario, trial.defense, trial.seed).cell.key
        for trial in (trials[number] for number in chosen)
        if isinstance(trial, AttackTrial) and trial.checkpoint
    ]
    first = sorted({numbers[key] for key in needed if key in numbers})
    run = run_trial if pack.meta.get("seed_bits") == SEED_BITS else _run_narrowly
    for stage in (first, [number for number in chosen if number not in first]):
        tasks = [(trials[number], folder) for number in stage]
        for done in (
            engine.execute(run, tasks, workers=workers, time_limit=math.inf) if tasks else ()
        ):
            trial = done.task[0]
            number = numbers[trial.cell.key]
            if isinstance(done.result, Failure):
                rerun = Rerun(_what(trial), "failed", done.result.message)
            else:
                rerun = _compare(pack, number, trial, done.result, here)
            colour = "green" if rerun.verdict in ("equal", "within tolerance") else "red"
            reason = f" ({rerun.reason})" if rerun.reason else ""
            console.print(
                f"[{colour}]{rerun.verdict}[/{colour}] {markup(rerun.what + reason)}",
                highlight=False,
                soft_wrap=True,
            )
            yield rerun


def _run_narrowly(task: tuple[Trial, Path]) -> Outcome:
    """Run a cell of a pack from the time when seeds had 32 bits."""
    with narrow_seeds():
        return run_trial(task)


def _compare(
    pack: Pack, number: int, trial: Trial, outcome: Outcome, here: Mapping[str, Any]
) -> Rerun:
    """Compare the rows of a cell with those of a pack.

    With the same code, versions and machine they must be bit-equal. The versions and the machine
    that a pack reports cannot be verified. The verdict says if they differ.
    """
    cell = pack.cells.iloc[number]
    same_code = trial.cell.key == cell["cell"] or pack.meta["code"] == here["code"]
    same_place = not _differences(pack, here)
    found = {table: _rows(pack, table, str(cell["cell"])) for table in TABLES}
    own = {table: frame_of(outcome, table) for table in TABLES if table != "renderings"}
    unequal = [
        table for table, frame in own.items() if not _equal(found[table], frame)
    ] + _other_pictures(found["renderings"], outcome)
    what = _what(trial)
    if not unequal and rows_digest(outcome) == cell["digest"]:
        return Rerun(what, "equal")
    if same_code and same_place:
        return Rerun(what, "different", ", ".join(unequal) or "digits that the pack omits")
    beyond = [*_beyond_tolerance(found, own)]
    if beyond:
        return Rerun(what, "different", "; ".join(beyond))
    return Rerun(what, "within tolerance", "" if same_code else "other code")


def _rows(pack: Pack, table: str, key: str) -> pd.DataFrame:
    every = pack.rows(table)
    return every[every["cell"] == key].drop(columns="cell")


def _equal(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    lines = (
        sorted(zip(*(_as_text(frame[name]) for name in frame if name != "seconds"), strict=True))
        for frame in (a, b[a.columns])
    )
    return next(lines) == next(lines)


def _as_text(column: pd.Series[Any]) -> pd.Series[str]:
    """Return values as text. Whole numbers become floats, as in tables with missing values."""
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    return (column.astype(float) if numeric else column).astype(str)


def _other_pictures(shown: pd.DataFrame, outcome: Outcome) -> list[str]:
    made = {(row.observation, row.victim): (row.truth, row.guess) for row in outcome.renderings}
    same = all(
        made.get((row.observation, row.victim)) == (row.truth, row.guess) for row in rows(shown)
    )
    return [] if same else ["pictures"]


def _beyond_tolerance(
    given: dict[str, pd.DataFrame], own: dict[str, pd.DataFrame]
) -> Iterator[str]:
    """Yield differences that another version or processor does not explain: see `TOLERANCE`."""
    key = ["observation", "victim"]
    a, b = (frames["attacks"].set_index(key).sort_index() for frames in (given, own))
    if not a.index.equals(b.index) or not (a["outcome"] == b["outcome"]).all():
        yield "other uploads were scored"
    else:
        known = a["identified"].notna() & b["identified"].notna()
        upload = a.index.get_level_values("observation")[known]
        p_value = sign_test(
            a.loc[known, "identified"].to_numpy(dtype=bool),
            b.loc[known, "identified"].to_numpy(dtype=bool),
            upload.to_numpy(),
        )
        if p_value < _LEAST_P:
            yield f"other victims were identified (p = {p_value:.1g})"
    a, b = (frames["utility"].set_index("round").sort_index() for frames in (given, own))
    if not a.index.equals(b.index) or not a["total"].equals(b["total"]):
        yield "other rounds were evaluated"
    elif ((a["correct"] - b["correct"]).abs() > _POINTS * a["total"]).any():
        yield "the accuracy differs"
    a, b = (frames["guarantees"].reset_index(drop=True) for frames in (given, own))
    if len(a) != len(b) or not np.allclose(a["epsilon"], b["epsilon"], rtol=_EPSILON):
        yield "epsilon differs"
    elif not a["violated"].equals(b["violated"]):
        yield "the verdict of the audit differs"
    a, b = (frames["replays"][[*_SAME]].reset_index(drop=True) for frames in (given, own))
    if not a.equals(b):
        yield "the replay differs"
    a, b = (frames["probes"].reset_index(drop=True) for frames in (given, own))
    measured = ["decoded", "plain", "remaining_noise", "contrast"]
    if len(a) != len(b) or not np.allclose(a[measured], b[measured], atol=_SHARE):
        yield "the share of the update that uploads hold differs"


def _differences(pack: Pack, here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences in versions and machine from the pack that may change results."""
    there = pack.meta
    pairs = [(name, other, here["versions"].get(name)) for name, other in there["versions"].items()]
    pairs += [(name, there["machine"].get(name), here["machine"][name]) for name in _BITS]
    return tuple(f"{name} {other} (here {own})" for name, other, own in pairs if other != own)


def _what(trial: Trial) -> str:
    """Return a description of a cell."""
    labels = trial.cell.labels
    place = f"{labels['defense']}, {labels['scenario']}, seed {labels['seed']}"
    if isinstance(trial, AttackTrial):
        return f"{labels['adversary']} against {place}, round {trial.checkpoint}"
    if isinstance(trial, ReplayTrial):
        return f"replay of {place}"
    return f"training under {place}"


def escapes(cells: int, checked: int) -> Iterator[tuple[int, float]]:
    """Yield the probabilities that one altered cell, or 5 % or 10 % of all, escape."""
    for altered in sorted({1, math.ceil(0.05 * cells), math.ceil(0.1 * cells)}):
        yield altered, escape_probability(cells, altered, checked)
