"""Vision transformers are attacked like other models, whatever module computes the attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vision_transformer import VISION_TRANSFORMER

from leakfrontier.adversaries import PANEL, Threat
from leakfrontier.evaluate.client.math_attention import math_attention
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial, run_trial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

UserFile = Callable[..., Path]

PASSIVE = [name for name, one in PANEL.members.items() if one.threat is Threat.PASSIVE]
FEW = {"iterations": 2, "examples": 20}
DPSGD = Method(name="DPSGD", options={"noise_multiplier": 0.5})


def scenario(file: Path, **options: object) -> Scenario:
    model = Method(name=f"{file}:build", options=dict(options))
    training = Training(rounds=1, clients=4, clients_per_round=2)
    return Scenario(dataset="digits", model=model, candidates=5, training=training)


def attack(where: Scenario, name: str, defense: Method, **options: object) -> AttackTrial:
    member = PANEL.members[name]
    known = {field.name for field in fields(member)}
    shorter = {key: value for key, value in FEW.items() if key in known}
    return AttackTrial(
        scenario=where,
        defense=defense,
        adversary=Method(name=name, options={**vars(member), **shorter}),
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=(0, 1),
        pictures=0,
    )


@pytest.mark.parametrize("defense", [Method(name="none"), DPSGD], ids=lambda one: one.name)
@pytest.mark.parametrize("name", PASSIVE)
def test_no_passive_attack_fails(
    user_file: UserFile, tmp_path: Path, name: str, defense: Method
) -> None:
    where = scenario(user_file(VISION_TRANSFORMER))
    assert run_trial((attack(where, name, defense), tmp_path)).attacks


@pytest.mark.parametrize("kind", ["attention", "function", "torchvision"])
@pytest.mark.parametrize("defense", [Method(name="none"), DPSGD], ids=lambda one: one.name)
def test_no_kind_of_attention_fails(
    user_file: UserFile, tmp_path: Path, kind: str, defense: Method
) -> None:
    where = scenario(user_file(VISION_TRANSFORMER), kind=kind)
    outcome = run_trial((attack(where, "InvertingGradients", defense), tmp_path))
    assert [row.outcome for row in outcome.attacks] == ["scored"] * 2
    assert not outcome.note  # no batching rule is missing
    assert run_trial((TrainTrial(where, defense, 0), tmp_path)).utility


def second_derivative() -> None:
    heads = torch.randn(1, 2, 3, 4, requires_grad=True)
    joined = scaled_dot_product_attention(heads, heads, heads).square().sum()
    (slope,) = torch.autograd.grad(joined, heads, create_graph=True)
    slope.square().sum().backward()


def test_what_was_set_before_returns() -> None:
    for _ in range(2):
        with math_attention(), math_attention():
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
            second_derivative()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.mha.get_fastpath_enabled()


def test_a_thread_that_leaves_does_not_switch_another_back() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with math_attention():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with math_attention():
        thread.start()
        entered.wait(10)
    assert not torch.backends.cuda.flash_sdp_enabled()
    second_derivative()
    left.set()
    thread.join()
    assert torch.backends.cuda.flash_sdp_enabled()
