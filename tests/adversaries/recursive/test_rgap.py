from typing import Literal

import pytest
from federated import rng
from recursive import attacked, seen
from torch import nn

from leakfrontier.adversaries import RGAP, NotApplicable, Observation


@pytest.mark.parametrize("balance", ["blocks", "rows"])
def test_rgap_needs_no_bias(balance: Literal["blocks", "rows"]) -> None:
    observation, truth = seen("cnn6", classes=1)
    assert attacked(observation, truth, RGAP(balance=balance)) > 60


def test_rgap_solves_the_equation_of_any_loss() -> None:
    observation, truth = seen("cnn6", classes=5)
    assert attacked(observation, truth, RGAP()) > 60


def test_what_does_not_apply_is_said() -> None:
    def refused(observation: Observation, reason: str) -> None:
        with pytest.raises(NotApplicable, match=reason):
            RGAP().reconstruct(observation, rng())

    refused(seen("lenet_x", activation="relu")[0], "no inverse")
    refused(seen("lenet_x", examples=2)[0], "batch")
    ends_active = nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=False), nn.Sigmoid())
    refused(seen(model=ends_active)[0], "starts from logits")


def test_a_gradient_of_nothing_fits_no_scale() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=False))
    observation, _ = seen(model=model)
    for value in observation.update.values():
        value.zero_()
    with pytest.raises(NotApplicable, match="no scale of the last layer's gradient"):
        RGAP().reconstruct(observation, rng())


def test_with_a_bias_its_gradient_is_the_scale() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    assert attacked(*seen(model=model), RGAP()) > 120


def test_the_balance_is_checked() -> None:
    with pytest.raises(ValueError, match="balance must be 'blocks' or 'rows', got 'none'"):
        RGAP(balance="none")  # type: ignore[arg-type]
