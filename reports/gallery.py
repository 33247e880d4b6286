"""Reconstructions beside the truth: the same victims for every defense and attack."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from PIL import Image

from leakfrontier.evaluate.labels import describe_attack, describe_defenses, rows, short_names
from leakfrontier.evaluate.store import Results

_VICTIMS = 6
_VICTIM = ["seed", "observation", "victim"]
_ATTACK = ["defense", "adversary", "knows_defense"]


@dataclass(frozen=True)
class Tile:
    """One picture, as a data URI; `identified` if it gives its victim away."""

    source: str
    identified: bool = False


@dataclass(frozen=True)
class Strip:
    """One row of pictures, a tile per victim; None where there is no picture."""

    name: str
    tiles: tuple[Tile | None, ...]


@dataclass(frozen=True)
class Gallery:
    """The pictures of one scenario and checkpoint.

    Attributes:
        references: The truth, and the guess made without looking at the upload.
        defenses: Strips of all attacks, by the defense's name.
    """

    references: tuple[Strip, ...]
    defenses: dict[str, tuple[Strip, ...]]


def make_gallery(
    results: Results, rates: pd.DataFrame, scenario: str, checkpoint: int
) -> Gallery | None:
    """Return the gallery of the first pictured victims; None without pictures.

    Args:
        results: The run.
        rates: `attack_rates(results)`; of an attack's knowledge variants the one with the
            highest rate is shown.
        scenario: Which scenario.
        checkpoint: Which attacked round.
    """
    pictures = _of(results.pictures, scenario, checkpoint)
    pictures = pictures[[_is_image(shape) for shape in pictures["shape"]]]
    if pictures.empty:
        return None
    victims = _first_victims(pictures)
    pictures = pictures.merge(victims, on=_VICTIM)
    scores = _of(results.attacks, scenario, checkpoint)[[*_ATTACK, *_VICTIM, "identified"]]
    pictures = pictures.merge(scores, on=[*_ATTACK, *_VICTIM], how="left")
    truth = Strip("truth", _tiles(pictures.drop_duplicates(_VICTIM), victims, "truth"))
    return Gallery(
        references=(truth, *_prior(pictures, victims)),
        defenses=_defenses(pictures, _of(rates, scenario, checkpoint), victims),
    )


def _of(frame: pd.DataFrame, scenario: str, checkpoint: int) -> pd.DataFrame:
    return frame[(frame["scenario"] == scenario) & (frame["checkpoint"] == checkpoint)]


def _is_image(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def _first_victims(pictures: pd.DataFrame) -> pd.DataFrame:
    """Return one victim of each of the first observations, or more of them if there are few."""
    victims = pictures[_VICTIM].drop_duplicates().sort_values(["victim", "seed", "observation"])
    return victims.head(_VICTIMS).reset_index(drop=True)


def _prior(pictures: pd.DataFrame, victims: pd.DataFrame) -> list[Strip]:
    blind = pictures[pictures["baseline"].astype(bool)].drop_duplicates(_VICTIM)
    return [Strip("prior guess", _tiles(blind, victims, "guess"))] if len(blind) else []


def _defenses(
    pictures: pd.DataFrame, rates: pd.DataFrame, victims: pd.DataFrame
) -> dict[str, tuple[Strip, ...]]:
    attacks = rates[~rates["baseline"].astype(bool)]
    strongest = attacks.sort_values("rate", ascending=False, na_position="last", kind="stable")
    strongest = strongest.drop_duplicates(["defense", "adversary"])
    names = short_names(rates["adversary"].unique())
    found: dict[str, tuple[Strip, ...]] = {}
    for defense in rows(describe_defenses(rates)):
        strips = []
        for attack in attacks["adversary"].unique():
            row = strongest[
                (strongest["defense"] == defense.defense) & (strongest["adversary"] == attack)
            ]
            if row.empty:
                continue
            chosen = pictures.merge(row[_ATTACK], on=_ATTACK)
            if chosen.empty:
                continue
            knows = bool(row["knows_defense"].fillna(False).iloc[0])
            name = describe_attack(
                names[attack],
                baseline=False,
                simulates=bool(row["simulates"].iloc[0]),
                knows=None if defense.family == "none" else knows,
                candidates=bool(row["candidates_granted"].iloc[0]),
            )
            strips.append(Strip(name, _tiles(chosen, victims, "guess")))
        found[str(defense.name)] = tuple(strips)
    return found


def _tiles(pictures: pd.DataFrame, victims: pd.DataFrame, column: str) -> tuple[Tile | None, ...]:
    found = {
        (row["seed"], row["observation"], row["victim"]): row for row in pictures.to_dict("records")
    }
    return tuple(
        Tile(
            _data_uri(found[key][column], found[key]["shape"]),
            column == "guess" and found[key]["identified"] is True,
        )
        if key in found
        else None
        for key in victims.itertuples(index=False, name=None)
    )


def _data_uri(pixels: bytes, shape: Sequence[int]) -> str:
    image = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
    planes = image[0] if shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image, 0, -1))
    buffer = io.BytesIO()
    Image.fromarray(planes).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
