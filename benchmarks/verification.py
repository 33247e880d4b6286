"""Measure how often `leakfrontier verify` catches altered packs and refutes honest ones.

python benchmarks/verification.py [PACKS_PER_KIND]

Nothing is trained. A pack of the standard benchmark is the truth. Its author alters it, or does
not. A rerun gives the rows of the truth: with the same versions bit by bit, with others with
scatter. The code of `leakfrontier verify` chooses the cells and judges the claims.

Scatter moves the final accuracy of a seed in units of test sampling, and changes whether single
uploads are identified. The first is a normal draw, or one of `MEASURED`. For these, initial weights
were perturbed by 1e-7 in `mlp` and `cnn` under `TopK` and `Quantization`, with three seeds each.
Undefended, five of six trainings kept their accuracy, and one moved by 0.28.

An alteration is caught if its claim is not confirmed. Then it does not count as verified, and the
exit code of `leakfrontier verify` is not 0.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import TABLES, columns
from leakfrontier.evaluate.share.claims import Place, claims_of
from leakfrontier.evaluate.share.judgement import (
    Compared,
    Decision,
    Stored,
    judge,
    overall,
)
from leakfrontier.evaluate.share.leaderboard import make_settings
from leakfrontier.evaluate.share.pack import Pack, read_pack
from leakfrontier.evaluate.share.verification import placed

STANDARD = Path(__file__).parent / "standard"
SEEDS, MORE = 3, 2  # the defaults of `verify`
FLIPS = 0.1
"""Twice the share of uploads that change if an attack identifies every second victim."""

MEASURED = (0.47, -0.46, 0.5, 0.2, -0.57, 0.2, 0.29, -2.05, 0.79, 0.09, -0.48, 0.2)
"""Changes of the accuracy of one seed by rounding, in units of test sampling."""

Rng = np.random.Generator
T = TypeVar("T")


@dataclass(frozen=True)
class Published(Pack):
    """A pack with rows that its author may have altered."""

    rows_given: Conclusions | None = None
    altered: frozenset[str] = frozenset()

    @cached_property
    def results(self) -> Conclusions:
        """Return the rows."""
        return super().results if self.rows_given is None else self.rows_given

    @cached_property
    def comparable(self) -> str:
        """Return the panel."""
        return self.panel

    @cached_property
    def places(self) -> set[Place]:
        """Return the defenses that have a place."""
        return placed(self)

    def with_rows(self, altered: Conclusions, cells: "pd.Series[str]") -> "Published":
        """Return the pack with other rows of some cells."""
        return replace(self, rows_given=altered, altered=frozenset(cells))

    @cached_property
    def cell_rows(self) -> dict[str, dict[str, pd.DataFrame]]:
        """Return the rows of every cell, by table. If some cells are altered, only of these."""
        found = {}
        for table, row_type in TABLES.items():
            frame = getattr(self.results, table)
            if self.altered:
                frame = frame[frame["cell"].isin(self.altered)]
            own = [*columns(row_type)]
            found[table] = {str(key): rows[own] for key, rows in frame.groupby("cell")}
            found[table][""] = frame[own].iloc[:0]
        return found

    def rows_of(self, key: str) -> dict[str, pd.DataFrame]:
        """Return the rows of a cell, by table."""
        return {table: found.get(key, found[""]) for table, found in self.cell_rows.items()}


@dataclass(frozen=True)
class Rerun:
    """The circumstances of a rerun.

    Attributes:
        same_place: Whether the pack says that it has the verifier's versions.
        scatter: Scatter of the accuracy in units of test sampling; 0 if all bits are equal.
        control_equal: Whether undefended trainings are equal in every bit nevertheless.
        measured: Whether accuracies scatter as in `MEASURED`, and not normally.
    """

    same_place: bool = True
    scatter: float = 0.0
    control_equal: bool = False
    measured: bool = False


def decision(
    truth: Published, published: Published, rerun: Rerun, rng: Rng, target: str = ""
) -> Decision:
    """Return the outcome of the target's claim, or of all claims, at the defaults of `verify`.

    Args:
        truth: The true rows, which the verifier finds.
        published: The rows as their author publishes them.
        rerun: The circumstances of the rerun.
        rng: The draws of the verifier.
        target: A defense; "" for all that have a place.
    """
    own = [place for place in published.places if target in ("", place[2])]
    seed = int(rng.integers(2**31))
    chosen = claims_of(published.results, own, seeds=SEEDS, more=MORE, seed=seed)
    cells = {
        number: _compared(truth, published, number, rerun, rng)
        for number in sorted({one for claim in chosen for one in claim.chosen})
    }
    return overall(judge(chosen, cells, same_place=rerun.same_place))


def _compared(
    truth: Published, published: Published, number: int, rerun: Rerun, rng: Rng
) -> Compared:
    """Return the comparison of a cell with its rerun, as `judgement.compare` finds it."""
    cell = published.results.cells.iloc[number]
    key, kind = str(cell["cell"]), str(cell["kind"])
    altered = key in published.altered
    stored = Stored(
        what=f"{kind} under {cell['defense']}",
        kind=kind,
        scenario=str(cell["scenario"]),
        defense=str(cell["defense"]),
        attack=f"{cell['adversary']}, {cell['knows_defense']}" if kind == "attack" else "",
        seed=int(cell["seed"]),
        rows=(published if altered else truth).rows_of(key),
        digest="",
        same_code=True,
    )
    spared = rerun.control_equal and bool(cell["control"]) and kind == "train"
    scatter = 0.0 if spared else rerun.scatter
    rows = (
        scattered(truth.rows_of(key), scatter, rng, measured=rerun.measured)
        if scatter
        else truth.rows_of(key)
    )
    return Compared(stored, rows, ("rows",) if altered or scatter else ())


def scattered(
    rows: dict[str, pd.DataFrame], scatter: float, rng: Rng, *, measured: bool = False
) -> dict[str, pd.DataFrame]:
    """Return the rows of a cell as other versions would give them."""
    utility, attacks = rows["utility"].copy(), rows["attacks"].copy()
    trained = utility["round"] > 0
    correct, total = (utility.loc[trained, name].to_numpy(float) for name in ("correct", "total"))
    spread = scatter * np.sqrt(correct * (1 - correct / total))
    size = len(correct)
    draws = rng.choice(MEASURED, size) if measured else rng.standard_normal(size)
    moved = np.clip(np.rint(correct + spread * draws), 0, total)
    utility.loc[trained, "correct"] = moved.astype(int)
    for name in ("identified", "counterfactual"):
        known = attacks[name].notna().to_numpy()
        found = attacks.loc[known, name].to_numpy(dtype=bool)
        share = found.mean() if len(found) else 0.0
        flips = FLIPS * np.where(found, 1 - share, share)  # so that the rate stays, on average
        attacks.loc[known, name] = found ^ (rng.random(len(found)) < flips)
    return {**rows, "utility": utility, "attacks": attacks}


def raised_accuracy(
    truth: Published, target: str, points: float | None, seeds: set[int] | None = None
) -> Published:
    """Return a pack in which a defense is more accurate in all rounds, or like no defense.

    Args:
        truth: The pack.
        target: The defense.
        points: How much to add; None for the accuracy of the undefended control.
        seeds: The altered seeds. Default: all.
    """
    results = truth.results
    utility = results.utility.copy()
    own = (utility["defense"] == target) & (utility["round"] > 0)
    if seeds is not None:
        own &= utility["seed"].isin(seeds)
    if points is None:
        control = utility[utility["control"]].set_index(["seed", "round"])["correct"]
        keys = zip(utility.loc[own, "seed"], utility.loc[own, "round"], strict=True)
        utility.loc[own, "correct"] = [int(control.get(key, 0)) for key in keys]
    else:
        more = utility.loc[own, "correct"] + (points * utility.loc[own, "total"]).round()
        utility.loc[own, "correct"] = more.astype(int).clip(upper=utility.loc[own, "total"])
    changed = replace(results, utility=utility)
    return truth.with_rows(changed, utility.loc[own, "cell"])


def copied_rows(truth: Published, target: str, source: str) -> Published:
    """Return a pack in which the attack rows of a defense are those of another."""
    results = truth.results
    key = ["adversary", "knows_defense", "seed", "checkpoint"]
    cells = results.cells.copy()
    attacks = cells["kind"] == "attack"
    theirs, own = (
        cells[attacks & (cells["defense"] == name)].set_index(key) for name in (source, target)
    )
    pairs = own.join(theirs[["cell", "status"]].add_suffix("_source"), how="inner")
    cells = cells.set_index("cell")
    cells.loc[pairs["cell"], "status"] = pairs["status_source"].to_numpy()
    renamed = dict(zip(pairs["cell_source"], pairs["cell"], strict=True))
    frames = {}
    for table in ("attacks", "scores"):
        frame = getattr(results, table)
        labels = [name for name in frame if name not in columns(TABLES[table])]
        taken = frame[frame["cell"].isin(renamed)].copy()
        taken["cell"] = taken["cell"].map(renamed)
        described = results.attacks.drop_duplicates("cell").set_index("cell")
        for name in ("defense", "family", "defense_options", "strength", "stochastic"):
            if name in labels:
                arm = described[described["defense"] == target].iloc[0][name]
                taken[name] = [arm] * len(taken)
        frames[table] = pd.concat([frame[~frame["cell"].isin(pairs["cell"])], taken])
    changed = replace(results, cells=cells.reset_index()[[*results.cells]], **frames)
    return truth.with_rows(changed, pairs["cell"])


def hidden_successes(truth: Published, target: str) -> Published:
    """Return a pack in which no attack identifies more than a blind guess, except as stated.

    The author alters only the attacks that succeed, and leaves the others as they are.
    """
    results = truth.results
    attacks = results.attacks.copy()
    own = (attacks["defense"] == target) & ~attacks["baseline"]
    found = attacks[own].groupby("cell")["identified"].mean().astype(float)
    cells = found.index[found > 0.1]
    chosen = attacks["cell"].isin(cells)
    for name in ("identified", "identified_original"):
        attacks.loc[chosen & attacks[name].notna(), name] = False
    changed = replace(results, attacks=attacks)
    return truth.with_rows(changed, pd.Series([*cells], dtype=object))


def fewer_uploads(truth: Published, uploads: int, seeds: int) -> Published:
    """Return an honest pack with fewer uploads and seeds."""
    results = truth.results
    kept = {
        name: getattr(results, name)[getattr(results, name)["seed"] < seeds]
        for name in ("attacks", "scores", "utility", "cells", "guarantees", "renderings")
    }
    for name in ("attacks", "scores", "renderings"):
        kept[name] = kept[name][kept[name]["observation"] < uploads]
    return replace(truth, name="few", rows_given=replace(results, **kept))


def simulate(kind: str, truths: list[Published], rng: Rng) -> Decision:
    """Return the outcome of one random pack of a kind."""
    if kind in HONEST:
        truth = _one_of(truths, rng)
        return decision(truth, truth, HONEST[kind], rng)
    if kind == FEW:
        truth = _one_of(truths, rng)
        few = fewer_uploads(truth, int(rng.integers(4, 24)), int(rng.integers(1, 4)))
        return "confirmed" if len(make_settings([truth, few])) == 1 else "refuted"
    alter, rerun = ALTERED[kind]
    truth, published, target = _one_of(successful(alter, truths), rng)
    return decision(truth, published, rerun, rng, target)


Alteration = Callable[[Published], Iterator[tuple[Published, str]]]


_SUCCESSFUL: dict[Alteration, list[tuple[Published, Published, str]]] = {}


def successful(
    alter: Alteration, truths: list[Published]
) -> list[tuple[Published, Published, str]]:
    """Return all alterations of some packs that give their target a place."""
    if alter not in _SUCCESSFUL:
        _SUCCESSFUL[alter] = [
            (truth, published, target)
            for truth in truths
            for published, target in alter(truth)
            if any(target == place[2] for place in published.places)
        ]
    return _SUCCESSFUL[alter]


def _one_of(values: Sequence[T], rng: Rng) -> T:
    return values[int(rng.integers(len(values)))]


def _defended(truth: Published, *, placed: bool) -> list[str]:
    """Return the defenses that have a place, or those that have none."""
    arms = truth.results.attacks.loc[~truth.results.attacks["control"], "defense"]
    have = {place[2] for place in truth.places}
    return [str(name) for name in arms.unique() if (name in have) == placed]


def accuracy_of_control(truth: Published) -> Iterator[tuple[Published, str]]:
    """Yield packs in which a defense has the accuracy of no defense."""
    for target in _defended(truth, placed=True):
        yield raised_accuracy(truth, target, None), target


def accuracy_of_one_seed(truth: Published) -> Iterator[tuple[Published, str]]:
    """Yield packs in which one seed of a defense has the accuracy of no defense."""
    for number, target in enumerate(_defended(truth, placed=True)):
        yield raised_accuracy(truth, target, None, {number % 3}), target


def three_points(truth: Published) -> Iterator[tuple[Published, str]]:
    """Yield packs in which every seed of a defense is three points more accurate."""
    for target in _defended(truth, placed=True):
        yield raised_accuracy(truth, target, 0.03), target


def attacks_of_another(truth: Published) -> Iterator[tuple[Published, str]]:
    """Yield packs in which a leaky defense has the attack rows of a private one."""
    for source in _defended(truth, placed=True)[:1]:
        for target in _defended(truth, placed=False):
            yield copied_rows(truth, target, source), target


def without_successes(truth: Published) -> Iterator[tuple[Published, str]]:
    """Yield packs in which the successful attacks on a leaky defense fail."""
    for target in _defended(truth, placed=False):
        yield hidden_successes(truth, target), target


HONEST = {
    "honest, same versions": Rerun(),
    "honest, other versions": Rerun(same_place=False, scatter=1.0),
    "honest, other versions, scatter as measured": Rerun(
        same_place=False, scatter=1.0, measured=True
    ),
    "honest, other versions, control equal": Rerun(
        same_place=False, scatter=1.0, control_equal=True, measured=True
    ),
}
CLAIMED, OTHER = Rerun(same_place=False), Rerun(same_place=False, scatter=1.0)
ALTERED: dict[str, tuple[Alteration, Rerun]] = {
    "accuracy of no defense": (accuracy_of_control, Rerun()),
    "accuracy of no defense, one seed": (accuracy_of_one_seed, Rerun()),
    "accuracy of no defense, other versions": (accuracy_of_control, OTHER),
    "copied rows": (attacks_of_another, Rerun()),
    "copied rows, other versions": (attacks_of_another, OTHER),
    "hidden successes": (without_successes, Rerun()),
    "+3 points, claims other versions": (three_points, CLAIMED),
    "+3 points, has other versions": (three_points, OTHER),
}
FEW = "fewer uploads or seeds"
KINDS = (*HONEST, *ALTERED, FEW)


def truths_of(paths: list[Path]) -> list[Published]:
    """Return packs as truths."""
    packs = [read_pack(path) for path in paths]
    return [Published(one.name, one.meta, one.entries) for one in packs]


def main(count: int) -> pd.DataFrame:
    """Print and return how often packs of each kind are refuted, undecided and confirmed."""
    truths = truths_of(sorted(STANDARD.glob("*.zip")))
    lines = []
    for kind in KINDS:
        rng = np.random.default_rng([*kind.encode()])
        found = Counter(simulate(kind, truths, rng) for _ in range(count))
        lines.append((kind, found["refuted"], found["undecided"], found["confirmed"]))
        print(*lines[-1], sep=" | ", flush=True)
    return pd.DataFrame(lines, columns=["packs", "refuted", "undecided", "confirmed"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
