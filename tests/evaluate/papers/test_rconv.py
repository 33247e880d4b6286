"""The networks and scores of R-CONV++'s tables."""

import math

import torch

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import Batch, SecureAggregation
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.papers.rconv import median_interval, single_trial, upload_of


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, int, int] = (3, 16, 16)) -> Dataset:
    examples = Batch(torch.rand(12, *shape, generator=rng()), torch.arange(12) % 4)
    return Dataset("noise", examples, examples, tuple("abcd"), ImageSpace(shape, 4))


def test_images_are_divided_among_clients() -> None:
    alone = upload_of({"network": "LeNet-ex", "batch": 4}, images(), rng())
    shared = upload_of({"network": "LeNet-ex", "batch": 4, "clients": 2}, images(), rng())
    assert alone.observation.protocol.clients == 1
    assert shared.observation.batch_size == 2  # without secure aggregation, each is seen alone
    summed = upload_of(
        {"network": "LeNet-ex", "batch": 4, "clients": 2}, images(), rng(), SecureAggregation(2)
    )
    assert summed.observation.protocol.clients == 2
    assert summed.observation.batch_size == 4


def test_what_an_attack_refuses_counts_as_grey() -> None:
    problem = {"network": "LeNet", "activation": "gelu"}
    scores = single_trial(problem, {"attack": "R-CONV"}, images(), rng())
    assert 5 < scores["median"][0] < 20
    assert scores["60 dB"] == [0.0]


def test_medians() -> None:
    found = median_interval([5.0, 1.0, 3.0, *range(10, 20)], range(13))
    assert found.value == 13
    assert found.low < 13 < found.high
    assert median_interval([1.0, 2.0], [0, 1]).low == -math.inf
    assert math.isnan(median_interval([], []).value)
