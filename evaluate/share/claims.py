"""The claims of a pack, and the cells that decide them.

A claim is one defense in one setting: its accuracy and its worst case. It is checked if the pack
gives the defense a place, or if the user names it. The undefended control is checked with it,
because places are relative to the control. For some seeds, these cells check a claim:

- the trainings, and the examination of the replay;
- per server, the attack that identifies most victims under this defense;
- per server, an attack that works under other defenses, drawn by the victims that it identifies
  there. An author who hides a success must alter such attacks;
- per server, an attack that works under other defenses but is not applicable under this one;
- a few other attacks, at random.

Cells that were not needed prove nothing. Neither do attacks that are not applicable under any
defense. They do not run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..conclude.analysis import SERVERS, at
from ..conclude.labels import rows
from ..conclude.results import Conclusions
from ..foundations.errors import UserError

BLIND = "a blind guess"
STRATA = (BLIND, *SERVERS)
"""The kinds of attack. A claim is checked by some of each."""

Place = tuple[str, int, str]
"""A scenario, an attacked round and a defense."""


@dataclass(frozen=True)
class PackClaim:
    """One defense in one setting, and the cells that check it. Cells are positions in a pack.

    Attributes:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        defense: The defense.
        control: Whether it is the undefended control.
        trainings: All its trainings, one per seed.
        attacks: All its attacks that were applicable.
        chosen: The cells that run again.
    """

    scenario: str
    checkpoint: int
    defense: str
    control: bool = False
    trainings: tuple[int, ...] = ()
    attacks: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Return a description for readers."""
        return f"{self.defense}, {self.scenario}, round {self.checkpoint}"

    @property
    def trainings_chosen(self) -> int:
        """Return the number of trainings that run again."""
        return len({*self.trainings} & {*self.chosen})

    @property
    def attacks_chosen(self) -> int:
        """Return the number of attacks that run again."""
        return len({*self.attacks} & {*self.chosen})

    @property
    def escapes(self) -> tuple[float, float]:
        """Return the probabilities that one altered training, or one altered attack, escapes.

        The second is for an attack that the author alters at random. An alteration that hides the
        worst case is more likely to be among the chosen attacks.
        """
        return (
            escape_probability(len(self.trainings), 1, self.trainings_chosen),
            escape_probability(len(self.attacks), 1, self.attacks_chosen),
        )


def escape_probability(cells: int, altered: int, checked: int) -> float:
    """Return the probability that no altered cell is among checked ones, chosen at random."""
    altered = min(altered, cells)
    if not altered >= 0 or not 0 <= checked <= cells:
        raise ValueError(
            f"altered and checked must be in [0, cells = {cells}], got {altered} and {checked}"
        )
    return float(stats.hypergeom.pmf(0, cells, altered, checked)) if cells else 1.0


def claims_of(
    results: Conclusions,
    placed: Iterable[Place],
    *,
    named: Sequence[str] = (),
    seeds: int,
    more: int,
    seed: int,
) -> list[PackClaim]:
    """Return the claims to check, with their cells. The control of a setting comes first.

    Args:
        results: The rows of a pack, with its cells in their order.
        placed: The defenses that have a place.
        named: Labels or families of defenses to check instead.
        seeds: How many seeds of each claim run again.
        more: How many attacks of each claim run again in addition, at random.
        seed: The seed of the choice. The author of the pack must not know it.

    Raises:
        UserError: If the pack has no defense of a name.
    """
    rng = np.random.default_rng(seed)
    evaluated = results.cells[results.cells["kind"] != "tune"]
    every = sorted({int(one) for one in evaluated["seed"].dropna()})
    chosen = {every[i] for i in rng.permutation(len(every))[:seeds]}
    summary = _summary(results)
    return [
        _with_cells(claim, summary, chosen, more, rng)
        for claim in _to_check(results, {*placed}, named)
    ]


def _to_check(
    results: Conclusions, placed: set[Place], named: Sequence[str]
) -> Iterator[PackClaim]:
    arms = results.attacks[["scenario", "checkpoint", "defense", "family", "control"]]
    arms = arms.drop_duplicates(["scenario", "checkpoint", "defense"])
    for name in named:
        if name not in {*arms["defense"], *arms["family"]}:
            raise UserError(
                f"the pack has no attacks on a defense {name!r}: choose from "
                f"{', '.join(dict.fromkeys(arms['defense']))}"
            )
    for _, setting in arms.groupby(["scenario", "checkpoint"], sort=False):
        lines = setting.sort_values("control", ascending=False, kind="stable").to_dict("records")
        found = [
            PackClaim(one["scenario"], int(one["checkpoint"]), one["defense"], bool(one["control"]))
            for one in lines
        ]
        wanted = [
            bool({*named} & {line["defense"], line["family"]})
            if named
            else (claim.scenario, claim.checkpoint, claim.defense) in placed
            for line, claim in zip(lines, found, strict=True)
        ]
        if any(wanted):
            pairs = zip(found, wanted, strict=True)
            yield from (claim for claim, is_wanted in pairs if is_wanted or claim.control)


