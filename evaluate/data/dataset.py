"""Labelled examples with everything that is known about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Generator, Tensor

from leakfrontier.adversaries import InputSpace, TokenSpace
from leakfrontier.defenses import Batch

from ..foundations.examples import Data, Examples
from ..modality.modality import Modality, modality_of


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples, for training and for testing.

    Attributes:
        name: The name by which `load_dataset` finds it.
        train: Training examples on the scale of the data, not normalised, and labels from 0:
            images or sound in [0, 1], or token ids. Full datasets are stored as 8-bit pixels.
        test: Test examples.
        classes: Name of each label.
        space: What an adversary knows about the inputs.
        vocabulary: The text of every token; empty if the data are not tokens.
        notes: Warnings.
    """

    name: str
    train: Data
    test: Data
    classes: tuple[str, ...]
    space: InputSpace
    vocabulary: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError(f"{self.name} has no classes")
        if isinstance(self.space, TokenSpace) and self.space.vocabulary != len(self.vocabulary):
            raise ValueError(
                f"the vocabulary of {self.name} must hold {self.space.vocabulary} tokens, got "
                f"{len(self.vocabulary)}"
            )
        for split, part in (("train", self.train), ("test", self.test)):
            inputs, targets = _stored(part), part.targets
            if not len(inputs) == len(targets) >= 1:
                raise ValueError(
                    f"the {split} split of {self.name} must hold one label per example and at "
                    f"least one example, got {len(inputs)} examples and {len(targets)} labels"
                )
            low, high = (value.item() for value in torch.aminmax(inputs))
            most = 1 if self.space.continuous else len(self.vocabulary) - 1
            if inputs.dtype == torch.uint8:
                most = 255
            if not (low >= 0 and high <= most):
                raise ValueError(
                    f"the {split} examples of {self.name} must lie in [0, {most}], got {low} to "
                    f"{high}"
                )
            first, last = (value.item() for value in torch.aminmax(targets))
            if not (first >= 0 and last < len(self.classes)):
                raise ValueError(
                    f"the {split} labels of {self.name} must be from 0 to "
                    f"{len(self.classes) - 1}, got {first} to {last}"
                )

    def to(self, device: torch.device) -> Dataset:
        """Return the same examples on a device."""
        if device == self.train.targets.device:
            return self
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def modality(self) -> Modality:
        """Return the kind of data."""
        return modality_of(self.space, self.vocabulary)

    @cached_property
    def normalised(self) -> tuple[Examples, Batch]:
        """Return the training and the test examples as model inputs."""
        to_inputs = self.modality.inputs
        if isinstance(self.test, Examples):
            test = self.test.then(to_inputs).at(slice(None))
        else:
            test = Batch(to_inputs(self.test.inputs), self.test.targets)
        if isinstance(self.train, Examples):
            return self.train.then(to_inputs), test
        return Examples(to_inputs(self.train.inputs), self.train.targets), test


def _stored(data: Data) -> Tensor:
    return data.stored if isinstance(data, Examples) else data.inputs


def split(batch: Batch) -> tuple[Batch, Batch]:
    """Return four fifths of every class and the held-out fifth. The split is always the same."""
    shuffled = torch.randperm(len(batch.targets), generator=Generator().manual_seed(0))
    by_class = shuffled[batch.targets[shuffled].argsort(stable=True)]
    held_out = torch.zeros(len(by_class), dtype=torch.bool)
    held_out[by_class[4::5]] = True
    return batch.at(~held_out), batch.at(held_out)
