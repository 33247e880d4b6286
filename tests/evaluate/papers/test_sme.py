"""The tables of SME, DLG and Inverting Gradients at toy size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from federated import rng

from leakfrontier.adversaries import FedAvg
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.papers import sme
from leakfrontier.evaluate.papers.sme import FEMNIST, build_attack, peak_memory, sme_upload
from leakfrontier.evaluate.papers.table import draw_batch
from leakfrontier.evaluate.papers.tables import TABLES

SMALL = {"E": 2, "N": 4}


@pytest.fixture(scope="module")
def data() -> dict[str, Dataset]:
    """Return the datasets of the tables by name."""
    folder = Path(os.environ.get("LEAKFRONTIER_DATA", ""))
    found = {FEMNIST: folder / "emnist_letters", "cifar100": folder / "cifar100"}
    for path in found.values():
        if not (path.is_absolute() and (path / "train").is_dir()):
            pytest.skip(f"LEAKFRONTIER_DATA does not name a folder with {path.name}/train")
    return {name: load_dataset(str(path)) for name, path in found.items()}


def test_the_papers_numbers_at_a_few_places() -> None:
    second, sixth, seventh = (TABLES[f"sme-table{number}"].rows for number in (2, 6, 7))
    assert [len(rows) for rows in (second, sixth, seventh)] == [36, 48, 72]
    assert second[2].setting == {"attack": "SME", "dataset": FEMNIST, "E": 10, "N": 10}
    assert second[2].paper == {"psnr": 30.3, "L_sim": 0.019}
    assert second[19].setting == {"attack": "IG", "dataset": "cifar100", "E": 10, "N": 10}
    assert second[19].paper == {"psnr": 26.0, "L_sim": 0.050}
    assert second[33].paper == {}
    assert sixth[14].setting == {"attack": "SME", "R": 5, "E": 10, "N": 10}
    assert sixth[14].paper == {"psnr": 24.8, "L_sim": 0.009}
    assert sixth[45].setting == {"attack": "DLFA", "R": 20, "E": 20, "N": 50}
    assert seventh[-4].paper == {"psnr": 20.0, "L_sim": 0.044}
    assert seventh[-4].setting == {"attack": "SME", "network": "ViT", "E": 20, "N": 50}


def test_letters_spread_as_femnist_does(data: dict[str, Dataset]) -> None:
    space = sme._FEMNIST_SPACE
    letters = draw_batch(data[FEMNIST].train, 500, rng())
    pixels = space.to_unit(sme._inputs(letters, space).inputs)
    assert pixels.std().item() == pytest.approx(0.158, abs=0.008)
    assert pixels.mean().item() == pytest.approx(0.964, abs=0.015)
    assert pixels.max().item() == pytest.approx(1, abs=1e-4)
    assert pixels.min() < 0.1


@pytest.mark.parametrize(
    ("network", "parameters"),
    [("CNN", 338_778), ("MLP", 1_848_062), ("LeNet", 66_126), ("ResNet8", 2_417_846)],
)
def test_networks_have_the_papers_size(
    network: str, parameters: int, data: dict[str, Dataset]
) -> None:
    model = sme_upload({**SMALL, "network": network}, data[FEMNIST], rng()).observation.model
    assert sum(value.numel() for value in model.parameters()) == parameters


@pytest.mark.parametrize("attack", ["SME", "IG", "DLFA"])
@pytest.mark.parametrize("dataset", [FEMNIST, "cifar100"])
def test_a_trial_of_every_attack(
    attack: str, dataset: str, data: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = {**SMALL, "dataset": dataset}
    monkeypatch.setattr(sme, "build_attack", lambda problem, name: build_attack(problem, name, 3))
    scores = sme.sme_trial(problem, {"attack": attack}, data[dataset], rng())
    assert len(scores["psnr"]) == 4
    assert 0 < scores["L_sim"][0] < 2
    assert scores["seconds"][0] > 0


def test_attacks_differ_as_the_paper_says() -> None:
    sme, ig = (build_attack({}, name) for name in ("SME", "IG"))
    assert (sme.alpha, sme.alpha_lr, ig.alpha, ig.alpha_lr) == (0.5, 0.001, 0, 0)  # type: ignore[attr-defined]
    assert build_attack({"network": "ViT"}, "SME").lr == 0.1  # type: ignore[attr-defined]
    colours = build_attack({"dataset": "cifar100"}, "DLFA")
    assert (colours.lr, build_attack({}, "DLFA").lr) == (0.1, 0.4)  # type: ignore[attr-defined]


def test_a_trained_network_is_attacked_in_its_round(
    data: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sme, "_FEDERATION", FedAvg(1, 200, 0.05))
    monkeypatch.setattr(sme, "_ROUNDS", (1, 2, 3))
    sme._trained.cache_clear()
    first, late, again = (
        sme_upload({**SMALL, "R": rounds}, data[FEMNIST], rng()).observation.model
        for rounds in (2, 3, 3)
    )
    assert not torch.equal(first[0].weight, late[0].weight)  # type: ignore[index]
    assert torch.equal(late[0].weight, again[0].weight)  # type: ignore[index]
    assert late is not again
    sme._trained.cache_clear()


def test_local_training_leaves_the_plane_only_slowly(data: dict[str, Dataset]) -> None:
    scores = sme.path_trial({"N": 20, "E": 5, "B": 20}, {}, data[FEMNIST], rng())
    assert scores["ratio"][0] > 0.98
    assert scores["max cos"][0] > scores["cos w_0"][0] > 0.9


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    def alive_one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(1000, 250)

    def alive_together() -> None:
        [torch.zeros(1000, 250) for _ in range(5)]

    assert peak_memory(alive_one_after_the_other) == pytest.approx(1e6, rel=0.1)
    assert peak_memory(alive_together) == pytest.approx(5e6, rel=0.1)


def test_the_cost_of_simulation_grows_with_the_steps(data: dict[str, Dataset]) -> None:
    memory = {
        (attack, epochs): sme.cost_trial(
            {"E": epochs, "N": 4}, {"attack": attack}, data[FEMNIST], rng()
        )["memory"][0]
        for attack in ("SME", "DLFA")
        for epochs in (1, 5)
    }
    assert memory["SME", 5] == pytest.approx(memory["SME", 1], rel=0.1)
    assert memory["DLFA", 5] > 2 * memory["DLFA", 1]
