import math
from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, observed, rng

from leakfrontier.adversaries import DLFA, FedAvg, NotApplicable
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())
SHARE = batch(4)
OBSERVATION = observed(
    LENET,
    SHARE,
    protocol=FedAvg(epochs=2, batch_size=2, lr=0.05),
    threat=ThreatModel(knows_targets=True),
)


def test_recovers_a_shuffled_client() -> None:
    attack = DLFA(iterations=120, order_prior=10.0)
    result = attack.reconstruct(OBSERVATION, rng())
    guess, private = SPACE.to_unit(result.inputs), SPACE.to_unit(SHARE.inputs)
    reached = metrics.psnr(guess[metrics.match(guess, private)], private).mean()
    blind = metrics.psnr(torch.full_like(private, 0.5), private).mean()
    assert reached > blind + 2


def test_simulates_what_the_client_does_on_examples_in_order() -> None:
    epochs = torch.cat([SHARE.inputs] * 2)
    ours = DLFA().simulation(OBSERVATION)(epochs, {}, SHARE.targets, {})
    theirs = OBSERVATION.simulate(*SHARE)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-6)


def test_each_epoch_has_examples_of_its_own() -> None:
    start = DLFA(restarts=3).start(OBSERVATION, rng())["inputs"]
    assert start.shape == (3, 8, *SPACE.shape)


def test_the_order_of_an_epoch_does_not_matter_to_the_prior() -> None:
    attack = DLFA(total_variation=0.0, range_penalty=0.0)
    shuffled = torch.cat([SHARE.inputs, SHARE.inputs[torch.tensor([2, 0, 3, 1])]])
    other = torch.cat([SHARE.inputs, batch(4, 1).inputs])
    same, different = attack.prior(OBSERVATION, torch.stack([shuffled, other]))
    assert same < 1e-6
    means = other.view(2, 4, *SPACE.shape).mean(dim=1)
    pairs = [(means[i] - means[j]).square().mean() for i in range(2) for j in range(2)]
    torch.testing.assert_close(different, 1000 * torch.stack(pairs).mean())


def test_penalises_variation_and_values_out_of_range() -> None:
    flat = torch.zeros(1, 8, *SPACE.shape)
    assert float(DLFA().prior(OBSERVATION, flat)) == 0
    rough = flat.clone()
    rough[0, 0, 0, 4, 4] = 1.0
    assert float(DLFA(order_prior=0.0).prior(OBSERVATION, rough)) == pytest.approx(4e-3 / 8)
    bright = flat + 3.0  # a pixel of 1.25
    penalty = DLFA().prior(OBSERVATION, bright)
    assert float(penalty) == pytest.approx(2 * 192 * 0.25**2, rel=1e-4)


def test_epochs_are_matched_and_averaged() -> None:
    noisy = SHARE.inputs[torch.tensor([3, 1, 0, 2])] + 0.02
    unknowns = {"inputs": torch.cat([SHARE.inputs, noisy]).unsqueeze(0)}
    inputs, targets = DLFA().finish(OBSERVATION, unknowns, SHARE.targets)
    torch.testing.assert_close(inputs, SPACE.clamp(SHARE.inputs + 0.01), atol=1e-5, rtol=0)
    assert targets.equal(SHARE.targets)


def test_early_layers_count_more() -> None:
    names = list(OBSERVATION.update)
    zero = {name: torch.zeros(1, *v.shape) for name, v in OBSERVATION.update.items()}
    one = {
        name: {**zero, name: torch.ones_like(zero[name]) / zero[name].numel() ** 0.5}
        for name in names
    }
    distance = DLFA().distance(OBSERVATION)
    values = [float(distance(one[name], zero)[0]) for name in names]
    assert values[0] == pytest.approx(2 / (4 * 0.05**2))
    assert values[0] == pytest.approx(values[1])  # weight and bias of one layer
    assert values[2] == pytest.approx(values[0] / math.e)


def test_gradients_and_sums_of_clients_are_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="a gradient"):
        DLFA().reconstruct(observed(LENET, SHARE), rng())
    with pytest.raises(NotApplicable, match="several clients"):
        DLFA().reconstruct(replace(OBSERVATION, protocol=FedAvg(clients=2)), rng())


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", math.inf), ("decay", 1.1), ("order_prior", -1.0), ("range_penalty", math.nan)],
)
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        DLFA(**{name: value})  # type: ignore[arg-type]
