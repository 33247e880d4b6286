"""From a configuration to a page in a browser: sound, text, and a server that is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import token_leakage
import toy_imprint
from playwright.sync_api import Page

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.reports import write_report

DATA = Path(os.environ.get("LEAKFRONTIER_DATA", "nowhere"))
IMPRINT = f"{toy_imprint.__file__}:ToyImprint"
INSPECTING = f"{toy_imprint.__file__}:Inspecting"
TRAINING = {"rounds": 2, "clients": 4, "clients_per_round": 2, "batch_size": 8}

pytestmark = pytest.mark.usefixtures("undrawn")
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="LEAKFRONTIER_DATA does not name the folder of datasets"
)


def reported(
    page: Page,
    folder: Path,
    scenario: dict[str, Any],
    *,
    defenses: list[Any],
    adversaries: list[Any],
) -> Conclusions:
    """Run, and open the page."""
    config = load_config(
        {
            "scenarios": [{"training": TRAINING, **scenario}],
            "defenses": defenses,
            "adversaries": ["PriorGuess", *adversaries],
            "observations": 2,
        }
    )
    results = run(config, folder, workers=1)
    assert set(results.cells["status"]) <= {"ok", "not needed"}
    page.goto(write_report(folder).as_uri())
    return results


@needs_data
def test_sound_is_attacked_and_can_be_played(page: Page, tmp_path: Path) -> None:
    results = reported(
        page,
        tmp_path,
        {
            "dataset": str(DATA / "audio" / "fsdd"),
            "model": {"name": "mlp", "width": 32},
            "candidates": 10,
            "checkpoints": [0],
        },
        defenses=["none", {"name": "DPSGD", "noise_multiplier": 10.0}],
        adversaries=["LinearLeakage"],
    )
    snr = results.scores[results.scores["metric"] == "snr"].groupby("defense")["value"].median()
    assert snr["none"] > 60
    assert snr.drop("none").max() < 10
    players = page.locator("#gallery audio")
    assert players.count() >= 6  # the truth, the prior and the attack, twice
    player = players.first.element_handle()
    page.wait_for_function("player => player.readyState > 0", arg=player, timeout=20_000)
    assert page.evaluate("player => player.duration", player) > 0.2
    assert page.evaluate("player => player.play().then(() => !player.paused)", player)


@needs_data
def test_wrong_tokens_of_a_text_are_marked(page: Page, tmp_path: Path) -> None:
    results = reported(
        page,
        tmp_path,
        {
            "dataset": str(DATA / "text" / "sst2"),
            "model": {"name": "token_mlp", "width": 128},
            "checkpoints": [0],
        },
        defenses=["none", {"name": "Noise", "scale": 1.0}],
        adversaries=[f"{token_leakage.__file__}:TokenLeakage"],
    )
    rates = results.rates().set_index(["defense", "adversary"])["rate"]
    assert rates["none", "TokenLeakage"] == 1.0
    assert rates["Noise(scale=1.0)", "TokenLeakage"] == 0.0
    assert page.locator("#gallery .tokens").count() >= 6
    undefended, noisy = (
        page.locator("#gallery h4", has_text=name).locator("xpath=following-sibling::table[1]")
        for name in ("none", "Noise")
    )
    assert undefended.locator(".tokens").count() >= 4
    assert undefended.locator("mark").count() == 0
    assert noisy.locator("mark").count() > 20
    page.locator("#gallery summary").click()
    assert noisy.locator("mark").first.is_visible()


def test_a_refused_attack_is_no_zero(page: Page, tmp_path: Path) -> None:
    together = {"name": "SecureAggregation", "clients": 4}
    results = reported(
        page,
        tmp_path,
        {
            "dataset": "digits",
            "model": {"name": "mlp", "width": 16},
            "training": {**TRAINING, "batch_size": 1},  # every upload has the attacked size
        },
        defenses=["none", together, {"name": "Chain", "links": [together, INSPECTING]}],
        adversaries=[IMPRINT],
    )
    worst = results.worst_case().set_index("defense")
    open_, inspected = (
        next(name for name in worst.index if name.startswith("Secure") and ("then" in name) == then)
        for then in (False, True)
    )
    assert worst.loc[open_, "parameters_rate"] == 1.0
    assert worst.loc[inspected, "parameters_rate"] != worst.loc[inspected, "parameters_rate"]
    rates = results.rates().set_index(["defense", "adversary_name"])
    assert rates.loc[(inspected, "ToyImprint"), "refused"] == 2
    text = page.locator("#gaps").inner_text()
    assert "refused by the client" in text.lower()
    assert "rows of the first layer are the same" in text
