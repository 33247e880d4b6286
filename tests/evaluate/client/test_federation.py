from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from federated import Sum, batch, make_client, mlp, rng
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedBuff, FedSGD, Protocol
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Defense,
    Loss,
    Refused,
    SecureAggregation,
    TopK,
    Update,
)
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.data.partition import partition
from leakfrontier.evaluate.models.models import build_model


def accuracy(defense: Defense, protocol: Protocol, server: str, lr: float, rounds: int) -> float:
    data = load_dataset("digits")
    space, (train, test) = data.space, data.normalised
    model = build_model("mlp", space, rng(), width=32)
    shares = partition(train, 4, "iid", rng())
    client = Client(model, cross_entropy, defense, protocol, space)
    federation = Federation(client, shares, 2, batch_size=64, server=server, lr=lr)
    federation.train(rounds, rng(), on_checkpoint=lambda *_: None)
    return data.modality.evaluate(model, test).correct / len(test.targets)


@pytest.mark.parametrize(
    ("protocol", "server", "lr", "rounds"),
    [
        (FedSGD(), "adam", 0.01, 60),
        (FedSGD(), "sgd", 0.2, 150),
        (FedAvg(epochs=1, batch_size=32, lr=0.1), "sgd", 1.0, 40),
        # `benchmarks/asynchronous.py` compares its accuracy with FedAvg's.
        (FedBuff(epochs=1, batch_size=32, lr=0.1, buffer=4, oldest=2), "sgd", 1.0, 40),
    ],
)
def test_training_learns(protocol: Protocol, server: str, lr: float, rounds: int) -> None:
    assert accuracy(Defense(), protocol, server, lr, rounds) > 0.85


def test_utility_falls_with_noise_and_recovers_by_error_feedback() -> None:
    clean = accuracy(Defense(), FedSGD(), "adam", 0.01, 60)
    assert accuracy(DPSGD(100.0), FedSGD(), "adam", 0.01, 20) < 0.5
    assert accuracy(TopK(0.1), FedSGD(), "adam", 0.01, 60) > clean - 0.1


def test_one_step_is_the_mean_of_the_clients_gradients() -> None:
    model, shares = mlp(), [batch(4, 0), batch(4, 1)]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = Defense().gradient(model, cross_entropy, Batch.joined(shares), rng())
    client = make_client(model)
    Federation(client, shares, 2, batch_size=4, server="sgd", lr=0.1).round(rng())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] - 0.1 * expected[name])


def test_error_feedback_is_kept_per_client_between_rounds() -> None:
    client = make_client(mlp(), TopK(0.1))
    federation = Federation(client, [batch(4), batch(4, 1)], 2, batch_size=4)
    federation.round(rng())
    defenses = federation._clients._defenses.values()
    dropped = [checked.inner._dropped for checked in defenses]  # type: ignore[attr-defined]
    assert not torch.equal(*dropped)


