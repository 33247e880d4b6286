import pytest
import torch
from federated import rng
from sentences import language_model, recovered, seen_by_server, sentences

from leakfrontier.adversaries import DAGER
from leakfrontier.defenses import EDA, Batch


def changed(alpha: float, tokens: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return EDA(alpha).on_batch(Batch(tokens, tokens), rng(seed)).inputs


def words(text: torch.Tensor) -> list[int]:
    """Return the tokens before the padding, which must be at the end."""
    count = int((text != 0).sum())
    assert not text[count:].any()
    return text[:count].tolist()


def test_exchanges_words_or_leaves_them_out() -> None:
    tokens = sentences([10, 6] * 50)
    before = tokens.clone()
    longer, shorter, same = 0, 0, 0
    for old, new in zip(tokens, changed(0.2, tokens), strict=True):
        left, right = words(old), words(new)
        if len(right) < len(left):
            rest = iter(left)
            assert all(word in rest for word in right)  # in their old order
            shorter += 1
        else:
            assert sorted(right) == sorted(left)
            places = sum(a != b for a, b in zip(left, right, strict=True))
            assert places <= 2 * round(0.2 * len(left))
            same, longer = same + (places == 0), longer + (places > 0)
    assert torch.equal(tokens, before)
    assert min(longer, shorter) > 25
    assert same < 20


def test_its_extremes() -> None:
    tokens = sentences([10, 6, 1])
    assert torch.equal(changed(0.0, tokens), tokens)
    for seed in range(10):
        assert all(words(text) for text in changed(1.0, tokens, seed))  # a word is always left
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        EDA(float("nan"))
    with pytest.raises(ValueError, match="EDA changes texts"):
        EDA().on_batch(Batch(torch.rand(2, 1, 4, 4), torch.zeros(2)), rng())


def test_labels_stay_and_next_tokens_are_those_of_the_changed_text() -> None:
    tokens = sentences([10, 6])
    labels = torch.tensor([1, 0])
    assert torch.equal(EDA(0.5).on_batch(Batch(tokens, labels), rng()).targets, labels)
    own = EDA(0.5).on_batch(Batch(tokens, tokens), rng())
    assert torch.equal(own.targets, own.inputs)
    assert not torch.equal(own.inputs, tokens)


def test_an_attack_recovers_the_changed_text() -> None:
    tokens, defense = sentences([10, 7]), EDA(0.3)
    observation = seen_by_server(language_model("gpt2"), tokens, defense=defense)
    guess = DAGER().reconstruct(observation, rng())
    assert recovered(guess, tokens) == 0
    common = {*guess.inputs.flatten().tolist()} & {*tokens.flatten().tolist()}
    assert len(common) >= 10
