"""Whatever is done to a copy, the original stays, and no other hook sees it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import cast
from weakref import ref

import pytest
import torch
from torch import nn

from leakfrontier.evaluate.users.copies import Copies, copied, in_precision_of


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_copy_is_handed_out_again_until_it_or_its_original_is_altered() -> None:
    copies, model = Copies(), network()
    first = copies.of(model)
    assert first is not model
    assert copies.of(model) is first
    assert copies.of(first) is first  # it was given away already
    assert copies.is_copy(first, model)
    next(first.parameters()).data.mul_(2)  # which leaves version counters alone
    second = copies.of(model)
    assert second is not first
    assert not copies.is_copy(first, model)
    assert torch.equal(second[0].weight, model[0].weight)
    with torch.no_grad():
        model[2].bias.add_(1)  # a step of the server
    third = copies.of(model)
    assert third is not second
    assert torch.equal(third[2].bias, model[2].bias)


def test_frozen_parameters_and_buffers_count() -> None:
    copies, model = Copies(), nn.BatchNorm1d(3)
    first = cast(nn.BatchNorm1d, copies.of(model))
    assert first.running_mean is not None
    first.running_mean += 1
    second = copies.of(model)
    assert second is not first
    second.requires_grad_(False)
    assert copies.of(model) is not second


def test_what_a_client_has_made_is_its_own() -> None:
    copies, model = Copies(), network()
    assert copies.give(model) is model
    assert copies.of(model) is model


def test_copies_do_not_outlive_their_originals() -> None:
    copies, model = Copies(), network()
    copy = ref(copies.of(model))
    del model
    gc.collect()
    assert copy() is None


def test_a_copy_shares_nothing_and_keeps_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    copy = cast(nn.Sequential, copied(model))
    assert copy[1].weight is copy[0].weight
    assert copy[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_weights_that_a_module_computes() -> None:
    model = nn.utils.weight_norm(nn.Linear(3, 2))  # deepcopy alone refuses what has a history
    inputs = torch.randn(4, 3)
    model(inputs)
    assert torch.equal(copied(model)(inputs), model(inputs))


def test_a_copy_follows_the_precision_of_its_original() -> None:
    """Searches let the models that adversaries know compute in double precision for a while."""
    copies, model = Copies(), network()
    copy = copies.of(model)
    before = copied(copy).state_dict()
    assert in_precision_of(copy, model.double()) is copy
    assert {value.dtype for value in copy.parameters()} == {torch.float64}
    in_precision_of(copy, model.float())
    assert all(torch.equal(value, before[name]) for name, value in copy.state_dict().items())


class Closing(nn.Module):
    """A model that calls its parts through functions that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.call = lambda x: self.layer(x)
        self.calls = {"first": [lambda x, layer=self.layer: layer(x)]}
        self.own = lambda: self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x) + self.calls["first"][0](x)


def test_functions_of_a_copy_refer_to_the_copy() -> None:
    model = Closing()
    copy = cast(Closing, copied(model))
    inputs = torch.randn(4, 3)
    assert torch.equal(copy(inputs), model(inputs))
    assert copy.own() is copy
    copy(inputs).sum().backward()
    assert model.layer.weight.grad is None
    assert copy.layer.weight.grad is not None
    with torch.no_grad():
        copy.layer.weight.zero_()
    assert not torch.equal(copy(inputs), model(inputs))


def test_hooks_that_close_over_a_model_refer_to_the_copy() -> None:
    model = network()
    model.register_forward_hook(lambda *_: [one.zero_() for one in model.buffers()] and None)
    copy = copied(model)
    (hook,) = copy._forward_hooks.values()
    assert hook.__closure__[0].cell_contents is copy


def test_a_function_that_still_leads_to_the_model_is_named() -> None:
    model = network()

    def outer() -> nn.Module:
        return model

    model.deep = {1: {2: ({3: lambda: outer()},)}}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"deep holds the function .*lambda.*function a method"):
        copied(model)


@pytest.mark.parametrize(
    "alter",
    [
        lambda copy: copy.register_forward_hook(lambda *given: given[2] * 0),
        lambda copy: setattr(copy, "forward", lambda x: x * 0),
        lambda copy: copy.train(not copy.training),
        lambda copy: setattr(copy, "note", 3),
        lambda copy: copy.add_module("more", nn.Linear(1, 1)),
    ],
    ids=["hook", "forward", "mode", "attribute", "module"],
)
def test_what_was_altered_is_not_handed_on(alter: Callable[[nn.Module], object]) -> None:
    copies, model = Copies(), network()
    copy = copies.of(model)
    assert copies.of(model) is copy
    assert copies.is_copy(copy, model)
    alter(copy)
    assert not copies.is_copy(copy, model)
    assert copies.of(model) is not copy


def test_a_copy_is_in_the_mode_of_its_original() -> None:
    copies, model = Copies(), network()
    assert copies.of(model.train()).training
    assert not copies.of(model.eval()).training


def test_a_function_that_refers_to_itself() -> None:
    model = network()

    def again(times: int) -> int:
        return again(times - 1) if times else 0

    model.again = again  # type: ignore[assignment]
    assert copied(model).again(3) == 0  # type: ignore[operator]
