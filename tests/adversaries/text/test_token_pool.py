from dataclasses import replace

import pytest
import torch
from sentences import VOCABULARY, language_model, seen_by_server, sentences

from leakfrontier.adversaries.text import token_pool
from leakfrontier.adversaries.text.subspace import row_space
from leakfrontier.adversaries.text.token_pool import TokenPool, find_tokens, vocabulary_energy
from leakfrontier.adversaries.text.transformer import block_gradient, find_transformer

FAMILIES = [("gpt2", "next-token"), ("llama", "next-token"), ("bert", "classification")]


@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_the_vocabulary_in_one_product_is_each_token_by_itself(family: str, task: str) -> None:
    observation = seen_by_server(language_model(family, task), sentences([6, 5]), task)
    view = find_transformer(observation)
    space = row_space(block_gradient(observation, view.first.projections))
    every = torch.arange(VOCABULARY)
    energy = vocabulary_energy(view, space, 4)
    for place in range(energy.shape[1]):
        alone = space.energy(view.at_position(every, place, view.first.module))
        torch.testing.assert_close(energy[:, place].double(), alone, rtol=0, atol=1e-4)


def test_a_pool_of_one_entry_is_for_every_position() -> None:
    tokens = [torch.tensor([4, 2]), torch.tensor([7])]
    assert TokenPool(tokens[:1], tokens[:1], 0.0).at(5).tolist() == [4, 2]
    pool = TokenPool(tokens, tokens, 0.0)
    assert pool.at(1).tolist() == [7]
    assert pool.at(2).tolist() == []


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_tokens_are_found_at_the_positions_that_they_had(noise: float) -> None:
    tokens = sentences([5])
    observation = seen_by_server(language_model("gpt2"), tokens)
    view = find_transformer(observation)
    space = row_space(block_gradient(observation, view.first.projections))
    pool = find_tokens(view, replace(space, noise=noise), 6, most=3)
    for place in range(4):  # the last token is a label
        assert int(pool.at(place)[0]) == int(tokens[0, place])
        assert float(pool.distances[place][0]) < 0.05
    assert all(len(found) <= 3 for found in pool.tokens)
    assert pool.level == max(float(d.max()) for d in pool.distances if len(d))
    nothing = [len(pool.at(place)) for place in (4, 5)]
    assert nothing == ([0, 0] if not noise else [1, 1])  # with noise, the nearest is always kept


def test_where_positions_do_not_matter_one_pool_has_all_tokens() -> None:
    tokens = sentences([5, 4])
    observation = seen_by_server(language_model("llama"), tokens)
    view = find_transformer(observation)
    space = row_space(block_gradient(observation, view.first.projections))
    pool = find_tokens(view, space, 6, most=10)
    assert len(pool.tokens) == 1
    assert {*pool.at(3).tolist()} == {*tokens[0, :4].tolist(), *tokens[1, :3].tolist()}


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (1, 1)])
def test_noise_leaves_no_more_tokens_than_are_asked_for(most: int, kept: int) -> None:
    tokens = sentences([5, 5])
    observation = seen_by_server(language_model("gpt2"), tokens)
    view = find_transformer(observation)
    space = row_space(block_gradient(observation, view.first.projections))
    found = find_tokens(view, replace(space, noise=1e-6), 1, most=most).at(0)
    assert len(found) == kept
    assert {*found.tolist()} <= {*tokens[:, 0].tolist()}


def test_looks_further_as_long_as_all_tokens_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated tokens put others into the span at places where these do not stand."""
    tokens = sentences([6, 5])
    observation = seen_by_server(language_model("gpt2"), tokens)
    view = find_transformer(observation)
    space = row_space(block_gradient(observation, view.first.projections))
    monkeypatch.setattr(token_pool, "_FIRST", 4 - 4 * space.rank)  # fewer than there are
    pool = find_tokens(view, space, view.positions, most=10)
    for place in range(4):
        assert torch.isin(tokens[:, place], pool.at(place)).all()
