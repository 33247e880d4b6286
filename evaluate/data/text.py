"""Labelled texts, from JSONL files and from the Hugging Face hub, as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakfrontier.adversaries import TokenSpace
from leakfrontier.defenses import Batch

from ..models.pretrained import Task, is_path, missing
from .dataset import Dataset, split
from .tokenizers import Tokenizer, make_tokenizer

LENGTH_PERCENTILE = 90
"""The length of an example is this quantile of the lengths of the training texts."""

MOST_TOKENS = 128
"""The maximum length of an example, unless a length is requested."""

HUB = "hub:"
"""Prefix of the name of a dataset on the Hugging Face hub."""

_TEXT_COLUMNS = ("text", "sentence", "content")


class LabelledText(NamedTuple):
    """A line of a file.

    Attributes:
        text: The text.
        label: Its label, "" without one. A number is its own name.
        place: File and line.
    """

    text: str
    label: str
    place: str


Splits = tuple[Sequence[LabelledText], Sequence[LabelledText]]
"""Texts for training and for testing."""


@dataclass(frozen=True)
class Reading:
    """How texts become examples.

    Attributes:
        task: What the model learns: the labels, or each token from the tokens before it.
        tokenizer: See `make_tokenizer`.
        length: Tokens of an example. Default: the 90th percentile of the training texts, at most
            `MOST_TOKENS`.
    """

    task: Task = "classification"
    tokenizer: str = "characters"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and not self.length >= 2:
            raise ValueError(f"length must be at least 2, got {self.length}")


AS_CHARACTERS = Reading()


def as_dataset(name: str, texts: Splits, reading: Reading) -> Dataset:
    """Return texts as a dataset of tokens."""
    train, test = texts
    tokenizer = make_tokenizer(reading.tokenizer, (line.text for line in train))
    rows = [[tokenizer.encode(line.text) for line in lines] for lines in texts]
    length = reading.length or common_length(rows[0])
    tokens = [tokenise(part, tokenizer, length) for part in rows]
    vocabulary = tokenizer.vocabulary
    if reading.task == "next-token":
        classes, targets = vocabulary, tokens
    else:
        classes = labels_of(train)
        targets = [label_ids(lines, classes) for lines in (train, test)]
    space = TokenSpace(
        (length,),
        len(classes),
        len(vocabulary),
        tokenizer.padding,
        reading.task,
        tokenizer.first,
        tokenizer.last,
        tokenizer.special,
    )
    splits = [Batch(*pair) for pair in zip(tokens, targets, strict=True)]
    return Dataset(name, splits[0], splits[1], classes, space, vocabulary)


def read_splits(path: Path, task: Task) -> Splits:
    """Return the texts of a folder of two JSONL files, or of one file with a fifth held out."""
    labelled = task == "classification"
    if path.is_file():
        return _held_out(read_texts(path, labelled=labelled))
    found = (path / f"{name}.jsonl" for name in ("test", "val"))
    test = next((file for file in found if file.exists()), None)
    if test is None:
        raise ValueError(f"{path} has a train.jsonl, but no test.jsonl or val.jsonl")
    train = read_texts(path / "train.jsonl", labelled=labelled)
    return train, read_texts(test, labelled=labelled)


def read_texts(path: Path, *, labelled: bool = True) -> list[LabelledText]:
    """Return the lines of a JSONL file: objects with a `text` and a `label` (number or name).

    Args:
        path: The file.
        labelled: Whether each text must have a label.

    Raises:
        ValueError: If a line cannot be used. The message has its number.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            texts = [
                _parsed(line, f"{path}, line {number}", labelled)
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the texts {path}: {error}") from error
    if not texts:
        raise ValueError(f"{path} holds no texts")
    return texts


def _parsed(line: str, place: str, labelled: bool) -> LabelledText:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    needed = {"text", "label"} if labelled else {"text"}
    if not isinstance(entry, dict) or not needed <= entry.keys():
        keys = ", ".join(f'"{key}": ...' for key in sorted(needed, reverse=True))
        raise ValueError(f"{place} must be {{{keys}}}, got {line.strip()[:80]}")
    return _checked(entry["text"], entry.get("label", ""), place)


def _checked(text: object, label: object, place: str) -> LabelledText:
    if not isinstance(text, str) or not text:
        raise ValueError(f"the text of {place} must be a non-empty string, got {text!r}")
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise ValueError(f"the label of {place} must be a whole number or a name, got {label!r}")
    return LabelledText(text, str(label), place)


def hub_texts(name: str, task: Task) -> Splits:
    """Return the texts of a dataset on the Hugging Face hub.

    Texts are in a column called text, sentence or content, labels in one called label. A split
    without labels is not used as a test split.

    Args:
        name: `hub:ID`, or `hub:ID@CONFIGURATION` as in `hub:nyu-mll/glue@sst2`. Instead of an id,
            it may be a folder that the library reads.
        task: The task. Next tokens need no labels.
    """
    place, _, configuration = name.removeprefix(HUB).partition("@")
    path = Path(place).expanduser()
    if is_path(place) and not path.exists():
        raise ValueError(f"cannot load the dataset {name}: {missing(path)}")
    if find_spec("datasets") is None:
        raise ValueError(f'{name} needs the library datasets: pip install "leakfrontier[hub]"')
    from datasets import load_dataset  # slow to import

    if place == "pandas":
        raise ValueError(f"{name} reads pickles, which is never allowed")
    try:
        splits = load_dataset(str(path) if path.exists() else place, configuration or None)
    except Exception as error:  # from the library, the network, or a file
        raise ValueError(f"cannot load the dataset {name}: {error}") from error
    found = {
        split: _column_texts(f"{name}, {split}", splits[split], task)
        for split in ("train", "test", "validation")
        if split in splits
    }
    usable = [split for split, texts in found.items() if all(text.label != "-1" for text in texts)]
    if "train" not in usable:
        raise ValueError(f"{name} has no training split with labels, got {', '.join(splits)}")
    held_out = next((split for split in usable if split != "train"), None)
    return _held_out(found["train"]) if held_out is None else (found["train"], found[held_out])


def _column_texts(place: str, rows: Any, task: Task) -> list[LabelledText]:  # noqa: ANN401 - untyped
    columns = rows.column_names
    column = next((name for name in _TEXT_COLUMNS if name in columns), None)
    if column is None or (task == "classification" and "label" not in columns):
        raise ValueError(
            f"{place} must have a column {' or '.join(_TEXT_COLUMNS)}, and label for "
            f"classification, got {', '.join(columns)}"
        )
    labels = rows["label"] if "label" in columns else [""] * len(rows)
    pairs = zip(rows[column], labels, strict=True)
    return [_checked(text, label, f"{place} {row}") for row, (text, label) in enumerate(pairs)]


def labels_of(texts: Iterable[LabelledText]) -> tuple[str, ...]:
    """Return the distinct labels of some texts."""
    return tuple(sorted({text.label for text in texts}))


def label_ids(texts: Sequence[LabelledText], classes: Sequence[str]) -> Tensor:
    """Return the index of each text's label among the classes."""
    known = {name: index for index, name in enumerate(classes)}
    for text in texts:
        if text.label not in known:
            raise ValueError(f"no training text has the label {text.label!r} of {text.place}")
    return torch.tensor([known[text.label] for text in texts])


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Return the 90th percentile of the lengths of token sequences, at most `MOST_TOKENS`."""
    lengths = [len(row) for row in rows]
    return min(MOST_TOKENS, int(np.percentile(lengths, LENGTH_PERCENTILE, method="higher")))


def tokenise(rows: Sequence[Sequence[int]], tokenizer: Tokenizer, length: int) -> Tensor:
    """Return token ids of shape (n, length). Longer rows are cut, shorter ones padded.

    If the tokenizer ends every text with a token, a cut row keeps that token.
    """
    kept = 0 if tokenizer.last is None else 1
    cut = [
        [*row[: length - kept], *row[len(row) - kept :]] if len(row) > length else [*row]
        for row in rows
    ]
    return torch.tensor([row + [tokenizer.padding] * (length - len(row)) for row in cut])


def _held_out(lines: Sequence[LabelledText]) -> Splits:
    """Return texts with a fifth of each class held out."""
    rows = Batch(torch.arange(len(lines)), label_ids(lines, labels_of(lines)))
    train, test = ([lines[row] for row in part.inputs] for part in split(rows))
    return train, test
