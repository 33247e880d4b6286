import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Batch, Defense, batch_gradient
from leakfrontier.evaluate.advise.clipping import clipped, gradient_norms
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

WORLD = load_world(Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16})))
MODEL = WORLD.model(Defense(), 0)


def gradients(size: int, count: int) -> torch.Tensor:
    """Return the gradients of the first public batches, one by one."""
    rows = [slice(index * size, (index + 1) * size) for index in range(count)]
    found = [
        batch_gradient(MODEL, cross_entropy, Batch(WORLD.test.inputs[one], WORLD.test.targets[one]))
        for one in rows
    ]
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in found]).detach()


@pytest.mark.parametrize("size", [1, 64])
def test_gradient_norms_are_those_of_public_batches(size: int) -> None:
    norms = gradient_norms(WORLD, MODEL, size)
    assert len(norms) == {1: 256, 64: 5}[size]  # there are 359 public examples
    exact = gradients(size, 5).norm(dim=1)
    torch.testing.assert_close(norms[:5], exact, rtol=1e-4, atol=0)


def test_shares_and_noise_over_signal_are_those_of_clipped_gradients() -> None:
    exact, noise = gradients(1, 256), 0.01
    norms = exact.norm(dim=1)
    median = float(norms.median())
    tried = [0.1 * median, median, 100 * median]
    for most, found in zip(tried, clipped(WORLD, MODEL, tried, noise), strict=True):
        assert found.share == pytest.approx(float((norms > most).double().mean()), abs=1 / 256)
        cut = (exact * (most / norms).clamp(max=1).unsqueeze(1)).double()
        pairs = cut @ cut.T  # the mean product of two different gradients: |their mean|^2
        signal = float(pairs.sum() - pairs.trace()) / (256 * 255)
        expected = noise * most * math.sqrt(exact.shape[1]) / math.sqrt(signal)
        assert found.noise_over_signal == pytest.approx(expected, rel=1e-3)
    few, half, none = clipped(WORLD, MODEL, tried, noise)
    assert few.share > half.share > none.share == 0


def test_a_signal_that_cannot_be_seen_is_missing() -> None:
    (found,) = clipped(WORLD, MODEL, [1.0], 0.01, batch_size=len(WORLD.test.targets))
    assert found.noise_over_signal is None  # one batch says nothing of its own variance
