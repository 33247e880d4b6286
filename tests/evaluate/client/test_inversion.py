from __future__ import annotations

import pytest
import torch
import tricks
from federated import Sum, batch, make_client, mlp, rng

from leakfrontier.adversaries import FedAvg, FedBuff, Protocol
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    ClientDP,
    Defense,
    Noise,
    Quantization,
    RandomK,
    Refused,
    TopK,
    batch_gradient,
)
from leakfrontier.evaluate.client.decoders import recovery
from leakfrontier.evaluate.client.inversion import (
    PAIRS,
    Inversion,
    PublicTraining,
    decoded,
    invert,
    noise_cancels,
    public_clients,
    still_holds_update,
)

STEPS = FedAvg(epochs=2, batch_size=4, lr=0.05)
TRICKS = [
    tricks.FirstIsZero(),
    tricks.LastRound(),
    tricks.UnlessDrawn(),
    tricks.PublicFactors(),
    tricks.LowBits(noise_multiplier=1.0),
    tricks.Permuted(),
    tricks.Echo(),
    tricks.OtherPermutation(),
    tricks.Flipped(),
    tricks.Sums(),
    tricks.Alternating(),
]
HONEST = [
    Defense(),
    Noise(scale=0.0),
    Noise(scale=0.1),
    DPSGD(noise_multiplier=0.0, max_grad_norm=1e6),
    DPSGD(noise_multiplier=1.0),
    ClientDP(noise_multiplier=0.0),
    TopK(ratio=1.0),
    TopK(ratio=0.001),
    RandomK(ratio=0.5),
    Quantization(bits=1),
    Quantization(bits=8),
]


def inverted(
    defense: Defense, protocol: Protocol | None = None, *, seed: int = 0, size: int = 1
) -> Inversion:
    client = make_client(defense.on_model(mlp()), defense, protocol)
    shares = [batch(16, 100 * seed + i) for i in range(public_clients(defense))]
    return invert(client, shares, PublicTraining(size), rng(seed))


@pytest.mark.parametrize("defense", TRICKS, ids=str)
def test_uploads_of_tricks_still_hold_the_update(defense: Defense) -> None:
    found = inverted(defense)
    assert found.row.decoded > 0.85
    assert still_holds_update(found.row)


@pytest.mark.parametrize(
    ("protocol", "size"), [(None, 1), (None, 8), (STEPS, 1)], ids=["one", "eight", "FedAvg"]
)
@pytest.mark.parametrize("defense", HONEST, ids=str)
def test_honest_defenses_are_not_accused(
    defense: Defense, protocol: Protocol | None, size: int
) -> None:
    found = inverted(defense, protocol, size=size).row
    assert not still_holds_update(found)
    assert not noise_cancels(found) or isinstance(defense, TopK)  # error feedback cancels its error


def test_noise_that_cancels_is_found() -> None:
    assert noise_cancels(inverted(tricks.CancellingNoise()).row)
    assert noise_cancels(
        inverted(tricks.ClaimedCancelling(noise_multiplier=1.0, poisson_sampling=False)).row
    )
    assert not noise_cancels(inverted(Noise(scale=1.0)).row)


@pytest.mark.parametrize("defense", [tricks.Permuted(), tricks.PublicFactors()], ids=str)
def test_the_decoder_finds_the_update_of_private_examples(defense: Defense) -> None:
    decoder = inverted(defense).decoder
    assert decoder is not None
    assert not decoder.needs_history
    client, private = make_client(mlp(), defense), batch(1, seed=999)
    upload = client.upload(private, rng())
    truth = batch_gradient(client.model, client.loss, private)
    found = decoded(decoder, [upload])
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in truth.items()
    }
    pair = [
        torch.cat([one[name].detach().flatten() for name in truth])[None] for one in (found, truth)
    ]
    assert recovery(*pair, torch.zeros_like(pair[1])) > 0.9


def test_uploads_that_are_seen_together_are_compared_with_sums() -> None:
    found = inverted(Pair()).row
    assert found.decoded == pytest.approx(1)
    assert found.plain == pytest.approx(1)


class Pair(Sum):
    @property
    def cohort(self) -> int:
        return 2


def test_clients_that_take_part_in_some_rounds_only() -> None:
    found = inverted(Defense(), FedBuff(buffer=4, oldest=2, epochs=1, batch_size=4, lr=0.05)).row
    assert found.decoded > 0.95
    assert found.plain > 0.95


class Refusing(Defense):
    def on_batch(self, batch: Batch, rng: torch.Generator) -> Batch:
        raise Refused("no")


def test_clients_that_refuse_are_not_tested() -> None:
    with pytest.raises(Refused, match="too few"):
        inverted(Refusing())


def test_the_test_can_be_repeated_and_leaves_the_model_as_it_was() -> None:
    client = make_client(mlp(), Noise(scale=0.1))
    shares = [batch(4, i) for i in range(PAIRS)]
    before = [value.clone() for value in client.model.parameters()]
    first, again = (invert(client, shares, PublicTraining(1), rng()).row for _ in range(2))
    assert first == again
    assert all(map(torch.equal, before, client.model.parameters()))
