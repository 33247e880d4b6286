from dataclasses import replace

import pytest
import torch
from sentences import language_model, seen_by_server, sentences

from leakfrontier.adversaries.text.sentence_ends import Ending, find_endings
from leakfrontier.adversaries.text.transformer import find_transformer


def endings(
    tokens: torch.Tensor, prefixes: list[tuple[int, ...]], family: str, task: str = "next-token"
) -> dict[tuple[int, ...], Ending]:
    """Return what ends, by prefix, if these prefixes are known."""
    observation = seen_by_server(language_model(family, task), tokens, task)
    found = find_endings(find_transformer(observation), observation, prefixes)
    assert found is not None
    assert len({one.prefix for one in found}) == len(found)
    return {one.prefix: one for one in found}


def cut(tokens: torch.Tensor, row: int, length: int) -> tuple[int, ...]:
    return tuple(tokens[row, :length].tolist())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_last_token_is_a_label_and_copies_are_counted(family: str) -> None:
    tokens = sentences([7, 5, 5])
    tokens[2] = tokens[1]
    prefixes = [cut(tokens, 0, 6), cut(tokens, 1, 4)]
    found = endings(tokens, prefixes, family)
    assert set(found) == set(prefixes)
    for prefix, row, count in zip(prefixes, (0, 1), (1, 2), strict=True):
        assert found[prefix].label == int(tokens[row, len(prefix)])
        assert found[prefix].count == pytest.approx(count, abs=0.02)
        assert found[prefix].fit > 0.99
        assert found[prefix].leaf


def test_a_sentence_that_begins_another_is_found_by_what_does_not_go_on() -> None:
    tokens = sentences([8, 5])
    tokens[1, :4] = tokens[0, :4]
    whole, inner = cut(tokens, 0, 7), cut(tokens, 1, 4)
    found = endings(tokens, [whole], "gpt2")
    assert set(found) == {whole, inner}
    assert found[inner].label == int(tokens[1, 4])
    assert not found[inner].leaf
    assert [found[p].count for p in (whole, inner)] == pytest.approx([1, 1], abs=0.02)


def test_of_classified_sentences_the_label_is_the_class() -> None:
    tokens = sentences([6, 5, 4, 4])
    prefixes = [cut(tokens, row, length) for row, length in enumerate([6, 5, 4, 4])]
    found = endings(tokens, prefixes, "llama", "classification")
    assert [found[prefix].label for prefix in prefixes] == [0, 0, 1, 1]
    assert [found[prefix].count for prefix in prefixes] == pytest.approx([1] * 4, abs=0.02)


def test_without_the_last_block_or_with_too_many_prefixes_nothing_is_said() -> None:
    tokens = sentences([6])
    observation = seen_by_server(language_model("gpt2"), tokens)
    view = find_transformer(observation)
    known = {n: value for n, value in observation.update.items() if n != view.last.down.name}
    assert find_endings(view, replace(observation, update=known), [cut(tokens, 0, 5)]) is None
    assert find_endings(view, observation, []) is None
    inputs = view.last.down.weight.shape[1]
    many = [(first, 1) for first in range(2, 2 + inputs // 2 + 1)]
    assert find_endings(view, observation, many) is None
