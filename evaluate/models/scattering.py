"""The scattering transform of images: wavelets, moduli and averages, without parameters.

References:
    Mallat. "Group Invariant Scattering." Communications on Pure and Applied Mathematics 65(10),
    2012. https://arxiv.org/abs/1101.2286
    Oyallon, Mallat. "Deep Roto-Translation Scattering for Object Classification." CVPR 2015.
    https://arxiv.org/abs/1412.8659
    Andreux et al. "Kymatio: Scattering Transforms in Python." JMLR 21(60), 2020, whose filters,
    padding and order of channels we follow. https://arxiv.org/abs/1812.11214
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_ANGLES = 64

_AT_ONCE = 2**13
"""Pixels that are transformed together. More at once is slower on CPUs."""


class Scattering(nn.Module):
    """The scattering transform up to order 2.

    S0 = x * phi, S1 = |x * psi_1| * phi and S2 = ||x * psi_1| * psi_2| * phi. The wavelets psi are
    Morlet wavelets of J scales and L angles; psi_2 is coarser than psi_1. The average phi covers
    2^J pixels. An image becomes 1 + JL + J(J-1)L^2/2 channels at 1/2^J of its resolution.

    Attributes:
        shape: Shape of the features of an image, (channels, height, width).
    """

    def __init__(self, shape: tuple[int, int, int], scales: int = 2, angles: int = 8) -> None:
        """Make the filters.

        Args:
            shape: Shape of an image, (channels, height, width).
            scales: J.
            angles: L.
        """
        super().__init__()
        channels, *pixels = shape
        if not (1 <= angles <= MOST_ANGLES and 1 <= scales < math.log2(min(pixels))):
            raise ValueError(
                f"scattering needs angles in [1, {MOST_ANGLES}], scales of at least 1, and images "
                f"larger than 2^scales pixels, got {angles=}, {scales=} and images of {pixels}"
            )
        self.scales, self.angles = scales, angles
        step = 2**scales
        sizes = [((size + step) // step + 1) * step for size in pixels]
        margins = [(full - size) for full, size in zip(sizes, pixels, strict=True)]
        self.margins = [side for m in reversed(margins) for side in (m // 2, (m + 1) // 2)]
        paths = 1 + scales * angles + scales * (scales - 1) // 2 * angles**2
        self.shape = (channels * paths, *(full // step - 2 for full in sizes))
        for scale in range(scales):
            psi = _wavelets(sizes, scale, angles)
            for level in range(max(scale, 1)):
                low = _cropped(_cropped(psi, level, 1), level, 2)
                self._keep(f"psi_{level}_{scale}", low / 4 ** (scale - level))
            for axis, size in enumerate(sizes):
                self._keep(f"phi_{scale}_{axis}", _averages(size, scale, scales))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images."""
        if not len(images):  # an FFT needs an image
            return images.new_zeros((0, *self.shape))
        count = max(1, _AT_ONCE // math.prod(images.shape[1:]))
        if len(images) <= count:
            return self._features(images)
        return torch.cat([self._features(some) for some in images.split(count)])

    def _features(self, images: Tensor) -> Tensor:
        padded = functional.pad(images, self.margins, mode="reflect")
        spectrum = torch.fft.fft2(padded).unsqueeze(2)
        orders = [[self._average(padded.unsqueeze(2), 0)], [], []]
        for scale in range(self.scales):
            moduli = self._moduli(spectrum, 0, scale)
            orders[1].append(self._average(moduli, scale))
            if scale + 1 < self.scales:
                inner = torch.fft.fft2(moduli).unsqueeze(3)
                coarser = range(scale + 1, self.scales)
                second = [self._average(self._moduli(inner, scale, to), to) for to in coarser]
                orders[2].append(torch.cat(second, dim=3).flatten(2, 3))
        return torch.cat([part for order in orders for part in order], dim=2).flatten(1, 2)

    def _keep(self, name: str, values: Tensor) -> None:
        self.register_buffer(name, values.to(torch.get_default_dtype()), persistent=False)

    def _moduli(self, spectrum: Tensor, level: int, scale: int) -> Tensor:
        """Return |u * psi| for all angles, subsampled to the resolution of the wavelets' scale.

        Subsampling by k averages the k x k blocks of the spectrum; psi holds the factor 1 / k^2.
        """
        psi = self.get_buffer(f"psi_{level}_{scale}")
        k = 2 ** (scale - level)
        products = [
            columns * filters
            for rows, parts in zip(spectrum.chunk(k, -2), psi.chunk(k, -2), strict=True)
            for columns, filters in zip(rows.chunk(k, -1), parts.chunk(k, -1), strict=True)
        ]
        moduli: Tensor = torch.fft.ifft2(sum(products[1:], products[0])).abs()
        return moduli

    def _average(self, values: Tensor, scale: int) -> Tensor:
        """Return u * phi, subsampled. phi is separable, so each axis is a small matrix."""
        rows, columns = (self.get_buffer(f"phi_{scale}_{axis}") for axis in range(2))
        averaged: Tensor = rows @ values @ columns.mT
        return averaged


def _wavelets(sizes: list[int], scale: int, angles: int) -> Tensor:
    """Return the spectra of Morlet wavelets of one scale, which are real, one per angle."""
    made = []
    for place in range(angles):
        theta = (int(angles / 2 - 1) - place) * math.pi / angles
        frequency, slant = 3 / 4 * math.pi / 2**scale, 4 / angles
        wave = _gabor(sizes, 0.8 * 2**scale, theta, frequency, slant)
        envelope = _gabor(sizes, 0.8 * 2**scale, theta, 0, slant)
        made.append(torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real)
    return torch.stack(made)


def _gabor(sizes: list[int], sigma: float, theta: float, frequency: float, slant: float) -> Tensor:
    """Return a Gaussian times a plane wave, made periodic by adding shifted copies."""
    axes = [torch.arange(-2 * size, 3 * size, dtype=torch.float64) for size in sizes]
    y, x = axes[0].unsqueeze(1), axes[1]
    along = y * math.cos(theta) + x * math.sin(theta)
    across = x * math.cos(theta) - y * math.sin(theta)
    bell = (-(along.square() + (slant * across).square()) / (2 * sigma**2)).exp()
    wave = torch.polar(bell, frequency * along) / (2 * math.pi * sigma**2 / slant)
    periodic: Tensor = wave.unflatten(1, (5, -1)).unflatten(0, (5, -1)).sum((0, 2))
    return periodic


def _averages(size: int, scale: int, scales: int) -> Tensor:
    """Return the matrix that averages and subsamples an axis, without the padded margins."""
    sigma = 0.8 * 2 ** (scales - 1)
    places = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    bell = (-places.square() / (2 * sigma**2)).exp().unflatten(0, (5, -1)).sum(0)
    spectrum = torch.fft.fft(bell / (math.sqrt(2 * math.pi) * sigma)).real
    kernel = torch.fft.ifft(_cropped(spectrum, scale, 0)).real
    step, length = 2 ** (scales - scale), len(kernel)
    kept = step * torch.arange(1, length // step - 1)
    matrix: Tensor = kernel[(kept.unsqueeze(1) - torch.arange(length)) % length]
    return matrix


def _cropped(spectrum: Tensor, level: int, axis: int) -> Tensor:
    """Return the low frequencies of a spectrum, for signals subsampled 2^level times."""
    size = spectrum.shape[axis]
    low = size // 2**level
    start = size // 2 ** (level + 1)
    kept = torch.cat([torch.arange(start), torch.arange(start + size - low, size)])
    return spectrum.index_select(axis, kept)
