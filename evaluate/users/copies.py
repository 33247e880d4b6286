"""Copies of models for users' code, so that the originals never change.

Hooks pass models to a defense, which may keep or alter them. Two models are never passed: the
server's own model, which is trained and evaluated, and the model that adversaries know.
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
    """A copy, and its state when it was made."""

    def __init__(self, original: nn.Module) -> None:
        self.model = copied(original)
        self._parts, self._versions = _parts(self.model), _versions(original)

    def equals(self, original: nn.Module) -> bool:
        """Return whether the copy is unaltered and has the values of its original."""
        return self._parts == _parts(self.model) and _alike(self.model, original)

    def is_of(self, original: nn.Module) -> bool:
        """Return whether the original has not changed since it was copied."""
        return self._versions == _versions(original)


class Copies:
    """A copy of each model. It is reused as long as it equals the original."""

    _given: ClassVar[WeakSet[nn.Module]] = WeakSet()

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, _Copy] = WeakKeyDictionary()

    def of(self, model: nn.Module, *, untouched: bool = False) -> nn.Module:
        """Return a copy of a model; the model itself if it was handed out before.

        Args:
            model: The model.
            untouched: Whether nobody can have altered the copy. Then it is compared with the
                original only if that has changed.
        """
        if model in self._given:
            return model
        known = self._copies.get(model)
        if known is not None and untouched and known.is_of(model):
            return known.model
        if known is None or not known.equals(model):
            known = _Copy(model)
            self._copies[model] = known
            self._given.add(known.model)
        return known.model

    def is_copy(self, model: nn.Module, original: nn.Module) -> bool:
        """Return whether a model is the unaltered copy of another that was handed out last."""
        known = self._copies.get(original)
        return known is not None and known.model is model and known.equals(original)

    def give(self, model: nn.Module) -> nn.Module:
        """Mark a model as belonging to users' code (e.g. one that it made), and return it."""
        self._given.add(model)
        return model


CLIENTS = Copies()
"""Copies of the models that clients receive."""

SIMULATED = Copies()
"""Copies on which adversaries run a defense's code. The clients' own copies may be altered."""


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares nothing with it.

    The next call of a module recomputes tensors that it derives, as `weight_norm` does. Functions
    that refer to a part of the model are rebuilt, because `deepcopy` does not copy them.

    Raises:
        ValueError: If the copy still refers to the model.
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
                    "to the model itself. The model cannot be copied: make the function a method"
                )
    return own


def _rebound(value: Any, twins: Mapping[int, Any]) -> Any:  # noqa: ANN401 - any attribute
    """Return an attribute whose functions refer to the copy instead of the original."""
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
    """Return the name of a function within a value that refers to an original; None if none."""
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
    """Return the values in a function's closure that are assigned already."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            found.append(None)
    return found


def _parts(model: nn.Module) -> list[object]:
    """Return the parts of a model besides values: modules, modes, hooks and attributes."""
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


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return how often each value of a model was written to."""
    values = chain(model.parameters(), model.buffers())
    return [(id(value), value._version) for value in values]


def _known(value: object) -> object:
    """Return a key of a value: the value if it is simple, otherwise its identity."""
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have equal modes, parameters and buffers. NaN equals nothing."""
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
    """Return a copy in its original's present precision, because attacks change it.

    Conversion from single to double precision and back rounds nothing.
    """
    precision = _precision(model)
    return copy if _precision(copy) == precision else copy.to(precision)


def _precision(model: nn.Module) -> torch.dtype | None:
    values = chain(model.parameters(), model.buffers())
    return next((value.dtype for value in values if value.is_floating_point()), None)
