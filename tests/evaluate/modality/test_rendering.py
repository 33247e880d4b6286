import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

from leakfrontier.evaluate.modality.rendering import image_png, joined, token_texts, wave_file


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_an_image_can_be_read_back(channels: int, mode: str) -> None:
    values = torch.randint(256, (channels, 5, 7), generator=torch.Generator().manual_seed(0))
    image = Image.open(io.BytesIO(image_png(values / 255)))
    assert (image.mode, image.size) == (mode, (7, 5))
    pixels = np.atleast_3d(np.asarray(image))
    assert np.array_equal(np.moveaxis(pixels, 2, 0), values.numpy())


def test_what_is_beyond_the_range_is_cut_off_and_vectors_are_grey() -> None:
    image = Image.open(io.BytesIO(image_png(torch.tensor([-1.0, 0.5, 2.0]))))
    assert np.asarray(image).tolist() == [[0, 128, 255]]


def test_sound_of_16_bits_can_be_read_back_exactly() -> None:
    samples = torch.tensor([[-32768, -1, 0, 1, 12345, 32767]])
    rate, values = wavfile.read(io.BytesIO(wave_file(samples / 2**15, 8000)))
    assert (rate, values.dtype, values.shape) == (8000, np.int16, (6,))
    assert values.tolist() == samples.flatten().tolist()


def test_loud_sound_is_cut_off() -> None:
    _, values = wavfile.read(io.BytesIO(wave_file(torch.tensor([[-3.0, 1.0, 3.0]]), 8000)))
    assert values.tolist() == [-32768, 32767, 32767]


def test_tokens_can_be_read_back() -> None:
    texts = ["a", " ", "\n", '"', "é", "[PAD]"]
    assert json.loads(token_texts(texts)) == texts


def in_bytes(text: str) -> list[str]:
    return [bytes([value]).decode(errors="surrogateescape") for value in text.encode()]


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["a", *in_bytes("\u00e4"), "b"], ["a", "\u00e4", "", "b"]),
        (in_bytes("\U0001f600!"), ["\U0001f600", "", "", "", "!"]),
        (in_bytes("\u00e4")[:1], ["\ufffd"]),
        ([*in_bytes("\u6211")[:2], "a"], ["\ufffd", "", "a"]),
        ([in_bytes("\u6211")[0], *in_bytes("\u00e4")], ["\ufffd", "\u00e4", ""]),
        (["e", "\u0301", "x"], ["e\u0301", "", "x"]),  # an accent of its own
        (["\U0001f469", "\u200d", "\U0001f467", "."], ["\U0001f469\u200d\U0001f467", "", "", "."]),
        (["\ud83d", "a"], ["?", "a"]),  # half of a character in UTF-16
    ],
)
def test_characters_are_whole_and_stand_where_they_begin(
    texts: list[str], whole: list[str]
) -> None:
    assert json.loads(token_texts(texts)) == whole
    assert joined(texts) == "".join(whole)
