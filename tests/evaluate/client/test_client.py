"""The one path: training, observation and replay pass the same hooks, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from federated import Sum, batch, convolutional, make_client, mlp, observed, rng
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import DPSGD, Batch, Defense, Loss, TopK, Update
from leakfrontier.evaluate.client.client import ThreatModel, observe, release
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.foundations.seeds import fork
from leakfrontier.evaluate.users.contract import Checked

STEPS = FedAvg(epochs=2, batch_size=2, lr=0.1)


@dataclass
class Spy(Defense):
    """Records every hook that it passes through, also in copies and in replays."""

    calls: list[str] = field(default_factory=list)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        self.calls.append("on_batch")
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self.calls.append("gradient")
        return super().gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.calls.append("on_update")
        return update

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        self.calls.append("on_round")
        return list(updates)


HOOKS = {
    "FedSGD": (FedSGD(), ["on_batch", "gradient", "on_update", "on_round"]),
    "FedAvg": (STEPS, ["on_batch", "gradient"] * 4 + ["on_update", "on_round"]),
}


@pytest.mark.parametrize(("protocol", "hooks"), HOOKS.values(), ids=HOOKS)
def test_every_upload_passes_all_hooks_in_order(protocol: Protocol, hooks: list[str]) -> None:
    spy, model, share = Spy(), mlp(), batch(4)

    federation = Federation(make_client(model, spy, protocol), [share], 1, batch_size=4)
    federation.round(rng())
    assert spy.calls == hooks, "training"

    spy.calls.clear()
    observation = observed(model, share, spy, protocol)
    assert spy.calls == hooks, "observation"

    spy.calls.clear()
    observation.simulate(*share)
    assert spy.calls == hooks, "replay"


@pytest.mark.parametrize("build", [mlp, convolutional])
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=3, batch_size=4, lr=0.1)])
def test_replay_of_the_truth_is_the_upload(build, protocol: Protocol) -> None:  # noqa: ANN001
    share = batch(4)  # a full batch per step, so that its order cannot matter
    for defense in (Defense(), DPSGD(0.0, 0.5), TopK(0.1)):
        observation = observed(build(), share, defense, protocol)
        replayed = observation.simulate(*share)
        for name, value in observation.update.items():
            torch.testing.assert_close(replayed[name], value, rtol=1e-3, atol=1e-6)


def test_an_ignorant_adversary_replays_the_undefended_client() -> None:
    share, model = batch(3), mlp()
    informed = observed(model, share, TopK(0.1))
    ignorant = observed(model, share, TopK(0.1), threat=ThreatModel(knows_defense=False))
    assert torch.equal(informed.update["1.weight"], ignorant.update["1.weight"])
    assert (informed.simulate(*share)["1.weight"] == 0).float().mean() > 0.5
    assert (ignorant.simulate(*share)["1.weight"] == 0).float().mean() < 0.5
    assert ignorant.log_likelihood is None


def test_the_adversary_never_replays_the_clients_noise() -> None:
    share, model = batch(3), mlp()

    @dataclass
    class Noise(Defense):
        def on_update(self, update: Update, rng: Generator) -> Update:
            return {
                name: value + torch.randn(value.shape, generator=rng)
                for name, value in update.items()
            }

    observation = observed(model, share, Noise())
    clean = make_client(model).upload(share, rng())
    client = observation.update["1.weight"] - clean["1.weight"]
    for _ in range(3):
        replayed = observation.simulate(*share)["1.weight"] - clean["1.weight"]
        correlation = torch.corrcoef(torch.stack([client.flatten(), replayed.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.1


def test_fedavg_equals_a_plain_loop_of_sgd() -> None:
    model, share = convolutional(), batch(6)
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.1)
    update = make_client(model, protocol=protocol).upload(share, rng(5))

    reference = convolutional()
    start = [p.detach().clone() for p in reference.parameters()]
    optimizer, draws = torch.optim.SGD(reference.parameters(), lr=0.1), fork(rng(5))
    for _ in range(2):
        for rows in torch.randperm(6, generator=draws).split(2):
            optimizer.zero_grad()
            cross_entropy(reference(share.inputs[rows]), share.targets[rows]).backward()
            optimizer.step()
    for value, before, after in zip(update.values(), start, reference.parameters(), strict=True):
        torch.testing.assert_close(value, after - before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=1, lr=0.5)])
def test_replay_is_differentiable_through_all_local_steps(protocol: Protocol) -> None:
    share = Batch(batch(2).inputs.double(), batch(2).targets)
    model = convolutional().double()
    observation = observed(model, share, protocol=protocol)

    def first_weight(inputs: Tensor) -> Tensor:
        return observation.simulate(inputs, share.targets)["0.weight"][0, 0]

    inputs = share.inputs.clone().requires_grad_()
    assert torch.autograd.gradcheck(first_weight, (inputs,), fast_mode=True)


def test_an_aggregate_is_one_observation_of_all_clients() -> None:
    shares, model = [batch(2, seed) for seed in range(3)], mlp()
    seen = observe(make_client(model, Sum()), shares, ThreatModel(), rng())
    assert len(seen) == 1
    observation, truth = seen[0].observation, seen[0].truth
    assert (observation.batch_size, observation.protocol.clients) == (6, 3)
    assert torch.equal(truth.inputs, torch.cat([share.inputs for share in shares]))
    replayed = observation.simulate(*truth)
    torch.testing.assert_close(replayed["1.weight"], observation.update["1.weight"])


def test_an_upload_tells_what_was_trained_on() -> None:
    @dataclass
    class Inverted(Defense):
        def on_batch(self, batch: Batch, rng: Generator) -> Batch:
            return Batch(-batch.inputs, batch.targets)

    share = batch(2)
    (upload,) = observe(make_client(mlp(), Inverted()), [share], ThreatModel(), rng())
    assert torch.equal(upload.truth.inputs, share.inputs)
    assert torch.equal(upload.trained_on.inputs, -share.inputs)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_was_trained_on_is_in_the_order_of_the_examples(size: int) -> None:
    @dataclass
    class Doubled(Defense):
        def on_batch(self, batch: Batch, rng: Generator) -> Batch:
            return Batch(2 * batch.inputs, batch.targets)

    share, protocol = batch(4), FedAvg(epochs=2, batch_size=size, lr=0.1)
    for defense, factor in ((Defense(), 1), (Doubled(), 2)):
        client = make_client(mlp(), defense, protocol)
        (upload,) = observe(client, [share], ThreatModel(), rng())
        assert torch.equal(upload.trained_on.inputs, factor * share.inputs)
        checked = Checked(defense, share)
        release([make_client(mlp(), checked, protocol)], [share], rng(), in_order=True)
        assert torch.equal(checked.trained_on.inputs, factor * share.inputs)


def test_what_the_adversary_gets_holds_no_secret_of_the_client() -> None:
    for defense in (TopK(0.1), DPSGD(1.0)):
        observation = observed(mlp(), batch(2), defense)
        assert observation.log_likelihood is not None
        reachable = observation.log_likelihood.func.__self__.inner  # type: ignore[attr-defined]
        assert reachable == defense
        assert getattr(reachable, "_dropped", None) is None
        assert getattr(reachable, "_client", None) is None


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="is empty"):
        observed(mlp(), Batch(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)))
