"""Labelled texts from JSONL files, as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

LENGTH_PERCENTILE = 90
"""Where in the lengths of the training texts the length of an example is taken from."""

MOST_TOKENS = 128
"""The longest example."""


class LabelledText(NamedTuple):
    """A line of a file.

    Attributes:
        text: The text.
        label: Its label; a number is its own name.
        place: File and line.
    """

    text: str
    label: str
    place: str


class Tokenizer(Protocol):
    """From texts to tokens: ids that are places in a vocabulary."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the text of every token."""

    @property
    def padding(self) -> int:
        """Return the token that fills what is shorter."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as many as it needs."""


@dataclass(frozen=True)
class CharacterTokenizer:
    """A token for every character, and two more for padding and for what is unknown.

    Attributes:
        characters: The known characters.
    """

    padding: ClassVar[int] = 0
    unknown: ClassVar[int] = 1

    characters: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """Return a tokenizer that knows the characters of some texts."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the characters, after the names of padding and the unknown."""
        return ("[PAD]", "[UNK]", *self.characters)

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        return {character: token for token, character in enumerate(self.characters, 2)}

    def encode(self, text: str) -> list[int]:
        """Return one token per character."""
        return [self._tokens.get(character, self.unknown) for character in text]


def read_texts(path: Path) -> list[LabelledText]:
    """Return the lines of a JSONL file: objects with a `text` and a `label`, a number or a name.

    Raises:
        ValueError: If a line cannot be used, with its number.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            texts = [
                _parsed(line, f"{path}, line {number}")
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the texts {path}: {error}") from error
    if not texts:
        raise ValueError(f"{path} holds no texts")
    return texts


def _parsed(line: str, place: str) -> LabelledText:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    if not isinstance(entry, dict) or not {"text", "label"} <= entry.keys():
        raise ValueError(f'{place} must be {{"text": ..., "label": ...}}, got {line.strip()[:80]}')
    text, label = entry["text"], entry["label"]
    if not isinstance(text, str) or not text:
        raise ValueError(f"the text of {place} must be a string that is not empty, got {text!r}")
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise ValueError(f"the label of {place} must be a whole number or a name, got {label!r}")
    return LabelledText(text, str(label), place)


def label_ids(texts: Sequence[LabelledText], classes: Sequence[str]) -> Tensor:
    """Return the place of each text's label among the classes."""
    known = {name: index for index, name in enumerate(classes)}
    for text in texts:
        if text.label not in known:
            raise ValueError(f"no training text has the label {text.label!r} of {text.place}")
    return torch.tensor([known[text.label] for text in texts])


def common_length(texts: Sequence[LabelledText], tokenizer: Tokenizer) -> int:
    """Return the 90th percentile of the texts' lengths in tokens, at most `MOST_TOKENS`."""
    lengths = [len(tokenizer.encode(text.text)) for text in texts]
    return min(MOST_TOKENS, int(np.percentile(lengths, LENGTH_PERCENTILE, method="higher")))


def tokenise(texts: Sequence[LabelledText], tokenizer: Tokenizer, length: int) -> Tensor:
    """Return token ids of shape (n, length): longer texts are cut, shorter ones padded."""
    rows = [tokenizer.encode(text.text)[:length] for text in texts]
    return torch.tensor([row + [tokenizer.padding] * (length - len(row)) for row in rows])
