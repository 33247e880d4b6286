from pathlib import Path

import pytest

from leakfrontier.evaluate.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    ModelTokenizer,
    Tokenizer,
    WordTokenizer,
    make_tokenizer,
)
from leakfrontier.evaluate.modality.rendering import joined

TEXTS = ["The cat isn't here.", "The  dog\nbarks!"]


LANGUAGES = [
    "Die F\u00fc\u00dfe sind gr\u00f6\u00dfer.",
    "\u6211\u4eec\u4eca\u5929\u53bb\u5317\u4eac\u3002",
    "\u0647\u0630\u0627 \u0646\u064e\u0635 \u0639\u0631\u0628\u064a.",
    "\U0001f600\U0001f469\u200d\U0001f467 \u2764\ufe0f",
]


def text_of(tokenizer: Tokenizer, text: str) -> str:
    return joined([tokenizer.vocabulary[token] for token in tokenizer.encode(text)])


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


@pytest.mark.parametrize("text", LANGUAGES)
def test_parts_of_characters_make_up_a_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), byte_pairs("ByteLevel"), byte_pairs("ByteFallback")):
        assert len(tokenizer.encode(text)) > len(text)
        assert text_of(tokenizer, text) == text


def byte_pairs(kind: str) -> ModelTokenizer:
    """Return a tokenizer whose every token is a byte, written as GPT-2 or as Llama does."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = kind == "ByteLevel"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = letters if level else [f"<0x{value:02X}>" for value in range(256)]
    vocabulary = {piece: place for place, piece in enumerate(["<end>", *pieces])}
    fast = Fast(models.BPE(vocabulary, [], byte_fallback=not level))
    if level:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    else:
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))


def test_tokenizers_by_name() -> None:
    assert make_tokenizer("bytes", TEXTS) == ByteTokenizer()
    assert make_tokenizer("words", TEXTS) == WordTokenizer.of(TEXTS)
    with pytest.raises(ValueError, match="there is no folder or file no-such"):
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
