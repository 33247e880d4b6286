from dataclasses import replace

import pytest
import torch
from federated import batch, mlp, observed
from sentences import VOCABULARY, language_model, seen_by_server, sentences

from leakfrontier.adversaries import NotApplicable
from leakfrontier.adversaries.text.subspace import row_space
from leakfrontier.adversaries.text.transformer import block_gradient, find_transformer, is_causal

FAMILIES = [
    ("gpt2", "next-token"),
    ("gpt2", "classification"),
    ("gptj", "next-token"),
    ("llama", "next-token"),
    ("llama", "classification"),
    ("qwen", "next-token"),
    ("bert", "classification"),
]


@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_what_blocks_are_given_spans_their_gradients(family: str, task: str) -> None:
    tokens = sentences([10, 7, 8])
    observation = seen_by_server(language_model(family, task), tokens, task)
    view = find_transformer(observation)
    assert view.absolute == (family in ("gpt2", "bert"))
    assert is_causal(view) == (family != "bert")
    counted = 9 if task == "next-token" else 10  # the last token is only a label
    for block in (view.first, view.second):
        space = row_space(block_gradient(observation, block.projections))
        (vectors,) = view.sequences(tokens[:1], [block.module])
        distances = space.distance(vectors[0])
        assert distances[:counted].max() < 1e-3
        assert counted == 10 or distances[9] > 0.1


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama", "qwen"])
def test_prefixes_that_grow_give_the_vectors_of_whole_sentences(family: str) -> None:
    tokens = sentences([10, 10])
    view = find_transformer(seen_by_server(language_model(family), tokens))
    (whole,) = view.sequences(tokens, [view.second.module])
    prefixes = view.no_prefix()
    for place in range(4):
        extended = view.extend(prefixes, tokens[:, place], [view.second.module])
        rows = torch.arange(2) if place else torch.zeros(2, dtype=torch.int64)
        grown = extended.vectors[0][rows, torch.arange(2)]
        torch.testing.assert_close(grown, whole[:, place], rtol=1e-4, atol=1e-5)
        prefixes = extended.keep(rows, torch.arange(2))
        assert torch.equal(prefixes.tokens, tokens[:, : place + 1])


def test_says_why_a_model_cannot_be_read() -> None:
    with pytest.raises(NotApplicable, match="not tokens"):
        find_transformer(observed(mlp(), batch(1)))
    observation = seen_by_server(language_model("gpt2"), sentences([4]))
    plain = torch.nn.Embedding(VOCABULARY, 4)
    with pytest.raises(NotApplicable, match="not a transformers model"):
        find_transformer(replace(observation, models=(plain,)))
    shallow = seen_by_server(language_model("gpt2", layers=1), sentences([4]))
    with pytest.raises(NotApplicable, match="fewer than two blocks"):
        find_transformer(shallow)


def test_reading_leaves_the_model_as_it_was() -> None:
    model = language_model("llama")
    observation = seen_by_server(model, sentences([4]))
    model.train()
    modes = [module.training for module in model.modules()]
    view = find_transformer(observation)
    view.extend(view.no_prefix(), torch.arange(3), [view.second.module])
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
