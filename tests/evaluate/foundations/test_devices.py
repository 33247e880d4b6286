"""Cells on another device: the same numbers, and nothing made in the wrong place."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pretended import THERE, pretended_device
from pydantic import JsonValue
from small_panel import OF_WEIGHTS, SMALL

from leakfrontier.adversaries import PANEL, ImageSpace
from leakfrontier.adversaries.matching import inverting_gradients
from leakfrontier.defenses import Batch, Defense, base
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.foundations.devices import current_device, on_device, resolved
from leakfrontier.evaluate.foundations.errors import OWN_FOLDER
from leakfrontier.evaluate.foundations.rows import Outcome
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.papers.table import PaperSetting, Scores, TableTrial
from leakfrontier.evaluate.papers.tables import TABLES
from leakfrontier.evaluate.run import cells, scenes, training_clients
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial, Trial, run_trial
from leakfrontier.evaluate.run.training_server import Order
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

MLP = Method(name="mlp", options={"width": 16})
SCENARIO = Scenario(
    dataset="digits",
    model=MLP,
    candidates=20,
    training=Training(rounds=2, clients=4, clients_per_round=2, batch_size=4),
)
AVERAGING = SCENARIO.model_copy(
    update={
        "protocol": Method(name="FedAvg", options={"epochs": 2, "batch_size": 1, "lr": 0.1}),
        "batch_size": 2,
    }
)
CONVOLUTIONS = Method(name="cnn")
INVERTIBLE = SCENARIO.model_copy(update={"model": Method(name="lenet_x")})
BATCH = SCENARIO.model_copy(update={"batch_size": 2, "model": CONVOLUTIONS})
TEXTS = Scenario(
    dataset="messages",
    task="next-token",
    model=Method(name="gpt2", options={"layers": 2, "width": 96, "heads": 2}),
    candidates=10,
)
SPACE = ImageSpace((3, 32, 32), 10, (0.5,) * 3, (0.25,) * 3)
MATCHED: dict[str, JsonValue] = {"iterations": 2, "starts": 2, "orders": 2}
OTHERS: dict[str, tuple[Scenario, dict[str, JsonValue]]] = {
    "PriorGuess": (SCENARIO, {}),
    "Fishing": (BATCH, {"iterations": 3}),
    "ScaleMIA": (BATCH, {"epochs": 1, "examples": 20}),
    "RGAP": (INVERTIBLE, {}),
    "RCONV": (INVERTIBLE, {}),
}
OF_TEXTS: dict[str, dict[str, JsonValue]] = {
    "LanguageGuess": {},
    "DAGER": {},
    "SOMP": {"pool": 20, "width": 4, "groups": 2},
    "LAMP": MATCHED,
    "GRAB": {**MATCHED, "rounds": 1, "beams": 2},
}
UNSTEADY = ("DAGER", "SOMP")
"""Those that lose a token on the pretended device in some runs, and never on the CPU: of them only
is asked that nothing is on the wrong device."""

DEFENSES = [
    Method(name="DPSGD", options={"noise_multiplier": 0.1}),
    Method(name="TopK", options={"ratio": 0.3, "error_feedback": True}),
    Method(name="Quantization", options={"bits": 4}),
    Method(name="Noise", options={"scale": 0.01, "distribution": "laplace"}),
    Method(name="ATS", options={"policy": "3-1-7"}),
    Method(name="SecureAggregation", options={"clients": 2}),
]


class Here:
    """A server in this process: another one does not know the pretended device."""

    def new(self, make: Callable[..., object], order: Order, _: bytes) -> None:
        world = load_world(order.scenario)
        model = world.model(Defense(), order.draws[1])  # type: ignore[arg-type]
        with patch.object(pickle, "loads", lambda _: (model, world.protocol)):
            self.made = make(order, b"")

    def call(self, method: str, content: bytes = b"") -> bytes:
        found: bytes = getattr(self.made, method)(content)
        return found


@contextmanager
def server_in_this_process() -> Iterator[None]:
    with patch.object(training_clients, "clean_process", Here):
        yield


def both(trial: Trial) -> tuple[Outcome, Outcome]:
    """Do a cell here, and on a device that mixes with no other."""
    outcomes, folder = [], Path(tempfile.mkdtemp(prefix=OWN_FOLDER))
    for device in ("cpu", "there"):
        scenes._SHOWN.clear()
        cells._EXAMINED.clear()
        if device == "cpu":
            outcomes.append(trial.run(folder))
            continue
        with pretended_device(), on_device(THERE), server_in_this_process():
            outcomes.append(trial.run(folder))
    shutil.rmtree(folder)
    here, there = (
        replace(
            one,
            busy=0.0,
            attacks=tuple(replace(row, seconds=0.0) for row in one.attacks),
        )
        for one in outcomes
    )
    return here, there


def attacked(
    scenario: Scenario, defense: Method, adversary: Method, uploads: int = 2
) -> AttackTrial:
    return AttackTrial(
        scenario,
        defense,
        adversary,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(uploads)),
        pictures=1,
    )


SHORT: dict[str, dict[str, JsonValue]] = {
    **{name: {"iterations": 3} for name in ("InvertingGradients", "SME", "DLG", "IDLG", "DLFA")},
    **{name: {"iterations": 3} for name in ("GradInversion", "FedLeak")},
    "LearningToInvert": {"uploads": 60},
}


def short(name: str) -> Method:
    """Return an attack of the panel with a few iterations of its inner loop."""
    return Method(name=name, options={**SMALL[name].options, **SHORT.get(name, {})})


@pytest.mark.parametrize("name", SMALL)
def test_attacks_run_on_another_device(name: str) -> None:
    scenario = AVERAGING if name in OF_WEIGHTS else SCENARIO
    here, there = both(attacked(scenario, Method(name="none"), short(name)))
    assert [row.outcome for row in here.attacks] == [row.outcome for row in there.attacks]
    assert {row.outcome for row in there.attacks} == {"scored"}
    assert there == here


@pytest.mark.parametrize("name", OTHERS)
def test_attacks_on_other_models_run_on_another_device(name: str) -> None:
    scenario, options = OTHERS[name]
    here, there = both(attacked(scenario, Method(name="none"), Method(name=name, options=options)))
    assert {row.outcome for row in there.attacks} == {"scored"}
    assert there == here


@pytest.mark.parametrize("name", OF_TEXTS)
def test_attacks_on_texts_run_on_another_device(name: str) -> None:
    adversary = Method(name=name, options=OF_TEXTS[name])
    here, there = both(attacked(TEXTS, Method(name="none"), adversary, uploads=1))
    assert {row.outcome for row in there.attacks} == {"scored"}
    if name in UNSTEADY:
        return
    assert [row.identified for row in there.attacks] == [row.identified for row in here.attacks]
    for one, other in zip(there.scores, here.scores, strict=True):  # sums in another order
        assert replace(one, value=0.0) == replace(other, value=0.0)
        assert one.value == pytest.approx(other.value, abs=1e-4)


def test_every_attack_of_the_panel_runs_on_another_device() -> None:
    assert {*SMALL, *OTHERS, *OF_TEXTS} == {*PANEL.members}


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("defense", DEFENSES, ids=lambda method: method.name)
def test_defenses_run_on_another_device(defense: Method) -> None:
    here, there = both(TrainTrial(SCENARIO, defense, 0))
    assert there == here
    assert all(claim.violated is False for claim in there.guarantees)  # audited there as well
    adversary = Method(name="InvertingGradients", options={"iterations": 2})
    here, there = both(attacked(SCENARIO, defense, adversary, uploads=1))
    assert there == here


def test_what_mixes_devices_fails() -> None:
    with pretended_device():
        far, near = torch.ones(3, device=THERE), torch.ones(3)
        with pytest.raises(RuntimeError, match="mixes tensors"):
            far + near
        with pytest.raises(RuntimeError):
            far.numpy()
        assert (far.cpu() + near).tolist() == [2, 2, 2]


def misplaced(value: torch.Tensor) -> torch.Tensor:
    """Return the same, by way of a tensor that is made on the CPU."""
    return value + torch.zeros(value.shape, device="cpu")


MISPLACED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the one path": (
        base,
        "batch_gradient",
        lambda made: (
            lambda model, loss, batch: made(
                model, loss, Batch(misplaced(batch.inputs), batch.targets)
            )
        ),
    ),
    "an inner loop": (
        inverting_gradients,
        "total_variation",
        lambda made: lambda inputs: made(misplaced(inputs)),
    ),
    "scoring": (metrics, "psnr", lambda made: lambda guess, truth: made(misplaced(guess), truth)),
    "identification": (
        metrics,
        "identified",
        lambda made: lambda guess, truth, pool: made(guess, truth, misplaced(pool)),
    ),
}


@pytest.mark.parametrize("place", MISPLACED)
def test_a_tensor_that_is_made_in_the_wrong_place_fails(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, change = MISPLACED[place]
    adversary = Method(name="InvertingGradients", options={"iterations": 2})
    trial = attacked(SCENARIO, Method(name="none"), adversary)
    right = trial.run(Path())
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    scenes._SHOWN.clear()
    assert trial.run(Path()).scores == right.scores  # as nobody notices on the CPU
    scenes._SHOWN.clear()
    with pytest.raises(RuntimeError, match="mixes tensors"), pretended_device(), on_device(THERE):
        trial.run(Path())


def test_draws_are_the_same_everywhere() -> None:
    def drawn() -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(0)
        return [
            torch.randn(3, generator=rng),
            torch.empty(3).exponential_(generator=rng),
            torch.bernoulli(torch.full((9,), 0.5), generator=rng),
            torch.randperm(5, generator=rng),
        ]

    here = drawn()
    with pretended_device(), on_device(THERE):
        there = drawn()
        assert {one.device.type for one in there} == {THERE.type}
        assert [one.tolist() for one in there] == [one.tolist() for one in here]


def test_a_device_that_is_not_there_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device must be auto or one .*\(cpu.*\), got cuda"):
            resolved("cuda")
        assert resolved("auto").type in ("cpu", "mps")
    with on_device("cpu"):
        assert current_device().type == "cpu"


def whereabouts(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: torch.Generator
) -> Scores:
    """Return whether a trial of a table has its data on another device."""
    return {"there": [float(data.train.inputs.device.type == THERE.type)], "seconds": [0.0]}


def test_a_table_is_measured_on_another_device() -> None:
    trial = TableTrial("t", whereabouts, "digits", {}, {}, 0, 0)
    here, there = both(trial)
    assert [row.value for row in here.scores] == [0.0, 0.0]
    assert [row.value for row in there.scores] == [1.0, 0.0]
    assert replace(trial, device="cuda").cell.key == trial.cell.key
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="one that this machine has"):
            run_trial((replace(trial, device="cuda"), Path()))


@pytest.mark.parametrize("name", ["dlg", "spearpp-table1"])
def test_trials_of_papers_run_on_another_device(name: str) -> None:
    table, draws = TABLES[name], torch.Generator().manual_seed(0)
    parts = (
        Batch(torch.rand(n, 3, 32, 32, generator=draws), torch.arange(n) % 10) for n in (60, 30)
    )
    data = Dataset("noise", *parts, tuple("0123456789"), SPACE)
    problem, method = table.rows[0].problem, {**table.rows[0].method, **table.reduced}
    if "iterations" in method:
        method["iterations"] = 3
    here = table.trial(problem, method, data, torch.Generator().manual_seed(1))
    with pretended_device(), on_device(THERE):
        there = table.trial(problem, method, data.to(THERE), torch.Generator().manual_seed(1))
    assert {**there, "seconds": 0} == {**here, "seconds": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize(
    "line", ["run", "reproduce dlg", "advise --epsilon 3 --dataset digits --model mlp"]
)
def test_commands_refuse_a_device_that_is_not_there(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, line: str
) -> None:
    code, _, errors = command(*line.split(), "--device", "cuda", "--out", tmp_path / "out")
    assert code == 2
    assert "device must be auto or one that this machine has" in " ".join(errors.split())


def test_the_device_is_no_part_of_a_cell() -> None:
    elsewhere = SCENARIO.model_copy(update={"device": "auto"})
    keys = {TrainTrial(one, Method(name="none"), 0).cell.key for one in (SCENARIO, elsewhere)}
    assert len(keys) == 1
