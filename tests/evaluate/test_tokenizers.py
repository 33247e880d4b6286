from pathlib import Path

import pytest

from leakfrontier.evaluate.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    ModelTokenizer,
    Tokenizer,
    WordTokenizer,
    make_tokenizer,
)

TEXTS = ["The cat isn't here.", "The  dog\nbarks!"]


def text_of(tokenizer: Tokenizer, text: str) -> str:
    return "".join(tokenizer.vocabulary[token] for token in tokenizer.encode(text))


def test_a_character_is_a_token() -> None:
    tokenizer = CharacterTokenizer.of(["hello", "hi"])
    assert tokenizer.vocabulary == ("[PAD]", "[UNK]", "e", "h", "i", "l", "o")
    assert tokenizer.encode("hole!") == [3, 6, 5, 2, tokenizer.unknown]


def test_a_word_is_a_token() -> None:
    tokenizer = WordTokenizer.of(TEXTS)
    assert len(tokenizer.encode(TEXTS[0])) == 7
    assert text_of(tokenizer, TEXTS[0]) == TEXTS[0]
    assert text_of(tokenizer, TEXTS[1]) == "The dog barks!"
    assert text_of(tokenizer, "The bird barks!") == "The[UNK] barks!"


def test_a_byte_is_a_token() -> None:
    tokenizer = ByteTokenizer()
    assert text_of(tokenizer, TEXTS[0]) == TEXTS[0]
    assert len(tokenizer.encode("\N{EURO SIGN}")) == 3
    assert len(tokenizer.vocabulary) == tokenizer.padding + 1


def test_tokenizers_by_name() -> None:
    assert make_tokenizer("bytes", TEXTS) == ByteTokenizer()
    assert make_tokenizer("words", TEXTS) == WordTokenizer.of(TEXTS)
    with pytest.raises(ValueError, match=r"cannot load the model .*no-such"):
        make_tokenizer("./no-such", TEXTS)


@pytest.fixture
def word_pieces(tmp_path: Path) -> ModelTokenizer:
    """Return a tokenizer as BERT's."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return ModelTokenizer(BertTokenizer(vocab=str(tmp_path / "vocab.txt")))


def test_the_tokenizer_of_an_encoder(word_pieces: ModelTokenizer) -> None:
    assert (word_pieces.first, word_pieces.last, word_pieces.padding) == (2, 3, 0)
    assert word_pieces.encode("the cats") == [2, 5, 6, 7, 3]
    assert text_of(word_pieces, "the cats") == " [CLS] the cats [SEP]"


def test_without_padding_texts_end_for_good() -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))
    assert tokenizer.padding == 0
    assert (tokenizer.first, tokenizer.last) == (None, None)
    tokenizer.source.eos_token = None
    with pytest.raises(ValueError, match="neither a padding token nor an end of text"):
        _ = tokenizer.padding
