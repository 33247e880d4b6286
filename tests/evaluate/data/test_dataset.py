import math

import pytest
import torch
from pretended import pretended_device

from leakfrontier.adversaries import ImageSpace, TokenSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data.dataset import Dataset, split
from leakfrontier.evaluate.modality.modality import Text

SPACE = ImageSpace((1, 2, 2), 2)


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.1])
def test_images_outside_the_unit_range(value: float) -> None:
    good = Batch(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    bad = Batch(good.inputs.clone(), good.targets)
    bad.inputs[1, 0, 1, 1] = value
    with pytest.raises(ValueError, match=r"test examples of mine must lie in \[0, 1\]"):
        Dataset("mine", good, bad, ("a", "b"), SPACE)


def test_labels_must_match() -> None:
    batch = Batch(torch.zeros(2, 1, 2, 2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="labels of mine must be from 0 to 1, got 0 to 2"):
        Dataset("mine", batch, batch, ("a", "b"), SPACE)
    with pytest.raises(ValueError, match="mine has no classes"):
        Dataset("mine", batch, batch, (), SPACE)


def test_tokens_must_be_in_the_vocabulary() -> None:
    batch = Batch(torch.tensor([[0, 3]]), torch.tensor([0]))
    space = TokenSpace((2,), 1, vocabulary=3, padding=0)
    with pytest.raises(
        ValueError, match=r"train examples of mine must lie in \[0, 2\], got 0 to 3"
    ):
        Dataset("mine", batch, batch, ("a",), space, ("[PAD]", "[UNK]", "a"))
    with pytest.raises(ValueError, match="vocabulary of mine must hold 3 tokens, got 2"):
        Dataset("mine", batch, batch, ("a",), space, ("[PAD]", "[UNK]"))


def images(count: int) -> Batch:
    return Batch(torch.rand(count, 1, 2, 2), torch.arange(count) % 2)


def test_every_split_has_examples_and_a_label_for_each() -> None:
    missing = Batch(images(3).inputs, torch.tensor([0, 1]))
    for bad, counts in ((images(0), "0 examples and 0"), (missing, "3 examples and 2")):
        with pytest.raises(ValueError, match=f"test split of mine .* got {counts} labels"):
            Dataset("mine", images(2), bad, ("a", "b"), SPACE)


def test_inputs_are_normalised_and_labels_left_alone() -> None:
    space = ImageSpace((1, 2, 2), 2, mean=(0.5,), std=(0.25,))
    data = Dataset("mine", images(4), images(2), ("a", "b"), space)
    train, test = data.normalised
    torch.testing.assert_close(train.inputs, (data.train.inputs - 0.5) / 0.25)
    torch.testing.assert_close(test.inputs, (data.test.inputs - 0.5) / 0.25)
    assert torch.equal(train.targets, data.train.targets)


def test_tokens_are_texts() -> None:
    batch = Batch(torch.tensor([[2, 0]]), torch.tensor([0]))
    space = TokenSpace((2,), 1, vocabulary=3, padding=0)
    data = Dataset("mine", batch, batch, ("a",), space, ("[PAD]", "[UNK]", "word"))
    assert isinstance(data.modality, Text)
    assert data.modality.text(batch.inputs[0]) == "word"


def test_on_its_own_device_a_dataset_is_itself() -> None:
    data = Dataset("mine", images(4), images(2), ("a", "b"), SPACE)
    assert data.to(torch.device("cpu")) is data
    with pretended_device() as there:
        moved = data.to(there)
        assert {part.inputs.device for part in (moved.train, moved.test)} == {there}
    assert (moved.name, moved.classes, moved.space) == ("mine", ("a", "b"), SPACE)


def test_a_fifth_of_every_class_is_held_out_and_always_the_same() -> None:
    targets = torch.arange(60) % 12
    whole = Batch(torch.arange(60.0)[:, None], targets)
    train, test = split(whole)
    assert test.targets.bincount().tolist() == [1] * 12
    assert sorted(torch.cat([train.inputs, test.inputs]).flatten().tolist()) == [*range(60)]
    torch.manual_seed(1)
    assert torch.equal(split(whole)[1].inputs, test.inputs)
