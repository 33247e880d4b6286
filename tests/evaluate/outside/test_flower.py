"""Our defenses in a Flower app, and what its server captures."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD
from leakfrontier.defenses import (
    DPSGD,
    PRECODE,
    Batch,
    Chain,
    ClientDP,
    Defense,
    Refused,
    SecureAggregation,
    TopK,
)
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.outside.capture_run import attack_captures
from leakfrontier.evaluate.outside.captured import find_captures, load_capture
from leakfrontier.evaluate.users.methods import Method

flwr_app = pytest.importorskip("flwr.app", reason="Flower is not installed: the extra `flower`")
flower = pytest.importorskip("leakfrontier.evaluate.outside.flower")

Message, RecordDict, ArrayRecord = flwr_app.Message, flwr_app.RecordDict, flwr_app.ArrayRecord
EXAMPLE = Path(__file__).parents[3] / "examples/flower_app.py"
TRAINING = FedAvg(epochs=2, batch_size=2, lr=0.1)
SEED = 3


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture(autouse=True)
def within_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process of Flower's, without which it makes no messages."""
    with suppress(ImportError):  # of older versions, every process is
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_run_id", "_node_id", "_task_id"):
            monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def batch() -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.randn(4, 1, 4, 4, generator=rng), torch.tensor([0, 1, 2, 0]))


@pytest.fixture
def context() -> Any:  # noqa: ANN401 - Flower is not typed here
    return flwr_app.Context(1, 7, {}, RecordDict(), {})


def sent(kind: str = "train") -> Any:  # noqa: ANN401
    content = RecordDict({"arrays": ArrayRecord(model().state_dict())})
    return Message(content, dst_node_id=7, message_type=kind)