def test_checkpoints_are_called_at_the_chosen_rounds() -> None:
    seen: list[int] = []
    federation = Federation(make_client(mlp()), [batch(4)], 1)
    federation.train(5, rng(), at={0, 2, 5, 9}, on_checkpoint=lambda done, _: seen.append(done))
    assert seen == [0, 2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients_per_round": 3}, "a round must have from 1 to 2 clients, got 3"),
        ({"clients_per_round": 1, "server": "lamb"}, r"server must be one of \['sgd', 'adam'\]"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Federation(make_client(mlp()), [batch(2)] * 2, **options)  # type: ignore[arg-type]


def trained(protocol: FedBuff, defense: Defense, rounds: int = 8) -> Federation:
    client = make_client(mlp(8), defense, protocol)
    shares = [batch(4, seed) for seed in range(4)]
    federation = Federation(client, shares, 1, server="sgd", lr=1.0)
    federation.train(rounds, rng(), on_checkpoint=lambda *_: None)
    return federation


def test_a_sum_cannot_be_weighted_by_age() -> None:
    summed = SecureAggregation(clients=3)
    with pytest.raises(ValueError, match=r"sees only their sum: set exponent: 0"):
        trained(FedBuff(buffer=3, oldest=2), summed)
    unweighted = FedBuff(buffer=3, oldest=2, exponent=0.0)
    assert sum(trained(unweighted, summed).rounds_of) == 3 * 8
    together, apart = (trained(unweighted, one).model for one in (Sum(), Defense()))
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@dataclass
class Noting(Defense):
    """Note which version of the model is received."""

    received: list[Tensor] = field(default_factory=list)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        self.received.append(next(model.parameters()).detach().clone())
        return model


def test_clients_train_on_versions_up_to_the_oldest() -> None:
    noting = Noting()
    versions: list[Tensor] = []
    protocol = FedBuff(batch_size=4, lr=0.1, buffer=2, oldest=2)
    client = make_client(mlp(8), noting, protocol)
    federation = Federation(client, [batch(4, seed) for seed in range(4)], 1, server="sgd", lr=1.0)
    ages = set()
    draws = rng()
    for now in range(20):
        versions.append(next(federation.model.parameters()).detach().clone())
        noting.received.clear()
        federation.round(draws)
        for received in noting.received:
            (version,) = (i for i, one in enumerate(versions) if one.equal(received))
            ages.add(now - version)
    assert ages == {0, 1, 2}


@dataclass(frozen=True)
class Late(FedBuff):
    """Every upload is one version old."""

    def staleness(self, rounds: int, rng: Generator) -> int:
        return min(rounds, 1)


def test_old_uploads_count_less() -> None:
    changes = {}
    for exponent in (0.0, 1.0):
        model = mlp(8)
        protocol = Late(batch_size=4, lr=0.1, buffer=1, oldest=1, exponent=exponent)
        client = make_client(model, protocol=protocol)
        federation = Federation(client, [batch(4)], 1, server="sgd", lr=1.0)
        federation.round(rng())
        before = next(model.parameters()).detach().clone()
        federation.round(rng())
        changes[exponent] = next(model.parameters()).detach() - before
    torch.testing.assert_close(changes[1.0], changes[0.0] / 2, rtol=1e-4, atol=1e-7)


@dataclass
class Picky(Defense):
    """Refuse every second model."""

    seen: list[int] = field(default_factory=list)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        self.seen.append(1)
        if len(self.seen) % 2 == 0:
            raise Refused("no")
        return model


def test_clients_that_refuse_are_left_out_of_the_mean() -> None:
    model, shares = mlp(), [batch(4, 0), batch(4, 1)]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    federation = Federation(
        make_client(model, Picky()), shares, 2, batch_size=4, server="sgd", lr=0.1
    )
    federation.round(rng())
    assert federation.refused == 1
    (taking_part,) = (i for i, rounds in enumerate(federation.rounds_of) if rounds)
    expected = Defense().gradient(mlp(), cross_entropy, shares[taking_part], rng())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] - 0.1 * expected[name])


@dataclass
class Squeamish(Defense):
    """Refuse on sight of a batch with a given label."""

    label: int = 0

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        if (batch.targets == self.label).any():
            raise Refused("not this")
        return super().gradient(model, loss, batch, rng)


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=2, lr=0.1)])
def test_clients_that_refuse_on_sight_of_their_batch_are_left_out(protocol: Protocol) -> None:
    shares = [Batch(batch(4, seed).inputs, torch.full((4,), seed)) for seed in range(3)]
    client = make_client(mlp(), Squeamish(), protocol)
    federation = Federation(client, shares, 3, batch_size=4)
    before = next(federation.model.parameters()).detach().clone()
    federation.round(rng())
    assert (federation.refused, federation.rounds_of) == (1, [0, 1, 1])
    assert not torch.equal(next(federation.model.parameters()), before)


def test_clients_that_compare_models_refuse_other_versions() -> None:
    comparing = SecureAggregation(clients=3, compare_models=True)
    late = trained(FedBuff(buffer=3, oldest=2, exponent=0.0), comparing)
    assert late.refused > 0
    assert late.refused + sum(late.rounds_of) == 3 * 8
    assert trained(FedBuff(buffer=3, oldest=0, exponent=0.0), comparing).refused == 0


def test_a_round_of_too_few_for_their_sum_is_refused_and_changes_nothing() -> None:
    client = make_client(mlp(8), SecureAggregation(clients=4))  # of whom 3 are needed
    shares = [batch(4, seed) for seed in range(4)]
    for per_round, refused in ((1, 1), (2, 2), (3, 0), (4, 0)):
        federation = Federation(client, shares, per_round, server="sgd", lr=1.0)
        before = next(federation.model.parameters()).detach().clone()
        federation.round(rng())
        assert federation.refused == refused
        assert sum(federation.rounds_of) == per_round - refused
        assert torch.equal(next(federation.model.parameters()), before) == (refused > 0)


