import math

import pytest
import torch
from federated import SPACE, batch, convolutional, make_client, mlp, rng
from scipy import stats
from torch import Generator, Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy, one_hot

from leakfrontier.defenses import Batch, Update, batch_gradient
from leakfrontier.defenses.mixup import Mixup, _draw_beta
from leakfrontier.evaluate.client.client import ThreatModel, make_replay, observe

MODELS = [mlp, convolutional]


def flat(update: Update) -> Tensor:
    return torch.cat([value.detach().flatten() for value in update.values()])


def mixed_gradient(defense: Mixup, model: nn.Module, data: Batch, draws: Generator) -> Update:
    return defense.gradient(model, cross_entropy, defense.on_batch(data, draws), draws)


@pytest.mark.parametrize("build", MODELS)
def test_identity_setting_is_the_undefended_gradient(build) -> None:  # noqa: ANN001
    model, data = build(), batch(4)
    gradient = mixed_gradient(Mixup(0.0), model, data, rng())
    torch.testing.assert_close(gradient, batch_gradient(model, cross_entropy, data))


@pytest.mark.parametrize("build", MODELS)
def test_a_batch_of_one_is_mixed_with_itself(build) -> None:  # noqa: ANN001
    model, data = build(), batch(1)
    gradient = mixed_gradient(Mixup(1.0), model, data, rng())
    plain = batch_gradient(model, cross_entropy, data)
    torch.testing.assert_close(flat(gradient), flat(plain), rtol=1e-4, atol=1e-6)


def test_is_the_gradient_at_mixed_inputs_and_mixed_labels() -> None:
    model, data = mlp(), batch(5)
    draws = rng(3)
    share = float(_draw_beta(2.0, draws))
    order = torch.randperm(5, generator=draws)
    labels = one_hot(data.targets, 10).float()
    mixed = Batch(
        share * data.inputs + (1 - share) * data.inputs[order],
        share * labels + (1 - share) * labels[order],
    )
    assert 0.05 < share < 0.95
    assert not torch.equal(order, torch.arange(5))
    gradient = mixed_gradient(Mixup(2.0), model, data, rng(3))
    expected = batch_gradient(model, cross_entropy, mixed)
    torch.testing.assert_close(flat(gradient), flat(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_the_share_has_a_beta_distribution(alpha: float) -> None:
    draws = rng(1)
    shares = [float(_draw_beta(alpha, draws)) for _ in range(2000)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 1e4])
def test_extreme_parameters_give_shares(alpha: float) -> None:
    draws = rng(1)
    shares = torch.stack([_draw_beta(alpha, draws) for _ in range(50)])
    assert ((shares >= 0) & (shares <= 1)).all()
    near = torch.full_like(shares, 0.5) if alpha > 1 else shares.round()
    torch.testing.assert_close(shares, near, rtol=0, atol=0.05)


def test_draws_come_from_the_generator() -> None:
    model, data = mlp(), batch(4)
    first, again, other = (
        flat(mixed_gradient(Mixup(), model, data, rng(seed))) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("build", MODELS)
def test_what_is_mixed_with_what_is_left_out_of_a_replay(build) -> None:  # noqa: ANN001
    client, data = make_client(build(), Mixup()), batch(4)
    (upload,) = observe(client, [data], ThreatModel(), rng(1))
    replay = make_replay(client, ThreatModel(), rng(7))
    plain = batch_gradient(client.model, client.loss, upload.trained_on)
    for name, value in replay(*upload.trained_on, upload.observation.update).items():
        torch.testing.assert_close(value, plain[name])


@pytest.mark.parametrize("build", MODELS)
def test_replay_is_differentiable_and_can_be_vectorised(build) -> None:  # noqa: ANN001
    replay = make_replay(make_client(build(), Mixup()), ThreatModel(), rng(7))
    data = batch(12)
    guesses = data.inputs.view(4, 3, *SPACE.shape).clone().requires_grad_()

    def size(guess: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([v.square().sum() for v in replay(guess, targets, {}).values()]).sum()

    values = vmap(size, randomness="different")(guesses, data.targets.view(4, 3))
    (slope,) = torch.autograd.grad(values.sum(), guesses)
    assert slope.isfinite().all()
    assert (slope.flatten(1).abs().sum(1) > 0).all()


def test_strength_and_randomness() -> None:
    assert (Mixup(0.0).stochastic, Mixup(0.5).stochastic) == (False, True)
    assert Mixup(0.0).strength == 0 < Mixup(0.5).strength < Mixup(1.0).strength


@pytest.mark.parametrize("alpha", [-0.1, math.inf, math.nan])
def test_rejects_a_bad_alpha(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha must be in \[0, inf\)"):
        Mixup(alpha)


def test_refuses_to_mix_tokens() -> None:
    tokens = Batch(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="mixes real-valued inputs"):
        Mixup().on_batch(tokens, rng())
