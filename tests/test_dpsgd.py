import math
from dataclasses import replace

import pytest
import torch
from federated import batch, convolutional, mlp, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Batch, Plan, Update, batch_gradient

MODELS = [mlp, convolutional]


def flat(update: Update) -> Tensor:
    return torch.cat([value.detach().flatten() for value in update.values()])


def clipped_mean(model: nn.Module, data: Batch, norm: float) -> Tensor:
    """Return the mean of clipped gradients, one example at a time."""
    total = torch.zeros(())
    for inputs, target in zip(*data, strict=True):
        one = flat(batch_gradient(model, cross_entropy, Batch(inputs[None], target[None])))
        total = total + one * min(1.0, norm / (float(one.norm()) + 1e-6))
    return total / len(data.inputs)


@pytest.mark.parametrize("build", MODELS)
def test_without_noise_it_is_the_mean_of_clipped_gradients(build) -> None:  # noqa: ANN001
    model, data = build(), batch(6)
    gradient = flat(DPSGD(0.0, 0.5).gradient(model, cross_entropy, data, rng()))
    torch.testing.assert_close(gradient, clipped_mean(model, data, 0.5), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", MODELS)
def test_identity_setting_is_the_undefended_gradient(build) -> None:  # noqa: ANN001
    model, data = build(), batch(6)
    gradient = DPSGD(0.0, math.inf).gradient(model, cross_entropy, data, rng())
    plain = batch_gradient(model, cross_entropy, data)
    assert list(gradient) == list(plain)
    torch.testing.assert_close(flat(gradient), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sigma", "norm", "size"), [(1.0, 1.0, 4), (0.3, 2.0, 1), (2.0, 0.1, 8)])
def test_noise_has_standard_deviation_sigma_c_over_b(sigma: float, norm: float, size: int) -> None:
    model, data = mlp(hidden=300), batch(size)  # 60,000 parameters: 0.3 % standard error
    defense = DPSGD(sigma, norm)
    residual = flat(defense.gradient(model, cross_entropy, data, rng(3))) - clipped_mean(
        model, data, norm
    )
    assert float(residual.std()) == pytest.approx(sigma * norm / size, rel=0.01)
    assert abs(float(residual.mean())) < 4 * sigma * norm / size / math.sqrt(residual.numel())


def test_no_example_contributes_more_than_the_norm() -> None:
    model, data = mlp(), batch(5)
    extreme = Batch(
        torch.cat([data.inputs, 1e4 * data.inputs[:1]]), data.targets[[0, 1, 2, 3, 4, 0]]
    )
    for norm in (0.01, 1.0):
        defense = DPSGD(0.0, norm, expected_batch_size=6)
        with_it = flat(defense.gradient(model, cross_entropy, extreme, rng()))
        without = flat(defense.gradient(model, cross_entropy, data, rng()))
        assert float((with_it - without).norm()) * 6 <= norm * (1 + 1e-4)


def test_same_optimizer_for_every_step_and_a_fresh_one_for_a_fresh_copy() -> None:
    model, defense = mlp(), DPSGD(1.0)
    first = defense.gradient(model, cross_entropy, batch(4), rng(1))
    optimizer = defense._client.optimizer  # type: ignore[union-attr]
    second = defense.gradient(model, cross_entropy, batch(4), rng(2))
    assert defense._client.optimizer is optimizer  # type: ignore[union-attr]
    assert type(optimizer).__module__.startswith("opacus.")
    assert not torch.equal(flat(first), flat(second))
    assert replace(defense)._client is None


def test_follows_the_model_as_it_is_trained() -> None:
    model, defense = mlp(), DPSGD(0.0, 1.0)
    defense.gradient(model, cross_entropy, batch(4), rng())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    gradient = flat(defense.gradient(model, cross_entropy, batch(4), rng()))
    torch.testing.assert_close(gradient, clipped_mean(model, batch(4), 1.0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", MODELS)
def test_replay_is_the_clipping_alone_and_differentiable(build) -> None:  # noqa: ANN001
    model, data = build(), batch(3)
    replay = DPSGD(1.0, 0.5).replay({})
    inputs = data.inputs.clone().requires_grad_()
    gradient = replay.gradient(model, cross_entropy, Batch(inputs, data.targets), rng())
    torch.testing.assert_close(flat(gradient), clipped_mean(model, data, 0.5), rtol=1e-4, atol=1e-6)
    (slope,) = torch.autograd.grad(sum(v.sum() for v in gradient.values()), inputs)
    assert slope.abs().sum() > 0


def test_log_likelihood_is_the_normal_density_up_to_a_constant() -> None:
    defense = DPSGD(0.5, 2.0, expected_batch_size=4)
    expected = {"w": torch.zeros(5)}
    observed = [{"w": torch.randn(5, generator=rng(i))} for i in range(2)]
    normal = torch.distributions.Normal(0.0, 0.5 * 2.0 / 4)
    ours = [defense.log_likelihood(one, expected) for one in observed]
    theirs = [normal.log_prob(one["w"]).sum() for one in observed]
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("sigma", "sample_rate", "steps", "delta", "epsilon"),
    [
        (1.3, 256 / 60000, 3510, 1e-5, 0.864),
        (1.0, 0.01, 1000, 1e-5, 1.828),
        (5.0, 1.0, 100, 1e-5, 9.997),
        (0.8, 0.02, 500, 1e-3, 3.003),
    ],
)
def test_guarantee_equals_the_reference(
    sigma: float, sample_rate: float, steps: int, delta: float, epsilon: float
) -> None:
    guarantee = DPSGD(sigma).guarantee(Plan(steps, sample_rate, delta))
    assert guarantee.epsilon == pytest.approx(epsilon, rel=0.005)
    assert (guarantee.unit, guarantee.adjacency) == ("record", "add/remove")


def test_no_noise_gives_no_guarantee() -> None:
    assert DPSGD(0.0).guarantee(Plan(1, 1.0, 1e-5)).epsilon == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": -1}, r"noise_multiplier must be in \[0, inf\)"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": 1, "max_grad_norm": 0}, r"max_grad_norm must be in \(0, inf\]"),
        ({"noise_multiplier": 1, "max_grad_norm": math.nan}, "max_grad_norm"),
        ({"noise_multiplier": 1, "max_grad_norm": math.inf}, "finite with noise"),
        ({"noise_multiplier": 1, "expected_batch_size": 0}, "expected_batch_size must be >= 1"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPSGD(**options)  # type: ignore[arg-type]
