"""Which defenses compute their gradient from a sum over examples."""

from dataclasses import dataclass

import pytest
import torch
from torch import Generator, nn
from torch.nn import functional as F

from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    Defense,
    Loss,
    Noise,
    Soteria,
    TopK,
    Update,
    batch_gradient,
    summing_of,
)


class Halved(Defense):
    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        return {
            name: value / 2 for name, value in super().gradient(model, loss, batch, rng).items()
        }


@dataclass
class Quieter(DPSGD):
    def replay(self, observed: object) -> Defense:
        return Defense()


@pytest.mark.parametrize(
    "defense", [Defense(), TopK(ratio=0.1), Chain((TopK(ratio=0.1), Noise(scale=0.1)))]
)
def test_a_mean_is_a_sum_over_its_size(defense: Defense) -> None:
    model, rng = nn.Linear(3, 2), Generator()
    batch = Batch(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    mean = batch_gradient(model, F.cross_entropy, batch)
    rule = summing_of(defense)
    assert rule is not None
    assert rule.clipped is None
    total = {name: 4 * value for name, value in mean.items()}
    found = rule.finished(total, model, F.cross_entropy, batch, rng)
    for name, value in mean.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_dpsgd_adds_the_noise_of_its_own_gradient(clipping: str) -> None:
    defense = DPSGD(noise_multiplier=0.5, max_grad_norm=0.1, clipping=clipping)  # type: ignore[arg-type]
    model = nn.Linear(3, 2)
    batch = Batch(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    rule = summing_of(Chain((defense,)))
    assert rule is not None
    assert rule.clipped is not None
    clipped = rule.clipped.gradient(model, F.cross_entropy, batch, Generator())
    total = {name: 4 * value for name, value in clipped.items()}
    found = rule.finished(total, model, F.cross_entropy, batch, Generator().manual_seed(1))
    own = defense.gradient(model, F.cross_entropy, batch, Generator().manual_seed(1))
    for name, value in own.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "defense",
    [Halved(), Soteria(pruning_rate=0.5), Quieter(noise_multiplier=1.0), Chain((Halved(),))],
)
def test_other_code_computes_its_own_gradient(defense: Defense) -> None:
    assert summing_of(defense) is None


def test_an_attribute_of_the_object_counts_as_its_own_code() -> None:
    defense = Defense()
    defense.gradient = lambda *_: {}  # type: ignore[method-assign]
    assert summing_of(defense) is None
