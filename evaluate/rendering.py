"""Examples as files that a page can show."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
from PIL import Image
from scipy.io import wavfile
from torch import Tensor, int16, uint8


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


def wave_file(amplitudes: Tensor, rate: int) -> bytes:
    """Return sound of shape (channels, samples) with amplitudes in [-1, 1] as 16-bit WAV.

    Louder values are cut off. Sound that came from 16 bits gets the same values again.
    """
    steps = amplitudes.detach().cpu().double().mul(2**15).round()
    values = steps.clamp(-(2**15), 2**15 - 1).to(int16)
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, values.T.contiguous().numpy())
    return buffer.getvalue()


def token_texts(texts: Sequence[str]) -> bytes:
    """Return the texts of a sequence's tokens."""
    return json.dumps(list(texts)).encode()
