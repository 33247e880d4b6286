from dataclasses import replace

import pytest
import torch
from federated import rng
from replaying import check_replay
from torch.distributions import Bernoulli

from leakfrontier.defenses import Update
from leakfrontier.defenses.signsgd import SignSGD


def update(*values: float) -> Update:
    entries = torch.tensor(values, dtype=torch.float32)
    return {"weight": entries[:2], "bias": entries[2:]}


def test_scales_signs_by_the_mean_magnitude_of_each_tensor() -> None:
    sent = SignSGD().on_update(update(1, -3, -10, 0), rng())
    assert sent["weight"].tolist() == [2, -2]
    assert sent["bias"].tolist() == [-5, 0]


def test_plain_signs_lose_all_magnitude() -> None:
    given = update(1e-20, -3, 1e20, -0.1)
    sent = SignSGD(scale=False).on_update(given, rng())
    assert sent["weight"].tolist() == sent["bias"].tolist() == [1, -1]


def test_what_is_lost_is_carried_to_the_next_round() -> None:
    defense = SignSGD(error_feedback=True)
    total = torch.zeros(2)
    for _ in range(50):
        total = total + defense.on_update({"w": torch.tensor([3.0, 1.0])}, rng())["w"]
    torch.testing.assert_close(total / 50, torch.tensor([3.0, 1.0]), rtol=0.1, atol=0)
    fresh = replace(defense).on_update({"w": torch.tensor([3.0, 1.0])}, rng())["w"]
    assert fresh.tolist() == [2, 2]


def test_without_error_feedback_nothing_is_carried() -> None:
    defense = SignSGD()
    for _ in range(3):
        assert defense.on_update({"w": torch.tensor([3.0, 1.0])}, rng())["w"].tolist() == [2, 2]


def test_it_is_deterministic_and_has_no_knob() -> None:
    assert not SignSGD().stochastic
    assert SignSGD().strength is None


@pytest.mark.parametrize("scale", [True, False])
def test_log_likelihood_is_that_of_signs_drawn_with_logistic_probability(scale: bool) -> None:
    expected = update(1.0, -3.0, 0.5, 4.5)
    signs = update(1, 1, -1, 1)
    factor = {"weight": 2.0, "bias": 2.5} if scale else {"weight": 1.0, "bias": 1.0}
    observed = {name: signs[name] * factor[name] for name in signs}
    reference = sum(
        Bernoulli(logits=expected[name] / expected[name].abs().mean())
        .log_prob((signs[name] > 0).float())
        .sum()
        for name in signs
    )
    torch.testing.assert_close(SignSGD(scale).log_likelihood(observed, expected), reference)


def test_log_likelihood_prefers_agreement_and_is_finite_for_zeros() -> None:
    observed = SignSGD().on_update(update(1, -3, 0, 0), rng())
    agreeing = SignSGD().log_likelihood(observed, update(1, -1, 0, 0))
    opposing = SignSGD().log_likelihood(observed, update(-1, 1, 0, 0))
    assert torch.isfinite(agreeing)
    assert agreeing > opposing


@pytest.mark.parametrize("scale", [True, False])
def test_replay_of_the_true_update_is_the_upload(scale: bool) -> None:
    defense, given = SignSGD(scale), update(1, -3, 0, 4)
    observed = defense.on_update(given, rng())
    torch.testing.assert_close(defense.replay(observed).on_update(given, rng()), observed)


@pytest.mark.parametrize("scale", [True, False])
def test_replay_is_differentiable_and_can_be_vectorised(scale: bool) -> None:
    check_replay(SignSGD(scale))


def test_error_feedback_needs_magnitudes() -> None:
    with pytest.raises(ValueError, match="scale must be True with error_feedback"):
        SignSGD(scale=False, error_feedback=True)


def test_another_architecture_has_nothing_to_add() -> None:
    defense = SignSGD(error_feedback=True)
    defense.on_update(update(1, 2, 3, 4), rng())
    other = {"weight": torch.arange(7.0)}
    expected = replace(defense).on_update(other, rng())
    torch.testing.assert_close(defense.on_update(other, rng()), expected)
