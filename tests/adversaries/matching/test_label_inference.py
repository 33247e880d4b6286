import pytest
import torch
from federated import SPACE, batch, convolutional, mlp, observed, rng
from torch import nn

from leakfrontier.adversaries import FedAvg, NotApplicable, PublicData, infer_targets
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.models.models import build_model


def errors(guess: torch.Tensor, truth: torch.Tensor) -> int:
    counts = [torch.bincount(labels, minlength=10) for labels in (guess, truth)]
    return int((counts[0] - counts[1]).abs().sum()) // 2


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_exact_for_one_example(build) -> None:  # noqa: ANN001
    for seed in range(20):
        share = batch(1, seed)
        assert infer_targets(observed(build(), share), rng()).tolist() == share.targets.tolist()


@pytest.mark.parametrize("size", [4, 8, 32])
@pytest.mark.parametrize(
    "threat", [ThreatModel(), ThreatModel(public=PublicData(*batch(50, seed=99)))]
)
def test_counts_of_a_batch_on_an_untrained_cnn(size: int, threat: ThreatModel) -> None:
    model = build_model("cnn", SPACE, rng())
    for seed in range(5):
        share = batch(size, seed)
        guess = infer_targets(observed(model, share, threat=threat), rng())
        assert len(guess) == size
        assert errors(guess, share.targets) <= 1


def test_counts_behind_local_steps() -> None:
    share = batch(16, seed=3)
    protocol = FedAvg(epochs=2, batch_size=4, lr=0.001)
    model = build_model("cnn", SPACE, rng())
    guess = infer_targets(observed(model, share, protocol=protocol), rng())
    assert errors(guess, share.targets) <= 2


def test_granted_labels_are_used() -> None:
    share = Batch(batch(3).inputs, torch.tensor([7, 1, 4]))
    observation = observed(mlp(), share, threat=ThreatModel(knows_targets=True))
    assert infer_targets(observation, rng()).tolist() == [7, 1, 4]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10, bias=False)), "has no bias"),
        (nn.Sequential(nn.Conv2d(3, 10, 8), nn.Flatten()), "does not end in a linear layer"),
    ],
)
def test_not_applicable_without_a_last_linear_layer(model: nn.Module, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        infer_targets(observed(model, batch(2)), rng())
