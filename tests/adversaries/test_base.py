from dataclasses import dataclass, replace

import pytest
import torch
from federated import SPACE, batch, mlp, observed, rng
from torch import Generator, nn

from leakfrontier.adversaries import (
    Adversary,
    FedAvg,
    FedSGD,
    NotApplicable,
    Observation,
    Reconstruction,
)
from leakfrontier.adversaries.base import Round, in_evaluation, in_groups


def guess(value: float) -> Reconstruction:
    return Reconstruction(torch.tensor([value]))


def test_what_is_alike_is_attacked_together_and_keeps_its_place() -> None:
    together = []

    def attack(group: list[int]) -> list[Reconstruction]:
        together.append(group)
        return [guess(10.0 * index) for index in group]

    def alike(index: int) -> str:
        if index == 2:
            raise NotApplicable("not this one")
        return "even" if index % 2 == 0 else "odd"

    found = in_groups(5, alike, attack)  # type: ignore[arg-type]
    assert together == [[0, 4], [1, 3]]
    assert str(found[2]) == "not this one"
    assert [float(one.inputs) for one in found if isinstance(one, Reconstruction)] == [
        0,
        10,
        30,
        40,
    ]


@dataclass(frozen=True)
class Picky(Adversary):
    """Guesses the size of the batch, unless it is 1."""

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        if observation.batch_size == 1:
            raise NotApplicable("one example")
        return guess(observation.batch_size)


def test_an_attack_that_does_not_apply_to_one_observation_goes_on_with_the_next() -> None:
    seen = [observed(mlp(4), batch(size)) for size in (1, 3)]
    first, second = Picky().reconstruct_all(seen, [rng(), rng()])
    assert isinstance(first, NotApplicable)
    assert isinstance(second, Reconstruction)
    assert float(second.inputs) == 3
    with pytest.raises(ValueError, match="shorter"):
        Picky().reconstruct_all(seen, [rng()])


def test_an_honest_server_sends_all_clients_the_same_model() -> None:
    model = mlp(4)
    sent = Picky().craft(model, Round(SPACE, FedSGD(), clients=3, batch_size=1), rng())
    assert len(sent.models) == 3
    assert all(one is model for one in sent.models)
    assert sent.kept is None


def test_an_upload_of_local_steps_is_the_mean_gradient_of_a_step() -> None:
    model, share = mlp(4), batch(4)
    protocol = FedAvg(epochs=3, batch_size=2, lr=1e-4)
    gradient = observed(model, share)
    steps = observed(model, share, protocol=protocol)
    assert (gradient.local_steps, steps.local_steps) == (1, 6)
    assert gradient.model is gradient.models[0]
    name = "3.bias"
    torch.testing.assert_close(
        steps.as_gradient(name), gradient.as_gradient(name), rtol=0.05, atol=1e-3
    )
    several = replace(steps, protocol=replace(protocol, clients=2))
    assert several.local_steps == 3  # of two examples each


def test_a_simulation_of_the_truth_is_the_upload() -> None:
    share = batch(2)
    observation = observed(mlp(4), share)
    torch.testing.assert_close(dict(observation.simulate(*share)), dict(observation.update))


def test_a_model_is_left_as_it_was_whatever_happens_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval())
    with in_evaluation(model):
        assert not any(part.training for part in model.modules())
    with pytest.raises(ZeroDivisionError), in_evaluation(model):
        1 / 0  # noqa: B018
    assert [part.training for part in model.modules()] == [True, True, False]
