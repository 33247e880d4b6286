"""Rounds whose clients are computed together equal rounds in which each computes alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from leakfrontier.adversaries import FedAvg, FedSGD, ImageSpace, Protocol
from leakfrontier.defenses import (
    ATS,
    DEFENSES,
    DPSGD,
    Batch,
    Chain,
    Defense,
    Noise,
    Quantization,
    Refused,
    SecureAggregation,
    TopK,
    Update,
)
from leakfrontier.evaluate.client import client as client_module
from leakfrontier.evaluate.client import side_by_side as tested
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.clients import Answer, Clients, Invited
from leakfrontier.evaluate.client.side_by_side import Asked, layout_of, side_by_side
from leakfrontier.evaluate.foundations.seeds import generator

SPACE = ImageSpace((1, 8, 8), 3)
SIZES = (1, 5, 9, 4)
OPTIONS: dict[str, dict[str, object]] = {
    "DPSGD": {"noise_multiplier": 0.5},
    "ClientDP": {"noise_multiplier": 0.1},
    "Noise": {"scale": 0.1},
    "TopK": {"ratio": 0.1},
    "RandomK": {"ratio": 0.5},
    "Quantization": {"bits": 4},
    "SecureAggregation": {"clients": 2},
    "Mixup": {"alpha": 0.5},
    "DualPruning": {"largest": 0.1, "smallest": 0.5},
    "Soteria": {"pruning_rate": 0.5},
}
SHIPPED = [cls(**OPTIONS.get(name, {})) for name, cls in DEFENSES.items() if name != "EDA"]
CHAINS = [
    Chain((DPSGD(noise_multiplier=0.1, clipping="per_layer"), Quantization(bits=8))),
    Chain((TopK(ratio=0.5), Noise(scale=0.01), SecureAggregation(clients=2))),
]
PROTOCOLS = (FedSGD(), FedAvg(epochs=2, batch_size=3, lr=0.1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 3))


def answer_of(defense: Defense, protocol: Protocol, make: Callable[[], nn.Module]) -> Answer:
    torch.manual_seed(0)
    if isinstance(defense, ATS):
        defense = defense.for_space(SPACE.mean, SPACE.std)
    model = defense.on_model(make()).eval()
    client = Client(model, F.cross_entropy, defense, protocol, SPACE)
    shares = [Batch(torch.rand(n, 1, 8, 8), torch.randint(3, (n,))) for n in SIZES]
    clients = Clients(client, shares, SIZES)
    invited = Invited(tuple(range(len(SIZES))), (0,) * len(SIZES), generator("round"))
    return clients.answer(invited, dict.fromkeys(invited.clients, model), model)


@pytest.mark.parametrize("make", [perceptron, convolutional])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=["FedSGD", "FedAvg"])
@pytest.mark.parametrize("defense", [*SHIPPED, *CHAINS], ids=repr)
def test_together_as_alone(
    defense: Defense,
    protocol: Protocol,
    make: Callable[[], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relative difference of uploads is at most 1e-4: sums are rounded in another order."""
    together = answer_of(defense, protocol, make)
    monkeypatch.setattr(client_module, "summed", lambda asked: None)
    alone = answer_of(defense, protocol, make)
    assert together.refused == alone.refused
    assert [one.clients for one in together.seen] == [one.clients for one in alone.seen]
    for one, other in zip(together.seen, alone.seen, strict=True):
        for found, expected in zip(one.updates, other.updates, strict=True):
            gap = sum(float((found[n] - value).square().sum()) for n, value in expected.items())
            whole = sum(float(value.square().sum()) for value in expected.values())
            assert gap <= 1e-8 * whole


def asked(model: nn.Module, inputs: Tensor) -> Asked:
    weights = dict(model.named_parameters())
    batch = Batch(inputs, torch.zeros(len(inputs), dtype=torch.long))
    return Asked(model, F.cross_entropy, weights, batch, None)


class Centred(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(dim=0)


class Viewed(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(len(inputs), -1)


def test_models_that_mix_or_draw_are_computed_alone() -> None:
    inputs = torch.rand(4, 6)
    assert layout_of(asked(nn.Sequential(nn.Linear(6, 3)), inputs)) is torch.contiguous_format
    assert layout_of(asked(nn.Sequential(nn.Linear(6, 3), Centred()), inputs)) is None
    dropping = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    assert layout_of(asked(dropping.train(), inputs)) is None
    assert layout_of(asked(dropping.eval(), inputs)) is torch.contiguous_format


def test_images_have_channels_last_unless_the_model_views_them() -> None:
    inputs = torch.rand(4, 1, 8, 8)
    assert layout_of(asked(convolutional(), inputs)) is torch.channels_last
    viewing = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Viewed(), nn.Linear(256, 3))
    assert layout_of(asked(viewing, inputs)) is torch.contiguous_format


def test_clients_of_a_round_share_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = tested.grouped_sums

    def counted(*args: object, **options: object) -> list[Update]:
        calls.append(args)
        return original(*args, **options)  # type: ignore[arg-type]

    answer_of(Defense(), FedSGD(), perceptron)  # the test of the model
    monkeypatch.setattr(tested, "grouped_sums", counted)
    answer_of(Defense(), FedSGD(), perceptron)
    assert len(calls) == 1


def test_each_task_has_its_own_global_draws() -> None:
    def drawing(seed: int) -> Callable[[], list[float]]:
        def draw() -> list[float]:
            torch.manual_seed(seed)
            model = nn.Linear(2, 2)
            first = float(torch.rand(()))
            tested.summed(asked(model, torch.rand(1, 2)))
            return [first, float(torch.rand(()))]

        return draw

    before = torch.get_rng_state()
    alone = [drawing(seed)() for seed in range(3)]
    torch.set_rng_state(before)
    assert side_by_side([drawing(seed) for seed in range(3)]) == alone
    assert torch.equal(torch.get_rng_state(), before)


@dataclass
class Fragile(Defense):
    error: type[Exception] = Refused
    _count: list[int] = field(default_factory=list, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        if torch.rand((), generator=rng) < 0.5:
            raise self.error("no")
        return update


def test_a_refusal_is_of_one_client() -> None:
    answer = answer_of(Fragile(), FedSGD(), perceptron)
    assert 0 < answer.refused < len(SIZES)
    assert len(answer.seen) == len(SIZES) - answer.refused
    assert answer.reason == "no"


def test_another_error_ends_the_round_and_leaves_global_draws_as_they_were() -> None:
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        side_by_side([lambda: tested.summed(asked(nn.Linear(2, 2), torch.rand(1, 2))), _fail])
    assert torch.equal(torch.get_rng_state(), before)


def _fail() -> None:
    raise KeyError("no")
