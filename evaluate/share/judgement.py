"""Judges the claims of a pack by their cells, as stored and as run again.

The code, the versions and the processor determine every bit of a row. If they are the same, any
difference refutes the claim. A pack can lie about its versions. So they also count as the same for
the trainings of a defense if one of them is equal in every bit.

Otherwise rounding differs, and the cells of a claim are judged together. Its accuracy is pooled
over all trainings that ran again, and the victims of each attack over all seeds. Each has three
outcomes:

- *refuted*, if chance explains the difference with a probability below `LEAST_P`;
- *confirmed*, if a difference of `POINTS` (accuracy) or `SHARE` (of all victims) is excluded with
  95 % confidence;
- *undecided* otherwise. Then the versions of the pack or more seeds decide.

The assumed scatter of a seed's accuracy is that of another test set. Real rounding moved 17 of 18
trainings by less, and one by twice as much (see `benchmarks/verification.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from ..conclude.labels import rows
from ..foundations.rows import LATER, TABLES, Outcome
from ..foundations.statistics import sign_test
from .claims import PackClaim
from .packed_rows import frame_of, rows_digest

LEAST_P, POINTS, SHARE, EPSILON = 1e-4, 0.03, 0.1, 0.01
TOLERANCE = (
    "the same uploads scored, refused and not applicable; epsilon within 1 %; the same verdict of "
    "audits and replays. Over all seeds of a claim together, a difference of 3 points of accuracy "
    "and of 10 % of the victims must be excluded with 95 % confidence"
)
"""The requirements on rows from another version, another code or another kind of processor."""

_CONFIDENT = float(stats.norm.ppf(0.95))
_SHARE = 0.1
_SAME = ("uploads_differ", "random", "draws", "straight_through", "one_by_one")
_SCORED = ("identified", "counterfactual")

Decision = Literal["confirmed", "undecided", "refuted"]
Rows = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Stored:
    """A cell of a pack.

    Attributes:
        what: A description.
        kind: `train`, `replay` or `attack`.
        scenario: Its scenario.
        defense: Its defense.
        attack: The name of the attack, and whether it knows the defense; "" for other cells.
        seed: Its seed.
        rows: Its rows, by table.
        digest: The digest of its exact rows.
        same_code: Whether the code here is that of the pack.
    """

    what: str
    kind: str
    scenario: str
    defense: str
    attack: str
    seed: int
    rows: Rows
    digest: str
    same_code: bool


@dataclass(frozen=True)
class Compared:
    """A cell that ran again.

    Attributes:
        stored: The cell of the pack.
        rows: Its new rows in the precision of a pack; None if it failed.
        unequal: The tables that differ; empty if all bits are equal.
        failure: Why it could not run.
    """

    stored: Stored
    rows: Rows | None
    unequal: tuple[str, ...] = ()
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Return whether all bits are equal."""
        return self.rows is not None and not self.unequal


@dataclass(frozen=True)
class Judgement:
    """The outcome of a claim.

    Attributes:
        claim: The claim.
        decision: The outcome.
        equal: How many of its cells were equal in every bit.
        reasons: The reasons against a confirmation.
    """

    claim: PackClaim
    decision: Decision
    equal: int
    reasons: tuple[str, ...] = ()


def compare(stored: Stored, outcome: Outcome | str) -> Compared:
    """Compare a cell with its rows of another run, or with the reason why there are none."""
    if isinstance(outcome, str):
        return Compared(stored, None, failure=outcome)
    own = {table: frame_of(outcome, table) for table in TABLES if table != "renderings"}
    comparable = _without_later_tables(stored, outcome)
    unequal = [
        table for table in own if not _equal(stored.rows[table], frame_of(comparable, table))
    ]
    unequal += _other_pictures(stored.rows["renderings"], outcome)
    if not unequal and rows_digest(comparable) != stored.digest:
        unequal = ["digits that the pack omits"]
    return Compared(stored, own, tuple(unequal))


def lacking(stored: Stored) -> list[str]:
    """Return the tables that the code of a pack may not have had. The code here has them."""
    return [table for table in LATER if not stored.same_code and not len(stored.rows[table])]


def _without_later_tables(stored: Stored, outcome: Outcome) -> Outcome:
    """Return new rows without the tables that the pack lacks, if its digest is of such rows."""
    empty: dict[str, Any] = dict.fromkeys(lacking(stored), ())
    without = replace(outcome, **empty)
    return without if rows_digest(without) == stored.digest else outcome


def judge(
    claims: Sequence[PackClaim], cells: Mapping[int, Compared], *, same_place: bool
) -> list[Judgement]:
    """Return the outcome of every claim.

    Args:
        claims: The claims.
        cells: All cells that ran again, by their position.
        same_place: Whether the pack says that its versions and processor are those here.
    """
    trained = {
        (one.stored.scenario, one.stored.defense)
        for one in cells.values()
        if one.equal and one.stored.same_code and _is_trained(one.stored)
    }
    return [_judged(claim, cells, trained, same_place) for claim in claims]


