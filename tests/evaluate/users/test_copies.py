"""Whatever is done to a copy, the original stays, and no other hook sees it."""

from __future__ import annotations

import gc
from typing import cast
from weakref import ref

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
