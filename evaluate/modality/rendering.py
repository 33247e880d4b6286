"""Examples as files that a page can show."""

from __future__ import annotations

import codecs
import io
import json
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image
from scipy.io import wavfile
from torch import Tensor, int16, uint8

_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
_SKIN_TONES = range(0x1F3FB, 0x1F400)


def png(pixels: bytes, shape: Sequence[int]) -> bytes:
    """Return a grey or coloured image, given as (channels, height, width) bytes, as a PNG."""
    image = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
    planes = image[0] if shape[0] == 1 else np.ascontiguousarray(np.moveaxis(image, 0, -1))
    buffer = io.BytesIO()
    Image.fromarray(planes).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def image_png(pixels: Tensor) -> bytes:
    """Return an image with values in [0, 1] as a PNG; data of other shapes as grey."""
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
    """Return the texts of a sequence's tokens, one for each, in whole characters.

    If several tokens form one character, such as an emoji, it belongs to the first of them.
    """
    whole = [""] * len(texts)
    place = 0
    for start, character in _characters(texts):
        if not (whole[place] and _continues(whole[place], character)):
            place = start
        whole[place] += character
    return json.dumps(whole).encode()


def joined(texts: Sequence[str]) -> str:
    """Return the text of tokens, whose own texts may be parts of characters."""
    return b"".join(map(_encoded, texts)).decode(errors="replace")


def _characters(texts: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield every character, with the position of the token in which it begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start = 0
    for place, text in enumerate(texts):
        for value in _encoded(text):
            begun = bool(decoder.getstate()[0])
            start = start if begun else place
            for number, character in enumerate(decoder.decode(bytes([value]))):
                yield (start if number == 0 else place), character
            if begun and decoder.getstate() == (bytes([value]), 0):  # the last one is incomplete
                start = place
    yield from ((start, character) for character in decoder.decode(b"", final=True))


def _encoded(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # surrogates that do not stand for a byte
        return text.encode(errors="replace")


def _continues(before: str, character: str) -> bool:
    """Return whether a character is drawn together with those before it."""
    return (
        before[-1] == "\N{ZERO WIDTH JOINER}"
        or character in _JOINERS
        or ord(character) in _SKIN_TONES
        or unicodedata.category(character).startswith("M")
    )
