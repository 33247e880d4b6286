"""Conversion of texts to token ids: by characters, words, bytes, or a model's own tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Protocol

from ..models.pretrained import load_tokenizer

MOST_WORDS = 20_000
"""The maximum vocabulary of words. Rarer words are unknown."""

_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer(Protocol):
    """Converts texts to tokens: ids that are positions in a vocabulary.

    The joined texts of a sequence's tokens are its text (`rendering.joined`).
    """

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the text of every token; `text_of` escapes parts of characters."""

    @property
    def padding(self) -> int:
        """Return the token that fills up shorter sequences."""

    @property
    def first(self) -> int | None:
        """Return the token that begins every sequence; None if there is none."""

    @property
    def last(self) -> int | None:
        """Return the token that ends every sequence; None if there is none."""

    @property
    def special(self) -> tuple[int, ...]:
        """Return the tokens that do not stand for text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a limit of length."""


@dataclass(frozen=True)
class PieceTokenizer:
    """A token for every known piece of text, one for padding and one for unknown pieces.

    Attributes:
        pieces: The known pieces.
    """

    padding: ClassVar[int] = 0
    unknown: ClassVar[int] = 1
    special: ClassVar[tuple[int, ...]] = (0, 1)
    first: ClassVar[None] = None
    last: ClassVar[None] = None

    pieces: tuple[str, ...]

    @staticmethod
    def split(text: str) -> list[str]:
        """Return the pieces of a text."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the names of padding and unknown, followed by the pieces."""
        return ("[PAD]", "[UNK]", *self.pieces)

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        return {piece: token for token, piece in enumerate(self.pieces, 2)}

    def encode(self, text: str) -> list[int]:
        """Return one token per piece."""
        return [self._tokens.get(piece, self.unknown) for piece in self.split(text)]


@dataclass(frozen=True)
class CharacterTokenizer(PieceTokenizer):
    """A token for every character."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """Return a tokenizer that knows the characters of some texts."""
        return cls(tuple(sorted(set().union(*texts))))

    @staticmethod
    def split(text: str) -> list[str]:
        """Return the characters."""
        return list(text)


@dataclass(frozen=True)
class WordTokenizer(PieceTokenizer):
    """A token for every word and every mark, each with a preceding space if there is one."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> WordTokenizer:
        """Return a tokenizer that knows the most frequent words of some texts."""
        counts = Counter(word for text in texts for word in cls.split(text))
        common = sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS]
        return cls(tuple(sorted(common)))

    @staticmethod
    def split(text: str) -> list[str]:
        """Return words and marks; all white space counts as one space."""
        return [re.sub(r"^\s+", " ", piece) for piece in _WORDS.findall(text)]


@dataclass(frozen=True)
class ByteTokenizer:
    """A token for every byte of UTF-8, and one for padding."""

    padding: ClassVar[int] = 256
    special: ClassVar[tuple[int, ...]] = (256,)
    first: ClassVar[None] = None
    last: ClassVar[None] = None

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the bytes, and the name of padding."""
        return (*(text_of(bytes([value])) for value in range(256)), "[PAD]")

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())


@dataclass(frozen=True, eq=False)
class ModelTokenizer:
    """The tokenizer of a transformers model.

    Without a padding token, it pads with its end of text, see `TokenSpace`. If it also ends texts
    with that token, this end counts as padding.

    Attributes:
        source: The tokenizer of transformers.
    """

    source: Any

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the text of every token, as it appears within a text."""
        pieces = self.source.convert_ids_to_tokens(list(range(len(self.source))))
        backend = getattr(self.source, "backend_tokenizer", None)
        if type(getattr(backend, "model", None)).__name__ == "WordPiece":
            return tuple(_word_piece(str(piece)) for piece in pieces)
        decode = self.source.convert_tokens_to_string
        # Some tokenizers strip a token's leading space if it stands alone: hence the difference.
        before, kinds = decode(["a"]), self._decoders
        return tuple(
            _bytes_of(str(piece), kinds) or decode(["a", str(piece)])[len(before) :]
            for piece in pieces
        )

    @property
    def _decoders(self) -> frozenset[str]:
        """Return the kinds of decoders that the tokenizer has."""
        backend = getattr(self.source, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return frozenset({"ByteLevel"} if hasattr(self.source, "byte_decoder") else ())
        state = json.loads(decoder.__getstate__())
        return frozenset(part["type"] for part in (state, *state.get("decoders", ())))

    @property
    def padding(self) -> int:
        """Return the padding token, otherwise the end of text."""
        for token in (self.source.pad_token_id, self.source.eos_token_id):
            if token is not None:
                return int(token)
        raise ValueError(
            f"the tokenizer {self.source.name_or_path} has neither a padding token nor an end of "
            "text: set its pad_token and save it again"
        )

    @cached_property
    def first(self) -> int | None:
        """Return the token that begins every text; None if there is none."""
        return self._common(0)

    @cached_property
    def last(self) -> int | None:
        """Return the token that ends every text; None if there is none or if it is the padding."""
        common = self._common(-1)
        return None if common == self.padding else common

    @property
    def special(self) -> tuple[int, ...]:
        """Return the special tokens."""
        return tuple(sorted(self.source.all_special_ids))

    def encode(self, text: str) -> list[int]:
        """Return the tokens, including those that the tokenizer adds."""
        return list(self.source(text)["input_ids"])

    def _common(self, place: int) -> int | None:
        found = {self.encode(text)[place] for text in ("a", "Some words.")}
        token = found.pop()
        return token if not found and token in self.special else None


def text_of(data: bytes) -> str:
    """Return bytes as text. Bytes that are not a whole character become lone surrogates."""
    return data.decode(errors="surrogateescape")


def _bytes_of(piece: str, decoders: frozenset[str]) -> str:
    """Return the text of a token that stands for bytes; empty for other tokens."""
    single = _BYTE.fullmatch(piece)
    if single and "ByteFallback" in decoders:
        return text_of(bytes.fromhex(single[1]))
    letters = _byte_letters()
    if "ByteLevel" in decoders and all(letter in letters for letter in piece):
        return text_of(bytes(letters[letter] for letter in piece))
    return ""


@cache
def _byte_letters() -> Mapping[str, int]:
    """Return the bytes that tokenizers like GPT-2's write as visible letters."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in visible]
    letters = {chr(value): value for value in visible}
    return letters | {chr(256 + place): value for place, value in enumerate(others)}


def _word_piece(piece: str) -> str:
    """Return the text of a WordPiece token, which marks continuations of a word."""
    return piece.removeprefix("##") if piece.startswith("##") else f" {piece}"


TOKENIZERS: dict[str, Callable[[Iterable[str]], Tokenizer]] = {
    "characters": CharacterTokenizer.of,
    "words": WordTokenizer.of,
    "bytes": lambda texts: ByteTokenizer(),
}
"""Every tokenizer of ours by name, given the training texts."""


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer: one of `TOKENIZERS`, or that of a model (`pretrained.load_model`)."""
    if name in TOKENIZERS:
        return TOKENIZERS[name](texts)
    return ModelTokenizer(load_tokenizer(name))
