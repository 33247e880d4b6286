"""What holds for every defense: the identity setting changes nothing, the extreme hides all."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from federated import batch, convolutional, make_client, mlp, observed, rng
from small_panel import OF_GRADIENTS, attacked
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import FedAvg, FedBuff, FedSGD, Protocol
from leakfrontier.defenses import (
    ATS,
    DEFENSES,
    DPSGD,
    EDA,
    Batch,
    Chain,
    ClientDP,
    Defense,
    DisaggregationSNR,
    DualPruning,
    Loss,
    Mixup,
    Noise,
    Outpost,
    Quantization,
    RandomK,
    SecureAggregation,
    Soteria,
    TopK,
    Update,
    WeightInspection,
    summing_of,
)
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

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
    "EDA": EDA(0.0),
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


@dataclass
class Drawing(Defense):
    """Draw at every hook, more and more, and ignore it."""

    drawn: int = 0

    def _draw(self, rng: Generator) -> None:
        self.drawn += 1
        torch.randn(self.drawn, generator=rng)

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        drawn = [*super().batches(examples, batch_size, epochs, rng)]
        self._draw(rng)
        yield from drawn

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        self._draw(rng)
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self._draw(rng)
        return super().gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self._draw(rng)
        return update

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        self._draw(rng)
        return list(updates)


PAIRED = {
    "user's": Drawing(),
    "two": Chain((RandomK(1.0), Noise(0.0), Drawing())),
    # DP-SGD's batches are Poisson samples at any setting, and not the undefended client's.
    **{name: one for name, one in IDENTITY.items() if "DPSGD" not in repr(one)},
}


def trained(defense: Defense, protocol: Protocol) -> dict[str, Tensor]:
    model, shares = mlp(8), [batch(9, seed) for seed in range(4)]
    federation = Federation(make_client(model, defense, protocol), shares, 2, batch_size=4)
    federation.train(4, rng(), on_checkpoint=lambda *_: None)
    return model.state_dict()


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize(
    "protocol",
    [
        FedSGD(),
        FedAvg(epochs=2, batch_size=4, lr=0.1),
        FedBuff(epochs=2, batch_size=4, lr=0.1, buffer=3, oldest=2),
    ],
)
def test_the_identity_setting_trains_the_undefended_model(name: str, protocol: Protocol) -> None:
    """Models are equal bit for bit; up to rounding, if the defense computes its own gradient."""
    undefended, defended = trained(Defense(), protocol), trained(PAIRED[name], protocol)
    assert undefended.keys() == defended.keys()
    rounding = {"rtol": 0, "atol": 0} if summing_of(PAIRED[name]) else {"rtol": 1e-3, "atol": 1e-5}
    for key, value in undefended.items():
        torch.testing.assert_close(defended[key], value, **rounding)


@pytest.mark.usefixtures("uploads_are_kept")
@pytest.mark.parametrize("name", EXTREME)
def test_at_its_extreme_the_whole_panel_falls_to_the_prior_rate(name: str) -> None:
    scenario = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16}))
    defense = Method(name=name, options={**EXTREME[name]})

    def identified(adversary: Method) -> int:
        rows = attacked(scenario, defense, adversary, uploads=6)
        assert {row.candidates for row in rows} == {100}
        return sum(bool(row.identified) for row in rows)

    prior = max(identified(Method(name="PriorGuess")) / 6, 1 / 100)
    for adversary in OF_GRADIENTS.values():
        interval = clopper_pearson(identified(adversary), 6)  # two of them are too many
        assert interval.low <= prior <= interval.high, adversary.name
