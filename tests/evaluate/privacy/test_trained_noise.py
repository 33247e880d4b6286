from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from federated import batch, mlp, rng
from torch import Generator
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Batch, Plan, Update
from leakfrontier.evaluate.privacy.canaries import Subject
from leakfrontier.evaluate.privacy.finding import Audit
from leakfrontier.evaluate.privacy.trained_noise import TrainedClient, trained_noise

ENTRIES = 2000


def audited(noise: float, *, kept: float = 0.0, repeated: bool = False) -> Audit:
    """Audit a client whose examples move its upload by one unit, claimed as sigma = 1."""

    def play(examples: Batch, rngs: Sequence[Generator]) -> list[Update]:
        sent, last = [], torch.zeros(ENTRIES)
        mean = torch.zeros(ENTRIES)
        mean[int(examples.targets[0])] = 1.0
        for one in rngs:
            fresh = noise * torch.randn(ENTRIES, generator=rng(1) if repeated else one)
            sent.append({"weight": mean + fresh - kept * last})
            last = fresh
        return sent

    data = batch(8)
    subject = Subject(DPSGD(1.0), mlp(), cross_entropy, data, Plan(4, 1.0, 1e-5), rng())
    other = Batch(data.inputs[:1], (data.targets[:1] + 1) % 10)
    return trained_noise(
        subject, TrainedClient("in round 3", play, data.at(torch.arange(1)), other)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_claimed_noise_is_enough(seed: int) -> None:
    assert not audited(1.0 + 0.1 * seed).violated


def test_larger_noise_may_be_correlated() -> None:
    assert not audited(1 / 0.3, kept=0.7).violated


def test_noise_that_cancels_is_found() -> None:
    found = audited(1.0, kept=1.0)
    assert found.violated
    assert "a combination of 4 uploads" in found.words


@pytest.mark.parametrize(("noise", "repeated"), [(0.0, False), (0.3, False), (1.0, True)])
def test_missing_or_repeated_noise_is_found(noise: float, repeated: bool) -> None:
    found = audited(noise, repeated=repeated)
    assert found.violated
    assert found.words.startswith("in round 3, ")