def replied(message: Any, trained: nn.Module) -> Any:  # noqa: ANN401
    metrics = flwr_app.MetricRecord({"num-examples": 4})
    content = RecordDict({"arrays": ArrayRecord(trained.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def own_loop(batch: Batch) -> Callable[..., Any]:
    """Return an app with a training loop of its own."""

    def train(message: Any, _: object) -> Any:  # noqa: ANN401
        trained = model()
        loss = cross_entropy(trained(batch.inputs), batch.targets)
        slopes = torch.autograd.grad(loss, [*trained.parameters()])
        with torch.no_grad():
            for value, slope in zip(trained.parameters(), slopes, strict=True):
                value -= 0.1 * slope
        return replied(message, trained)

    return train


def by_us(batch: Batch) -> Callable[..., Any]:
    """Return an app that trains by `train_locally`."""

    def train(message: Any, _: object) -> Any:  # noqa: ANN401
        trained = model()
        flower.train_locally(trained, batch, TRAINING)
        return replied(message, trained)

    return train


def change(reply: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    before, after = model().state_dict(), reply.content["arrays"].to_torch_state_dict()
    return {name: after[name] - before[name] for name in before}


def test_a_defense_of_uploads_defends_any_app(batch: Batch, context: Any) -> None:  # noqa: ANN401
    defended = flower.DefenseMod(TopK(0.1))(sent(), context, own_loop(batch))
    plain = own_loop(batch)(sent(), context)
    kept = {name: value != 0 for name, value in change(defended).items()}
    total = sum(mask.numel() for mask in kept.values())
    assert sum(int(mask.sum()) for mask in kept.values()) == round(0.1 * total)
    for name, mask in kept.items():
        torch.testing.assert_close(change(defended)[name][mask], change(plain)[name][mask])


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64])
def test_what_no_defense_acts_on_must_come_back_as_it_was(
    context: Any,  # noqa: ANN401
    kind: torch.dtype,
) -> None:
    before = {"weight": torch.zeros(3), "other": torch.zeros(2, dtype=kind)}

    def app(other: torch.Tensor) -> Callable[..., Any]:
        after = ArrayRecord({"weight": torch.ones(3), "other": other})
        return lambda message, _: Message(RecordDict({"arrays": after}), reply_to=message)

    def message() -> Any:  # noqa: ANN401
        content = RecordDict({"arrays": ArrayRecord(before)})
        return Message(content, dst_node_id=7, message_type="train")

    mod = flower.DefenseMod(ClientDP(1.0, 1.0))
    with pytest.raises(ValueError, match=r"changed 'other'.*undefended.*as it was sent"):
        mod(message(), context, app(torch.ones(2, dtype=kind)))
    reply = mod(message(), context, app(before["other"]))
    assert torch.equal(reply.content["arrays"].to_torch_state_dict()["other"], before["other"])


def test_what_a_defense_remembers_stays_with_its_client(
    batch: Batch,
    context: Any,  # noqa: ANN401
) -> None:
    mod = flower.DefenseMod(TopK(0.1, error_feedback=True))
    first, second = (change(mod(sent(), context, own_loop(batch))) for _ in range(2))
    fresh = change(mod(sent(), flwr_app.Context(1, 8, {}, RecordDict(), {}), own_loop(batch)))
    assert all(torch.equal(first[name], fresh[name]) for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert mod.defense._dropped is None


@pytest.mark.parametrize(
    "defense", [DPSGD(0.5, 1.0), Chain((DPSGD(0.5, 1.0), TopK(0.2)))], ids=["DPSGD", "chain"]
)
def test_a_defense_of_training_is_the_harness_s_own_client(
    batch: Batch,
    context: Any,  # noqa: ANN401
    defense: Defense,
) -> None:
    reply = flower.DefenseMod(defense, seed=SEED)(sent(), context, by_us(batch))
    client = Client(model(), cross_entropy, defense, TRAINING, flower.InputSpace((1, 4, 4), 3))
    expected = client.upload(batch, generator("flower", SEED, 7, 0))
    for name, value in change(reply).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("defense", "app"), [(DPSGD(0.5), by_us), (ClientDP(0.5), own_loop)])
def test_noise_comes_from_the_system_unless_it_is_seeded(
    batch: Batch,
    context: Any,  # noqa: ANN401
    defense: Defense,
    app: Callable[[Batch], Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mod = flower.DefenseMod(defense)
    drawn: list[int] = []
    stream = "leakfrontier.evaluate.foundations.system_draws._Stream"
    normal = pytest.importorskip("leakfrontier.evaluate.foundations.system_draws")._Stream.normal

    def counted(self: Any, shape: Any) -> torch.Tensor:  # noqa: ANN401
        drawn.append(math.prod(shape))
        return normal(self, shape)

    monkeypatch.setattr(f"{stream}.normal", counted)
    mod(sent(), context, app(batch))
    entries = sum(value.numel() for value in model().parameters())
    assert sum(drawn) in (entries, 4 * entries)  # once, or at each of four local steps
    flower.DefenseMod(defense, seed=SEED)(sent(), context, app(batch))
    assert sum(drawn) in (entries, 4 * entries)


def test_its_guarantee_grows_with_the_rounds(batch: Batch, context: Any) -> None:  # noqa: ANN401
    mod = flower.DefenseMod(DPSGD(1.0), delta=1e-4)
    replies = [mod(sent(), context, by_us(batch)) for _ in range(2)]
    found = [dict(reply.content["metrics"]) for reply in replies]
    plans = [flower.Plan(rounds * 4, 0.5, 1e-4) for rounds in (1, 2)]
    assert [one["leakfrontier.epsilon"] for one in found] == [
        DPSGD(1.0).guarantee(plan).epsilon for plan in plans
    ]
    assert found[0]["leakfrontier.delta"] == 1e-4
    assert found[0]["num-examples"] == 4
    assert replies[0].content[flower.GUARANTEE]["unit"] == "record"


def test_a_client_s_guarantee_counts_rounds(batch: Batch, context: Any) -> None:  # noqa: ANN401
    mod = flower.DefenseMod(ClientDP(1.0))
    for call in (own_loop, by_us):
        fresh = flwr_app.Context(1, 7, {}, RecordDict(), {})
        metrics = mod(sent(), fresh, call(batch)).content["metrics"]
        expected = ClientDP(1.0).guarantee(flower.Plan(1, 1.0, 1e-5)).epsilon
        assert metrics["leakfrontier.epsilon"] == expected
        assert expected < math.inf


def test_an_app_that_does_not_train_by_us_is_refused(
    batch: Batch,
    context: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(ValueError, match=r"did not train with .*train_locally.*undefended"):
        flower.DefenseMod(DPSGD(1.0))(sent(), context, own_loop(batch))


def test_secure_aggregation_is_refused_and_flower_s_own_named() -> None:
    for defense in (SecureAggregation(2), Chain((TopK(0.1), SecureAggregation(2)))):
        with pytest.raises(ValueError, match=r"protocol between clients.*secaggplus_mod"):
            flower.DefenseMod(defense)


def test_an_architecture_has_to_be_agreed_on(batch: Batch, context: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=r"build the model with .*agreed"):
        flower.DefenseMod(PRECODE())(sent(), context, by_us(batch))


def test_a_refusal_is_a_reply(context: Any) -> None:  # noqa: ANN401
    def refuse(*_: object) -> None:
        raise Refused("its weights are traps")

    reply = flower.DefenseMod(TopK(0.1))(sent(), context, refuse)
    assert reply.error.reason == "refused by the client: its weights are traps"


def test_evaluation_is_left_alone(context: Any) -> None:  # noqa: ANN401
    message = sent("evaluate")
    assert flower.DefenseMod(TopK(0.1))(message, context, lambda m, _: m) is message


def test_gradients_are_no_weights(batch: Batch) -> None:
    with pytest.raises(ValueError, match="return weights: use FedAvg"):
        flower.train_locally(model(), batch, FedSGD())


def test_a_flower_app_leaks_without_a_defense_and_not_with_one(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, EXAMPLE, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "DPSGD: {'client': 0.5, " in done.stdout
    assert "leakfrontier.epsilon" in done.stdout
    rates = {}
    for name in ("none", "DPSGD"):
        folder = tmp_path / name
        found = [load_capture(path) for path in find_captures(folder)]
        assert [one.about.round for one in found] == [0, 0, 1, 1, 2, 2]
        results, scored = attack_captures(
            folder,
            tmp_path / f"{name} attacked",
            adversaries=[
                Method(name="PriorGuess"),
                Method(name="LinearLeakage"),
                Method(name="InvertingGradients", options={"iterations": 50}),
            ],
            workers=1,
        )
        assert scored
        assert set(results.cells["status"]) == {"ok"}
        attacks = results.attacks[~results.attacks["baseline"]]
        own = attacks[attacks["defense"].str.startswith(name)]
        rates[name] = own.groupby("adversary_name")["identified"].mean()
        assert len(own) >= 2 * 6
    assert rates["none"]["LinearLeakage"] == 1.0
    assert rates["DPSGD"].max() == 0.0
