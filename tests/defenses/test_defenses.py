"""What holds for every defense: the identity setting changes nothing, the extreme hides all."""

import math
from collections.abc import Callable

import pytest
import torch
from federated import batch, convolutional, mlp, observed
from small_panel import OF_GRADIENTS, attacked
from torch import nn

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import (
    ATS,
    DEFENSES,
    DPSGD,
    Chain,
    ClientDP,
    Defense,
    DisaggregationSNR,
    DualPruning,
    Mixup,
    Noise,
    Outpost,
    Quantization,
    RandomK,
    SecureAggregation,
    Soteria,
    TopK,
    WeightInspection,
)
from leakfrontier.evaluate.methods import Method
from leakfrontier.evaluate.scenario import Scenario
from leakfrontier.evaluate.statistics import clopper_pearson

IDENTITY: dict[str, Defense] = {
    "none": Defense(),
    "DPSGD": DPSGD(0.0, math.inf),
    "DPSGD, hooks": DPSGD(0.0, math.inf, per_example="hooks"),
    "ClientDP": ClientDP(0.0, math.inf),
    "Noise": Noise(0.0),
    "Quantization": Quantization(32),
    "TopK": TopK(1.0),
    "RandomK": RandomK(1.0),
    "DualPruning": DualPruning(0.0, 0.0),
    "ATS": ATS(""),
    "Mixup": Mixup(0.0),
    "SecureAggregation": SecureAggregation(clients=1),
    "Soteria": Soteria(0.0),
    "Outpost": Outpost(noise=0.0, pruning_rate=0.0),
    "WeightInspection": WeightInspection(1.0, 1.0, 1.0, 1.0, math.inf, 0.0),
    "DisaggregationSNR": DisaggregationSNR(math.inf),
    "Chain": Chain((DPSGD(0.0, math.inf), TopK(1.0), SecureAggregation(clients=1))),
}
NO_IDENTITY = {"SignSGD", "PRECODE"}  # a sign has no magnitude; a bottleneck is always there

EXTREME: dict[str, dict[str, float]] = {
    "DPSGD": {"noise_multiplier": 100.0},
    "ClientDP": {"noise_multiplier": 100.0},
    "Noise": {"scale": 100.0},
    "TopK": {"ratio": 1e-6},
    "RandomK": {"ratio": 1e-6},
    "DualPruning": {"largest": 0.5, "smallest": 0.4999},
}
# One bit per entry, Soteria, PRECODE and ATS leave victims identifiable at their strongest; a sum
# hides them only among more clients than a test has time for.


def test_every_defense_has_an_identity_setting_or_a_reason() -> None:
    assert set(DEFENSES) <= {*IDENTITY, *NO_IDENTITY}


@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=4, lr=0.1)])
@pytest.mark.parametrize("build", [mlp, convolutional])
def test_the_identity_setting_is_the_undefended_upload(
    name: str, protocol: Protocol, build: Callable[[], nn.Module]
) -> None:
    share, model = batch(4), build()  # one full batch per step, so that its order cannot matter
    undefended = observed(model, share, protocol=protocol).update
    defended = observed(model, share, IDENTITY[name], protocol=protocol).update
    assert list(defended) == list(undefended)
    for key, value in undefended.items():
        torch.testing.assert_close(defended[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EXTREME)
def test_at_its_extreme_the_whole_panel_falls_to_the_prior_rate(name: str) -> None:
    scenario = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16}))
    defense = Method(name=name, options={**EXTREME[name]})

    def identified(adversary: Method) -> int:
        rows = attacked(scenario, defense, adversary, uploads=10)
        assert {row.candidates for row in rows} == {100}
        return sum(bool(row.identified) for row in rows)

    prior = max(identified(Method(name="PriorGuess")) / 10, 1 / 100)
    for adversary in OF_GRADIENTS.values():
        interval = clopper_pearson(identified(adversary), 10)
        assert interval.low <= prior <= interval.high, adversary.name