@dataclass
class Seen(Defense):
    """Notes the examples of every step, and how many uploads are seen together."""

    clients: int = 1
    log: list[Tensor] = field(default_factory=list)
    together: list[int] = field(default_factory=list)

    @property
    def cohort(self) -> int:
        return self.clients

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self.log.append(batch.targets)
        return super().gradient(model, loss, batch, rng)

    def on_round(self, updates: list[Update], rng: Generator) -> list[Update]:  # type: ignore[override]
        self.together.append(len(updates))
        return Sum().on_round(updates, rng) if self.clients > 1 else updates


def test_each_example_is_in_one_batch_of_an_epoch_however_many_rounds_that_takes() -> None:
    data, defense = Batch(batch(10).inputs, torch.arange(10)), Seen()
    federation = Federation(make_client(mlp(8), defense), [data], 1, batch_size=4)
    for _ in range(6):
        federation.round(rng())
    seen = torch.cat(defense.log).tolist()
    assert [len(one) for one in defense.log] == [4, 4, 2, 4, 4, 2]
    assert sorted(seen[:10]) == sorted(seen[10:]) == [*range(10)]


@pytest.mark.parametrize(
    ("cohort", "groups"), [(1, [1] * 6), (2, [2, 2, 2]), (3, [3, 3]), (4, [6]), (8, [6])]
)
def test_uploads_are_added_up_in_groups_of_the_cohort(cohort: int, groups: list[int]) -> None:
    defense = Seen(clients=cohort)
    shares = [batch(4, seed) for seed in range(6)]
    federation = Federation(make_client(mlp(8), defense), shares, 6, batch_size=4)
    federation.round(rng())
    assert defense.together == groups


STASH: list[nn.Module] = []
"""What a dishonest defense keeps between its calls, and between rounds."""


@dataclass
class Meddling(Defense):
    """Uploads zeros, and writes into every model that it was ever handed by a hook."""

    hook: str

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        if self.hook == "on_receive":
            STASH.extend([model, agreed])
        return model

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        if self.hook == "gradient":
            STASH.append(model)
        if self.hook == "in place":
            with torch.no_grad():
                for value in model.parameters():
                    value += 1
        return super().gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.meddle()
        return {name: torch.zeros_like(value) for name, value in update.items()}

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        if self.hook == "on_cohort":
            STASH.extend(models)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        self.meddle()
        return list(updates)

    def meddle(self) -> None:
        for model in STASH:
            for value in model.parameters():
                value.data += 1  # unseen by autograd


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(), FedBuff(buffer=2, oldest=2)])
@pytest.mark.parametrize("hook", ["on_receive", "on_cohort", "gradient"])
def test_a_defense_cannot_reach_the_global_model(hook: str, protocol: Protocol) -> None:
    STASH.clear()
    model, shares = mlp(), [batch(4, number) for number in range(3)]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    client = replace(make_client(model, Meddling(hook)), protocol=protocol)
    federation = Federation(client, shares, 2, batch_size=2, server="sgd", lr=1.0)
    federation.train(3, rng(), on_checkpoint=lambda *_: None)
    assert STASH  # it did try
    for name, value in federation.model.named_parameters():
        assert torch.equal(value, before[name])


def test_what_a_gradient_writes_into_its_model_is_named_and_has_no_effect() -> None:
    model = mlp()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    federation = Federation(make_client(model, Meddling("in place")), [batch(4, 0)], 1)
    with pytest.raises(ValueError, match=r"Meddling\.gradient modified its argument"):
        federation.round(rng())
    for name, value in federation.model.named_parameters():
        assert torch.equal(value, before[name])


def test_clients_of_a_round_share_a_copy_that_none_has_altered() -> None:
    """Copying a model for each client would be slow, and too much for large ones."""
    received: list[nn.Module] = []

    @dataclass
    class Watching(Defense):
        def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
            received.append(model)
            return model

    shares = [batch(4, number) for number in range(4)]
    federation = Federation(make_client(mlp(), Watching()), shares, 4, lr=0.1)
    federation.train(2, rng(), on_checkpoint=lambda *_: None)
    assert [received.count(one) for one in dict.fromkeys(received)] == [4, 4]
    assert federation.model not in received
