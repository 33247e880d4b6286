"""Copies of models for code that is not ours: whatever it does to them, the originals stay.

A defense is given models by its hooks, and may keep or alter them. The server's own model, which is
trained and evaluated, and the one that adversaries know, are never among these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from itertools import chain
from types import CellType, FunctionType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn


class _Copy:
    """A copy, and what it was like when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._parts = model, _parts(model)

    def equals(self, original: nn.Module) -> bool:
        """Return whether nobody has altered it, and it has the values of its original."""
        return self._parts == _parts(self.model) and _alike(self.model, original)


class Copies:
    """A copy of each model, which is handed out again for as long as it equals the original."""

    _given: ClassVar[WeakSet[nn.Module]] = WeakSet()

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()

    def of(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model; the model itself if it was given away before."""
        if model in self._given:
            return model
        known = self._copies.get(model)
        if known is None or not known.equals(model):
            known = _Copy(copied(model))
            self._copies[model] = known
            self._given.add(known.model)
        return known.model

    def is_copy(self, model: nn.Module, original: nn.Module) -> bool:
        """Return whether a model is the copy of another that was last handed out, unaltered."""
        known = self._copies.get(original)
        return known is not None and known.model is model and known.equals(original)

    def give(self, model: nn.Module) -> nn.Module:
        """Return a model that belongs to code that is not ours, such as one that it has made."""
        self._given.add(model)
        return model


CLIENTS = Copies()
"""What clients are sent."""

SIMULATED = Copies()
"""What adversaries let the code of a defense run on: the clients' own copies may be altered."""


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares nothing with it.

    Tensors that a module has computed, as of `weight_norm`, are computed anew by its next call.
    Functions that a module keeps are made anew where they refer to a part of the model, which
    `deepcopy` leaves as they are.

    Raises:
        ValueError: If the copy still leads to the model.
    """
    computed = (v for module in model.modules() for v in vars(module).values())
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for value in computed
        if isinstance(value, Tensor) and not value.is_leaf
    }
    own = copy.deepcopy(model, memo)
    originals = [*model.modules(), *model.parameters(), *model.buffers()]
    twins = {id(one): memo[id(one)] for one in originals if id(one) in memo}
    for module in own.modules():
        for name, value in [*vars(module).items()]:
            vars(module)[name] = _rebound(value, twins)
            if (function := _leading(vars(module)[name], twins)) is not None:
                raise ValueError(
                    f"{type(module).__name__}.{name} holds the function {function}, which refers "
                    "to the model itself, so that the model cannot be copied: make it a method"
                )
    return own


def _rebound(value: Any, twins: Mapping[int, Any]) -> Any:  # noqa: ANN401 - any attribute
    """Return an attribute whose functions refer to a copy, and not to its original."""
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _rebound(part, twins)
    elif isinstance(value, list):
        value[:] = [_rebound(part, twins) for part in value]
    elif isinstance(value, FunctionType) and _leading(value, twins) is not None:
        cells = [CellType(twins.get(id(part), part)) for part in _closed(value)]
        defaults = tuple(twins.get(id(part), part) for part in value.__defaults__ or ())
        own = FunctionType(
            value.__code__, value.__globals__, value.__name__, defaults or None, tuple(cells)
        )
        own.__kwdefaults__ = value.__kwdefaults__
        return own
    return value


def _leading(
    value: object, twins: Mapping[int, Any], within: frozenset[int] = frozenset()
) -> str | None:
    """Return the name of a function within a value that refers to an original, if one does."""
    if id(value) in within:  # a function may refer to itself
        return None
    within |= {id(value)}
    if isinstance(value, FunctionType):
        kept = [
            *_closed(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
        inner = any(
            _leading(one, twins, within) for one in kept if isinstance(one, FunctionType | partial)
        )
        return value.__qualname__ if inner or any(id(one) in twins for one in kept) else None
    if isinstance(value, partial):
        kept = [value.func, *value.args, *value.keywords.values()]
        return next((found for one in kept if (found := _leading(one, twins, within))), None)
    if isinstance(value, dict | list | tuple | set):
        parts = value.values() if isinstance(value, dict) else value
        return next((found for one in parts if (found := _leading(one, twins, within))), None)
    return None


def _closed(function: FunctionType) -> list[object]:
    """Return what a function has closed over, as far as it is there yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            found.append(None)
    return found


def _parts(model: nn.Module) -> list[object]:
    """Return what a model is made of besides values: modules, modes, hooks and attributes."""
    found: list[object] = []
    for module in model.modules():
        found += [id(module), type(module)]
        for name, value in vars(module).items():
            if isinstance(value, dict):
                found += [name, [(key, _known(part)) for key, part in value.items()]]
            elif isinstance(value, list | tuple | set):
                found += [name, [_known(part) for part in value]]
            else:
                found += [name, _known(value)]
    return found


def _known(value: object) -> object:
    """Return what tells a value from others: itself if it is simple, else which object it is."""
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same modes, parameters and buffers; NaN equals nothing."""
    if [part.training for part in one.modules()] != [part.training for part in other.modules()]:
        return False
    left, right = (
        dict(chain(model.named_parameters(), model.named_buffers())) for model in (one, other)
    )
    return left.keys() == right.keys() and all(
        value.requires_grad == right[name].requires_grad
        and value.dtype == right[name].dtype
        and torch.equal(value, right[name])
        for name, value in left.items()
    )


def in_precision_of(copy: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copy that computes as its original does now: attacks change the precision of theirs.

    From single to double precision and back nothing is rounded.
    """
    precision = _precision(model)
    return copy if _precision(copy) == precision else copy.to(precision)


def _precision(model: nn.Module) -> torch.dtype | None:
    values = chain(model.parameters(), model.buffers())
    return next((value.dtype for value in values if value.is_floating_point()), None)
