"""The device on which tensors are made. Methods need not know it.

Within `on_device`, tensors that are made without a device are made on the current device. So a
defense or an attack that was written for the CPU runs on a GPU unchanged. Generators stay on the
CPU. All draws are made there and moved, so that all devices see the same numbers. Initial weights,
victims and noise are the same on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

Device = Literal["auto", "cpu", "cuda", "mps"]

_CURRENT: ContextVar[torch.device | None] = ContextVar("device", default=None)

_IN_PLACE = (
    *(Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_),
    *(Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
)
_DRAWN = (
    *(torch.randn, torch.rand, torch.randint, torch.randperm, torch.normal, torch.bernoulli),
    *(torch.multinomial, torch.poisson, torch._standard_gamma, torch.binomial),
    *(torch.randn_like, torch.rand_like, torch.randint_like),
    *(Tensor.bernoulli, Tensor.multinomial),
)


def current_device() -> torch.device:
    """Return the device on which tensors are made."""
    return _CURRENT.get() or torch.device("cpu")


def resolved(device: Device) -> torch.device:
    """Return a device of this machine.

    Raises:
        ValueError: If the machine has no such device.
    """
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if device == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if available[name]))
    if not available.get(device, False):
        found = ", ".join(name for name, there in available.items() if there)
        raise ValueError(
            f"device must be auto or one that this machine has ({found}), got {device}"
        )
    return torch.device(device)


@contextmanager
def on_device(device: Device | torch.device) -> Iterator[torch.device]:
    """Make tensors on a device, also within another `on_device`. The CPU needs no change."""
    place = device if isinstance(device, torch.device) else resolved(device)
    before = current_device()
    token = _CURRENT.set(place)
    try:
        if place.type == before.type == "cpu":
            yield place
        else:
            with _Placed(place):
                yield place
    finally:
        _CURRENT.reset(token)


class _Placed(TorchFunctionMode):
    """Makes tensors on a device, and draws random numbers on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Add the device to a call that makes a tensor."""
        options = dict(kwargs or {})
        if function in _IN_PLACE and args[0].device.type == self._device.type != "cpu":
            drawn = torch.empty_like(args[0], device="cpu")
            function(drawn, *args[1:], **options)
            return args[0].copy_(drawn)
        if function in _DRAWN and self._is_here(options.get("device")):
            args, options = _on_cpu(args), {name: _on_cpu(v) for name, v in options.items()}
            options.pop("device", None)
            if function in _device_constructors():
                options["device"] = "cpu"
            return function(*args, **options).to(self._device)
        if function in _device_constructors() and options.get("device") is None:
            options["device"] = self._device
        return function(*args, **options)

    def _is_here(self, device: object) -> bool:
        """Return whether a device is None or this one."""
        return device is None or torch.device(str(device)).type == self._device.type


def _on_cpu(value: Any) -> Any:  # noqa: ANN401 - any argument
    if isinstance(value, tuple):
        return tuple(_on_cpu(part) for part in value)
    return value.cpu() if isinstance(value, Tensor) else value
