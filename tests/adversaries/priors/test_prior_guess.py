from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, mlp, observed, rng

from leakfrontier.adversaries import NotApplicable, PriorGuess, PublicData, TokenSpace
from leakfrontier.evaluate.client.client import ThreatModel

PUBLIC = PublicData(*batch(200, seed=7))
TEXTS = TokenSpace((3,), 2, vocabulary=9, padding=0)
PUBLIC_TEXTS = PublicData(
    torch.tensor([[5, 6, 7], [5, 8, 0], [4, 6, 0], [4, 1, 1], [4, 1, 0]]),
    torch.tensor([0, 0, 0, 1, 1]),
)


def guess(**threat: object) -> torch.Tensor:
    observation = observed(mlp(), batch(3), threat=ThreatModel(**threat))  # type: ignore[arg-type]
    return PriorGuess().reconstruct(observation, rng()).inputs


def guess_texts(space: TokenSpace, **granted: object) -> list[list[int]]:
    observation = replace(observed(mlp(), batch(3)), space=space, **granted)  # type: ignore[arg-type]
    inputs = PriorGuess().reconstruct(observation, rng()).inputs
    assert inputs.dtype == torch.int64
    tokens: list[list[int]] = inputs.tolist()
    return tokens


def test_guesses_the_mean_of_the_public_data() -> None:
    torch.testing.assert_close(guess(public=PUBLIC)[1], PUBLIC.inputs.mean(dim=0))


def test_guesses_the_mean_of_the_class_if_labels_are_known() -> None:
    targets = batch(3).targets
    expected = [PUBLIC.inputs[PUBLIC.targets == target].mean(dim=0) for target in targets]
    torch.testing.assert_close(guess(public=PUBLIC, knows_targets=True), torch.stack(expected))


def test_without_public_data_guesses_the_centre() -> None:
    torch.testing.assert_close(SPACE.to_unit(guess()), torch.full((3, 3, 8, 8), 0.5))


def test_guesses_the_most_frequent_token_at_each_place() -> None:
    assert guess_texts(TEXTS, public=PUBLIC_TEXTS) == [[4, 1, 0]] * 3  # of equals the first
    known = torch.tensor([0, 1, 0])
    expected = [[5, 6, 0], [4, 1, 0], [5, 6, 0]]
    assert guess_texts(TEXTS, public=PUBLIC_TEXTS, targets=known) == expected


def test_without_public_texts_guesses_padding_if_there_is_any() -> None:
    assert guess_texts(TEXTS) == [[0, 0, 0]] * 3
    with pytest.raises(NotApplicable, match="no public texts"):
        guess_texts(replace(TEXTS, padding=None))


def test_does_not_depend_on_the_update() -> None:
    first = observed(mlp(), batch(3, seed=1))
    second = observed(mlp(), batch(3, seed=2))
    attack = PriorGuess()
    assert torch.equal(
        attack.reconstruct(first, rng()).inputs, attack.reconstruct(second, rng()).inputs
    )
