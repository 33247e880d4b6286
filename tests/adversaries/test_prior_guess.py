import torch
from federated import SPACE, batch, mlp, observed, rng

from leakfrontier.adversaries import PriorGuess, PublicData
from leakfrontier.evaluate.client import ThreatModel

PUBLIC = PublicData(*batch(200, seed=7))


def guess(**threat: object) -> torch.Tensor:
    observation = observed(mlp(), batch(3), threat=ThreatModel(**threat))  # type: ignore[arg-type]
    return PriorGuess().reconstruct(observation, rng()).inputs


def test_guesses_the_mean_of_the_public_data() -> None:
    torch.testing.assert_close(guess(public=PUBLIC)[1], PUBLIC.inputs.mean(dim=0))


def test_guesses_the_mean_of_the_class_if_labels_are_known() -> None:
    targets = batch(3).targets
    expected = [PUBLIC.inputs[PUBLIC.targets == target].mean(dim=0) for target in targets]
    torch.testing.assert_close(guess(public=PUBLIC, knows_targets=True), torch.stack(expected))


def test_without_public_data_guesses_the_centre() -> None:
    torch.testing.assert_close(SPACE.to_unit(guess()), torch.full((3, 3, 8, 8), 0.5))


def test_does_not_depend_on_the_update() -> None:
    first = observed(mlp(), batch(3, seed=1))
    second = observed(mlp(), batch(3, seed=2))
    attack = PriorGuess()
    assert torch.equal(
        attack.reconstruct(first, rng()).inputs, attack.reconstruct(second, rng()).inputs
    )
