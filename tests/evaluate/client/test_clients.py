"""Clients answer from what they remember, and from nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from federated import batch, make_client, mlp, rng
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import FedAvg, FedSGD, Protocol
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Defense,
    Refused,
    SecureAggregation,
    TopK,
    Update,
    batch_gradient,
    trainable,
)
from leakfrontier.evaluate.client.averaging import Averaging
from leakfrontier.evaluate.client.clients import Answer, Clients, Invited, Shares

FEDAVG = FedAvg(epochs=2, batch_size=2, lr=0.1)


def clients_of(defense: Defense, protocol: Protocol, model: nn.Module) -> Clients:
    shares = [batch(6, seed) for seed in range(5)]
    return Clients(make_client(model, defense, protocol), shares, [2] * 5)


def played(
    clients: Clients, model: nn.Module, rounds: int
) -> tuple[list[Invited], list[Answer], list[dict[int, object]]]:
    server = Averaging(model, clients.client.protocol, 5, 4)
    draws = rng()
    invitations, answers, memories = [], [], []
    for _ in range(rounds):
        invited = server.invite(draws)
        invitations.append(Invited(invited.clients, invited.ages, rng_copy(invited.rng)))
        memories.append(dict(clients.memories(invited.clients)))
        answers.append(clients.answer(invited, dict.fromkeys(invited.clients, model), model))
    return invitations, answers, memories


def rng_copy(draws: Generator) -> Generator:
    same = Generator()
    same.set_state(draws.get_state())
    return same


@pytest.mark.parametrize("protocol", [FedSGD(), FEDAVG], ids=["FedSGD", "FedAvg"])
@pytest.mark.parametrize(
    "defense",
    [Defense(), TopK(0.2), DPSGD(0.5), SecureAggregation(2)],
    ids=lambda d: type(d).__name__,
)
def test_a_part_of_a_round_can_be_played_again(defense: Defense, protocol: Protocol) -> None:
    model = mlp()
    invitations, answers, memories = played(clients_of(defense, protocol, model), model, 5)
    again = clients_of(defense, protocol, model)
    for number in (4, 2):  # in any order
        seen = answers[number].seen[0]
        again.remember({index: memories[number][index] for index in seen.clients})  # type: ignore[misc]
        sent = dict.fromkeys(seen.clients, model)
        invited = invitations[number]
        copy = Invited(invited.clients, invited.ages, rng_copy(invited.rng))
        (found,) = again.answer(copy, sent, model).seen
        assert found.clients == seen.clients
        for one, other in zip(found.updates, seen.updates, strict=True):
            torch.testing.assert_close(one, other)  # other clients change the order of sums


def test_secrets_are_the_examples_of_the_round() -> None:
    model = mlp()
    clients = clients_of(Defense(), FedSGD(), model)
    _, answers, _ = played(clients, model, 3)
    for answer in answers:
        for index, secret in answer.secrets.items():
            expected = clients.shares[index].at(secret.rows)
            assert torch.equal(secret.trained_on.inputs, expected.inputs)
            assert len(secret.rows) == 2


@dataclass
class Refusing(Defense):
    def on_update(self, update: Update, rng: Generator) -> Update:
        raise Refused("never")


def test_refusals_are_counted_with_their_reason() -> None:
    model = mlp()
    _, (answer,), _ = played(clients_of(Refusing(), FedSGD(), model), model, 1)
    assert (answer.seen, answer.refused, answer.reason) == ([], 4, "never")


@dataclass
class Spy(Defense):
    calls: ClassVar[list[str]] = []
    uploads: int = field(default=0, init=False)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        self.calls.append("on_receive")
        return model

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.calls.append(f"batches {examples} {batch_size} {epochs}")
        yield from super().batches(examples, batch_size, epochs, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.uploads += 1
        self.calls.append(f"on_update {self.uploads}")
        return update

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        self.calls.append(f"on_cohort {len(models)}")

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        self.calls.append(f"on_round {len(updates)}")
        return list(updates)


@pytest.mark.parametrize("protocol", [FedSGD(), FEDAVG], ids=["FedSGD", "FedAvg"])
def test_a_defense_is_called_as_in_training_when_its_round_is_played_again(
    protocol: Protocol,
) -> None:
    model = mlp()
    clients = clients_of(Spy(), protocol, model)
    invitations, _, memories = played(clients, model, 3)
    last = invitations[-1]
    again = clients_of(Spy(), protocol, model)
    sequences = []
    for one in (clients, again):
        Spy.calls.clear()
        one.remember(memories[-1])  # type: ignore[arg-type]
        invited = Invited(last.clients, last.ages, rng_copy(last.rng))
        one.answer(invited, dict.fromkeys(last.clients, model), model)
        sequences.append([*Spy.calls])
    assert sequences[0] == sequences[1]
    assert any(call == "on_update 3" for call in sequences[1])  # it has a history


@pytest.mark.parametrize("cohort", [1, 3])
def test_weights_give_the_mean_over_all_examples(cohort: int) -> None:
    model, sizes = mlp(), (1, 4, 7)
    shares = [Batch(torch.rand(n, 3, 8, 8), torch.randint(10, (n,))) for n in sizes]
    defense = SecureAggregation(clients=3) if cohort == 3 else Defense()
    client = make_client(model, defense, FedSGD())
    weights = tuple(map(float, sizes))
    private = Shares(Batch.joined(shares), torch.arange(12).split(sizes))
    clients = Clients(client, private, sizes, weights)
    server = Averaging(copy.deepcopy(model), FedSGD(), 3, 3, "sgd", 1.0, weights=weights)
    invited = server.invite(rng())
    answer = clients.answer(invited, dict.fromkeys(invited.clients, model), model)
    assert len(answer.seen) == 3 // cohort
    server.step(invited, answer.seen)
    expected = batch_gradient(model, client.loss, Batch.joined(shares))
    for name, value in trainable(server.model).items():
        step = model.get_parameter(name) - value
        torch.testing.assert_close(step, expected[name], rtol=1e-3, atol=1e-5)
