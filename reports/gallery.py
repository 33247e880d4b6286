"""Reconstructions beside the truth, with the same victims for every defense and attack."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

import pandas as pd

from leakfrontier.evaluate.conclude.analysis import at
from leakfrontier.evaluate.conclude.labels import describe_defenses, limit_text, rows, short_names
from leakfrontier.evaluate.conclude.results import Conclusions

from .tables import attack_name

_VICTIMS = {"image/png": 6, "audio/wav": 2, "tokens": 3}
"""The number of victims shown, by media. Sound is large, and text is long."""

_VICTIM = ["seed", "observation", "victim"]
_ATTACK = ["defense", "adversary", "knows_defense"]


@dataclass(frozen=True)
class Token:
    """A piece of text; `wrong` if the truth has another token at its place."""

    text: str
    wrong: bool = False


@dataclass(frozen=True)
class Tile:
    """A picture, a sound or a text of one victim.

    Attributes:
        source: An image or a sound, as a data URI.
        tokens: A text instead.
        identified: Whether it identifies its victim.
        absent: The reason if there is nothing to show.
        attack: The attack that made the guess, if a strip shows several attacks.
    """

    source: str = ""
    tokens: tuple[Token, ...] = ()
    identified: bool = False
    absent: str = ""
    attack: str = ""

    @property
    def runs(self) -> tuple[Token, ...]:
        """Return the text as wrong tokens and joined runs of right ones (for text shaping)."""
        return tuple(
            token
            for wrong, run in groupby(self.tokens, key=lambda token: token.wrong)
            for token in (run if wrong else [Token("".join(part.text for part in run))])
        )


@dataclass(frozen=True)
class Strip:
    """One row of the gallery: a tile per victim, and a note."""

    name: str
    tiles: tuple[Tile, ...]
    note: str = ""


@dataclass(frozen=True)
class Gallery:
    """The reconstructions of one scenario and checkpoint.

    Attributes:
        media: As in `Rendering`.
        references: The truth, and the guess without the upload.
        worst: The worst case under every defense. For each victim it is a guess of a passive server
            that identifies it, or otherwise the guess of the strongest attack.
        defenses: Strips of all attacks, by the defense's name.
    """

    media: str
    references: tuple[Strip, ...]
    worst: tuple[Strip, ...]
    defenses: dict[str, tuple[Strip, ...]]


def make_gallery(results: Conclusions, scenario: str, checkpoint: int) -> Gallery | None:
    """Return the gallery of the first stored victims; None if there are none.

    An attack may run with and without knowledge of the defense. The variant that finds more is
    shown.

    Args:
        results: The run.
        scenario: The name of the scenario.
        checkpoint: The attacked round.
    """
    kept = at(results.renderings, scenario, checkpoint)
    if kept.empty:
        return None
    media = str(kept["media"].iloc[0])
    victims = _first_victims(kept, _VICTIMS[media])
    attacks = at(results.attacks, scenario, checkpoint).merge(victims, on=_VICTIM)
    shown = attacks[[*_ATTACK, *_VICTIM, "baseline", "outcome", "identified"]].merge(
        kept[[*_ATTACK, *_VICTIM, "media", "truth", "guess"]], on=[*_ATTACK, *_VICTIM], how="left"
    )
    truth = shown.dropna(subset="truth").drop_duplicates(_VICTIM)
    rates = at(results.rates(), scenario, checkpoint)
    return Gallery(
        media,
        references=(
            Strip("truth", _tiles(truth.assign(guess=truth["truth"], identified=False), victims)),
            *_prior(shown, victims),
        ),
        worst=_worst(shown, rates, at(results.worst_case(), scenario, checkpoint), victims),
        defenses=_defenses(shown, rates, victims),
    )


def _first_victims(kept: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return one victim of each of the first observations, or more if there are few.

    In captures, defenses may have different victims. Then each defense gets its share.
    """
    order = ["victim", "seed", "observation"]
    victims = kept[["defense", *_VICTIM]].drop_duplicates().sort_values(order)
    victims["turn"] = victims.groupby("defense").cumcount()
    victims = victims.sort_values(["turn", *order])[_VICTIM].drop_duplicates()
    return victims.head(count).reset_index(drop=True)


def _prior(shown: pd.DataFrame, victims: pd.DataFrame) -> list[Strip]:
    blind = shown[shown["baseline"]].dropna(subset="guess").drop_duplicates(_VICTIM)
    return [Strip("prior guess", _tiles(blind, victims))] if len(blind) else []


