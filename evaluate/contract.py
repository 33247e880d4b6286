"""What every defense must keep to: hooks return well-formed values and leave arguments alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Defense, Loss, Update


@dataclass
class Checked(Defense):
    """A defense whose hooks are checked at every call, so that a mistake is named where it is.

    Attributes:
        inner: The defense that does the work.
        trained_on: If given, the client's examples; each is replaced by what a local step last
            saw of it.
    """

    inner: Defense
    trained_on: Batch | None = field(default=None, repr=False, compare=False)
    _rows: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Check that the client trains on a model, and left the one that it was sent alone."""
        before = [value.clone() for value in model.state_dict().values()]
        result = self.inner.on_receive(model, agreed)
        self._check_untouched("on_receive", before, model.state_dict().values())
        if not isinstance(result, nn.Module):
            raise ValueError(
                f"{self._name('on_receive')} must return a model, got {type(result).__name__}"
            )
        return result

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Draw as the defense does, remembering which examples are next."""
        for rows in self.inner.batches(examples, batch_size, epochs, rng):
            self._rows = rows
            yield rows

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Check the private batch and what the defense makes of it."""
        check_batch(batch, "the private batch")
        before = [tensor.clone() for tensor in batch]
        result = self.inner.on_batch(batch, rng)
        if not isinstance(result, Batch):
            raise ValueError(
                f"{self._name('on_batch')} must return a Batch, got {type(result).__name__}"
            )
        self._check_untouched("on_batch", before, batch)
        check_batch(result, f"the batch returned by {self._name('on_batch')}")
        self._record(batch, result)
        return result

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Check that the gradient has the model's names and shapes."""
        arguments = [*batch, *model.parameters()]
        before = [tensor.clone() for tensor in arguments]
        result = self.inner.gradient(model, loss, batch, rng)
        self._check_untouched("gradient", before, arguments)
        self._check_update("gradient", result, dict(model.named_parameters()))
        return result

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Check that the upload has the update's names and shapes."""
        given = dict(update)
        before = [tensor.clone() for tensor in given.values()]
        result = self.inner.on_update(update, rng)
        if list(update) != list(given):
            raise ValueError(f"{self._name('on_update')} changed the names of its argument")
        self._check_untouched("on_update", before, given.values())
        self._check_update("on_update", result, given)
        return result

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Tell the defense."""
        self.inner.on_cohort(models)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Check that the server sees one update per client, or one for all of them."""
        before = [value.clone() for update in updates for value in update.values()]
        result = self.inner.on_round(updates, rng)
        after = [value for update in updates for value in update.values()]
        self._check_untouched("on_round", before, after)
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
        rows = torch.arange(len(batch.inputs)) if self._rows is None else self._rows
        inputs = self.trained_on.inputs.index_copy(0, rows, result.inputs)
        self.trained_on = Batch(inputs, self.trained_on.targets)

    def _name(self, hook: str) -> str:
        return f"{type(self.inner).__name__}.{hook}"

    def _check_untouched(
        self, hook: str, before: Iterable[Tensor], after: Iterable[Tensor]
    ) -> None:
        if not all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
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
            if not _is_finite(value):
                raise ValueError(f"{source} returned NaN or infinite values for {name!r}")


def check_batch(batch: Batch, what: str) -> None:
    """Raise if a batch is not paired with targets, or has values that are not finite."""
    if len(batch.inputs) != len(batch.targets):
        raise ValueError(f"{what} has {len(batch.inputs)} inputs but {len(batch.targets)} targets")
    if not _is_finite(batch.inputs):
        raise ValueError(f"{what} contains NaN or infinite values")


def _is_finite(value: Tensor) -> bool:
    """Return whether all values are finite; their sum tells at a fraction of the cost."""
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())
