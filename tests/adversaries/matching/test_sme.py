import math
from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, observed, rng
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import SME, FedAvg, NotApplicable
from leakfrontier.adversaries.matching.sme import cosine_between, descent_between
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())
SHARE = batch(4)
OBSERVATION = observed(
    LENET,
    SHARE,
    protocol=FedAvg(epochs=20, batch_size=2, lr=0.05),
    threat=ThreatModel(knows_targets=True),
)


def quality(attack: SME) -> float:
    guess = SPACE.to_unit(attack.reconstruct(OBSERVATION, rng()).inputs)
    private = SPACE.to_unit(SHARE.inputs)
    return float(metrics.psnr(guess[metrics.match(guess, private)], private).mean())


def test_a_surrogate_beats_the_initial_weights() -> None:
    at_start = SME(iterations=150, alpha=0.0, alpha_lr=0.0)
    assert quality(SME(iterations=150)) > quality(at_start) + 2


def test_the_gradient_turns_towards_the_update_between_the_ends() -> None:
    cosines = cosine_between(OBSERVATION, *SHARE, torch.linspace(0, 1, 11))
    assert 2 <= int(cosines.argmax()) <= 8
    assert cosines.max() > max(cosines[0], cosines[-1]) + 0.05


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_surrogate_lies_on_the_line(alpha: float) -> None:
    descent = descent_between(OBSERVATION, *SHARE, OBSERVATION.update, torch.tensor(alpha))
    moved = build_model("lenet", SPACE, rng())
    with torch.no_grad():
        for name, value in moved.named_parameters():
            value += alpha * OBSERVATION.update[name]
    loss = cross_entropy(moved(SHARE.inputs), SHARE.targets)
    for name, gradient in zip(
        descent, torch.autograd.grad(loss, list(moved.parameters())), strict=True
    ):
        torch.testing.assert_close(descent[name], -gradient, rtol=1e-3, atol=1e-5)


def test_alpha_follows_its_slope_and_stays_between_the_ends() -> None:
    attack = SME(iterations=20, alpha=0.0, alpha_lr=0.05)
    evaluate = attack._evaluation(
        OBSERVATION,
        SHARE.targets.unsqueeze(0),
        {name: value.unsqueeze(0) for name, value in OBSERVATION.update.items()},
    )
    inputs = SHARE.inputs.unsqueeze(0)
    values = [evaluate({"inputs": inputs, "alpha": torch.tensor([a])}) for a in (0.3, 0.301)]
    difference = (values[1][0] - values[0][0]) / 0.001
    torch.testing.assert_close(values[0][1]["alpha"], difference, rtol=0.05, atol=1e-3)
    clamped = attack.project(OBSERVATION, {"inputs": inputs, "alpha": torch.tensor([1.4])})
    assert clamped["alpha"].tolist() == [1.0]


def test_its_objective_takes_the_best_alpha_unless_that_is_fixed() -> None:
    free, fixed = SME(), SME(alpha=0.0, alpha_lr=0.0)
    prior = float(free.prior(OBSERVATION, SHARE.inputs.unsqueeze(0)))
    cosines = cosine_between(OBSERVATION, *SHARE, torch.linspace(0, 1, 21))
    assert free.objective(OBSERVATION, *SHARE) == pytest.approx(float(1 - cosines.max()) + prior)
    assert fixed.objective(OBSERVATION, *SHARE) == pytest.approx(float(1 - cosines[0]) + prior)


def test_guesses_stay_in_the_range_of_the_data() -> None:
    pixels = SPACE.to_unit(SME(iterations=3).reconstruct(OBSERVATION, rng()).inputs)
    assert pixels.min() >= -1e-5
    assert pixels.max() <= 1 + 1e-5


def test_gradients_and_sums_of_clients_are_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="a gradient"):
        SME().reconstruct(observed(LENET, SHARE), rng())
    summed = replace(OBSERVATION, protocol=FedAvg(clients=2))
    with pytest.raises(NotApplicable, match="several clients"):
        SME().reconstruct(summed, rng())


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("alpha", 1.5), ("alpha_lr", -1.0), ("total_variation", math.nan)],
)
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        SME(**{name: value})  # type: ignore[arg-type]
