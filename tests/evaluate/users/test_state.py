"""What a defense remembers is saved without code, and restored with nothing else."""

from __future__ import annotations

import os
import pickle
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from federated import batch, mlp, rng
from torch import Generator, nn

from leakfrontier.defenses import DPSGD, Chain, Defense, DualPruning, Noise, RandomK, SignSGD, TopK
from leakfrontier.evaluate.users.state import restored, saved


@pytest.mark.parametrize(
    "defense",
    [
        TopK(0.1),
        RandomK(0.1, error_feedback=True),
        SignSGD(error_feedback=True),
        DualPruning(0.1, 0.5),
        Chain((Noise(0.1), TopK(0.1))),
    ],
    ids=repr,
)
def test_the_next_upload_is_the_same(defense: Defense) -> None:
    first, second = ({"a": torch.randn(50, generator=rng(seed))} for seed in (1, 2))
    defense.on_update(first, rng())
    content = saved(defense)
    again = restored(content, type(defense)(**options(defense)))
    expected = defense.on_update(second, rng(3))
    torch.testing.assert_close(again.on_update(second, rng(3)), expected, rtol=0, atol=0)


def options(defense: Defense) -> dict[str, Any]:
    return {n: getattr(defense, n) for n, f in defense.__dataclass_fields__.items() if f.init}


def test_a_client_of_opacus_is_made_again() -> None:
    defense, model, loss = DPSGD(0.5), mlp(), nn.functional.cross_entropy
    defense.gradient(model, loss, batch(2), rng())
    again = restored(saved(defense), DPSGD(0.5))
    torch.testing.assert_close(
        again.gradient(model, loss, batch(2), rng(1)),
        defense.gradient(model, loss, batch(2), rng(1)),
    )


@dataclass
class Remembering(Defense):
    kept: dict[str, Any] = field(default_factory=dict, init=False)


def test_tensors_numbers_and_containers_are_kept() -> None:
    defense = Remembering()
    shared = torch.ones(2)
    defense.kept = {
        "tensors": [shared, shared],
        "parameter": nn.Parameter(torch.zeros(3)),
        "array": np.arange(4),
        "generator": rng(5),
        "queue": deque([1, 2], maxlen=3),
        "dtype": torch.float16,
        "text": {"a": (1, 2.5, None, True)},
        "layer": nn.Linear(2, 2),
    }
    found = restored(saved(defense), Remembering()).kept  # type: ignore[attr-defined]
    assert found["tensors"][0] is found["tensors"][1]
    assert found["parameter"].requires_grad
    assert found["array"].tolist() == [0, 1, 2, 3]
    expected = torch.rand(2, generator=rng(5))
    assert torch.equal(torch.rand(2, generator=found["generator"]), expected)
    assert found["queue"] == deque([1, 2], maxlen=3)
    assert (found["dtype"], found["text"]) == (torch.float16, defense.kept["text"])
    assert torch.equal(found["layer"].weight, defense.kept["layer"].weight)


@dataclass
class Holding(Defense):
    held: Any = None


@pytest.mark.parametrize("held", [open, lambda: 1, (x for x in [1]), np.random.default_rng(0)])
def test_what_cannot_be_saved_or_restored_is_refused(held: object) -> None:
    with pytest.raises(ValueError, match="Keep tensors, numbers, text"):
        restored(saved(Holding(held)), Holding())


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


def test_no_code_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = pickle.dumps(Evil())
    for content in (struct.pack("<Q", len(stream)) + stream, b"", b"abc", struct.pack("<Q", 2**63)):
        with pytest.raises(ValueError, match="cannot be restored"):
            restored(content, Defense())


def test_another_defense_is_refused() -> None:
    with pytest.raises(ValueError, match="it is a TopK"):
        restored(saved(TopK(0.1)), Defense())


def test_a_seed_of_the_state_is_not_shared() -> None:
    defense = Remembering()
    defense.kept = {"rng": Generator().manual_seed(1)}
    again = restored(saved(defense), Remembering())
    torch.rand(3, generator=defense.kept["rng"])
    fresh = Generator().manual_seed(1)
    assert torch.equal(torch.rand(2, generator=again.kept["rng"]), torch.rand(2, generator=fresh))  # type: ignore[attr-defined]
