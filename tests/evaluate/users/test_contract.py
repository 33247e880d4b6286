from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from federated import batch, make_client, mlp, observed, rng
from torch import Generator, nn

from leakfrontier.defenses import Batch, Defense, Loss, Refused, TopK, Update
from leakfrontier.evaluate.client.client import release
from leakfrontier.evaluate.users.contract import Checked


@dataclass
class Receiving(Defense):
    """Does something with the model that it is sent."""

    how: str

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        if self.how == "refuse":
            raise Refused("not that one")
        if self.how == "modify":
            with torch.no_grad():
                next(model.parameters()).add_(1)
        if self.how == "copy":
            return copy.deepcopy(agreed)
        return None if self.how == "nothing" else model  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("modify", "Receiving.on_receive modified its argument"),
        ("nothing", "Receiving.on_receive must return a model, got NoneType"),
    ],
)
def test_what_a_client_may_not_do_with_a_model_is_named(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checked(Receiving(how)).on_receive(mlp(), mlp())


def test_a_refusal_passes() -> None:
    with pytest.raises(Refused, match="not that one"):
        Checked(Receiving("refuse")).on_receive(mlp(), mlp())


def test_a_client_may_train_on_another_model() -> None:
    sent, agreed = mlp(), mlp()
    with torch.no_grad():
        next(sent.parameters()).zero_()
    kept = Checked(Receiving("keep")).on_receive(sent, agreed)
    assert kept is not sent  # a copy, as what the client does to it is its own affair
    assert all(map(torch.equal, kept.state_dict().values(), sent.state_dict().values()))
    received = Checked(Receiving("copy")).on_receive(sent, agreed)
    assert received is not agreed
    torch.testing.assert_close(received.state_dict(), agreed.state_dict())


def test_buffers_are_looked_at_too() -> None:
    @dataclass
    class Counting(Defense):
        def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
            model.get_buffer("0.running_mean").add_(1)
            return model

    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 10))
    with pytest.raises(ValueError, match=r"Counting.on_receive modified its argument"):
        Checked(Counting()).on_receive(model, model)


@dataclass
class Broken(Defense):
    """Breaks the contract of a hook in a chosen way."""

    how: str

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        if self.how == "no batch":
            return batch.inputs  # type: ignore[return-value]
        if self.how == "NaN batch":
            return Batch(batch.inputs * torch.nan, batch.targets)
        if self.how == "modified batch":
            batch.inputs.add_(1)
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        if self.how == "modified model":
            with torch.no_grad():
                next(model.parameters()).add_(1)
        return super().gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        name = next(iter(update))
        if self.how == "wrong names":
            return {f"module.{key}": value for key, value in update.items()}
        if self.how == "missing name":
            return {key: value for key, value in update.items() if key != name}
        if self.how == "wrong shape":
            return {**update, name: update[name].flatten()}
        if self.how == "NaN":
            return {**update, name: update[name] / 0}
        if self.how == "no dict":
            return list(update.values())  # type: ignore[return-value]
        if self.how == "no tensor":
            return {**update, name: update[name].tolist()}
        if self.how == "modified":
            update[name].mul_(2)
        if self.how == "renamed":
            update["extra"] = update.pop(name)
        return update

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        if self.how == "modified round":
            next(iter(updates[0].values())).mul_(2)
        return [] if self.how == "nothing" else list(updates)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("NaN batch", "the batch returned by Broken.on_batch contains NaN"),
        ("modified batch", "Broken.on_batch modified its argument"),
        ("modified model", "Broken.gradient modified its argument"),
        ("wrong names", r"Broken.on_update must return the parameters \['1.bias'"),
        ("missing name", "Broken.on_update must return the parameters"),
        ("wrong shape", r"Broken.on_update must keep the shape \(32, 192\) of '1.weight'"),
        ("NaN", "Broken.on_update returned NaN or infinite values for '1.weight'"),
        ("no dict", "Broken.on_update must return a dict of tensors, got list"),
        ("modified", "Broken.on_update modified its argument"),
        ("renamed", "Broken.on_update changed the names of its argument"),
        ("no batch", "Broken.on_batch must return a Batch, got Tensor"),
        ("no tensor", "Broken.on_update must return tensors, got list for '1.weight'"),
        ("modified round", "Broken.on_round modified its argument"),
        ("nothing", "Broken.on_round must return 1 or 1 updates, got 0"),
    ],
)
def test_a_defense_that_breaks_its_contract_is_named(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        observed(mlp(), batch(2), Broken(how))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_private_batch_with_nan_is_refused(value: float) -> None:
    share = batch(2)
    share.inputs[1, 0, 0, 0] = value
    with pytest.raises(ValueError, match="the private batch contains NaN or infinite"):
        observed(mlp(), share)


def test_checks_change_nothing() -> None:
    model, share = mlp(), batch(3)
    plain = release([make_client(model, TopK(0.1))], [share], rng())
    checked = release([make_client(model, Checked(TopK(0.1)))], [share], rng())
    assert all(torch.equal(plain[0][name], checked[0][name]) for name in plain[0])