def stratum(labels: Mapping[str, Any]) -> str:
    """Return the kind of an attack, from its labels: one of `STRATA`."""
    if labels["baseline"]:
        return BLIND
    return "candidates" if labels["candidates_granted"] else str(labels["threat"])


def _summary(results: Conclusions) -> pd.DataFrame:
    """Return all cells with the number of victims `found`, and whether they were `scored`.

    `number` is the position of a cell. A cell with rows but without scores was not applicable.
    """
    attacks = results.attacks
    scores = pd.DataFrame(
        {
            "cell": attacks["cell"],
            "found": attacks["identified"].fillna(False).astype(int),
            "scored": attacks["outcome"] != "not applicable",
        }
    )
    counted = scores.groupby("cell").agg(found=("found", "sum"), scored=("scored", "any"))
    cells = results.cells.reset_index(drop=True)
    cells = cells.assign(number=range(len(cells))).join(counted, on="cell")
    attacked = cells["kind"] == "attack"
    labels = cells.loc[attacked, ["baseline", "candidates_granted", "threat"]]
    kinds = [stratum(one._asdict()) for one in rows(labels)]
    cells["stratum"] = pd.Series(kinds, index=cells.index[attacked], dtype=object)
    return cells[cells["status"] == "ok"]


def _with_cells(
    claim: PackClaim, cells: pd.DataFrame, seeds: set[int], more: int, rng: np.random.Generator
) -> PackClaim:
    """Return a claim with its cells, of which some are chosen."""
    own = cells[(cells["scenario"] == claim.scenario) & (cells["defense"] == claim.defense)]
    trainings = own[own["kind"] == "train"]
    here = at(cells[cells["found"].notna()], claim.scenario, claim.checkpoint)
    attacks, others = (here[(here["defense"] == claim.defense) == own] for own in (True, False))
    scored = attacks[attacks["scored"].astype(bool)]
    picked = [number for kind in STRATA for number in _most(scored, kind, rng)]
    if not claim.control:
        elsewhere = others[others["found"] > 0].groupby("adversary")["found"].sum()
        absent = attacks[~attacks["adversary"].isin(scored["adversary"])]
        for group in (scored, absent):
            works = group.assign(found=group["adversary"].map(elsewhere)).dropna(subset=["found"])
            picked += [number for kind in STRATA for number in _drawn(works, kind, rng)]
    examined = own.loc[own["kind"] == "replay", "number"] if seeds else ()
    tuned = own.loc[own["kind"] == "tune", "number"] if seeds else ()
    picked += [*trainings["number"]]
    seed_of = dict(zip(cells["number"], cells["seed"], strict=True))
    picked = [number for number in picked if seed_of[number] in seeds] + [*examined]
    picked += [int(one) for one in rng.permutation([*tuned])[:1]]
    left = scored[scored["seed"].isin(seeds) & ~scored["number"].isin(picked)]["number"]
    drawn = rng.permutation([*left])[: 0 if claim.control else more]
    return replace(
        claim,
        trainings=tuple(map(int, trainings["number"])),
        attacks=tuple(map(int, scored["number"])),
        chosen=tuple(sorted({int(one) for one in (*picked, *drawn)})),
    )


def _most(attacks: pd.DataFrame, kind: str, rng: np.random.Generator) -> list[int]:
    """Return the cells of the attack of a kind that found most; one at random among equals."""
    found = _found(attacks, kind)
    return _one_of(attacks, found[found == found.max()], rng)


def _drawn(attacks: pd.DataFrame, kind: str, rng: np.random.Generator) -> list[int]:
    """Return the cells of an attack of a kind. The more it found, the more probable it is."""
    return _one_of(attacks, _found(attacks, kind), rng)


def _found(attacks: pd.DataFrame, kind: str) -> pd.Series[float]:
    own = attacks[attacks["stratum"] == kind]
    return own.groupby(["adversary", "knows_defense"])["found"].sum()


def _one_of(
    attacks: pd.DataFrame, weights: pd.Series[float], rng: np.random.Generator
) -> list[int]:
    if weights.empty:
        return []
    shares = weights.to_numpy(dtype=float)
    shares = shares / shares.sum() if shares.sum() else np.full(len(shares), 1 / len(shares))
    adversary, knows = weights.index[int(rng.choice(len(shares), p=shares))]
    chosen = attacks[(attacks["adversary"] == adversary) & (attacks["knows_defense"] == knows)]
    return [*chosen["number"]]
