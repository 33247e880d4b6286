"""Users' code sees none of our frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from federated import batch, mlp, rng
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Defense, Loss, TopK, Update, batch_gradient
from leakfrontier.evaluate.users.alone import Alone, alone, fresh

SETTING: ContextVar[str] = ContextVar("setting", default="unset")


def frames() -> list[str]:
    found, frame = [], sys._getframe().f_back
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_a_function_sees_only_itself() -> None:
    assert len(frames()) > 3
    assert alone(frames) == []


def test_torch_and_context_stay_in_force() -> None:
    token = SETTING.set("set")
    try:
        assert alone(SETTING.get) == "set"
    finally:
        SETTING.reset(token)
    with torch.no_grad():
        assert not alone(torch.is_grad_enabled)
    points = torch.randn(4, 3)
    slopes = torch.func.vmap(torch.func.grad(lambda x: alone(lambda: (x * x).sum())))(points)
    torch.testing.assert_close(slopes, 2 * points)


def test_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 / 0)


@dataclass
class Watching(Defense):
    seen: list[list[str]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.seen.append(frames())

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.seen.append(frames())
        yield from super().batches(examples, batch_size, epochs, rng)
        self.seen.append(frames())

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        self.seen.append(frames())
        return model

    def expect(self, batch_size: int) -> None:
        self.seen.append(frames())

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        self.seen.append(frames())
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self.seen.append(frames())
        return batch_gradient(model, loss, batch)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.seen.append(frames())
        return update

    def on_cohort(self, models: Any) -> None:  # noqa: ANN401 - a sequence
        self.seen.append(frames())

    def on_round(self, updates: Any, rng: Generator) -> list[Update]:  # noqa: ANN401
        self.seen.append(frames())
        return list(updates)

    def unguarded(self) -> Defense:
        self.seen.append(frames())
        return self

    def replay(self, observed: Any) -> Defense:  # noqa: ANN401 - an update
        self.seen.append(frames())
        return self

    def log_likelihood(self, observed: Any, expected: Any, batch_size: Any = None) -> Tensor | None:  # noqa: ANN401
        self.seen.append(frames())
        return None


def test_no_hook_sees_our_frames() -> None:
    inner = Watching()
    inner.seen.clear()
    model, examples, loss = mlp(), batch(2), nn.functional.cross_entropy
    defense = Alone(inner)
    defense.on_receive(model, model)
    rows = [*defense.batches(4, 2, 1, rng())]
    assert sorted(torch.cat(rows).tolist()) == [0, 1, 2, 3]
    defense.expect(2)
    update = defense.gradient(model, loss, defense.on_batch(examples, rng()), rng())
    defense.on_update(update, rng())
    defense.on_cohort([model])
    defense.on_round([update], rng())
    defense.unguarded().replay(update).log_likelihood(update, update)
    fresh(inner)
    assert len(inner.seen) == 13
    others = {
        "drawn",
        "<listcomp>",
        "__init__",
        "replace",
        "_replace",
    }  # of dataclasses, and a list
    hooks = {name for name in vars(Watching) if not name.startswith("__")} | {"__post_init__"}
    assert {name for seen in inner.seen for name in seen} <= others | hooks


def test_a_fresh_copy_has_no_state() -> None:
    defense = TopK(0.1)
    defense.on_update({"a": torch.randn(20)}, rng())
    assert defense._dropped is not None
    assert fresh(defense)._dropped is None  # type: ignore[attr-defined]
