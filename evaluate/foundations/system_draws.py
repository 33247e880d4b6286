"""Unpredictable noise: draws from a cryptographic stream.

Torch's Mersenne Twister is linear: about 20,000 known bits of its output reveal its state. Some
entries of a clipped gradient are known to be zero, e.g. at dark pixels. There, the upload shows
the noise alone. So noise that leaves a simulation is not drawn from the Mersenne Twister.

Samples are still floating-point numbers. Some values are possible for one input and impossible for
another (Mironov, "On Significance of the Least Significant Bits for Differential Privacy",
CCS 2012). `Noise(discrete=True)` and `ClientDP(discrete=True)` avoid this: they draw from a
discrete Gaussian.
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
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.overrides import TorchFunctionMode

from .seeds import SystemGenerator


@contextmanager
def system_draws() -> Iterator[SystemGenerator]:
    """Yield a generator whose draws are cryptographically strong within this context.

    Example:
        with system_draws() as rng:
            upload = defense.on_update(update, rng)
    """
    with SystemDraws():
        yield SystemGenerator()


class _Stream:
    """AES in counter mode. Each process has its own key from the operating system."""

    def __init__(self) -> None:
        self._process = 0

    def words(self, shape: Sequence[int]) -> Tensor:
        """Return uniform integers of 63 bits."""
        if self._process != os.getpid():  # a forked process must not repeat its parent's draws
            self._process, key = os.getpid(), os.urandom(32)
            self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        drawn = bytearray(self._cipher.update(bytes(8 * math.prod(shape))))
        if not drawn:
            return torch.empty(tuple(shape), dtype=torch.int64)
        return torch.frombuffer(drawn, dtype=torch.int64).view(tuple(shape)) & (2**63 - 1)

    def open_uniform(self, shape: Sequence[int]) -> Tensor:
        """Return numbers between 0 and 1, excluding both, in double precision."""
        return ((self.words(shape) >> 11).double() + 0.5) * 2.0**-52

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers in [0, 1) that the tensor's type represents; rounding could give 1."""
        bits = 1 - round(math.log2(torch.finfo(like.dtype).eps))
        return (self.words(like.shape) >> (63 - bits)).double() * 2.0**-bits

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers (Box and Muller 1958)."""
        radius = (-2 * self.open_uniform(shape).log()).sqrt()
        return radius * (2 * math.pi * self.open_uniform(shape)).cos()

    def integers(self, shape: Sequence[int], count: int) -> Tensor:
        """Return integers below `count`, all equally probable."""
        drawn, most = self.words(shape), 2**63 - 2**63 % count
        while most < 2**63 and bool((again := drawn >= most).any()):
            drawn = torch.where(again, self.words(shape), drawn)
        return drawn % count


class SystemDraws(TorchFunctionMode):
    """Replaces torch's draws from a `SystemGenerator` by draws from a cryptographic stream.

    It refuses functions whose draws it does not know exactly, and draws within `torch.func.vmap`.
    Draw before `vmap`, for all examples at once.
    """

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
        """Return a draw from the stream; pass other calls through."""
        options = dict(kwargs or {})
        if not isinstance(options.get("generator"), SystemGenerator):
            return function(*args, **options)
        name = getattr(function, "__name__", str(function))
        if function not in _DRAWS:
            known = ", ".join(sorted({one.__name__ for one in _DRAWS}))
            raise ValueError(f"{name} cannot draw from the operating system: use one of {known}")
        if any(one.key() == TransformType.Vmap for one in get_interpreter_stack() or ()):
            raise ValueError(f"{name} draws inside vmap: draw before it, for all examples at once")
        drawn = function(*args, **options)  # gives shape and type; the values are replaced
        if drawn.is_complex():
            raise ValueError(f"{name} cannot draw complex numbers from the operating system")
        parameters = {key: one for key, one in options.items() if key not in _NOT_DRAWN}
        return drawn.copy_(_DRAWS[function](self._stream, drawn, *args, **parameters))


_NOT_DRAWN = ("generator", "dtype", "device", "layout", "out", "requires_grad", "pin_memory")


# Each function has torch's own signature, after the stream and the tensor that torch drew.


def _rand(stream: _Stream, drawn: Tensor, *_: object, size: object = None) -> Tensor:
    return stream.uniform(drawn)


def _randn(stream: _Stream, drawn: Tensor, *_: object, size: object = None) -> Tensor:
    return stream.normal(drawn.shape)


def _normal(
    stream: _Stream,
    drawn: Tensor,
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: object = None,
) -> Tensor:
    return torch.as_tensor(mean) + torch.as_tensor(std) * stream.normal(drawn.shape)


def _randint(stream: _Stream, drawn: Tensor, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401
    bounds = [one for one in given if isinstance(one, int)]
    low = named.get("low", bounds[0] if len(bounds) > 1 or ("high" in named and bounds) else 0)
    high = named.get("high", bounds[-1] if bounds else 0)
    return stream.integers(drawn.shape, high - low) + int(low)


def _randperm(stream: _Stream, drawn: Tensor, n: int) -> Tensor:
    return stream.words((n,)).argsort()


def _bernoulli(stream: _Stream, drawn: Tensor, input: Tensor, p: float | None = None) -> Tensor:
    return stream.open_uniform(drawn.shape) < (input if p is None else p)


def _fill_normal(
    stream: _Stream, drawn: Tensor, _: Tensor, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    return mean + std * stream.normal(drawn.shape)


def _fill_uniform(
    stream: _Stream, drawn: Tensor, _: Tensor, *given: float, **named: float
) -> Tensor:
    low = named.get("from", given[0] if given else 0.0)
    high = named.get("to", given[1] if len(given) > 1 else 1.0)
    return low + (high - low) * stream.uniform(drawn)


def _fill_exponential(stream: _Stream, drawn: Tensor, _: Tensor, lambd: float = 1.0) -> Tensor:
    return -stream.open_uniform(drawn.shape).log() / lambd


def _fill_bernoulli(stream: _Stream, drawn: Tensor, _: Tensor, p: Tensor | float = 0.5) -> Tensor:
    return stream.open_uniform(drawn.shape) < p


_DRAWS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    Tensor.normal_: _fill_normal,
    Tensor.uniform_: _fill_uniform,
    Tensor.exponential_: _fill_exponential,
    Tensor.bernoulli_: _fill_bernoulli,
}
