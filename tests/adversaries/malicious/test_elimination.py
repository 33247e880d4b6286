from __future__ import annotations

import torch
from federated import SPACE, batch, make_client, rng, seeded
from torch import Tensor, nn

from leakfrontier.adversaries import ARES, FedSGD, Observation, PublicData, Round
from leakfrontier.adversaries.malicious.elimination import eliminated
from leakfrontier.defenses import Defense, Noise, Quantization
from leakfrontier.evaluate.client.client import ThreatModel, observe


def seen(examples: int, defense: Defense | None = None) -> Observation:
    """Return an upload of a perceptron that ARES has crafted."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 128),
            nn.ReLU(),
            nn.Linear(128, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
    )
    known = Round(SPACE, FedSGD(), 1, examples, PublicData(*batch(200, 9)))
    crafted = ARES().craft(model, known, rng())
    client = make_client(model, defense)
    (upload,) = observe(client, [batch(examples)], ThreatModel(), rng(1), models=crafted.models)
    return upload.observation


def found(observation: Observation) -> Tensor:
    model = observation.model
    first, head = model.get_submodule("1"), model.get_submodule("5")
    assert isinstance(first, nn.Linear)
    assert isinstance(head, nn.Linear)
    return eliminated(observation, model, "1", head, first.weight.any(dim=1))


def nearest(guesses: Tensor, truth: Tensor) -> list[float]:
    """Return the distance of each example from the nearest guess, per value."""
    distances = torch.cdist(truth.flatten(1), guesses.flatten(1)).amin(dim=1)
    return [float(distance) / truth[0].numel() ** 0.5 for distance in distances]


def test_examples_are_found_one_after_the_other() -> None:
    guesses = found(seen(16))
    assert len(guesses) == 16
    assert max(nearest(guesses, batch(16).inputs)) < 1e-3


def test_no_example_is_found_twice() -> None:
    guesses = found(seen(16)).flatten(1)
    assert (torch.cdist(guesses, guesses) + 10 * torch.eye(len(guesses))).min() > 1


def test_rounding_costs_some_precision_and_not_the_examples() -> None:
    guesses = found(seen(4, Quantization(8, stochastic=False)))
    distances = nearest(guesses, batch(4).inputs)
    assert 1e-4 < sorted(distances)[2] < 0.3


def test_a_lone_example_is_the_mean_of_all_rows() -> None:
    observation = seen(1, Noise(1e-2))
    (distance,) = nearest(found(observation), batch(1).inputs)
    weight, bias = (observation.update[f"1.{part}"] for part in ("weight", "bias"))
    row = bias.abs().argmax()
    single = (weight[row] / bias[row]).view(1, *SPACE.shape)
    assert distance < nearest(single, batch(1).inputs)[0] / 3


def test_nothing_is_found_in_nothing() -> None:
    observation = seen(2)
    for value in observation.update.values():
        value.zero_()
    assert len(found(observation)) == 0