def _is_trained(stored: Stored) -> bool:
    return stored.kind == "train" and bool((stored.rows["utility"]["round"] > 0).any())


def overall(judgements: Sequence[Judgement]) -> Decision:
    """Return the outcome of several claims together; without any, nothing is confirmed."""
    return worst([one.decision for one in judgements] or ["undecided"])


def worst(decisions: Collection[Decision]) -> Decision:
    """Return the worst of some outcomes."""
    if "refuted" in decisions:
        return "refuted"
    return "undecided" if "undecided" in decisions else "confirmed"


def _judged(
    claim: PackClaim,
    cells: Mapping[int, Compared],
    trained: set[tuple[str, str]],
    same_place: bool,
) -> Judgement:
    """Return the outcome of a claim.

    Args:
        claim: The claim.
        cells: All cells that ran again.
        trained: Scenarios and defenses with a training that is equal in every bit.
        same_place: As for `judge`.
    """
    own = [cells[number] for number in claim.chosen if number in cells]
    unclear = [f"{one.stored.what} failed: {one.failure}" for one in own if one.rows is None]
    for kind, name in {"train": "training", "attack": "attack"}.items():
        if not any(one.stored.kind == kind for one in own):
            unclear.append(f"no {name} ran again")
    ran = [one for one in own if one.rows is not None]
    certain = (claim.scenario, claim.defense) in trained
    found = [(one, reason) for one in ran for reason in _certain(one, same_place, certain)]
    against = [reason for one, reason in found if one.stored.same_code]
    other = [reason for one, reason in found if not one.stored.same_code]
    unclear += [f"{reason}; the code of the pack is not the code here" for reason in other]
    if not found:
        for refutes, reason in _pooled(ran):
            (against if refutes else unclear).append(reason)
    decision: Decision = "refuted" if against else "undecided" if unclear else "confirmed"
    equal = sum(one.equal for one in own)
    return Judgement(claim, decision, equal, tuple(against or unclear))


def _certain(cell: Compared, same_place: bool, trained: bool) -> Iterator[str]:
    """Yield the differences of one cell that rounding does not explain."""
    if cell.equal or cell.rows is None:
        return
    stored = cell.stored
    if stored.same_code and (same_place or (trained and stored.kind == "train")):
        yield f"{stored.what}: {', '.join(cell.unequal)} differ"
    else:
        yield from (f"{stored.what}: {one}" for one in _structural(stored, cell.rows))


def _structural(stored: Stored, own: Rows) -> Iterator[str]:
    """Yield differences between the rows of a cell that no rounding explains."""
    for table, find in _DIFFERENCES.items():
        a, b = stored.rows[table], own[table]
        if (len(a) or len(b)) and table not in lacking(stored):
            yield from find(a, b)


