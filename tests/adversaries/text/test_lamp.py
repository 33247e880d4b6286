from typing import Any

import pytest
import torch
from federated import rng
from small_language import observed, right, sentences, space_of, trained

from leakfrontier.adversaries import LAMP, LanguageGuess, PublicData
from leakfrontier.adversaries.text.language_prior import language_prior
from leakfrontier.adversaries.text.texts import Texts
from leakfrontier.evaluate.client.client import ThreatModel

BUDGET: dict[str, Any] = {"iterations": 60, "starts": 60, "orders": 60, "reorder_every": 10}
THREAT = ThreatModel(public=PublicData(*sentences(200, 7)))


def test_reads_sentences_that_a_small_gpt2_learns_far_beyond_the_blind_guess() -> None:
    reached: list[float] = []
    blind: list[float] = []
    for seed in range(50, 54):
        truth = sentences(1, seed)
        observation = observed(trained("next-token"), space_of("next-token"), truth, threat=THREAT)
        for attack, shares in ((LAMP(**BUDGET), reached), (LanguageGuess(), blind)):
            guess = attack.reconstruct(observation, rng(seed))
            shares.append(right(guess.inputs, truth.inputs))
    assert sum(reached) / 4 > 0.5
    assert sum(reached) / 4 > sum(blind) / 4 + 0.25


def test_reads_sentences_of_a_small_bert_without_a_language_model() -> None:
    space, model = (
        space_of("classification", encoder=True),
        trained("classification", encoder=True, steps=10),
    )
    shares = []
    for seed in (50, 52):
        truth = sentences(1, seed, encoder=True)
        guess = LAMP(**BUDGET | {"iterations": 100}).reconstruct(
            observed(model, space, truth), rng(seed)
        )
        words = truth.inputs > 2
        shares.append(float((guess.inputs == truth.inputs)[words].float().mean()))
    assert min(shares) > 0.5


@pytest.mark.parametrize("comparison", ["cosine", "l1l2"])
def test_no_order_that_it_takes_is_worse(comparison: str) -> None:
    truth = sentences(2, 5)
    observation = observed(trained("next-token"), space_of("next-token"), truth, threat=THREAT)
    attack = LAMP(orders=40, comparison=comparison)  # type: ignore[arg-type]
    prior = language_prior(observation)
    assert prior is not None
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    for seed in range(3):
        noise = torch.randn(*texts.known.shape, texts.table.shape[1], generator=rng(seed))
        start = {"inputs": texts.settled(texts.size * noise).unsqueeze(0)}
        end = attack.reorder(texts, start, rng(seed))

        def discrete(inputs: torch.Tensor) -> float:
            tokens = texts.nearest(inputs[0])
            distance = attack.distances(texts, inputs, tokens.unsqueeze(0))
            return float(distance + attack.language * prior(tokens).mean())

        assert discrete(end["inputs"]) <= discrete(start["inputs"]) + 1e-5
        sizes = [part["inputs"].norm(dim=-1).sort().values for part in (start, end)]
        torch.testing.assert_close(*sizes)  # nothing but the order has changed


def test_the_language_model_decides_between_orders_of_like_gradients() -> None:
    truth = sentences(1, 5)
    observation = observed(trained("next-token"), space_of("next-token"), truth)
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    width = texts.known.shape[1]
    wrong = truth.inputs[:, :width].clone()
    wrong[0, [1, 2]] = wrong[0, [2, 1]]  # a noun before its adjective
    start = {"inputs": texts.embedded(wrong).unsqueeze(0)}
    found = LAMP(orders=200, language=100.0).reorder(texts, start, rng())
    prior = language_prior(observation)
    assert prior is not None
    assert float(prior(texts.nearest(found["inputs"][0]))) < float(prior(wrong)) - 0.5


def test_refuses_nonsense() -> None:
    for options in ({"comparison": "euclidean"}, {"language": -1.0}, {"absolute": float("inf")}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            LAMP(**options)
