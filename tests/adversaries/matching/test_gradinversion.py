import math

import pytest
import torch
from federated import SPACE, batch, observed, rng, seeded
from torch import nn

from leakfrontier.adversaries import FedAvg, GradInversion, NotApplicable
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())


def test_recovers_an_undefended_example() -> None:
    share = batch(1)
    attack = GradInversion(iterations=300, restarts=2, matching=1.0)
    result = attack.reconstruct(observed(LENET, share), rng())
    assert metrics.psnr(SPACE.to_unit(result.inputs), SPACE.to_unit(share.inputs)) > 18


def test_the_distance_is_half_the_squared_error_times_its_weight() -> None:
    share = batch(1)
    observation = observed(LENET, share)
    attack = GradInversion(
        matching=0.1, total_variation=0.0, size=0.0, batch_norm=0.0, consistency=0.0
    )
    blank = torch.zeros_like(share.inputs)
    replayed = observation.simulate(blank, share.targets)
    squares = sum(float((replayed[n] - v).square().sum()) for n, v in observation.update.items())
    value = attack.objective(observation, blank, share.targets)
    assert value == pytest.approx(0.05 * squares, rel=1e-4)


def spread(consistency: float) -> float:
    attack = GradInversion(iterations=100, restarts=3, consistency=consistency, langevin=0.0)
    observation = observed(LENET, batch(1))
    evaluate = attack._evaluation(
        observation,
        torch.stack([batch(1).targets] * 3),
        {name: torch.stack([value] * 3) for name, value in observation.update.items()},
    )
    best, _ = attack.optimizer().minimise(
        evaluate,
        attack.start(observation, rng()),
        lambda unknowns: attack.project(observation, unknowns),
        torch.zeros_like,
    )
    return float(best["inputs"].std(dim=0).mean())


def test_consistency_draws_the_starts_together() -> None:
    assert spread(1.0) < 0.5 * spread(0.0)


def test_batch_norm_statistics_count_where_the_model_has_them() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.BatchNorm2d(3, momentum=1.0), nn.Sigmoid(), nn.Flatten(), nn.Linear(192, 10)
        )
    )
    share = batch(4)
    model(share.inputs)
    observation = observed(model.eval(), share)
    guesses = torch.stack([share.inputs, torch.zeros_like(share.inputs)])
    with_them = GradInversion(batch_norm=0.1).prior(observation, guesses)
    without = GradInversion(batch_norm=0.0).prior(observation, guesses)
    at_truth, at_blank = (with_them - without).tolist()
    assert at_truth < 0.05 < at_blank


def test_several_local_steps_are_not_applicable() -> None:
    observation = observed(LENET, batch(2), protocol=FedAvg(epochs=2, batch_size=2))
    with pytest.raises(NotApplicable, match="several local steps"):
        GradInversion().reconstruct(observation, rng())


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("matching", math.nan), ("langevin", -1.0), ("consistency", math.inf)],
)
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        GradInversion(**{name: value})  # type: ignore[arg-type]
