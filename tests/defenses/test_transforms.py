from collections.abc import Callable

import numpy as np
import pytest
import torch
from federated import rng
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.func import vmap

from leakfrontier.defenses.transforms import (
    OPERATIONS,
    POOL,
    Transform,
    apply_policies,
    parse_policy,
)

Reference = Callable[[Image.Image, float], Image.Image]


def images(count: int = 4, channels: int = 3, seed: int = 0, size: int = 32) -> Tensor:
    """Return smooth pictures with some noise, on the grid of 8 bits; none spans the range."""
    draws = rng(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=draws)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size + 3), mode="bilinear")
    noise = torch.rand(smooth.shape, generator=draws)
    return (230 * (0.1 + 0.7 * smooth + 0.2 * noise)).round() / 255


def affine(*numbers: float, resample: Image.Resampling) -> Reference:
    """Return PIL's affine transformation; NaN stands for the magnitude."""

    def transform(image: Image.Image, magnitude: float) -> Image.Image:
        matrix = [magnitude if np.isnan(number) else number for number in numbers]
        return image.transform(image.size, Image.Transform.AFFINE, matrix, resample)

    return transform


def translate(axis: int) -> Reference:
    def transform(image: Image.Image, share: float) -> Image.Image:
        matrix = [1, 0, 0, 0, 1, 0]
        matrix[2 + 3 * axis] = share * image.size[axis]
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    return transform


def rotate(image: Image.Image, degrees: float) -> Image.Image:
    turned = image.convert("RGBA").rotate(degrees)
    grey = Image.new("RGBA", image.size, (128,) * 4)
    return Image.composite(turned, grey, turned).convert(image.mode)


def enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Reference:
    return lambda image, change: kind(image).enhance(1 + change)


