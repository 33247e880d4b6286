"""Pictures come back as they were."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from leakfrontier.evaluate.rendering import image_png, png


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def test_grey_and_colour_come_back() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    np.testing.assert_array_equal(pixels(png(grey.tobytes(), grey.shape)), grey[0])
    colour = np.arange(18, dtype=np.uint8).reshape(3, 2, 3)
    np.testing.assert_array_equal(
        pixels(png(colour.tobytes(), colour.shape)), np.moveaxis(colour, 0, -1)
    )


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 4, 5), (2, 4, 5), (7,)])
def test_whatever_has_values_from_0_to_1_is_drawn(shape: tuple[int, ...]) -> None:
    values = torch.linspace(-0.5, 1.5, 4 * 5 * 6)[: int(np.prod(shape))].reshape(shape)
    drawn = pixels(image_png(values))
    assert drawn.dtype == np.uint8
    expected = values.clamp(0, 1).mul(255).round().numpy()
    expected = np.moveaxis(expected, 0, -1) if shape[0] == 3 else expected.reshape(-1, shape[-1])
    np.testing.assert_array_equal(drawn, expected)
