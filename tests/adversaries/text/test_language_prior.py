import math

import pytest
import torch
from federated import batch, mlp, rng
from federated import observed as observed_images
from small_language import (
    PADDING,
    VOCABULARY,
    observed,
    sentences,
    space_of,
    trained,
)
from torch import Tensor

from leakfrontier.adversaries import NotApplicable, PublicData
from leakfrontier.adversaries.text.language_prior import (
    draw_sentences,
    language_prior,
    next_token_logits,
)
from leakfrontier.evaluate.client.client import ThreatModel

SPACE = space_of("next-token")


def successor(tokens: Tensor) -> Tensor:
    """Return the logits of one to whom every token is followed by the next number."""
    return 50 * torch.nn.functional.one_hot(tokens + 1, VOCABULARY).float()


def test_drawn_sentences_follow_the_model_and_keep_what_is_known() -> None:
    known = torch.tensor([[4, -1, -1, -1, PADDING]]).expand(20, -1)
    drawn = draw_sentences(successor, known, torch.arange(3, 20), rng())
    assert drawn.unique(dim=0).tolist() == [[4, 5, 6, 7, PADDING]]
    assert known[0].tolist() == [4, -1, -1, -1, PADDING]  # left as it was


def test_first_words_are_any_that_are_allowed_and_no_others_are_drawn() -> None:
    allowed = torch.tensor([3, 7, 9])
    drawn = draw_sentences(successor, torch.full((60, 2), -1), allowed, rng())
    assert {*drawn[:, 0].tolist()} == {3, 7, 9}
    assert torch.isin(drawn, allowed).all()  # though the next numbers are none of them
    again = draw_sentences(successor, torch.full((60, 2), -1), allowed, rng())
    assert torch.equal(drawn, again)


def test_the_prior_is_the_clients_loss() -> None:
    truth = sentences(4, 1)
    observation = observed(trained("next-token", steps=0), SPACE, truth)
    prior = language_prior(observation)
    assert prior is not None
    with torch.no_grad():
        loss = observation.loss(observation.model(truth.inputs), truth.inputs)
    torch.testing.assert_close(prior(truth.inputs).mean(), loss)


def test_a_model_that_has_learned_nothing_is_no_prior_where_it_can_be_tried() -> None:
    threat = ThreatModel(public=PublicData(*sentences(16, 7)))
    untrained = trained("next-token", steps=0)
    for task in ("next-token", "classification"):
        model = trained(task, steps=0)
        seen = observed(model, space_of(task), sentences(1, 1), threat=threat)
        assert language_prior(seen) is None
    prior = language_prior(observed(untrained, SPACE, sentences(1, 1)))
    assert prior is not None
    assert float(prior(sentences(1, 1).inputs)) == pytest.approx(math.log(VOCABULARY), rel=0.1)


def test_a_classifier_with_tied_embeddings_is_a_language_model() -> None:
    tokens = sentences(2, 1).inputs
    model = trained("classification", steps=0)
    logits = next_token_logits(observed(model, space_of("classification"), sentences(2, 1)))
    assert logits(tokens).shape == (*tokens.shape, VOCABULARY)
    network = model.model.transformer
    with torch.no_grad():
        states = network.eval()(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(logits(tokens), states @ network.wte.weight[:VOCABULARY].T)


def test_what_is_no_language_model_is_said() -> None:
    with pytest.raises(NotApplicable, match="not tokens"):
        next_token_logits(observed_images(mlp(), batch(1)))
    space = space_of("classification", encoder=True)
    model = trained("classification", encoder=True, steps=0)
    encoder = observed(model, space, sentences(1, 1, encoder=True))
    with pytest.raises(NotApplicable, match="encoder"):
        next_token_logits(encoder)
    assert language_prior(encoder) is None
