"""The benchmark of DP-SGD sums clipped gradients as the defense does."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import DPSGD, Batch
from leakfrontier.evaluate.models.models import build_model

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "dpsgd.py"))
SPACE = ImageSpace((1, 28, 28), 10)


@pytest.mark.parametrize("name", ["linear", "tanh_cnn"])
@pytest.mark.parametrize("norm", [0.1, 10.0])
def test_sums_as_the_defense_does(name: str, norm: float) -> None:
    rng = torch.Generator().manual_seed(0)
    model = build_model(name, SPACE, rng, zero_head=False)
    batch = Batch(torch.randn(6, 1, 28, 28, generator=rng), torch.arange(6))
    defense = DPSGD(0.0, norm)
    defense.expect(1)
    expected = defense.gradient(model, cross_entropy, batch, rng)
    found = BENCHMARK["clipped_sum"](model, batch, norm)
    for value, true in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(value, true, rtol=1e-3, atol=1e-5)
