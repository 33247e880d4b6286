"""Frozen parameters are constants of the architecture: no upload, attack or noise knows of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import batch, make_client, mlp, observed, rng
from small_panel import SMALL, attacked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, NotApplicable, Protocol
from leakfrontier.adversaries.matching.label_inference import infer_targets
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    PRECODE,
    Chain,
    ClientDP,
    Defense,
    DualPruning,
    Mixup,
    Noise,
    Outpost,
    Plan,
    Quantization,
    RandomK,
    SecureAggregation,
    SignSGD,
    Soteria,
    TopK,
    batch_gradient,
)
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.privacy.audit import audit
from leakfrontier.evaluate.privacy.canaries import Subject
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

FROZEN = ("1.weight", "1.bias", "steps")

DEFENSES = [
    Defense(),
    DPSGD(1.0),
    DPSGD(1.0, per_example="hooks"),
    DPSGD(1.0, clipping="per_layer", per_example="hooks"),
    ClientDP(1.0),
    Noise(0.1),
    Quantization(4),
    SignSGD(),
    TopK(0.1),
    RandomK(0.1),
    DualPruning(0.1, 0.1),
    ATS("3-1-7", mean=(0.5,), std=(0.25,)),
    Mixup(),
    SecureAggregation(2),
    Soteria(0.5),
    PRECODE(),
    Outpost(),
    Chain((DPSGD(1.0), TopK(0.1))),
]


class Frozen(nn.Sequential):
    """A perceptron whose first layer is frozen, with an integer parameter beside it."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self[1].requires_grad_(False)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        for name, layer in self.named_children():
            inputs = layer(inputs) if name.isdigit() else inputs
        return inputs


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=1, batch_size=2, lr=0.1)])
@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
def test_frozen_parameters_are_neither_trained_nor_uploaded(
    defense: Defense, protocol: Protocol
) -> None:
    model = defense.on_model(Frozen())
    before = weights(model)
    client = make_client(model, defense, protocol)
    shares = [batch(4, seed) for seed in range(defense.cohort)]
    (upload, *_) = observe(client, shares, ThreatModel(), rng())
    trained = {name for name in before if name not in FROZEN}
    assert {*upload.observation.update} == trained
    assert {*upload.observation.simulate(*upload.truth)} == trained

    federation = Federation(client, [batch(4, seed) for seed in range(2)], 2, lr=0.1)
    federation.round(rng())
    after = weights(model)
    assert [name for name in FROZEN if not torch.equal(before[name], after[name])] == []
    assert any(not torch.equal(before[name], after[name]) for name in trained)


def test_what_is_trained_has_the_gradient_that_it_always_had() -> None:
    model, data = Frozen(), batch(4)
    everything = batch_gradient(mlp(), cross_entropy, data)
    found = batch_gradient(model, cross_entropy, data)
    assert {*found} == {*everything} - {*FROZEN}
    for name, value in found.items():
        torch.testing.assert_close(value, everything[name])


def test_the_guarantee_is_of_what_is_trained() -> None:
    plan, data = Plan(20, 0.25, 1e-5), batch(16)
    subject = Subject(DPSGD(1.0, 0.5), Frozen(), cross_entropy, data, plan, rng())
    assert subject.sensitivity == pytest.approx(0.5, rel=1e-3)
    upload = subject.upload(subject.client(16), subject.records(torch.arange(16)), cross_entropy)
    assert not [name for name in upload if name.removeprefix("model.") in FROZEN]
    found = audit(
        defense=DPSGD(1.0, 0.5),
        model=Frozen(),
        loss=cross_entropy,
        data=data,
        plan=plan,
        rng=rng(),
        methods=("residual noise", "one run"),
    )
    assert [one.violated for one in found.values()] == [False, False]  # type: ignore[union-attr]


def test_labels_cannot_be_read_off_a_frozen_layer() -> None:
    model = mlp()
    model[-1].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(NotApplicable, match="the last linear layer is frozen"):
        infer_targets(observed(model, batch(2)), rng())


def test_soteria_says_that_its_layer_is_frozen() -> None:
    model = mlp()
    model[-1].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"columns of '3.weight', which is frozen"):
        observed(model, batch(2), Soteria(0.5))


MODEL = """
from torch import nn

def build(space, frozen=1):
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)
    )
    model[frozen].requires_grad_(False)
    return model
"""
FIRST_LAYER = {"LinearLeakage", "SPEAR", "SPEARPlusPlus"}


@pytest.mark.parametrize("frozen", [1, 5])
@pytest.mark.parametrize("protocol", ["FedSGD", "FedAvg"])
def test_every_attack_runs_or_does_not_apply(
    user_file: Callable[..., Path], frozen: int, protocol: str
) -> None:
    name = f"{user_file(MODEL)}:build"
    scenario = Scenario(
        dataset="digits",
        model=Method(name=name, options={"frozen": frozen}),
        protocol=Method(name=protocol),
        candidates=10,
    )
    for adversary in SMALL.values():
        short = {
            key: min(value, 3) if isinstance(value, int) and key != "width" else value
            for key, value in adversary.options.items()
        }
        chosen = Method(name=adversary.name, options={**short, **_least(adversary.name)})
        for row in attacked(scenario, Method(name="none"), chosen, uploads=2):
            assert row.outcome in ("scored", "not applicable")
            if frozen == 1 and adversary.name in FIRST_LAYER:
                assert row.reason.endswith(("does not contain it", "is not affine"))


def _least(name: str) -> dict[str, Any]:
    return {"uploads": 40} if name == "LearningToInvert" else {}


def test_a_run_on_a_model_with_a_frozen_layer(
    tiny: dict[str, Any], user_file: Callable[..., Path], tmp_path: Path
) -> None:
    tiny["scenarios"][0] |= {"model": f"{user_file(MODEL)}:build", "checkpoints": [0, 4]}
    tiny["adversaries"] = ["PriorGuess", "LinearLeakage", {"name": "DLG", "iterations": 2}]
    results = run(load_config(tiny), tmp_path / "out", workers=1)
    assert set(results.cells["status"]) == {"ok"}
    outcomes = results.attacks.groupby("adversary_name")["outcome"].unique()
    assert outcomes["LinearLeakage"].tolist() == ["not applicable"]
    assert outcomes["DLG"].tolist() == ["scored"]


def test_a_copy_of_a_frozen_model_is_frozen() -> None:
    model = copy.deepcopy(Frozen())
    assert {*batch_gradient(model, cross_entropy, batch(2))} == {"3.weight", "3.bias"}
