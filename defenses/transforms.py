"""The pool of image transformations that `ATS` policies use.

All work on images of shape (N, channels, height, width) with values in [0, 1]. They are
differentiable, with a straight-through gradient for rounding. `torch.func.vmap` can vectorise them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d, pad

from . import torchvision_ops  # noqa: F401 (torchvision may not import without it)

Policy = tuple[int, ...]
"""Positions in the `POOL`, in the order in which they are applied."""

LONGEST = 3
"""Maximum number of transformations in a policy."""


@dataclass(frozen=True)
class Operation:
    """A kind of transformation, and the range of its magnitude.

    Attributes:
        apply: Function from images and a magnitude to images.
        weakest: Magnitude at level 0.
        strongest: Magnitude at level 9.
        signed: Whether the magnitude's sign is drawn for each image.
    """

    apply: Callable[[Tensor, float], Tensor]
    weakest: float = 0.0
    strongest: float = 0.0
    signed: bool = False


class Transform(NamedTuple):
    """An entry of the pool: an operation at one of ten levels."""

    operation: str
    level: int

    @property
    def magnitude(self) -> float:
        """Return the magnitude, linear in the level."""
        kind = OPERATIONS[self.operation]
        return kind.weakest + (kind.strongest - kind.weakest) * self.level / 9

    @property
    def stochastic(self) -> bool:
        """Return whether its effect is random."""
        return OPERATIONS[self.operation].signed and self.magnitude > 0

    def apply(self, images: Tensor, rng: Generator) -> Tensor:
        """Return the transformed images; each image has its own sign."""
        kind = OPERATIONS[self.operation]
        if not kind.signed:
            return kind.apply(images, self.magnitude)
        forth, back = (kind.apply(images, sign * self.magnitude) for sign in (1, -1))
        return torch.where(_draw(2, images, rng) == 0, forth, back)


def parse_policy(text: str) -> tuple[Policy, ...]:
    """Return the alternatives of a policy: `3-1-7` is one, `3-1-7+43-18-18` are two.

    The empty text is the policy that transforms nothing.
    """
    if text == "":
        return ((),)
    if isinstance(text, str) and re.fullmatch(r"\d+(-\d+)*(\+\d+(-\d+)*)*", text, re.ASCII):
        alternatives = tuple(tuple(map(int, part.split("-"))) for part in text.split("+"))
        if all(len(one) <= LONGEST and max(one) < len(POOL) for one in alternatives):
            return alternatives
    raise ValueError(
        f"policy must be up to {LONGEST} entries of the pool, each from 0 to {len(POOL) - 1}, as "
        f"in '3-1-7', or several such policies as in '3-1-7+43-18-18', got {text!r}"
    )


def apply_policies(images: Tensor, policies: tuple[Policy, ...], rng: Generator) -> Tensor:
    """Return each image transformed by one of the policies, drawn uniformly."""
    choice = _draw(len(policies), images, rng)
    result = images
    for index, policy in enumerate(policies):
        transformed = images
        for entry in policy:
            transformed = POOL[entry].apply(transformed, rng)
        result = torch.where(choice == index, transformed, result)
    return result


def _draw(count: int, images: Tensor, rng: Generator) -> Tensor:
    """Return a number below `count` for each image."""
    drawn = torch.randint(count, (len(images), 1, 1, 1), generator=rng, device=rng.device)
    return drawn.to(images.device)


class _StraightThrough(torch.autograd.Function):
    """An operation on images with slope 1 (straight through). It may branch on their values."""

    @staticmethod
    def forward(images: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        return operation(images)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None

    @staticmethod
    def vmap(
        info: object,
        in_dims: tuple[int, None],
        images: Tensor,
        operation: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, int]:
        return _straight_through(images.movedim(in_dims[0], 0), operation), 0


def _straight_through(images: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _StraightThrough.apply(images, operation)  # type: ignore[no-untyped-call]
    return result


def _in_eight_bits(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an operation on floats that does what the given operation does to bytes."""

    def on_floats(images: Tensor) -> Tensor:
        levels = images.mul(255).round().clamp(0, 255).to(torch.uint8)
        return operation(levels).to(images.dtype) / 255

    return on_floats


def _functional() -> Any:  # noqa: ANN401 - torchvision has no types
    from torchvision.transforms.v2 import functional  # slow to import

    return functional


def _invert(images: Tensor, _: float) -> Tensor:
    return 1 - images


def _autocontrast(images: Tensor, _: float) -> Tensor:
    return _straight_through(images, _functional().autocontrast)


def _equalize(images: Tensor, _: float) -> Tensor:
    return _straight_through(images, _in_eight_bits(_functional().equalize))


def _posterize(images: Tensor, bits: float) -> Tensor:
    posterize = _functional().posterize
    return _straight_through(images, _in_eight_bits(lambda levels: posterize(levels, round(bits))))


def _solarize(images: Tensor, threshold: float) -> Tensor:
    return torch.where(images * 255 < threshold, images, 1 - images)


def _brightness(images: Tensor, change: float) -> Tensor:
    return _enhance(images, torch.zeros_like(images), change)


