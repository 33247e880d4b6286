import pytest
import torch
from federated import batch, mlp, rng
from federated import observed as observed_images
from small_language import (
    DETERMINERS,
    PADDING,
    VERBS,
    observed,
    right,
    sentences,
    space_of,
    trained,
)

from leakfrontier.adversaries import LanguageGuess, NotApplicable, PublicData
from leakfrontier.adversaries.text.language_prior import language_prior
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.client.client import ThreatModel

PUBLIC = PublicData(*sentences(200, 7))
SPACE = space_of("next-token")


def guess(truth: Batch, **threat: object) -> torch.Tensor:
    known = ThreatModel(**threat)  # type: ignore[arg-type]
    observation = observed(trained("next-token"), SPACE, truth, threat=known)
    inputs = LanguageGuess().reconstruct(observation, rng()).inputs
    assert inputs.shape == truth.inputs.shape
    assert inputs.dtype == torch.int64
    return inputs


def test_its_sentences_are_of_the_language() -> None:
    first, second = guess(sentences(2, 1), public=PUBLIC)
    assert {int(first[0]), int(second[0])} == set(DETERMINERS)  # the only first words
    for tokens in (first, second):
        assert int(tokens[3]) in VERBS
        assert int(tokens[4]) in DETERMINERS
        assert SPACE.real(tokens[None]).sum() in (6, 7)  # as long as public texts
        assert tokens[-1] == PADDING


def test_it_is_better_than_nothing_and_far_from_the_truth() -> None:
    share = [right(guess(truth, public=PUBLIC), truth.inputs) for truth in _single(30)]
    assert 0.1 < sum(share) / len(share) < 0.4


def test_it_does_not_depend_on_the_update() -> None:
    assert torch.equal(guess(sentences(2, 1)), guess(sentences(2, 2)))


def test_without_public_texts_it_begins_as_the_model_does() -> None:
    assert (guess(sentences(3, 1))[:, 0] != PADDING).all()


def test_needs_a_language_model() -> None:
    with pytest.raises(NotApplicable, match="not tokens"):
        LanguageGuess().reconstruct(observed_images(mlp(), batch(1)), rng())
    encoder = observed(
        trained("classification", encoder=True, steps=10),
        space_of("classification", encoder=True),
        sentences(1, 1, encoder=True),
    )
    with pytest.raises(NotApplicable, match="encoder"):
        LanguageGuess().reconstruct(encoder, rng())


def test_a_model_that_has_learned_the_language_knows_its_sentences() -> None:
    threat = ThreatModel(public=PUBLIC)
    truth = sentences(1, 1)
    prior = language_prior(observed(trained("next-token"), SPACE, truth, threat=threat))
    assert prior is not None
    likely, unlikely = prior(truth.inputs), prior(truth.inputs.flip(1))
    assert float(likely) < float(unlikely)


def _single(count: int) -> list[Batch]:
    return [sentences(1, seed) for seed in range(100, 100 + count)]
