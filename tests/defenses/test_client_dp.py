import math

import pytest
import torch
from federated import batch, convolutional, mlp, rng
from replaying import check_replay
from torch.distributions import Normal
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Plan, batch_gradient
from leakfrontier.defenses.client_dp import ClientDP


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_identity_setting_is_the_undefended_update(build) -> None:  # noqa: ANN001
    given = batch_gradient(build(), cross_entropy, batch(2))
    defense = ClientDP(0.0, math.inf)
    torch.testing.assert_close(defense.on_update(given, rng()), given, rtol=0, atol=0)
    assert not defense.stochastic


@pytest.mark.parametrize(("sigma", "norm"), [(1.0, 1.0), (0.3, 2.0), (5.0, 0.01)])
def test_noise_has_standard_deviation_sigma_c_around_the_clipped_update(
    sigma: float, norm: float
) -> None:
    given = {"w": torch.full((60_000,), 7.0)}
    clipped = norm / math.sqrt(60_000)
    noise = ClientDP(sigma, norm).on_update(given, rng(1))["w"] - clipped
    assert float(noise.std()) == pytest.approx(sigma * norm, rel=0.01)
    assert abs(float(noise.mean())) < 4 * sigma * norm / math.sqrt(60_000)


def test_no_client_contributes_more_than_the_norm() -> None:
    for size in (1e-3, 1.0, 1e6):
        sent = ClientDP(0.0, 0.5).on_update({"w": torch.full((9,), size)}, rng())["w"]
        assert float(sent.norm()) == pytest.approx(min(0.5, 3 * size))


def test_replay_clips_without_noise() -> None:
    replay = ClientDP(2.0, 1.0).replay({})
    sent = replay.on_update({"w": torch.tensor([3.0, 4.0])}, rng())["w"]
    torch.testing.assert_close(sent, torch.tensor([0.6, 0.8]))


def test_replay_is_differentiable_and_can_be_vectorised() -> None:
    check_replay(ClientDP(0.5, 0.01))


def test_log_likelihood_is_the_normal_density_up_to_a_constant() -> None:
    defense = ClientDP(0.5, 3.0)
    expected = {"w": torch.zeros(5)}
    observed = [{"w": torch.randn(5, generator=rng(i))} for i in range(2)]
    ours = [defense.log_likelihood(one, expected) for one in observed]
    theirs = [Normal(0.0, 1.5).log_prob(one["w"]).sum() for one in observed]
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1])  # type: ignore[operator]
    assert ClientDP(0.0, 3.0).log_likelihood(observed[0], expected) is None


@pytest.mark.parametrize(
    ("sigma", "norm", "steps", "epsilon"), [(1.0, 1.0, 1, 4.377), (5.0, 0.1, 100, 9.997)]
)
def test_guarantee_equals_the_reference_whatever_the_norm_and_the_sampling(
    sigma: float, norm: float, steps: int, epsilon: float
) -> None:
    for sample_rate in (1.0, 0.01):
        guarantee = ClientDP(sigma, norm).guarantee(Plan(steps, sample_rate, 1e-5))
        assert guarantee.epsilon == pytest.approx(epsilon, rel=0.005)
        assert (guarantee.unit, guarantee.adjacency) == ("client", "zero-out")
    record = DPSGD(sigma).guarantee(Plan(steps, 0.01, 1e-5))
    assert record.epsilon < epsilon


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_no_noise_gives_no_guarantee(norm: float) -> None:
    assert ClientDP(0.0, norm).guarantee(Plan(1, 1.0, 1e-5)).epsilon == math.inf


def test_strength_is_the_noise_multiplier() -> None:
    assert ClientDP(0.0).strength == 0 < ClientDP(0.1).strength < ClientDP(1.0).strength
    assert ClientDP(0.1).stochastic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": -1}, r"noise_multiplier must be in \[0, inf\)"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": 1, "max_update_norm": 0}, r"max_update_norm must be in \(0, inf\]"),
        ({"noise_multiplier": 1, "max_update_norm": math.nan}, "max_update_norm"),
        ({"noise_multiplier": 1, "max_update_norm": math.inf}, "finite with noise"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientDP(**options)
