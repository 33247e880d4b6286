from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import tricks
import unreplayable
from federated import batch, make_client, mlp, rng
from torch import Generator, Tensor

from leakfrontier.adversaries import FedAvg, Protocol
from leakfrontier.defenses import (
    ATS,
    DEFENSES,
    DPSGD,
    ClientDP,
    Defense,
    DisaggregationSNR,
    Mixup,
    Noise,
    Quantization,
    RandomK,
    TopK,
    Update,
    batch_gradient,
)
from leakfrontier.evaluate.client.discrimination import Examined, angle, discriminated
from leakfrontier.evaluate.client.examination import examine, failures, mending_of
from leakfrontier.evaluate.client.inversion import (
    PublicTraining,
    invert,
    public_clients,
    still_holds_update,
)
from leakfrontier.evaluate.client.mending import Mending

STEPS = FedAvg(epochs=2, batch_size=2, lr=0.05)
HONEST = [
    Defense(),
    DPSGD(noise_multiplier=0.0, max_grad_norm=1e6),
    DPSGD(noise_multiplier=0.1),
    ClientDP(noise_multiplier=10.0),
    Noise(scale=0.05, distribution="laplace"),
    Noise(scale=10.0),
    TopK(ratio=0.001),
    RandomK(ratio=0.1),
    Quantization(bits=1),
    Mixup(),
    ATS(mean=(0.5,), std=(0.25,)),
    DisaggregationSNR(threshold=torch.inf),
    *(DEFENSES[name]() for name in ("SignSGD", "Outpost", "WeightInspection", "PRECODE")),
]


def examined(defense: Defense, protocol: Protocol | None = None, seed: int = 0) -> Examined:
    client = make_client(defense.on_model(mlp()), defense, protocol)
    shares = [batch(8, 100 * seed + one) for one in range(public_clients(defense))]
    size = 4 if protocol else 1
    rounds = [
        [batch(size, 1000 + 10 * number + one) for one in range(defense.cohort)]
        for number in range(3)
    ]
    replay = examine(client, rounds, rng(seed))
    inversion = invert(client, shares, PublicTraining(1), rng(seed))
    probe = discriminated(inversion, client, rounds, mending_of(replay), rng(seed))
    return Examined(replay, probe, inversion.decoder)


def problems(found: Examined) -> list[str]:
    assert found.probe is not None
    return [one.problem for one in failures(found.replay, found.probe)]


@dataclass
class Misjudging(Noise):
    """Its likelihood is largest far from the upload."""

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        return sum(
            ((observed[name] - v).square().sum() for name, v in expected.items()), torch.zeros(())
        )


@dataclass
class NotANumber(Defense):
    """Its replay is not a number away from the truth."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        return _Near(observed)


@dataclass
class _Near(Defense):
    observed: Mapping[str, Tensor]

    def on_update(self, update: Update, rng: Generator) -> Update:
        near = all(torch.allclose(value, self.observed[n]) for n, value in update.items())
        return update if near else {n: value * torch.nan for n, value in update.items()}


TRICKS: dict[str, tuple[Defense, tuple[str, ...]]] = {
    "replay returns the observed upload": (tricks.Echo(), ("`replay`", "`unguarded`")),
    "another permutation": (tricks.OtherPermutation(), ("`replay`", "`unguarded`")),
    "replay of another sign": (unreplayable.Elsewhere(), ("`replay`",)),
    "replay without numbers": (NotANumber(), ("`replay`",)),
    "likelihood of another sign": (Misjudging(scale=0.01), ("`log_likelihood`",)),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_what_misleads_adversaries_is_named(trick: str) -> None:
    defense, hooks = TRICKS[trick]
    found = problems(examined(defense))
    assert len(found) == len(hooks)
    for hook, problem in zip(hooks, found, strict=True):
        assert hook in problem


@pytest.mark.parametrize("protocol", [None, STEPS], ids=["FedSGD", "FedAvg"])
@pytest.mark.parametrize("defense", HONEST, ids=str)
def test_honest_defenses_do_not_fail(defense: Defense, protocol: Protocol | None) -> None:
    found = examined(defense, protocol)
    assert problems(found) == []
    assert found.probe is not None
    assert not still_holds_update(found.probe)
    assert found.mending == mending_of(found.replay)


def test_repairs_follow_from_what_misleads() -> None:
    misled = examined(tricks.OtherPermutation()).mending
    assert misled == Mending(undefended=True, guarded=True, no_likelihood=True)
    assert examined(Misjudging(scale=0.01)).mending == Mending(no_likelihood=True)


def test_findings_are_read_again(tmp_path: Path) -> None:
    found = examined(Defense())
    found.write(tmp_path / "examined" / "one.json")
    again = Examined.read(tmp_path / "examined" / "one.json")
    assert again is not None
    assert (again.replay, again.probe) == (found.replay, found.probe)
    assert Examined.read(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text('[{"unknown": 1}, null]')
    assert Examined.read(tmp_path / "bad.json") is None


def test_the_hidden_update_is_found_if_one_upload_is_enough() -> None:
    client, private = make_client(mlp(), tricks.Permuted()), batch(1, seed=77)
    upload = client.upload(private, rng())
    found = examined(tricks.Permuted()).found_in([upload])
    assert found is not None
    assert angle(found, batch_gradient(client.model, client.loss, private)) < 0.3
    assert examined(tricks.LastRound()).found_in([upload]) is None
    assert examined(Defense()).found_in([upload]) is None
    assert Examined(examined(Defense()).replay).found_in([upload]) is None


def test_angles_are_between_directions() -> None:
    one, other = {"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([0.0, 2.0])}
    assert angle(one, one) == 0
    assert angle(one, other) == 1
    assert angle({"a": -one["a"]}, one) == 1
    assert angle({"a": 0 * one["a"]}, one) == 1
    assert angle({"a": torch.tensor([1.0, 1.0])}, one) == pytest.approx(0.5**0.5)
