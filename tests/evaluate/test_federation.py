import pytest
import torch
from federated import batch, mlp, rng
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import DPSGD, Batch, Defense, TopK
from leakfrontier.evaluate.data import load_dataset, partition
from leakfrontier.evaluate.federation import Federation, evaluate
from leakfrontier.evaluate.models import build_model


def accuracy(defense: Defense, protocol: Protocol, server: str, lr: float, rounds: int) -> float:
    data = load_dataset("digits")
    space = data.space
    train = Batch(space.to_inputs(data.train.inputs), data.train.targets)
    test = Batch(space.to_inputs(data.test.inputs), data.test.targets)
    model = build_model("mlp", space, rng(), width=32)
    shares = partition(train, 4, "iid", rng())
    federation = Federation(
        model, cross_entropy, shares, defense, protocol, 2, batch_size=64, server=server, lr=lr
    )
    federation.train(rounds, rng(), on_checkpoint=lambda *_: None)
    return evaluate(model, cross_entropy, test)[0] / len(test.targets)


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
    everybody = Batch(*(torch.cat(parts) for parts in zip(*shares, strict=True)))
    expected = Defense().gradient(model, cross_entropy, everybody, rng())
    Federation(
        model, cross_entropy, shares, Defense(), FedSGD(), 2, batch_size=4, server="sgd", lr=0.1
    ).round(rng())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] - 0.1 * expected[name])


def test_error_feedback_is_kept_per_client_between_rounds() -> None:
    federation = Federation(
        mlp(), cross_entropy, [batch(4), batch(4, 1)], TopK(0.1), FedSGD(), 2, batch_size=4
    )
    federation.round(rng())
    dropped = [checked.inner._dropped for checked in federation._defenses]  # type: ignore[attr-defined]
    assert not torch.equal(*dropped)


def test_checkpoints_are_called_at_the_chosen_rounds() -> None:
    seen: list[int] = []
    federation = Federation(mlp(), cross_entropy, [batch(4)], Defense(), FedSGD(), 1)
    federation.train(5, rng(), at={0, 2, 5, 9}, on_checkpoint=lambda done, _: seen.append(done))
    assert seen == [0, 2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients_per_round": 3}, r"clients_per_round must be in \[1, 2\], got 3"),
        ({"clients_per_round": 1, "server": "lamb"}, r"server must be one of \['sgd', 'adam'\]"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Federation(
            mlp(),
            cross_entropy,
            [batch(2), batch(2)],
            Defense(),
            FedSGD(),
            **options,  # type: ignore[arg-type]
        )
