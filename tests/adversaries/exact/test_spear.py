from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, mlp, observed, psnr, rng

from leakfrontier.adversaries import SPEAR, Adversary, SPEARPlusPlus


@pytest.mark.parametrize("size", [1, 2, 8])
def test_recovers_a_batch_exactly(size: int) -> None:
    truth = batch(size)
    guess = SPEAR().reconstruct(observed(mlp(200), truth), rng())
    assert len(guess.inputs) == size
    assert psnr(guess, truth.inputs).min() > 90
    assert guess.confidence is not None
    assert float(guess.confidence.min()) == pytest.approx(1)
    assert guess.objective == pytest.approx(0)


def test_too_few_samples_give_what_was_found_and_less_confidence() -> None:
    truth = batch(16)
    guess = SPEAR(samples=2000).reconstruct(observed(mlp(200), truth), rng())
    assert len(guess.inputs) < 16
    assert guess.objective is not None
    assert guess.objective > 0.05


@pytest.mark.parametrize("samples", [0, -1])
def test_rejects_a_number_of_samples_below_one(samples: int) -> None:
    with pytest.raises(ValueError, match="samples must be at least 1"):
        SPEAR(samples=samples)


@pytest.mark.parametrize("attack", [SPEAR(), SPEARPlusPlus()])
def test_an_update_without_signal_gives_no_guess(attack: Adversary) -> None:
    observation = observed(mlp(), batch(2))
    empty = {name: torch.zeros_like(value) for name, value in observation.update.items()}
    guess = attack.reconstruct(replace(observation, update=empty), rng())
    assert guess.inputs.shape == (0, *SPACE.shape)
