from __future__ import annotations

import pytest
import torch
from federated import mlp, rng

from leakfrontier.adversaries import FedAvg, FedBuff, FedSGD
from leakfrontier.defenses import Update, trainable
from leakfrontier.evaluate.client.averaging import SCHEDULES, Averaging, invite
from leakfrontier.evaluate.client.clients import Seen


def constant(model: torch.nn.Module, value: float) -> Update:
    return {name: torch.full_like(one, value) for name, one in trainable(model).items()}


def test_the_server_steps_along_the_mean() -> None:
    model = mlp()
    before = [one.detach().clone() for one in trainable(model).values()]
    server = Averaging(model, FedSGD(), 4, 2, "sgd", 0.5)
    invited = server.invite(rng())
    updates = [constant(model, 1.0), constant(model, 3.0)]
    server.step(invited, [Seen((c,), [u]) for c, u in zip(invited.clients, updates, strict=True)])
    for old, new in zip(before, trainable(model).values(), strict=True):
        torch.testing.assert_close(new, old - 0.5 * 2.0)
    server.step(server.invite(rng()), [])  # nobody took part


def test_a_sum_counts_for_all_its_clients() -> None:
    model = mlp()
    before = next(model.parameters()).detach().clone()
    server = Averaging(model, FedAvg(epochs=1, batch_size=4, lr=0.1), 4, 4, "sgd", 1.0)
    invited = server.invite(rng())
    server.step(invited, [Seen(invited.clients, [constant(model, 8.0)])])
    torch.testing.assert_close(next(model.parameters()), before + 2.0)


def test_uploads_count_by_their_weights() -> None:
    model = mlp()
    before = next(model.parameters()).detach().clone()
    server = Averaging(model, FedSGD(), 4, 4, "sgd", 1.0, weights=(1.0, 3.0, 2.0, 2.0))
    alone = [Seen((0,), [constant(model, 5.0)]), Seen((1,), [constant(model, 1.0)])]
    together = Seen((2, 3), [constant(model, 6.0)])  # the sum of scaled uploads
    server.step(server.invite(rng()), [*alone, together])
    torch.testing.assert_close(next(model.parameters()), before - (5 + 3 + 2 * 6) / 8)


def test_momentum_and_schedules() -> None:
    model = mlp()
    first = next(model.parameters())
    server = Averaging(model, FedSGD(), 1, 1, "sgd", 0.5, momentum=0.9, schedule="linear", rounds=2)
    for velocity, lr in ((1.0, 0.5), (1.9, 0.25)):
        before = first.detach().clone()
        server.step(server.invite(rng()), [Seen((0,), [constant(model, 1.0)])])
        torch.testing.assert_close(first, before - lr * velocity)
    assert SCHEDULES["cosine"](0.5) == pytest.approx(0.5)
    assert SCHEDULES["cosine"](1.0) == pytest.approx(0.0)


def test_a_round_can_be_invited_again() -> None:
    protocol = FedBuff(epochs=1, batch_size=4, lr=0.1, buffer=3, oldest=2)
    server = Averaging(mlp(), protocol, 9, 3)
    draws, again = rng(), rng()
    for number in range(4):
        invited = server.invite(draws)
        other = invite(protocol, 9, 3, min(number, 2), again)
        assert (invited.clients, invited.ages) == (other.clients, other.ages)
        assert torch.equal(invited.rng.get_state(), other.rng.get_state())
        server.step(invited, [])


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 2 clients, got 3"):
        Averaging(mlp(), FedSGD(), 2, 3)
    with pytest.raises(ValueError, match="server must be one of"):
        Averaging(mlp(), FedSGD(), 2, 1, "momentum")
