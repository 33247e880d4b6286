import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from federated import batch, convolutional, mlp, rng
from replaying import check_replay
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Update, batch_gradient
from leakfrontier.defenses.quantization import Quantization

VALUES = torch.tensor([0.0, 0.1, -0.24, 0.26, 0.45, -0.74, 0.76, -1.0])


def gradient(build: Callable[[], nn.Module] = mlp) -> Update:
    return batch_gradient(build(), cross_entropy, batch(3))


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_full_precision_uploads_everything_as_it_is(build: Callable[[], nn.Module]) -> None:
    defense, update = Quantization(32), gradient(build)
    sent = defense.on_update(update, rng())
    assert all(torch.equal(sent[name], update[name]) for name in update)
    assert not defense.stochastic
    assert defense.strength == 0
    assert defense.log_likelihood(update, update) is None


def test_one_bit_leaves_zero_and_the_largest_magnitude() -> None:
    sent = Quantization(1, stochastic=False).on_update({"w": VALUES * 3}, rng())["w"]
    assert sent.tolist() == [0, 0, 0, 0, 0, -3, 3, -3]
    drawn = Quantization(1).on_update({"w": VALUES * 3}, rng())["w"]
    assert set(drawn.unique().tolist()) == {-3, 0, 3}


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_there_are_two_to_the_bits_magnitudes_and_the_error_is_bounded(
    bits: int, stochastic: bool
) -> None:
    update = {"w": torch.rand(100_000, generator=rng(1)) * 2 - 1}
    sent = Quantization(bits, stochastic).on_update(update, rng())["w"]
    largest = update["w"].abs().max()
    step = float(largest) / (2**bits - 1)
    magnitudes = (sent.abs() / step).round()
    torch.testing.assert_close(sent.abs(), magnitudes * step)
    assert magnitudes.max() == 2**bits - 1
    assert bits == 16 or magnitudes.unique().numel() == 2**bits  # not enough entries for all
    assert sent.abs().max() == largest
    bound = step if stochastic else step / 2
    assert (sent - update["w"]).abs().max() <= bound * (1 + 1e-2)  # float32 at 16 bits
    assert ((sent == 0) | (sent.sign() == update["w"].sign())).all()


def test_the_nearest_level_is_taken_and_stays_put() -> None:
    defense = Quantization(3, stochastic=False)
    once = defense.on_update(gradient(), rng())
    twice = defense.on_update(once, rng())
    torch.testing.assert_close(once, twice)
    reference = torch.fake_quantize_per_tensor_affine(VALUES, 1 / 7, 0, -7, 7)
    torch.testing.assert_close(defense.on_update({"w": VALUES}, rng())["w"], reference)


def test_stochastic_rounding_is_unbiased() -> None:
    draws, generator = 2000, rng(3)
    defense = Quantization(2)
    total = torch.stack(
        [defense.on_update({"w": VALUES}, generator)["w"] for _ in range(draws)]
    ).double()
    level = VALUES.double().abs() * 3
    spread = (level - level.floor()) * (1 - (level - level.floor())) / 9
    error = (total.mean(0) - VALUES).abs()
    assert (error <= 4 * (spread / draws).sqrt() + 1e-7).all()
    torch.testing.assert_close(total.var(0), spread, rtol=0.25, atol=1e-6)
    nearest = replace(defense, stochastic=False).on_update({"w": VALUES}, rng())["w"]
    assert (nearest - VALUES).abs().max() > 0.05  # which the test above would notice


def test_scope_says_whose_largest_entry_counts() -> None:
    update = {"a": torch.tensor([8.0, 1.0]), "b": torch.tensor([0.5, 0.1])}
    alone = Quantization(1, stochastic=False, scope="tensor").on_update(update, rng())
    together = Quantization(1, stochastic=False, scope="global").on_update(update, rng())
    assert alone["b"].tolist() == [0.5, 0]
    assert together["b"].tolist() == [0, 0]
    assert alone["a"].tolist() == together["a"].tolist() == [8, 0]


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_tensor_of_zeros_stays_so(stochastic: bool) -> None:
    defense = Quantization(2, stochastic)
    zeros = {"w": torch.zeros(4)}
    assert defense.on_update(zeros, rng())["w"].tolist() == [0, 0, 0, 0]
    assert torch.isfinite(defense.log_likelihood(zeros, {"w": torch.ones(4)}))  # type: ignore[arg-type]


def test_draws_come_from_the_generator() -> None:
    defense, update = Quantization(2), gradient()
    one, same, other = (defense.on_update(update, rng(seed)) for seed in (1, 1, 2))
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(one["1.weight"], other["1.weight"])


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_replay_of_the_true_batch_is_the_upload(scope: str) -> None:
    defense = Quantization(3, stochastic=False, scope=scope)  # type: ignore[arg-type]
    update = gradient()
    observed = defense.on_update(update, rng())
    torch.testing.assert_close(defense.replay(observed).on_update(update, rng()), observed)


def test_replay_of_random_rounding_is_its_mean() -> None:
    update = gradient()
    replayed = Quantization(2).replay(Quantization(2).on_update(update, rng()))
    torch.testing.assert_close(replayed.on_update(update, rng()), update)


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_replay_is_differentiable_and_can_be_vectorised(stochastic: bool, scope: str) -> None:
    check_replay(Quantization(2, stochastic, scope))  # type: ignore[arg-type]


def test_likelihood_of_nearest_rounding_is_flat_within_the_bin() -> None:
    defense = Quantization(1, stochastic=False)
    observed = {"w": torch.tensor([2.0, 0.0])}
    values = [
        float(defense.log_likelihood(observed, {"w": torch.tensor([2.0, x])}))  # type: ignore[arg-type]
        for x in (0.0, 0.99, -0.99, 2.0, -4.0)
    ]
    assert values == [0, 0, 0, -0.5, -4.5]  # half a step too far is one half-width


def test_likelihood_of_random_rounding_is_the_gaussian_of_its_mean_variance() -> None:
    defense = Quantization(2)
    observed = {"w": torch.tensor([3.0, 1.0, 0.0])}
    fractions = torch.linspace(0, 1, 100_001)
    std = float((fractions * (1 - fractions)).mean().sqrt())
    normal = torch.distributions.Normal(observed["w"], std)
    guesses = [torch.tensor([2.5, 1.5, 0.2]), torch.tensor([2.9, 0.7, -0.4])]
    ours = [defense.log_likelihood(observed, {"w": guess}) for guess in guesses]
    theirs = [normal.log_prob(guess).sum() for guess in guesses]
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1], rtol=1e-3, atol=1e-3)  # type: ignore[operator]


def test_strength_grows_as_bits_are_saved() -> None:
    strengths = [Quantization(bits).strength for bits in (32, 16, 8, 4, 1)]
    assert strengths == sorted(set(strengths))


@pytest.mark.parametrize("bits", [0, 17, 31, -1, 2.5, math.nan])
def test_rejects_bad_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=r"bits must be a whole number in \[1, 16\], or 32, got"):
        Quantization(bits)


def test_rejects_an_unknown_scope() -> None:
    with pytest.raises(ValueError, match="scope must be 'tensor' or 'global', got 'layer'"):
        Quantization(4, scope="layer")  # type: ignore[arg-type]
