"""Checks of users' classes: hooks with our signatures, and well-formed values.

The hooks of a defense are checked at every call. A class and its claims are checked once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from numbers import Real

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import (
    ADJACENCIES,
    Batch,
    Defense,
    Guarantee,
    Loss,
    Summing,
    Update,
    overrides,
    summing_of,
    trainable,
)

from .alone import Alone, alone
from .copies import CLIENTS

_WITH_MODEL = ("on_receive", "gradient", "on_cohort", "on_model")
"""Hooks that are given a model, which they may alter."""


@dataclass
class Checked(Defense):
    """A defense whose hooks run alone and are checked, so that an error names the faulty hook.

    Attributes:
        inner: The defense that does the work.
        trained_on: The client's examples, or None. Each example is replaced by what a local step
            last saw of it.
    """

    inner: Defense
    trained_on: Batch | None = field(default=None, repr=False, compare=False)
    _rows: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _seen: int = field(default=0, init=False, repr=False, compare=False)

    def begin(self, examples: Batch) -> None:
        """Begin an upload for some examples."""
        self.trained_on, self._rows, self._seen = examples, None, 0

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Check that the hook returns a model and did not change the received one.

        The client gets copies. Later changes to them have no effect on the server.
        """
        if not any(overrides(self.inner, hook) for hook in _WITH_MODEL):
            return CLIENTS.of(model, untouched=True)
        model = CLIENTS.of(model)
        if not overrides(self.inner, "on_receive"):
            return model
        agreed = CLIENTS.of(agreed)
        before = [value.clone() for value in model.state_dict().values()]
        result = alone(self.inner.on_receive, model, agreed)
        self._check_untouched("on_receive", before, model.state_dict().values())
        if not isinstance(result, nn.Module):
            raise ValueError(
                f"{self._name('on_receive')} must return a model, got {type(result).__name__}"
            )
        return CLIENTS.give(result)

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Yield the defense's batches, and remember which examples are next."""
        for rows in Alone(self.inner).batches(examples, batch_size, epochs, rng):
            if not isinstance(rows, Tensor) or rows.dtype != torch.long or rows.dim() != 1:
                raise ValueError(
                    f"{self._name('batches')} must yield vectors of example numbers (torch.long), "
                    f"got {_described(rows)}"
                )
            self._rows = rows
            yield rows

    def expect(self, batch_size: int) -> None:
        """Pass the nominal batch size to the defense. Examples come in order."""
        self._rows = None
        self._seen = 0
        alone(self.inner.expect, batch_size)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Check the private batch and the defense's batch."""
        check_batch(batch, "the private batch")
        if not overrides(self.inner, "on_batch"):
            return batch
        before = [tensor.clone() for tensor in batch]
        result = alone(self.inner.on_batch, batch, rng)
        if not isinstance(result, Batch):
            raise ValueError(
                f"{self._name('on_batch')} must return a Batch, got {type(result).__name__}"
            )
        self._check_untouched("on_batch", before, batch)
        if result.inputs.dtype != batch.inputs.dtype:
            raise ValueError(
                f"{self._name('on_batch')} must return inputs of {_dtype(batch.inputs)}, got "
                f"{_dtype(result.inputs)}"
            )
        check_batch(result, f"the batch returned by {self._name('on_batch')}")
        self._record(batch, result)
        return result

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Check that the gradient has the model's names and shapes."""
        arguments = [*batch, *model.parameters()]
        before = [tensor.clone() for tensor in arguments]
        result = alone(self.inner.gradient, model, loss, batch, rng)
        self._check_untouched("gradient", before, arguments)
        self._check_update("gradient", result, trainable(model))
        return result

    @property
    def summing(self) -> Summing | None:
        """Return how the gradient follows from sums; None if the defense must compute it."""
        return summing_of(self.inner)

    def needs_model(self, hook: str) -> bool:
        """Return whether a hook may use the model of a local step, perhaps one that it kept."""
        if hook == "from_sum":
            return self.summing is not None and self.summing.clipped is not None
        return overrides(self.inner, hook) or hook == "gradient"

    def from_sum(
        self, total: Update, model: nn.Module, loss: Loss, batch: Batch, rng: Generator
    ) -> Update:
        """Return the gradient for a sum over examples, which must be finite."""
        rule = self.summing
        assert rule is not None
        result = rule.finished(total, model, loss, batch, rng)
        self._check_update("gradient", result, total)
        return result

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Check that the upload has the update's names and shapes."""
        if not overrides(self.inner, "on_update"):
            return update
        given = dict(update)
        before = [tensor.clone() for tensor in given.values()]
        result = alone(self.inner.on_update, update, rng)
        if list(update) != list(given):
            raise ValueError(f"{self._name('on_update')} changed the names of its argument")
        self._check_untouched("on_update", before, given.values())
        self._check_update("on_update", result, given)
        return result

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Pass the models to the defense."""
        if overrides(self.inner, "on_cohort"):
            alone(self.inner.on_cohort, models)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Check that the server sees one update per client, or one for all of them."""
        if not overrides(self.inner, "on_round"):
            return list(updates)
        before = [value.clone() for update in updates for value in update.values()]
        result = alone(self.inner.on_round, updates, rng)
        after = [value for update in updates for value in update.values()]
        self._check_untouched("on_round", before, after)
        if not isinstance(result, list | tuple):
            raise ValueError(
                f"{self._name('on_round')} must return a list of updates, got {_described(result)}"
            )
        if len(result) not in (1, len(updates)):
            raise ValueError(
                f"{self._name('on_round')} must return 1 or {len(updates)} updates, "
                f"got {len(result)}"
            )
        for update in result:
            self._check_update("on_round", update, updates[0])
        return result

    def _record(self, batch: Batch, result: Batch) -> None:
        if self.trained_on is None or result.inputs.shape != batch.inputs.shape:
            return
        rows = self._rows
        if rows is None:  # in order, one epoch after another
            rows = torch.arange(self._seen, self._seen + len(batch.inputs))
            rows = rows % len(self.trained_on.inputs)
            self._seen += len(batch.inputs)
        inputs = self.trained_on.inputs.index_copy(0, rows, result.inputs)
        self.trained_on = Batch(inputs, self.trained_on.targets)

    def _name(self, hook: str) -> str:
        return f"{type(self.inner).__name__}.{hook}"

    def _check_untouched(
        self, hook: str, before: Iterable[Tensor], after: Iterable[Tensor]
    ) -> None:
        if not all(map(_equal, before, after)):
            raise ValueError(
                f"{self._name(hook)} modified its argument: hooks must return new tensors "
                "(x = x + 1, not x += 1)"
            )

    def _check_update(self, hook: str, update: Update, like: Mapping[str, Tensor]) -> None:
        source = self._name(hook)
        if not isinstance(update, dict):
            raise ValueError(f"{source} must return a dict of tensors, got {type(update).__name__}")
        if set(update) != set(like):
            raise ValueError(
                f"{source} must return the parameters {sorted(like)}, got {sorted(update)}"
            )
        for name, value in update.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{source} must return tensors, got {type(value).__name__} for {name!r}"
                )
            if value.shape != like[name].shape:
                raise ValueError(
                    f"{source} must keep the shape {tuple(like[name].shape)} of {name!r}, "
                    f"got {tuple(value.shape)}"
                )
            if value.dtype != like[name].dtype:
                raise ValueError(
                    f"{source} must return {_dtype(like[name])}, got {_dtype(value)} for {name!r}"
                )
            if not _is_finite(value):
                raise ValueError(f"{source} returned NaN or infinite values for {name!r}")


