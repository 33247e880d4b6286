"""Examples as files that a page can show."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor, uint8


def png(pixels: bytes, shape: Sequence[int]) -> bytes:
    """Return a grey or coloured image, given as (channels, height, width) bytes, as a PNG."""
    image = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
    planes = image[0] if shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image, 0, -1))
    buffer = io.BytesIO()
    Image.fromarray(planes).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def image_png(pixels: Tensor) -> bytes:
    """Return an image with values in [0, 1] as a PNG; what is no image in colours, as grey."""
    values = pixels.detach().cpu().clamp(0, 1).mul(255).round().to(uint8)
    if values.dim() != 3 or values.shape[0] not in (1, 3):
        values = values.reshape(1, -1, values.shape[-1])
    return png(values.numpy().tobytes(), values.shape)
