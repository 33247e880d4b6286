import pytest
import torch
from federated import SPACE, TOKENS, rng

from leakfrontier.adversaries import ImageSpace, NotApplicable, TokenSpace


def test_pixels_and_inputs_are_inverse() -> None:
    pixels = torch.rand(2, *SPACE.shape, generator=rng())
    torch.testing.assert_close(SPACE.to_unit(SPACE.to_inputs(pixels)), pixels)


def test_mean_and_deviation_are_per_channel() -> None:
    space = ImageSpace((2, 1, 1), 10, mean=(0.0, 0.5), std=(1.0, 0.25))
    assert space.to_inputs(torch.ones(1, 2, 1, 1)).flatten().tolist() == [1.0, 2.0]


def test_clamp_keeps_to_the_range_of_the_data() -> None:
    inputs = 100 * torch.randn(4, *SPACE.shape, generator=rng())
    pixels = SPACE.to_unit(SPACE.clamp(inputs))
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    inside = SPACE.to_inputs(torch.full((1, *SPACE.shape), 0.3))
    torch.testing.assert_close(SPACE.clamp(inside), inside)


def test_tokens_have_no_scale_and_cannot_be_moved() -> None:
    values = torch.zeros(1, *TOKENS.shape, dtype=TOKENS.dtype)
    for operation in (TOKENS.to_unit, TOKENS.to_inputs, TOKENS.clamp):
        with pytest.raises(NotApplicable, match="tokens"):
            operation(values)
    assert (SPACE.dtype, TOKENS.dtype) == (torch.float32, torch.int64)


def test_there_is_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="vocabulary must be at least 1, got 0"):
        TokenSpace((4,), 2)