def check_batch(batch: Batch, what: str) -> None:
    """Raise if inputs and targets differ in number, or if values are not finite."""
    if len(batch.inputs) != len(batch.targets):
        raise ValueError(f"{what} has {len(batch.inputs)} inputs but {len(batch.targets)} targets")
    if not _is_finite(batch.inputs):
        raise ValueError(f"{what} contains NaN or infinite values")


def _equal(old: Tensor, new: Tensor) -> bool:
    """Return whether nothing has changed. NaN counts as equal to NaN."""
    if torch.equal(old, new):
        return True
    return old.shape == new.shape and bool(((old == new) | (old.isnan() & new.isnan())).all())


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(value)} of shape {tuple(value.shape)}"
    return type(value).__name__


def _is_finite(value: Tensor) -> bool:
    """Return whether all values are finite. Testing their sum is much faster."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


@cache
def check_class(cls: type, base: type) -> None:
    """Raise if the fields or hook names of a class show a mistake of its author.

    Args:
        cls: A subclass.
        base: The class whose hooks it may override: `Defense` or `Adversary`.
    """
    hooks = {name: value for name, value in inspect.getmembers(base) if not name.startswith("_")}
    known = {one.name for one in fields(cls)}
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        if owner.__module__.partition(".")[0] == __name__.partition(".")[0]:
            continue  # a class of ours
        _check_dataclass(owner, base)
        for name, value in vars(owner).items():
            if name in hooks:
                _check_signature(owner, name, value, hooks[name])
            elif not name.startswith("_") and name not in known and _is_hook(value):
                close = get_close_matches(name, hooks, n=1, cutoff=0.8)
                if close and close[0] not in vars(owner):
                    raise ValueError(
                        f"{owner.__name__}.{name} is never called: did you mean {close[0]}? "
                        "If it is your own method, let its name begin with an underscore"
                    )


def _is_hook(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _check_dataclass(cls: type, base: type) -> None:
    """Raise if annotations are not fields because the decorator is missing."""
    known = {one.name for one in fields(cls)} if is_dataclass(cls) else set()
    for name, annotation in inspect.get_annotations(cls).items():
        if name not in known and "ClassVar" not in str(annotation):
            frozen = "(frozen=True)" if base is not Defense else ""
            raise ValueError(
                f"{cls.__name__}.{name} is not an option because {cls.__name__} is not a "
                "dataclass. Write:\n"
                f"    @dataclass{frozen}\n    class {cls.__name__}({cls.__bases__[0].__name__}):"
            )


def _check_signature(cls: type, name: str, value: object, hook: object) -> None:
    """Raise if a hook's signature does not match the harness's call."""
    if not inspect.isfunction(hook):
        if inspect.isfunction(value):
            raise ValueError(
                f"{cls.__name__}.{name} is used as an attribute: put @property above it"
            )
        return
    if not inspect.isfunction(value):
        raise ValueError(f"{cls.__name__}.{name} must be a method, got {type(value).__name__}")
    expected, found = inspect.signature(hook), inspect.signature(value)
    required = [one for one in expected.parameters.values() if one.default is one.empty]
    optional = [one.name for one in expected.parameters.values() if one.default is not one.empty]
    try:
        found.bind(*required, **dict.fromkeys(optional))
    except TypeError as error:
        raise ValueError(
            f"{cls.__name__}.{name} must take ({', '.join(expected.parameters)}), got "
            f"({', '.join(found.parameters)})"
        ) from error


def check_guarantee(name: str, claim: object) -> None:
    """Raise if a claim cannot be true.

    Args:
        name: The name of the defense.
        claim: The value that `guarantee` returned.
    """
    if claim is None:
        return
    source = f"{name}.guarantee"
    if not isinstance(claim, Guarantee):
        raise ValueError(f"{source} must return a Guarantee or None, got {_described(claim)}")
    allowed: dict[str, tuple[Callable[[object], bool], str]] = {
        "epsilon": (lambda value: isinstance(value, Real) and float(value) >= 0, "a number >= 0"),
        "delta": (lambda value: isinstance(value, Real) and 0 < float(value) < 1, "in (0, 1)"),
        "unit": (lambda value: value in ("record", "client"), "'record' or 'client'"),
        "adjacency": (
            lambda value: value in ADJACENCIES,
            " or ".join(f"'{name}'" for name in ADJACENCIES),
        ),
        "accountant": (lambda value: isinstance(value, str), "a text"),
    }
    for part, (is_allowed, words) in allowed.items():
        value = getattr(claim, part)
        if not is_allowed(value):
            raise ValueError(f"{part} of {source} must be {words}, got {value!r}")