def _worst(
    shown: pd.DataFrame, rates: pd.DataFrame, worst: pd.DataFrame, victims: pd.DataFrame
) -> tuple[Strip, ...]:
    counted = ~rates["baseline"] & ~rates["candidates_granted"] & (rates["threat"] == "passive")
    attacks = shown.merge(rates.loc[counted, [*_ATTACK, "found"]], on=_ATTACK)
    attacks = attacks.dropna(subset="guess").assign(known=attacks["identified"].eq(True))
    attacks = attacks.sort_values(["known", "found"], ascending=False, kind="stable")
    attacks = attacks.drop_duplicates(["defense", *_VICTIM]).copy()
    attacks["attack"] = attacks["adversary"].map(short_names(rates, "adversary"))
    success = {row.defense: limit_text(row.rate, row.low, row.high) for row in rows(worst)}
    return tuple(
        Strip(
            str(defense.name),
            _tiles(attacks[attacks["defense"] == defense.defense], victims),
            success.get(defense.defense, ""),
        )
        for defense in rows(describe_defenses(rates))
    )


def _defenses(
    shown: pd.DataFrame, rates: pd.DataFrame, victims: pd.DataFrame
) -> dict[str, tuple[Strip, ...]]:
    names = short_names(rates, "adversary")
    attacks = rates[~rates["baseline"]]
    places = {name: place for place, name in enumerate(attacks["adversary"].unique())}
    strongest = attacks.sort_values("found", ascending=False, kind="stable")
    strongest = strongest.drop_duplicates(["defense", "adversary"])
    strongest = strongest.sort_values("adversary", key=lambda labels: labels.map(places))
    by_attack = dict(iter(shown.groupby(_ATTACK)))
    found: dict[str, tuple[Strip, ...]] = {}
    for defense in rows(describe_defenses(rates)):
        strips = []
        for row in rows(strongest[strongest["defense"] == defense.defense]):
            chosen = by_attack.get(tuple(getattr(row, name) for name in _ATTACK))
            if chosen is not None and chosen["guess"].notna().any():
                name = attack_name(names[row.adversary], row)
                absent = "not needed" if row.not_needed else "not run"
                strips.append(Strip(name, _tiles(chosen, victims, absent)))
        found[str(defense.name)] = tuple(strips)
    return found


def _tiles(shown: pd.DataFrame, victims: pd.DataFrame, absent: str = "not run") -> tuple[Tile, ...]:
    found = {tuple(row[name] for name in _VICTIM): row for row in shown.to_dict("records")}
    keys = victims.itertuples(index=False, name=None)
    return tuple(_tile(found[key]) if key in found else Tile(absent=absent) for key in keys)


def _tile(row: dict[Any, Any]) -> Tile:
    if not isinstance(row["guess"], bytes):
        return Tile(absent="refused" if row["outcome"] == "refused" else "n/a")
    said = {"identified": row["identified"] is True, "attack": row.get("attack", "")}
    if row["media"] == "tokens":
        return Tile(tokens=_marked(row["truth"], row["guess"]), **said)
    data = base64.b64encode(row["guess"]).decode()
    return Tile(f"data:{row['media']};base64,{data}", **said)


def _marked(truth: bytes, guess: bytes) -> tuple[Token, ...]:
    """Return the tokens of a guess. Tokens that differ from the truth are marked as wrong."""
    private, guessed = (_texts(tokens) for tokens in (truth, guess))
    return tuple(
        Token("" if text is None else text, wrong=text != expected)
        for expected, text in zip_longest(private, guessed)
    )


def _texts(tokens: bytes) -> Sequence[str]:
    texts: list[str] = json.loads(tokens)
    return texts


def best_strips(results: Conclusions, scenario: str, checkpoint: int) -> dict[str, Strip]:
    """Return the best stored guess of each of the first victims, by the defense's label.

    The label "" has the truth. This is for packs, which store one guess per victim: one that
    identifies it, or otherwise the nearest.
    """
    kept = at(results.renderings, scenario, checkpoint)
    if kept.empty:
        return {}
    victims = _first_victims(kept, min(_VICTIMS[str(kept["media"].iloc[0])], 4))
    attacks = at(results.attacks, scenario, checkpoint)
    key = ["cell", *_VICTIM]
    shown = kept[["defense", *key, "media", "truth", "guess"]].merge(
        attacks[[*key, "outcome", "identified"]], on=key
    )
    truth = shown.drop_duplicates(_VICTIM)
    truth = truth.assign(guess=truth["truth"], identified=False)
    strips = {"": Strip("truth", _tiles(truth, victims))}
    for defense, own in shown.groupby("defense", sort=False):
        strips[str(defense)] = Strip(str(defense), _tiles(own, victims))
    return strips
