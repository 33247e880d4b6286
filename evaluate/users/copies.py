"""Copies of models for code that is not ours: whatever it does to them, the originals stay.

A defense is given models by its hooks, and may keep or alter them. The server's own model, which is
trained and evaluated, and the one that adversaries know, are never among these.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn


class Copies:
    """A copy of each model, which is handed out again for as long as it equals the original."""

    _given: ClassVar[WeakSet[nn.Module]] = WeakSet()

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def of(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model; the model itself if it was given away before."""
        if model in self._given:
            return model
        known = self._copies.get(model)
        if known is None or not _alike(known, model):
            known = copied(model)
            self._copies[model] = known
            self._given.add(known)
        return known

    def is_copy(self, model: nn.Module, original: nn.Module) -> bool:
        """Return whether a model is the copy of another that was last handed out."""
        return self._copies.get(original) is model

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
    """
    computed = (v for module in model.modules() for v in vars(module).values())
    memo = {
        id(value): value.detach().clone()
        for value in computed
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, memo)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same parameters and buffers; NaN equals nothing."""
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