SHEAR = affine(1, 0, 0, float("nan"), 1, 0, resample=Image.Resampling.BICUBIC)
REFERENCES: dict[str, Reference] = {
    "invert": lambda image, _: ImageOps.invert(image),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "posterize": lambda image, bits: ImageOps.posterize(image, round(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "brightness": enhance(ImageEnhance.Brightness),
    "contrast": enhance(ImageEnhance.Contrast),
    "color": enhance(ImageEnhance.Color),
    "sharpness": enhance(ImageEnhance.Sharpness),
    "translateX": translate(0),
    "translateY": translate(1),
    "shearY": SHEAR,
    "rotate": rotate,
}
ROUNDED = {"brightness", "contrast", "color", "sharpness", "shearY", "autocontrast"}


def by_pil(pixels: Tensor, operation: str, magnitude: float) -> Tensor:
    def one(picture: Tensor) -> Tensor:
        levels = picture.mul(255).round().byte().permute(1, 2, 0).numpy()
        image = Image.fromarray(levels.squeeze(2) if levels.shape[2] == 1 else levels)
        result = np.asarray(REFERENCES[operation](image, magnitude))
        return torch.from_numpy(result.reshape(levels.shape).copy()).permute(2, 0, 1) / 255

    return torch.stack([one(picture) for picture in pixels])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_does_what_pil_does(operation: str, channels: int) -> None:
    pixels = images(channels=channels)
    kind = OPERATIONS[operation]
    for level in {entry.level for entry in POOL if entry.operation == operation}:
        magnitude = Transform(operation, level).magnitude
        for signed in (magnitude, -magnitude) if kind.signed else (magnitude,):
            ours, theirs = kind.apply(pixels, signed), by_pil(pixels, operation, signed)
            allowed = 1.51 / 255 if operation in ROUNDED else 1e-6  # PIL rounds to 8 bits
            torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


def test_the_pool_is_the_published_one() -> None:
    assert len(POOL) == 50
    assert {index for index, entry in enumerate(POOL) if entry == ("translateY", 3)} == {
        *(24, 42, 43, 48)
    }
    named = {0: ("invert", 7), 3: ("translateX", 9), 10: ("shearY", 5), 18: ("contrast", 7)}
    assert {index: POOL[index] for index in named} == named
    assert POOL[3].magnitude == pytest.approx(0.453, abs=5e-4)
    assert POOL[1].magnitude == pytest.approx(1 / 3)
    assert round(POOL[11].magnitude) == 6
    assert POOL[2].magnitude == pytest.approx(20 / 3)


@pytest.mark.parametrize("entry", range(len(POOL)))
def test_changes_images_within_their_range_and_shape(entry: int) -> None:
    pixels = images()
    before = pixels.clone()
    result = POOL[entry].apply(pixels, rng())
    assert torch.equal(pixels, before)
    assert result.shape == pixels.shape
    assert result.dtype == pixels.dtype
    assert result.min() >= 0
    assert result.max() <= 1
    does_nothing = entry in (28, 39)  # solarize0 and color0
    assert torch.allclose(result, pixels, atol=1e-6) is does_nothing


def test_color_leaves_grey_images_alone() -> None:
    grey = images(channels=1)
    torch.testing.assert_close(POOL[27].apply(grey, rng()), grey)


def test_constant_images_survive() -> None:
    flat = torch.full((2, 3, 8, 8), 0.4)
    for entry in POOL:
        assert entry.apply(flat, rng()).isfinite().all()


def test_signs_are_drawn_for_each_image_and_from_the_generator_alone() -> None:
    pixels = images(1).expand(200, -1, -1, -1)
    entry = POOL[15]
    kind = OPERATIONS["brightness"]
    brighter, darker = (kind.apply(pixels[:1], sign * entry.magnitude) for sign in (1, -1))
    result = entry.apply(pixels, rng(3))
    up = (result == brighter).flatten(1).all(1)
    down = (result == darker).flatten(1).all(1)
    assert (up ^ down).all()
    assert 70 <= int(up.sum()) <= 130  # 4 standard deviations
    assert torch.equal(result, entry.apply(pixels, rng(3)))
    assert not torch.equal(result, entry.apply(pixels, rng(4)))


def test_alternatives_are_drawn_uniformly() -> None:
    pixels = images(1, size=8).expand(300, -1, -1, -1)
    result = apply_policies(pixels, ((0,), (11,), ()), rng())
    versions = [OPERATIONS["invert"].apply(pixels[:1], 0), POOL[11].apply(pixels[:1], rng())]
    counts = [int((result == one).flatten(1).all(1).sum()) for one in [*versions, pixels[:1]]]
    assert sum(counts) == 300
    assert all(68 <= count <= 132 for count in counts)  # 4 standard deviations


def test_transformations_are_applied_in_order() -> None:
    pixels = images()
    first, second = POOL[37], POOL[11]  # solarize and posterize do not commute
    expected = second.apply(first.apply(pixels, rng()), rng())
    assert torch.equal(apply_policies(pixels, ((37, 11),), rng()), expected)
    assert not torch.equal(apply_policies(pixels, ((11, 37),), rng()), expected)


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("", ((),)),
        ("3-1-7", ((3, 1, 7),)),
        ("49", ((49,),)),
        ("3-1-7+43-18-18", ((3, 1, 7), (43, 18, 18))),
    ],
)
def test_reads_policies(text: str, policies: object) -> None:
    assert parse_policy(text) == policies


@pytest.mark.parametrize(
    "text", ["50", "a-b", "1-2-3-4", "-1", "1-", "1--2", "1+", "+", " ", "1 - 2", "٣", 7, None]
)
def test_explains_the_format_of_a_policy(text: str) -> None:
    with pytest.raises(ValueError, match=r"from 0 to 49, as in '3-1-7'.*'3-1-7\+43-18-18', got"):
        parse_policy(text)


@pytest.mark.parametrize("entry", sorted({*POOL}), ids=lambda entry: "".join(map(str, entry)))
def test_is_differentiable_and_vectorised_alike(entry: Transform) -> None:
    guesses = images(6, size=12).view(3, 2, 3, 12, 15).requires_grad_()
    kind = OPERATIONS[entry.operation]

    def apply(pixels: Tensor) -> Tensor:
        return kind.apply(pixels, entry.magnitude)

    at_once = vmap(apply)(guesses)
    one_by_one = torch.stack([apply(guess) for guess in guesses])
    torch.testing.assert_close(at_once, one_by_one)
    weights = torch.randn(at_once.shape, generator=rng())
    slopes = [torch.autograd.grad((r * weights).sum(), guesses)[0] for r in (at_once, one_by_one)]
    torch.testing.assert_close(*slopes)
    assert slopes[0].abs().sum() > 0


def test_vectorised_guesses_draw_their_own_signs() -> None:
    guess = images(1, size=8)
    guesses = guess.expand(50, 1, -1, -1, -1)
    draws = rng()
    results = vmap(lambda one: POOL[15].apply(one, draws), randomness="different")(guesses)
    assert len(results.flatten(1).unique(dim=0)) == 2