def _other_uploads(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    """Yield a difference unless the same victims were scored, among as many look-alikes."""
    a, b = (_in_order(frame) for frame in (given, own))
    names = ("observation", "victim", "outcome", "candidates", "transformed")
    same = len(a) == len(b)
    same = same and all(_texts(a[name]) == _texts(b[name]) for name in names)
    if not same or any((a[name].isna() != b[name].isna()).any() for name in _SCORED):
        yield "other uploads were scored"


def _in_order(frame: pd.DataFrame) -> pd.DataFrame:
    order = np.lexsort((frame["victim"].to_numpy(), frame["observation"].to_numpy()))
    return frame.iloc[order].reset_index(drop=True)


def _other_rounds(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    a, b = (frame.set_index("round").sort_index() for frame in (given, own))
    if not a.index.equals(b.index) or not a["total"].equals(b["total"]):
        yield "other rounds were evaluated"


def _other_guarantees(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    a, b = (frame.reset_index(drop=True) for frame in (given, own))
    if len(a) != len(b) or not np.allclose(a["epsilon"], b["epsilon"], rtol=EPSILON):
        yield "epsilon differs"
    elif not a["violated"].equals(b["violated"]):
        yield "the verdict of the audit differs"


def _other_replay(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    a, b = (frame[[*_SAME]].reset_index(drop=True) for frame in (given, own))
    if not a.equals(b):
        yield "the replay differs"


def _other_probe(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    measured = ["decoded", "plain", "remaining_noise", "contrast"]
    if len(given) != len(own) or not np.allclose(given[measured], own[measured], atol=_SHARE):
        yield "the share of the update that uploads hold differs"


def _other_tuning(given: pd.DataFrame, own: pd.DataFrame) -> Iterator[str]:
    a, b = (frame.reset_index(drop=True) for frame in (given, own))
    if len(a) != len(b) or not a[["settings", "total"]].equals(b[["settings", "total"]]):
        yield "other settings were tried"
    elif not np.allclose(a["correct"] / a["total"], b["correct"] / b["total"], atol=_SHARE):
        yield "the accuracy on validation examples differs"


_DIFFERENCES = {
    "attacks": _other_uploads,
    "utility": _other_rounds,
    "guarantees": _other_guarantees,
    "replays": _other_replay,
    "probes": _other_probe,
    "tunings": _other_tuning,
}


def _pooled(cells: Sequence[Compared]) -> Iterator[tuple[bool, str]]:
    """Yield whether the pooled rows refute a claim, and why they do not confirm it."""
    if all(one.equal for one in cells):
        return
    yield from _accuracy([one for one in cells if one.stored.kind == "train"])
    attacks = [one for one in cells if one.stored.kind == "attack"]
    victims = len(_scored(attacks, 0)[["seed", "observation", "victim"]].drop_duplicates())
    for name in dict.fromkeys(one.stored.attack for one in attacks):
        own = [one for one in attacks if one.stored.attack == name]
        for outcome in ("identified", "counterfactual"):
            yield from _victims(own, outcome, victims)


def _accuracy(trainings: Sequence[Compared]) -> Iterator[tuple[bool, str]]:
    """Compare the final accuracies of all seeds together."""
    if all(one.equal for one in trainings):
        return
    pairs = [(_final(one.stored.rows), _final(one.rows or {})) for one in trainings]
    total = sum(int(a["total"]) for a, _ in pairs)
    given, own = (sum(int(pair[side]["correct"]) for pair in pairs) for side in (0, 1))
    share = (given + own) / (2 * total)
    spread = sqrt(max(total * share * (1 - share), 1.0)) / total
    gap = (given - own) / total
    said = f"the accuracy is {100 * own / total:.1f} %, not {100 * given / total:.1f} %"
    if 2 * stats.norm.sf(abs(gap) / spread) < LEAST_P:
        yield True, said
    elif abs(gap) + _CONFIDENT * spread > POINTS:
        yield False, f"{said}; {total:,} predictions do not exclude a difference of 3 points"


def _final(rows: Rows) -> Any:  # noqa: ANN401 - a row of a table
    return rows["utility"].sort_values("round").iloc[-1]


def _victims(attacks: Sequence[Compared], name: str, total: int) -> Iterator[tuple[bool, str]]:
    """Compare the victims that an attack identified, over all seeds together.

    Args:
        attacks: The cells of one attack.
        name: The outcome to compare.
        total: The number of victims of the claim.
    """
    if all(one.equal for one in attacks):
        return
    a, b = (_scored(attacks, side).dropna(subset=[name]) for side in (0, 1))
    unit = a.groupby(["seed", "observation"]).ngroup().to_numpy()
    given, own = (frame[name].to_numpy(dtype=bool) for frame in (a, b))
    uploads = np.bincount(unit, weights=given.astype(float) - own)
    spread = sqrt(max(float((uploads**2).sum()), 1.0))
    what = "victims" if name == "identified" else "victims of other uploads"
    said = (
        f"{attacks[0].stored.attack}: {own.sum()} of {len(own)} {what} are identified, not "
        f"{given.sum()}"
    )
    if sign_test(given, own, unit) < LEAST_P:
        yield True, said
    elif abs(float(uploads.sum())) + _CONFIDENT * spread > SHARE * total:
        yield False, f"{said}; this does not exclude a difference of 10 % of {total} victims"


def _scored(attacks: Sequence[Compared], side: int) -> pd.DataFrame:
    """Return the rows of some attacks, stored (side 0) or run again (side 1), in one order."""
    columns = ["observation", "victim", *_SCORED]
    frames = [
        _in_order((one.stored.rows, one.rows or {})[side]["attacks"])[columns] for one in attacks
    ]
    if not frames:
        return pd.DataFrame(columns=["seed", *columns])
    seeds = [
        one.stored.seed for one, frame in zip(attacks, frames, strict=True) for _ in frame.index
    ]
    return pd.concat(frames, ignore_index=True).assign(seed=seeds)


def _equal(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    if not len(a) and not len(b):
        return True
    lines = (
        sorted(zip(*(_texts(frame[name]) for name in frame if name != "seconds"), strict=True))
        for frame in (a, b[a.columns])
    )
    return next(lines) == next(lines)


def _texts(column: pd.Series[Any]) -> list[str]:
    """Return values as text. Whole numbers become floats, as in tables with missing values."""
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    return [str(value) for value in (column.astype(float) if numeric else column).tolist()]


def _other_pictures(shown: pd.DataFrame, outcome: Outcome) -> list[str]:
    made = {(row.observation, row.victim): (row.truth, row.guess) for row in outcome.renderings}
    same = all(
        made.get((row.observation, row.victim)) == (row.truth, row.guess) for row in rows(shown)
    )
    return [] if same else ["pictures"]
