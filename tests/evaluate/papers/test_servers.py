"""The tables of malicious servers at toy size."""

from __future__ import annotations

import math

import pytest
import torch
from federated import SPACE, batch, rng

from leakfrontier.adversaries import ARES, RobbingTheFedDirectPass, TrapWeights
from leakfrontier.defenses import Noise
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers import ares, loki, robbing_the_fed
from leakfrontier.evaluate.papers.servers import (
    Setup,
    attack_of,
    crafted_upload,
    psnrs,
    scores,
    shrunk,
)
from leakfrontier.evaluate.papers.table import PaperSetting
from leakfrontier.evaluate.papers.tables import TABLES


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def test_the_papers_numbers_at_a_few_places() -> None:
    second = TABLES["ares-table2"].rows
    assert len(second) == 33
    assert second[0].setting == {"attack": "ARES", "dataset": "cifar10", "batch": 32}
    assert second[0].paper == {"psnr": 92.27}
    assert second[7].setting == {"attack": "RtF", "dataset": "cifar10", "batch": 256}
    assert second[7].paper == {"psnr": 15.08}
    assert second[-1].setting == {"attack": "TW", "dataset": "ham", "batch": 64}
    assert second[-1].paper == {"psnr": 14.39}
    assert TABLES["ares-table3"].rows[4].paper == {"psnr": 28.26}
    assert TABLES["ares-fig13"].rows[5].paper == {"psnr": 51.9}
    assert TABLES["ares-ats"].rows[0].paper == {"psnr": 86.8}
    assert TABLES["rtf"].rows[1].paper["60 dB"] == 63 / 64
    assert TABLES["loki"].rows[0].paper["20 dB"] == 575 / 640


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("ares-")])
def test_methods_and_networks_exist(name: str) -> None:
    table = TABLES[name]
    for row in table.rows:
        for procedure in table.procedures.values():
            attack_of(procedure(row.method))
        assert row.problem.get("network", "CNN") in ares.NETWORKS


def test_the_papers_procedure_has_the_papers_bins() -> None:
    published = TABLES["ares-table2"].procedures["paper"]
    assert attack_of(published({"attack": "ARES"})) == ARES(bins="paper")
    assert attack_of(published({"attack": "RtF"})) == RobbingTheFedDirectPass(calibrated=False)
    assert attack_of(published({"attack": "TW"})) == TrapWeights()


def test_exact_guesses_are_not_given_away_and_missing_ones_are_the_mean_colour() -> None:
    truth = batch(3).inputs
    guess = torch.cat([truth[2:], truth[:1] + 0.04])  # of the standard deviation, 0.25
    found = psnrs(guess, truth, SPACE)
    assert found[2] == 200
    assert found[0] == pytest.approx(40, abs=0.5)  # clamped where it leaves the range
    mean = -10 * math.log10(float((SPACE.to_unit(truth[1]) - 0.5).square().mean()))
    assert found[1] == pytest.approx(mean, abs=1e-4)
    assert scores(found)["20 dB"] == [1, 0, 1]
    assert scores(found)["60 dB"] == [0, 0, 1]
    assert scores(found)["median"][0] == pytest.approx(found[0].item())


def test_large_images_are_shrunk_and_others_left(digits: Dataset) -> None:
    assert shrunk(digits, 8) is digits
    small = shrunk(digits, 4)
    assert small.space.shape == small.train.inputs.shape[1:] == (1, 4, 4)
    averages = digits.train.inputs.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean(dim=(3, 5))
    torch.testing.assert_close(small.train.inputs, averages)


CASES: list[tuple[PaperSetting, set[str]]] = [
    ({"batch": 4}, set()),
    ({"batch": 4, "network": "MLP"}, set()),
    ({"batch": 4, "bits": 16}, set()),
    ({"batch": 4, "density": 0.9}, set()),
    ({"batch": 4, "b": 1e-8}, {"noise"}),
    ({"batch": 8, "E": 2}, set()),
    ({"batch": 4, "clients": 2}, set()),
]


@pytest.mark.parametrize(("problem", "more"), CASES, ids=str)
def test_ares_recovers_small_digits(problem: PaperSetting, more: set[str], digits: Dataset) -> None:
    method = {"attack": "ARES rows" if "clients" in problem else "ARES"}
    found = ares.ares_trial(problem, method, digits, rng())
    assert {*found} == {*TABLES["ares-table2"].metrics, "seconds"} | more
    if "E" in problem:  # rounding of local steps loses some: the share varies from batch to batch
        more_found = [ares.ares_trial(problem, method, digits, rng(seed)) for seed in (1, 2, 3)]
        shares = [sum(one["20 dB"]) / problem["batch"] for one in (found, *more_found)]
        assert sum(shares) / len(shares) >= 0.6
        return
    assert sum(found["20 dB"]) >= problem["batch"] * 3 / 4
    if "b" not in problem:
        return
    assert -8 < found["noise"][0] < -3
    assert (
        found["noise"][0]
        > ares.ares_trial({**problem, "b": 1e-9}, method, digits, rng())["noise"][0]
    )


def test_transformed_images_are_what_is_recovered(few_photos: Dataset) -> None:
    found = ares.ares_trial({"defense": "ATS", "batch": 8}, {"attack": "ARES"}, few_photos, rng())
    assert sum(found["60 dB"]) >= 6
    assert sum(found["original"]) < sum(found["psnr"]) - 8 * 40


def test_noise_is_relative_to_the_gradient_that_is_attacked(digits: Dataset) -> None:
    model = build_model("mlp", digits.space, rng(), width=16)
    for scale in (0.0, 1.0):
        upload = crafted_upload(ARES(), Setup(model, 4, defense=Noise(scale)), digits, rng())
        clean = crafted_upload(ARES(), Setup(model, 4), digits, rng())
        entries = clean.observation.update["1.weight"].abs()
        expected = float(entries[entries > 0].median())
        assert ares.median_entry(upload) == pytest.approx(expected, rel=1e-3)


def test_who_is_alone(digits: Dataset) -> None:
    found = ares.rate_trial({"batch": 16}, {"attack": "RtF"}, digits, rng())
    assert found["Eq. 16"][0] < found["expected"][0]
    assert sum(found["alone"]) / 16 == pytest.approx(found["expected"][0], abs=0.2)
    traps = ares.rate_trial({"batch": 16}, {"attack": "TW"}, digits, rng())
    assert len(traps["alone"]) == 16


def test_the_modules_of_rtf_and_loki(few_photos: Dataset) -> None:
    found = robbing_the_fed.rtf_trial({"bins": 512}, {"query": "random"}, few_photos, rng())
    assert sum(found["60 dB"]) >= 45
    row = TABLES["rtf"].rows[3]
    assert TABLES["rtf"].procedures["paper"](row.method) == {
        "query": "fourier",
        "mode": 0,
        "calibrated": False,
    }
    assert loki.CLIENTS * loki.EXAMPLES == 640
    published = TABLES["loki"].procedures["paper"]
    assert published({"queries": 2}) == {"queries": 2, "readout": "minmax"}
