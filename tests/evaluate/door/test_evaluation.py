from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import FedAvg, ImageSpace, LinearLeakage
from leakfrontier.defenses import Chain, Defense, TopK, Update
from leakfrontier.evaluate.door.evaluation import attack, evaluate, load
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.outside.capture import capture


@dataclass
class Rounded(Defense):
    step: float = 0.01

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: (value / self.step).round() * self.step for name, value in update.items()}


@dataclass
class Masked(Defense):
    """Its tensor is no option that a file can name: the object travels whole."""

    mask: Tensor

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: value * self.mask for name, value in update.items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": Net,
    "candidates": 20,
    "training": {"rounds": 2, "clients": 4},
}


def small(*defenses: object, **changes: Any) -> Any:  # noqa: ANN401 - results
    options: dict[str, Any] = {
        "scenario": SMALL,
        "adversaries": ["PriorGuess", LinearLeakage()],
        "observations": 3,
        "only": True,
        "workers": 2,
        "quiet": True,
    }
    return evaluate(*defenses, **{**options, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a session's defense on a session's model."""
    place = tmp_path_factory.mktemp("door")
    masked = [Chain((Masked(torch.tensor(one)), TopK(ratio=1.0))) for one in (0.5, 0.25)]
    small(Rounded(1e-4), Rounded, {"name": "TopK", "ratio": [0.5, 1.0]}, *masked, out=place)
    return place


def test_objects_of_a_session_are_trained_and_attacked(folder: Path) -> None:
    results = load(folder)
    expected = {"none", "Rounded", "Rounded(step=0.0001)", "TopK(ratio=0.5)", "TopK(ratio=1.0)"}
    named = {one for one in results.frontier().points["defense"] if "Masked" not in one}
    assert named == expected
    assert results.frontier().points["defense"].nunique() == len(expected) + 2
    assert results.cells["status"].eq("ok").all()
    rates = results.rates().set_index(["defense", "adversary"])["rate"]
    assert rates["none", "LinearLeakage"] == 1
    assert results.frontier().scenario == "digits/Net"


def test_what_is_in_the_folder_is_not_run_again(folder: Path) -> None:
    before = load(folder).cells.set_index("cell")["seconds"]
    again = small(Rounded(1e-4), TopK(ratio=0.5), out=folder)
    assert {*again.cells["cell"]} < {*before.index}
    for cell, seconds in again.cells.set_index("cell")["seconds"].items():
        assert seconds == before[cell]


def test_a_model_in_hand_keeps_its_weights(tmp_path: Path) -> None:
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    results = small(model=net, adversaries=["LinearLeakage"], out=tmp_path)
    assert results.frontier().scenario == "digits/Net"
    assert not results.attacks["identified"].any()  # no gradient passes through dead units


def test_a_scenario_may_be_given_by_name_dataset_and_model(tmp_path: Path) -> None:
    results = evaluate(
        config={"scenarios": [SMALL], "defenses": ["none", Rounded], "observations": 2},
        adversaries=["PriorGuess"],
        model={"name": "mlp", "width": 4},
        out=tmp_path,
        quiet=True,
    )
    assert results.frontier().scenario == "digits/mlp(width=4)"
    assert {*results.frontier().points["defense"]} == {"none", "Rounded"}
    assert results.config["scenarios"][0]["training"]["rounds"] == 2


def test_the_default_is_the_preset_with_its_defenses(monkeypatch: pytest.MonkeyPatch) -> None:
    from leakfrontier.evaluate.door import evaluation

    seen: dict[str, Any] = {}

    def run(config: Any, folder: Path, **_: Any) -> None:  # noqa: ANN401
        seen.update(config=config, folder=folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "run", run)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Rounded(0.5), quiet=True)
    assert seen["folder"] == Path("runs/quick")
    names = [one.name.rpartition(":")[2] for one in seen["config"].defenses]
    assert names[0] == "none"
    assert names[-1] == "Rounded"
    assert "DPSGD" in names
    with pytest.raises(KeyboardInterrupt):
        evaluate(Rounded(0.5), scenario="fashion-mini/mlp", device="auto", quiet=True)
    (scenario,) = seen["config"].scenarios
    assert (scenario.name, scenario.training.rounds) == ("fashion-mini/mlp", 80)
    assert scenario.device == "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scenario": "missing"}, "unknown scenario"),
        ({"scenario": {"datset": "digits"}}, "unknown key 'datset'"),
        ({"model": 3}, "expected a model"),
        ({"dataset": "missing"}, "missing"),
        ({"observations": 0}, "observations"),
        ({"config": "missing.yaml"}, "cannot read the configuration"),
        ({"adversaries": [TopK(ratio=0.5)]}, "TopK"),
        ({"workers": 0}, "workers must be a whole number from 1"),
        ({"engine": "ray"}, "engine must be an Engine"),
        ({"config": None}, "config must be a preset, a path or a mapping"),
        ({"dataset": 3}, "dataset must be a name or a path"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        small(**{**given, "out": tmp_path})


def test_methods_may_be_given_as_lists_or_alone(tmp_path: Path) -> None:
    found = small([Rounded, ["SignSGD"]], adversaries="PriorGuess", observations=1, out=tmp_path)
    assert {*found.rates()["defense"]} == {"none", "Rounded", "SignSGD"}
    assert {*found.rates()["adversary"]} == {"PriorGuess"}


def test_what_is_no_defense_is_refused(tmp_path: Path) -> None:
    for wrong in (3, nn.Linear(1, 1), LinearLeakage()):
        with pytest.raises(UserError, match=r"expected a defense|must be a subclass|unknown"):
            small(wrong, out=tmp_path)


def test_captures_of_an_own_loop_are_attacked(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    inputs, targets = torch.rand(1, 1, 8, 8), torch.tensor([3])
    file = tmp_path / "own.py"
    file.write_text(
        "from torch import nn\ndef build(space):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    with capture(
        model,
        tmp_path / "captures" / "one",
        model=f"{file}:build",
        space=ImageSpace((1, 8, 8), 10),
        batch_size=1,
        dataset="digits",
        defense=Defense(),
        truth=(inputs, targets),
    ):
        nn.functional.cross_entropy(model(inputs), targets).backward()
    results = attack(
        tmp_path / "captures",
        adversaries=[LinearLeakage()],
        trust_code=True,
        candidates=20,
        out=tmp_path / "out",
        quiet=True,
    )
    assert results.attacks["identified"].all()
    assert results.report().is_file()


def test_a_capture_names_no_code_of_a_session(tmp_path: Path) -> None:
    model = nn.Linear(64, 10)
    with (
        pytest.raises(ValueError, match="Rounded is defined in a notebook or a script"),
        capture(
            model,
            tmp_path / "one",
            model={"name": "mlp", "width": 4},
            space=ImageSpace((1, 8, 8), 10),
            batch_size=1,
            protocol=FedAvg(epochs=1),
            defense=Rounded(),
        ),
    ):
        pass
    assert not (tmp_path / "one").exists()


def test_a_pack_is_loaded_like_a_folder() -> None:
    pack = Path(__file__).parents[3] / "benchmarks" / "standard" / "mlp-trained.zip"
    results = load(pack)
    assert "DPSGD" in " ".join(results.frontier().points["defense"])