def _contrast(images: Tensor, change: float) -> Tensor:
    return _enhance(images, _grey(images).mean((-3, -2, -1), keepdim=True), change)


def _color(images: Tensor, change: float) -> Tensor:
    return _enhance(images, _grey(images), change)


def _sharpness(images: Tensor, change: float) -> Tensor:
    inner = images[..., 1:-1, 1:-1]
    smooth = (9 * avg_pool2d(images, 3, stride=1) + 4 * inner) / 13  # the middle has weight 5
    return _enhance(images, images + pad(smooth - inner, (1, 1, 1, 1)), change)


def _enhance(images: Tensor, without: Tensor, change: float) -> Tensor:
    """Move images away from their version without a property, or towards it.

    It is like torchvision's `adjust_...`, which clamp in place and therefore cannot be vectorised.
    """
    return (images + change * (images - without)).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    if images.shape[-3] == 1:
        return images
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    return (weights * images).sum(-3, keepdim=True)


def _translate_x(images: Tensor, share: float) -> Tensor:
    y, x = _pixel_centres(images)
    return _nearest(images, y, x + share * images.shape[-1], fill=0.0)


def _translate_y(images: Tensor, share: float) -> Tensor:
    y, x = _pixel_centres(images)
    return _nearest(images, y + share * images.shape[-2], x, fill=0.0)


def _rotate(images: Tensor, degrees: float) -> Tensor:
    y, x = _pixel_centres(images)
    middle_y, middle_x = images.shape[-2] / 2, images.shape[-1] / 2
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    source_y = sine * (x - middle_x) + cosine * (y - middle_y) + middle_y
    source_x = cosine * (x - middle_x) - sine * (y - middle_y) + middle_x
    return _nearest(images, source_y, source_x, fill=128 / 255)


def _shear_y(images: Tensor, slope: float) -> Tensor:
    """Move each column by `slope` times its position, with cubic interpolation as in PIL."""
    y, x = _pixel_centres(images)
    source = y + slope * x
    above = (source - 0.5).floor()
    part = (source - 0.5 - above).to(images.dtype)
    a, b, c, d = (_take(images, above + offset, x.floor()) for offset in (-1, 0, 1, 2))
    cubic = b + part * (c - a + part * (2 * (a - b) + c - d + part * (b - a + d - c)))
    inside = (source >= 0) & (source < images.shape[-2])
    return torch.where(inside, cubic.clamp(0, 1), 0.0)


def _pixel_centres(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates of all pixels, in double precision because they are rounded later."""
    height, width = images.shape[-2:]
    y, x = (torch.arange(n, dtype=torch.float64, device=images.device) for n in (height, width))
    grid = torch.meshgrid(y + 0.5, x + 0.5, indexing="ij")
    return grid[0], grid[1]


def _nearest(images: Tensor, y: Tensor, x: Tensor, fill: float) -> Tensor:
    """Return images with pixels taken from the given places; `fill` outside."""
    height, width = images.shape[-2:]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return torch.where(inside, _take(images, y.floor(), x.floor()), fill)


def _take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    return images[..., rows.long().clamp(0, height - 1), columns.long().clamp(0, width - 1)]


OPERATIONS: dict[str, Operation] = {
    "invert": Operation(_invert),
    "autocontrast": Operation(_autocontrast),
    "equalize": Operation(_equalize),
    "posterize": Operation(_posterize, 8, 4),
    "solarize": Operation(_solarize, 256, 0),
    "brightness": Operation(_brightness, 0, 0.5, signed=True),
    "contrast": Operation(_contrast, 0, 0.5, signed=True),
    "color": Operation(_color, 0, 0.5, signed=True),
    "sharpness": Operation(_sharpness, 0, 0.5, signed=True),
    "translateX": Operation(_translate_x, 0, 150 / 331, signed=True),
    "translateY": Operation(_translate_y, 0, 150 / 331, signed=True),
    "shearY": Operation(_shear_y, 0, 0.3, signed=True),
    "rotate": Operation(_rotate, 0, 30),
}
"""Every operation of the pool by its published name."""

POOL: tuple[Transform, ...] = tuple(
    Transform(operation, int(level))
    for operation, level in re.findall(
        r"([a-zA-Z]+)(\d)",
        "invert7 contrast6 rotate2 translateX9 sharpness1 sharpness3 shearY2 translateY2 "
        "autocontrast5 equalize2 shearY5 posterize5 color3 brightness5 sharpness9 brightness9 "
        "equalize5 equalize1 contrast7 sharpness5 color5 translateX5 equalize7 autocontrast8 "
        "translateY3 sharpness6 brightness6 color8 solarize0 invert0 equalize0 autocontrast0 "
        "equalize8 equalize4 color5 equalize5 autocontrast4 solarize4 brightness3 color0 "
        "solarize1 autocontrast0 translateY3 translateY3 autocontrast1 solarize1 equalize5 "
        "invert0 translateY3 autocontrast1",
    )
)
"""The published pool. Some entries are equal, and two, solarize0 and color0, do nothing."""
