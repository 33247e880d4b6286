import pytest
import torch
from federated import SPACE, rng

from leakfrontier.adversaries import ImageSpace, NotApplicable, TokenSpace, WaveSpace

SOUND = WaveSpace((1, 50), 10, mean=(0.5,), std=(0.02,), rate=8000)
TEXT = TokenSpace((5,), 2, vocabulary=30, padding=0)


@pytest.mark.parametrize("space", [SPACE, SOUND], ids=["images", "sound"])
def test_values_and_inputs_are_inverse(space: ImageSpace | WaveSpace) -> None:
    values = torch.rand(2, *space.shape, generator=rng())
    torch.testing.assert_close(space.to_unit(space.to_inputs(values)), values)


def test_mean_and_deviation_are_per_channel() -> None:
    space = ImageSpace((2, 1, 1), 10, mean=(0.0, 0.5), std=(1.0, 0.25))
    assert space.to_inputs(torch.ones(1, 2, 1, 1)).flatten().tolist() == [1.0, 2.0]
    stereo = WaveSpace((2, 3), 10, mean=(0.0, 0.5), std=(1.0, 0.25))
    assert stereo.to_inputs(torch.ones(1, 2, 3)).tolist() == [[[1.0] * 3, [2.0] * 3]]


@pytest.mark.parametrize("space", [SPACE, SOUND], ids=["images", "sound"])
def test_clamp_keeps_to_the_range_of_the_data(space: ImageSpace | WaveSpace) -> None:
    inputs = 100 * torch.randn(4, *space.shape, generator=rng())
    values = space.to_unit(space.clamp(inputs))
    assert values.min() >= -1e-6
    assert values.max() <= 1 + 1e-6
    inside = space.to_inputs(torch.full((1, *space.shape), 0.3))
    torch.testing.assert_close(space.clamp(inside), inside)


def test_tokens_have_no_scale() -> None:
    assert (TEXT.continuous, TEXT.dtype) == (False, torch.int64)
    assert (SOUND.continuous, SOUND.dtype) == (True, torch.float32)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for move in (TEXT.to_unit, TEXT.to_inputs, TEXT.clamp):
        with pytest.raises(NotApplicable, match="token"):
            move(tokens)
    with pytest.raises(ValueError, match="vocabulary must be at least 1, got 0"):
        TokenSpace((5,), 2)
