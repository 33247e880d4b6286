"""Noise that nobody can predict: draws from a cryptographic stream.

Torch's Mersenne Twister is linear: about 20,000 known bits of its output give its state
away. Where an entry of a clipped gradient is known to be zero, such as at dark pixels, the upload
shows the noise alone. So noise that leaves a simulation is not drawn from it.

What is not promised: samples are floating-point numbers, of which some values are impossible for
one input and possible for another (Mironov, "On Significance of the Least Significant Bits for
Differential Privacy", CCS 2012). `Noise(discrete=True)` and `ClientDP(discrete=True)` draw from a
discrete Gaussian instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .seeds import SystemGenerator, reseed


@contextmanager
def system_draws() -> Iterator[SystemGenerator]:
    """Give a generator whose draws are cryptographically strong for as long as this is entered.

    Example:
        with system_draws() as rng:
            upload = defense.on_update(update, rng)
    """
    with SystemDraws():
        yield SystemGenerator()


class _Stream:
    """AES in counter mode, under a key from the operating system."""

    def __init__(self) -> None:
        self._cipher = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def words(self, shape: Sequence[int]) -> Tensor:
        """Return uniform integers of 63 bits."""
        drawn = bytearray(self._cipher.update(bytes(8 * math.prod(shape))))
        if not drawn:
            return torch.empty(tuple(shape), dtype=torch.int64)
        return torch.frombuffer(drawn, dtype=torch.int64).view(tuple(shape)) & (2**63 - 1)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return numbers between 0 and 1, excluding both, in double precision."""
        return ((self.words(shape) >> 11).double() + 0.5) * 2.0**-52

    def unit(self, shape: Sequence[int]) -> Tensor:
        """Return numbers in [0, 1) that single precision holds, so that rounding gives no 1."""
        return (self.words(shape) >> 39).double() * 2.0**-24

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers (Box and Muller 1958)."""
        radius = (-2 * self.uniform(shape).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()

    def integers(self, shape: Sequence[int], count: int) -> Tensor:
        """Return integers below `count`, none more probable than another."""
        drawn, most = self.words(shape), 2**63 - 2**63 % count
        while bool((again := drawn >= most).any()) if most < 2**63 else False:
            drawn = torch.where(again, self.words(shape), drawn)
        return drawn % count


class SystemDraws(TorchFunctionMode):
    """Takes what torch draws from a `SystemGenerator` out of a cryptographic stream instead."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = _Stream()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Return a draw from the stream; anything else as it is."""
        options = dict(kwargs or {})
        rng = options.get("generator")
        if not isinstance(rng, SystemGenerator):
            return function(*args, **options)
        reseed(rng)  # for what is not replaced, and for the shape and type of what is
        drawn = function(*args, **options)
        if function in _DRAWS:
            values = _DRAWS[function](self._stream, drawn.shape, *_numbers(args, options))
            drawn.copy_(values)
        return drawn


def _numbers(args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a distribution, in torch's order: not the shape, nor the type."""
    named = [options[name] for name in _PARAMETERS if name in options]
    return [one for one in (*args, *named) if isinstance(one, int | float | Tensor)]


def _normal(
    stream: _Stream, shape: Sequence[int], mean: Tensor | float, std: Tensor | float = 1.0
) -> Tensor | float:
    return mean + std * stream.normal(shape)


def _uniform(stream: _Stream, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * stream.unit(shape)


def _integers(stream: _Stream, shape: Sequence[int], *bounds: int) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return low + stream.integers(shape, high - low)


_PARAMETERS = ("mean", "std", "low", "high", "lambd", "p")
_DRAWS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.randn: lambda stream, shape, *_: stream.normal(shape),
    torch.rand: lambda stream, shape, *_: stream.unit(shape),
    torch.normal: _normal,
    torch.randint: _integers,
    torch.randperm: lambda stream, shape, _: stream.words(shape).argsort(),
    torch.bernoulli: lambda stream, shape, p: stream.uniform(shape) < p,
    Tensor.normal_: lambda stream, shape, _, *options: _normal(stream, shape, *(options or (0.0,))),
    Tensor.uniform_: lambda stream, shape, _, *bounds: _uniform(stream, shape, *bounds),
    Tensor.exponential_: lambda stream, shape, _, rate=1.0: -stream.uniform(shape).log() / rate,
    Tensor.bernoulli_: lambda stream, shape, _, p=0.5: stream.uniform(shape) < p,
}
