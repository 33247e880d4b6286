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
from leakfrontier.adversaries.language_prior import (
    draw_sentences,
    language_prior,
    next_token_logits,
)
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.client import ThreatModel

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
    with pytest.raises(NotApplicable, match="no tokens"):
        LanguageGuess().reconstruct(observed_images(mlp(), batch(1)), rng())
    encoder = observed(
        trained("classification", encoder=True, steps=10),
        space_of("classification", encoder=True),
        sentences(1, 1, encoder=True),
    )
    with pytest.raises(NotApplicable, match="encoder"):
        LanguageGuess().reconstruct(encoder, rng())
    assert language_prior(encoder) is None


def test_a_model_that_has_learned_nothing_is_no_prior() -> None:
    threat = ThreatModel(public=PUBLIC)
    truth = sentences(1, 1)
    random = trained("classification", steps=0)
    assert (
        language_prior(observed(random, space_of("classification"), truth, threat=threat)) is None
    )
    prior = language_prior(observed(trained("next-token"), SPACE, truth, threat=threat))
    assert prior is not None
    likely, unlikely = prior(truth.inputs), prior(truth.inputs.flip(1))
    assert float(likely) < float(unlikely)


def test_the_prior_is_the_clients_loss() -> None:
    truth = sentences(4, 1)
    observation = observed(trained("next-token"), SPACE, truth)
    prior = language_prior(observation)
    assert prior is not None
    with torch.no_grad():
        loss = observation.loss(observation.model(truth.inputs), truth.inputs)
    torch.testing.assert_close(prior(truth.inputs).mean(), loss)


def test_drawn_sentences_are_of_allowed_tokens_and_keep_known_ones() -> None:
    observation = observed(trained("next-token"), SPACE, sentences(1, 1))
    known = torch.full((40, 6), -1)
    known[:, 0], known[:, 5] = 4, PADDING
    allowed = torch.tensor([3, 4, 5, 20, 40])
    drawn = draw_sentences(next_token_logits(observation), known, allowed, rng())
    assert (drawn[:, 0] == 4).all()
    assert (drawn[:, 5] == PADDING).all()
    assert torch.isin(drawn[:, 1:5], allowed).all()
    grammatical = (drawn[:, :5] == torch.tensor([4, 5, 20, 40, 3])).float().mean()
    assert grammatical > 0.8  # the only sentence of these words, but for the determiner


def _single(count: int) -> list[Batch]:
    return [sentences(1, seed) for seed in range(100, 100 + count)]
