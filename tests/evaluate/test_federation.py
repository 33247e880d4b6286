import pytest
import torch
from federated import batch, make_client, mlp, rng
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import DPSGD, Batch, Defense, TopK
from leakfrontier.evaluate.client import Client
from leakfrontier.evaluate.data import load_dataset, partition
from leakfrontier.evaluate.federation import Federation
from leakfrontier.evaluate.models import build_model


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
        (FedAvg(epochs=1, batch_size=32, lr=0.1), "sgd", 1.0, 60),
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
    dropped = [checked.inner._dropped for checked in federation._defenses]  # type: ignore[attr-defined]
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
