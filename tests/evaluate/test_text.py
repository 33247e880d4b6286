import json
import os
from pathlib import Path

import pytest
import torch

from leakfrontier.adversaries import TokenSpace
from leakfrontier.evaluate.data import Dataset, load_dataset
from leakfrontier.evaluate.modality import Text
from leakfrontier.evaluate.text import (
    MOST_TOKENS,
    CharacterTokenizer,
    LabelledText,
    Tokenizer,
    read_texts,
    tokenise,
)


def write(path: Path, *entries: tuple[str, int | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in entries]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts_of(dataset: Dataset, tokens: torch.Tensor) -> list[str]:
    return ["".join(dataset.vocabulary[token] for token in row if token) for row in tokens]


def test_a_character_is_a_token() -> None:
    tokenizer = CharacterTokenizer.of(["hello", "hi"])
    assert tokenizer.vocabulary == ("[PAD]", "[UNK]", "e", "h", "i", "l", "o")
    assert tokenizer.encode("hole!") == [3, 6, 5, 2, tokenizer.unknown]


def test_texts_are_cut_or_padded() -> None:
    texts = [LabelledText(text, "0", "") for text in ("ab", "abcab")]
    tokens = tokenise(texts, CharacterTokenizer("abc"), 4)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[2, 3, 0, 0], [2, 3, 4, 2]]


def test_other_tokenizers_fit_in() -> None:
    class Words:
        vocabulary = ("to", "be", "or", "not", "")
        padding = 4

        def encode(self, text: str) -> list[int]:
            return [self.vocabulary.index(word) for word in text.split()]

    words: Tokenizer = Words()
    tokens = tokenise([LabelledText("to be or not to be", "0", "")], words, 7)
    assert tokens.tolist() == [[0, 1, 2, 3, 0, 1, 4]]


def test_a_folder_of_texts_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ("bad", "no"), ("good", "yes"), ("fun", "yes"))
    write(tmp_path / "test.jsonl", ("fund", "yes"), ("a zoo", "no"))
    dataset = load_dataset(str(tmp_path))
    assert dataset.classes == ("no", "yes")
    assert dataset.vocabulary == ("[PAD]", "[UNK]", *"abdfgnou")
    assert dataset.space == TokenSpace((4,), 2, vocabulary=10, padding=0)
    assert texts_of(dataset, dataset.train.inputs) == ["bad", "good", "fun"]
    assert texts_of(dataset, dataset.test.inputs) == ["fund", "a[UNK][UNK]o"]
    assert dataset.test.targets.tolist() == [1, 0]
    assert torch.equal(dataset.normalised[0].inputs, dataset.train.inputs)
    assert isinstance(dataset.modality, Text)


def test_one_file_is_split_by_class(tmp_path: Path) -> None:
    entries = [(f"text {index}", index % 2) for index in range(20)]
    dataset = load_dataset(str(write(tmp_path / "all.jsonl", *entries)))
    assert dataset.classes == ("0", "1")
    assert dataset.train.targets.bincount().tolist() == [8, 8]
    assert dataset.test.targets.bincount().tolist() == [2, 2]
    known = {letter for text in texts_of(dataset, dataset.train.inputs) for letter in text}
    assert set(dataset.vocabulary[2:]) == known  # of the training texts alone


def test_lengths_follow_the_training_texts(tmp_path: Path) -> None:
    short = [("ab", 0)] * 9
    write(tmp_path / "short" / "train.jsonl", *short, *short, ("a" * 20, 1))
    write(tmp_path / "short" / "test.jsonl", ("b" * 99, 0))
    assert load_dataset(str(tmp_path / "short")).space.shape == (2,)
    write(tmp_path / "long" / "train.jsonl", ("a" * 999, 0))
    write(tmp_path / "long" / "val.jsonl", ("a", 0))
    assert load_dataset(str(tmp_path / "long")).space.shape == (MOST_TOKENS,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl, line 3 is no JSON"),
        ('["text", "label"]', r'line 3 must be {"text": ..., "label": ...}, got \["text"'),
        ('{"text": "a"}', r"line 3 must be"),
        ('{"text": 5, "label": 1}', r"text of .*bad.jsonl, line 3 must be a string.*got 5"),
        ('{"text": "", "label": 1}', r"text of .*line 3 must be a string that is not empty"),
        ('{"text": "a", "label": 0.5}', r"label of .*line 3 must be a whole number.*got 0.5"),
        ('{"text": "a", "label": null}', r"label of .*line 3 must be .*got None"),
        ('{"text": "a", "label": true}', r"label of .*line 3 must be .*got True"),
    ],
)
def test_unusable_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a", "label": 0}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_texts(path)


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é", "label": 0}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"cannot read the texts .*latin.jsonl"):
        load_dataset(str(tmp_path / "latin.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty.jsonl holds no texts"):
        load_dataset(str(tmp_path / "empty.jsonl"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes.txt must be a folder or a .jsonl file"):
        load_dataset(str(tmp_path / "notes.txt"))
    write(tmp_path / "half" / "train.jsonl", ("a", 0))
    with pytest.raises(ValueError, match=r"half has a train.jsonl, but no test.jsonl"):
        load_dataset(str(tmp_path / "half"))
    write(tmp_path / "new" / "train.jsonl", ("a", 0), ("b", 1))
    write(tmp_path / "new" / "test.jsonl", ("a", 0), ("b", 2))
    with pytest.raises(ValueError, match=r"no training text has the label '2' of .*test.*line 2"):
        load_dataset(str(tmp_path / "new"))


@pytest.mark.parametrize(("name", "length"), [("cola", 64), ("sst2", 116)])
def test_real_sentences(name: str, length: int) -> None:
    folder = os.environ.get("LEAKFRONTIER_DATA")
    if not folder:
        pytest.skip("LEAKFRONTIER_DATA does not name a folder of datasets")
    path = Path(folder) / "text" / name
    dataset = load_dataset(str(path))
    assert dataset.train.inputs.shape == (2000, length)
    assert dataset.test.inputs.shape == (500, length)
    lines = [json.loads(line) for line in (path / "train.jsonl").open(encoding="utf-8")]
    assert texts_of(dataset, dataset.train.inputs) == [line["text"][:length] for line in lines]
    assert dataset.train.targets.tolist() == [line["label"] for line in lines]
