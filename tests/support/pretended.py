"""A device that is not there: tensors that say they are on it, and compute on the CPU.

Torch's fake tensors know devices as well, but in a build for CPUs autograd aborts the process for
one on `cuda` that requires a gradient ("PyTorch is not linked with support for cuda devices"), and
without values no code gets past its first `if`. These have both: whole cells run, and what mixes
devices fails as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

THERE = torch.device("meta")  # of those that a build for CPUs lets autograd use
_aten = torch.ops.aten
_MAY_MIX = {  # as on a GPU: copies, and indices on the CPU
    _aten.copy_.default,
    _aten._to_copy.default,
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


class Pretended(Tensor):
    """A tensor of a device that is not there."""

    value: Tensor

    @staticmethod
    def __new__(cls: type[Pretended], value: Tensor) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=THERE,
            requires_grad=False,
        )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        return _dispatched(function, args, dict(kwargs or {}))

    def __repr__(self, **_: object) -> str:
        return f"Pretended({self.value!r})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        return _dispatched(function, args, dict(kwargs or {}))


def _dispatched(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> object:  # noqa: ANN401
    tensors = [one for one in tree_iter((args, options)) if isinstance(one, Tensor)]
    there = any(isinstance(one, Pretended) for one in tensors)
    if there and function not in _MAY_MIX:
        for one in tensors:
            if not isinstance(one, Pretended) and one.dim():
                raise RuntimeError(
                    f"{function} mixes tensors of another device and cpu, of {one.shape}"
                )
    if options.get("generator") is not None and (there or options.get("device") == THERE):
        raise RuntimeError(f"{function} draws on another device from a generator of the CPU")
    wanted = options.get("device")
    if function in _MAY_MIX - {_aten._to_copy.default}:  # where the first argument is
        there = isinstance(args[0], Pretended)
    if wanted is not None:
        there = torch.device(wanted).type == THERE.type
        options["device"] = "cpu"
    plain = tree_map(lambda x: x.value if isinstance(x, Pretended) else x, (args, options))
    result = function(*plain[0], **plain[1])
    if not there:
        return result
    known = {id(one.value): one for one in tensors if isinstance(one, Pretended)}
    return tree_map(lambda x: known[id(x)] if id(x) in known else _wrapped(x), result)


def _wrapped(value: object) -> object:
    return Pretended(value) if isinstance(value, Tensor) and type(value) is Tensor else value


class _Made(TorchFunctionMode):
    """Makes tensors of numbers on the CPU first, which torch does beyond our reach."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and options.get("device") == THERE:
            return function(*args, **{**options, "device": "cpu"}).to(THERE)
        products = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
        if function in products and (args[0].dim(), args[1].dim()) == (1, 2):
            # Torch squeezes the result in place, which a wrapper misses.
            return function(args[0].unsqueeze(0), *args[1:]).squeeze(0)
        if function is Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].value.tolist()
        if function is Tensor.__getitem__ and isinstance(args[1], list):
            index = torch.tensor(args[1], dtype=torch.long, device="cpu")
            return args[0][index]  # else made beyond our reach
        if function is Tensor.numpy and options.get("force") and isinstance(args[0], Pretended):
            return args[0].value.detach().numpy()
        if function is Tensor.new_tensor and isinstance(args[0], Pretended):
            return torch.tensor(args[1], dtype=args[0].dtype, device="cpu").to(THERE)
        return function(*args, **options)


def _jvp(
    function: Callable[..., Tensor], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Push forward by pulling back twice: forward derivatives of wrappers crash."""
    value, pull_back = torch.func.vjp(function, *primals)
    _, push_forward = torch.func.vjp(pull_back, torch.zeros_like(value))
    return value, push_forward(tangents)[0]


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Let there be another device."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps what is tied
    try:
        with _Mode(), _Made(), patch.object(torch.func, "jvp", _jvp):
            yield THERE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
