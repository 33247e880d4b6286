from dataclasses import replace

import pytest
import torch
from federated import SPACE, TOKENS, batch, convolutional, mlp, observed, rng
from torch import nn

from leakfrontier.adversaries import FedAvg, LinearLeakage, NotApplicable
from leakfrontier.evaluate.modality import metrics

ATTACK = LinearLeakage()


@pytest.mark.parametrize("scale", [1.0, -0.01])
def test_recovers_one_example_exactly_at_any_scale_of_the_update(scale: float) -> None:
    truth = batch(1)
    observation = observed(mlp(), truth)
    scaled = {name: value * scale for name, value in observation.update.items()}
    guess = ATTACK.reconstruct(replace(observation, update=scaled), rng())
    torch.testing.assert_close(guess.inputs, truth.inputs, rtol=1e-4, atol=1e-5)


def test_one_local_step_is_as_good_as_a_gradient() -> None:
    truth = batch(1)
    observation = observed(mlp(), truth, protocol=FedAvg(epochs=1, batch_size=1, lr=0.1))
    guess = ATTACK.reconstruct(observation, rng())
    torch.testing.assert_close(guess.inputs, truth.inputs, rtol=1e-3, atol=1e-3)


def test_all_rows_together_average_noise_out() -> None:
    truth = batch(1)
    observation = observed(mlp(hidden=512), truth)
    update = dict(observation.update)
    draws = rng(2)
    for name in ("1.weight", "1.bias"):
        noise = torch.randn(update[name].shape, generator=draws)
        update[name] = update[name] + 0.2 * update["1.bias"].abs().max() * noise
    guess = ATTACK.reconstruct(replace(observation, update=update), rng()).inputs
    strongest = update["1.bias"].abs().argmax()
    row = (update["1.weight"][strongest] / update["1.bias"][strongest]).view_as(truth.inputs)
    assert (guess - truth.inputs).norm() < 0.8 * (SPACE.clamp(row) - truth.inputs).norm()


def test_finds_the_examples_that_activate_a_row_alone() -> None:
    truth, model = batch(4), mlp(hidden=1000)
    with torch.no_grad():
        model[1].bias.fill_(-1.0)  # type: ignore[index] # few rows are active at all
    guess = ATTACK.reconstruct(observed(model, truth), rng())
    assert guess.inputs.shape == truth.inputs.shape
    pixels, private = SPACE.to_unit(guess.inputs), SPACE.to_unit(truth.inputs)
    matched = pixels[metrics.match(pixels, private)]
    assert metrics.psnr(matched, private).max() > 60


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (convolutional(), "layer '0' transforms the input"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10, bias=False)), "needs a bias"),
        (nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 10)), "needs a bias and 192"),
    ],
)
def test_refuses_a_model_it_cannot_read(model: nn.Module, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        ATTACK.reconstruct(observed(model, batch(1)), rng())


def test_refuses_tokens() -> None:
    observation = observed(mlp(), batch(1))
    tokens = replace(observation, space=TOKENS)
    with pytest.raises(NotApplicable, match="token"):
        ATTACK.reconstruct(tokens, rng())


class Mixed(nn.Module):
    """Frozen features of an image: as many as it has pixels."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(images).abs()


class Scaled(nn.Module):
    """Pixels on another scale."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - 0.3) / 0.4


def test_features_of_the_size_of_an_image_are_not_taken_for_one() -> None:
    observation = observed(nn.Sequential(Mixed(), mlp()), batch(1))
    with pytest.raises(NotApplicable, match=r"layer '1\.1' sees features, not the pixels"):
        ATTACK.reconstruct(observation, rng())


def test_pixels_on_another_scale_are_recovered() -> None:
    truth = batch(1)
    guess = ATTACK.reconstruct(observed(nn.Sequential(Scaled(), mlp()), truth), rng())
    torch.testing.assert_close(guess.inputs, truth.inputs, rtol=1e-3, atol=1e-4)
