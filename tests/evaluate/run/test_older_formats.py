"""Files of formats 1 and 2, as they were written, give the tables and the page of today."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from leakfrontier.evaluate.run.store import FILE_NAME, Store
from leakfrontier.reports import write_report

ATTACKS = (
    "observation, victim, reason, psnr, ssim, psnr_transformed, identified, identified_original, "
    "counterfactual, candidates, label_correct, labels_granted, objective, objective_at_truth"
)
PICTURES = "cell TEXT, observation, victim, shape, truth, guess"
CHAIN = {
    "name": "Chain",
    "options": {},
    "links": [
        {"name": "DPSGD", "options": {"noise_multiplier": 0.1}},
        {"name": "mine.py:TopK", "options": {"ratio": 0.5}, "source": "c0ffee"},
    ],
}
DEFENSES = {
    "none": ({"name": "none", "options": {}}, "none"),
    "DPSGD(noise_multiplier=0.1) then TopK(ratio=0.5)": (CHAIN, "Chain"),
}


def write_old(folder: Path, version: int) -> None:
    """Write a run as earlier versions did, statement by statement."""
    later = ", bound, seconds" if version == 2 else ", seconds"
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute(f"PRAGMA application_id = {0x4C46524F}")
        database.execute(f"PRAGMA user_version = {version}")
        database.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT)")
        database.execute("CREATE TABLE plan (cell TEXT PRIMARY KEY, kind TEXT, config, labels)")
        database.execute(
            "CREATE TABLE outcomes (cell TEXT PRIMARY KEY, status, error, seconds, busy)"
        )
        database.execute(f"CREATE TABLE attacks (cell TEXT, {ATTACKS}{later})")
        database.execute("CREATE TABLE utility (cell TEXT, round, correct, total, loss)")
        database.execute(
            "CREATE TABLE pictures (cell TEXT, observation, victim, shape, truth, guess)"
        )
        plan = []
        for label, (defense, family) in DEFENSES.items():
            labels = {
                "scenario": "digits/mlp",
                "defense": label,
                "family": family,
                "strength": None,
                "stochastic": False,
                "seed": 0,
            }
            attack = labels | {
                "checkpoint": 0,
                "adversary": "LinearLeakage",
                "threat": "passive: reads what honest training reveals",
                "baseline": False,
                "simulates": False,
                "knows_defense": True,
            }
            adversary = {"name": "LinearLeakage", "options": {"tolerance": 0.1}}
            trained, attacked = f"train {label}", f"attack {label}"
            plan += [trained, attacked]
            for key, kind, config, texts in (
                (trained, "train", {"defense": defense}, labels),
                (attacked, "attack", {"defense": defense, "adversary": adversary}, attack),
            ):
                content = (key, kind, json.dumps(config), json.dumps(texts))
                database.execute("INSERT INTO plan VALUES (?, ?, ?, ?)", content)
                database.execute("INSERT INTO outcomes VALUES (?, 'ok', '', 1.0, 0.5)", (key,))
            database.execute("INSERT INTO utility VALUES (?, 5, 90, 100, 0.5)", (trained,))
            scored = [attacked, 0, 0, None, 30.5, 0.9, None, 1, 1, 0, 20, 1, 0, None, None]
            absent = [attacked, 1, 0, "no bias", *[None] * 8, 0, None, None]
            for row in (scored, absent):
                values = [*row, *([0.7] if version == 2 else []), 2.0]
                marks = ", ".join("?" * len(values))
                database.execute(f"INSERT INTO attacks VALUES ({marks})", values)
            for observation, shape in enumerate(("[1, 2, 2]", "[4]")):
                picture = (attacked, observation, 0, shape, b"\x00\xff\x80\x01", b"abcd")
                database.execute("INSERT INTO pictures VALUES (?, ?, ?, ?, ?, ?)", picture)
        meta = {"panel": "2026.1", "config": {"seeds": 1}, "plan": plan}
        for name, value in meta.items():
            database.execute("INSERT INTO meta VALUES (?, ?)", (name, json.dumps(value)))


@pytest.mark.parametrize("version", [1, 2])
def test_older_files_are_read_as_those_of_today(tmp_path: Path, version: int) -> None:
    write_old(tmp_path, version)
    results = Store(tmp_path).results()
    labels = results.cells.set_index("cell").loc[f"attack {list(DEFENSES)[1]}"]
    assert labels["family"] == "DPSGD then TopK"
    assert labels["defense_options"] == {"1 DPSGD noise_multiplier": 0.1, "2 TopK ratio": 0.5}
    assert (labels["adversary_name"], labels["threat"]) == ("LinearLeakage", "passive")
    assert labels["adversary_options"] == {"tolerance": 0.1}
    assert results.cells["control"].sum() == 2
    assert set(results.attacks["outcome"]) == {"scored", "not applicable"}
    assert set(results.scores["metric"]) == {"psnr", "ssim"}
    assert set(results.renderings["media"]) == {"image/png"}
    assert all(truth.startswith(b"\x89PNG") for truth in results.renderings["truth"])
    rates = results.rates()
    assert rates["psnr"].tolist() == [30.5, 30.5]
    assert rates["not_applicable"].tolist() == [1, 1]
    assert rates["not_needed"].tolist() == rates["refused"].tolist() == [0, 0]
    np.testing.assert_array_equal(rates["bound"], [np.nan if version == 1 else 0.7] * 2)
    assert results.final_utility()["refused"].tolist() == [0, 0]


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_made_of_an_older_file(tmp_path: Path) -> None:
    write_old(tmp_path, 1)
    page = write_report(tmp_path).read_text()
    assert "DPSGD(noise_multiplier=0.1) then TopK(ratio=0.5)" in page
    assert page.count("data:image/png") == 5  # the truth, and a guess under each defense, twice
    assert "no bias" in page
