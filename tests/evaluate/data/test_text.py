import json
import os
from pathlib import Path

import pytest
import torch

from leakfrontier.adversaries import TokenSpace
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.data.text import HUB, MOST_TOKENS, Reading, read_texts, tokenise
from leakfrontier.evaluate.data.tokenizers import CharacterTokenizer
from leakfrontier.evaluate.modality.modality import Text


def write(path: Path, *entries: tuple[str, int | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in entries]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts_of(dataset: Dataset, tokens: torch.Tensor) -> list[str]:
    return ["".join(dataset.vocabulary[token] for token in row if token) for row in tokens]


def test_texts_are_cut_or_padded() -> None:
    tokens = tokenise([[2, 3], [2, 3, 4, 2, 3]], CharacterTokenizer(tuple("abc")), 4)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[2, 3, 0, 0], [2, 3, 4, 2]]


def test_the_end_of_a_text_is_kept() -> None:
    class Bracketed:
        vocabulary = ("[", "]", "", "a")
        padding, first, last, special = 2, 0, 1, (0, 1, 2)

        def encode(self, text: str) -> list[int]:
            return [0, *(3 for _ in text), 1]

    rows = [Bracketed().encode("aaaaa"), Bracketed().encode("a")]
    assert tokenise(rows, Bracketed(), 4).tolist() == [[0, 3, 3, 1], [0, 3, 1, 2]]


def test_a_folder_of_texts_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ("bad", "no"), ("good", "yes"), ("fun", "yes"))
    write(tmp_path / "test.jsonl", ("fund", "yes"), ("a zoo", "no"))
    dataset = load_dataset(str(tmp_path))
    assert dataset.classes == ("no", "yes")
    assert dataset.vocabulary == ("[PAD]", "[UNK]", *"abdfgnou")
    assert dataset.space == TokenSpace((4,), 2, vocabulary=10, padding=0, special=(0, 1))
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
        ("{", r"bad.jsonl, line 3 is not JSON"),
        ('["text", "label"]', r'line 3 must be {"text": ..., "label": ...}, got \["text"'),
        ('{"text": "a"}', r"line 3 must be"),
        ('{"text": 5, "label": 1}', r"text .*bad.jsonl, line 3 must be a non-empty string.*got 5"),
        ('{"text": "", "label": 1}', r"text of .*line 3 must be a non-empty string"),
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


def test_next_tokens_are_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "a b {i}"}}\n' for i in range(10)))
    reading = Reading("next-token", "words", length=5)
    dataset = load_dataset(str(tmp_path / "all.jsonl"), reading=reading)
    assert len(dataset.train.inputs) == 8
    assert torch.equal(dataset.train.inputs, dataset.train.targets)
    assert dataset.space.classes == len(dataset.vocabulary) == 2 + 2 + 8  # of training texts
    assert dataset.train.inputs[:, 3:].eq(0).all()
    with pytest.raises(ValueError, match=r'line 1 must be {"text": ..., "label": ...}'):
        load_dataset(str(tmp_path / "all.jsonl"))
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        Reading(length=1)


def test_messages_come_with_the_package() -> None:
    dataset = load_dataset("messages", reading=Reading("next-token", "words"))
    assert dataset.train.inputs.shape == (960, 13)
    assert len(dataset.test.inputs) == 240
    assert isinstance(dataset.modality, Text)
    assert dataset.modality.text(dataset.train.inputs[0]).startswith("The doctor says that my ")
    assert load_dataset("messages").classes == ("health", "home", "money", "travel")


def test_a_dataset_as_the_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pytest.importorskip("datasets")
    folder = tmp_path / "texts"
    write(folder / "train.jsonl", ("bad", 0), ("good", 1))
    write(folder / "validation.jsonl", ("fine", 1))
    write(folder / "test.jsonl", ("withheld", -1))
    dataset = load_dataset(f"{HUB}{folder}")
    assert dataset.classes == ("0", "1")
    assert texts_of(dataset, dataset.train.inputs) == ["bad", "good"]
    assert len(dataset.test.inputs) == 1  # not the split whose labels are withheld
    with pytest.raises(ValueError, match="cannot load the dataset hub:/nowhere/at/all"):
        load_dataset(f"{HUB}/nowhere/at/all")


@pytest.mark.parametrize(
    "name", ["./texts", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "data/x"]
)
def test_a_missing_folder_of_texts_is_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakfrontier.evaluate.data.text.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"cannot load the dataset hub:.*no folder or file"):
        load_dataset(f"{HUB}{name}")


def test_the_hub_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakfrontier.evaluate.data.text.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the library datasets: pip install .*\[hub\]"):
        load_dataset("hub:someone/something")
