from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from federated import rng
from torch import Generator, Tensor

from leakfrontier.defenses import DPSGD, Defense
from leakfrontier.evaluate.privacy.draws import draws_poisson, poisson_samples, shuffled_epochs


@dataclass
class Drawn(Defense):
    """Draws batches that are wrong in one way."""

    fault: str

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        held = torch.arange(0)
        for _ in range(epochs * -(-examples // batch_size)):
            rate = torch.full((examples,), batch_size / examples)
            if self.fault == "too often":
                rate *= 1.5
            if self.fault == "favourites":
                rate = rate * 2 * (torch.arange(examples) % 2)
            rows = torch.bernoulli(rate, generator=rng).nonzero().flatten()
            if self.fault == "fixed size":
                rows = torch.randperm(examples, generator=rng)[:batch_size]
            if self.fault == "twice":
                rows = torch.cat([rows, rows[:1]])
            if self.fault == "sticky" and torch.rand(1, generator=rng) < 0.5:
                rows = held
            held = rows
            yield rows


FOUND = {
    "too often": "but 0.1 is claimed",
    "favourites": "the variance of counts of records",
    "fixed size": "the variance of batch sizes is 0 times",
    "sticky": "are also in the next step",
    "twice": "a record is twice in one batch",
}


@pytest.mark.parametrize("fault", FOUND)
def test_batches_that_are_no_poisson_samples_are_told_by_what_is_wrong(fault: str) -> None:
    worst = min(poisson_samples(Drawn(fault), 0.1, rng()), key=lambda one: one.p_value)
    assert worst.p_value < 1e-6
    assert FOUND[fault] in worst.words


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_poisson_samples_are_not_accused(rate: float) -> None:
    assert min(one.p_value for one in poisson_samples(DPSGD(1.0), rate, rng())) > 1e-3


def test_shuffled_epochs_are_no_poisson_samples_and_the_other_way_round() -> None:
    assert shuffled_epochs(Defense(), rng()).p_value == 1
    assert not draws_poisson(Defense(), 0.1)
    assert draws_poisson(DPSGD(1.0), 0.1)
    found = shuffled_epochs(DPSGD(1.0), rng())
    assert found.p_value == 0
    assert "in two batches of an epoch" in found.words
