import math
from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, convolutional, mlp, observed, rng
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, InvertingGradients, Observation
from leakfrontier.defenses import Update, batch_gradient
from leakfrontier.defenses.outpost import Outpost, risk
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

ALWAYS = Outpost(decay=0.0)


def flat(update: Update) -> Tensor:
    return torch.cat([value.detach().flatten() for value in update.values()])


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_identity_setting_is_the_undefended_gradient(build) -> None:  # noqa: ANN001
    model, data = build(), batch(3)
    plain = batch_gradient(model, cross_entropy, data)
    for identity in (
        Outpost(noise=0.0, pruning_rate=0.0),
        Outpost(noised_share=0.0, pruning_rate=0.0, decay=0.0),
    ):
        gradient = identity.gradient(model, cross_entropy, data, rng())
        assert list(gradient) == list(plain)
        assert torch.equal(flat(gradient), flat(plain))
        assert not identity.stochastic


@pytest.mark.parametrize(("rate", "kept"), [(0.25, 0.75), (0.8, 0.2), (0.9999, 0.0)])
def test_prunes_the_smallest_entries_of_every_tensor(rate: float, kept: float) -> None:
    model, data = convolutional(), batch(3)
    plain = batch_gradient(model, cross_entropy, data)
    defense = replace(ALWAYS, noise=0.0, pruning_rate=rate)
    for name, value in defense.gradient(model, cross_entropy, data, rng()).items():
        left = value != 0
        assert int(left.sum()) == max(1, round(kept * value.numel()))
        assert torch.equal(value[left], plain[name][left])
        assert plain[name][left].abs().min() >= plain[name][~left].abs().max()


def test_noise_has_the_standard_deviation_of_each_layers_risk() -> None:
    model, data = mlp(hidden=300), batch(2)
    plain = batch_gradient(model, cross_entropy, data)
    defense = replace(ALWAYS, noise=0.5, noised_share=1.0, pruning_rate=0.0)
    noisy = defense.gradient(model, cross_entropy, data, rng(3))
    for name in ("1.weight", "3.weight"):
        residual = (noisy[name] - plain[name]).detach()
        weight = model.get_parameter(name).detach()
        variance = (weight - weight.mean()).square().mean()
        assert float(residual.std()) == pytest.approx(0.5 * float(variance), rel=0.05)


def test_noise_is_where_the_fisher_information_is_largest() -> None:
    model, data = convolutional(), batch(2)
    plain = flat(batch_gradient(model, cross_entropy, data))
    defense = replace(ALWAYS, noised_share=0.3, pruning_rate=0.0)
    noised = flat(defense.gradient(model, cross_entropy, data, rng())) != plain
    assert int(noised.sum()) == pytest.approx(0.3 * len(plain), rel=0.02)  # GroupNorm is at no risk
    assert plain[noised].square().min() >= plain[~noised].square().sort().values[-20]


def test_risk_is_the_variance_of_the_weights_up_to_one() -> None:
    assert float(risk(torch.tensor([1.0, 2.0, 3.0]) / 2)) == pytest.approx(0.25)
    assert float(risk(torch.tensor([10.0, -10.0]))) == 1
    assert float(risk(torch.tensor([5.0]))) == 0


def test_steps_are_perturbed_less_and_less_often() -> None:
    model, data, draws = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), batch(1), rng()
    plain = flat(batch_gradient(model, cross_entropy, data))
    defense, rounds, steps = Outpost(decay=1.0), 300, 4
    perturbed = torch.zeros(steps)
    for _ in range(rounds):
        for step in range(steps):
            gradient = defense.gradient(model, cross_entropy, data, draws)
            perturbed[step] += not torch.equal(flat(gradient), plain)
        defense.on_update({}, draws)  # a new round begins
    expected = 1 / (1 + torch.arange(1.0, steps + 1))
    assert (perturbed / rounds - expected).abs().max() < 4 * math.sqrt(0.25 / rounds)


def test_extreme_noise_leaves_nothing_of_the_gradient() -> None:
    model, data = mlp(), batch(1)
    plain = flat(batch_gradient(model, cross_entropy, data))
    defense = replace(ALWAYS, noise=1e4, noised_share=1.0)
    noisy = flat(defense.gradient(model, cross_entropy, data, rng()))
    assert abs(float(torch.cosine_similarity(noisy, plain, dim=0))) < 0.1


def test_replay_is_the_pruning_without_the_noise() -> None:
    model, data = convolutional(), batch(2)
    plain = batch_gradient(model, cross_entropy, data)
    without_noise = replace(ALWAYS, noise=0.0).gradient(model, cross_entropy, data, rng())
    pruned = ALWAYS.gradient(model, cross_entropy, data, rng())

    def replayed(observed: Update) -> Update:
        return ALWAYS.replay(observed).on_update(plain, rng())

    assert torch.equal(flat(replayed(pruned)), flat(without_noise))
    assert torch.equal(flat(replayed(plain)), flat(plain))  # a step that was not perturbed
    together = vmap(replayed)({name: torch.stack([pruned[name], plain[name]]) for name in plain})
    for index, expected in enumerate((without_noise, plain)):
        assert all(torch.equal(together[name][index], expected[name]) for name in plain)


def test_local_steps_are_replayed_as_they_are() -> None:
    share, protocol = batch(4), FedAvg(epochs=3, batch_size=1, lr=0.01)
    observation = observed(convolutional(), share, Outpost(), protocol=protocol)
    undefended = observed(convolutional(), share, protocol=protocol)
    torch.testing.assert_close(observation.simulate(*share), undefended.simulate(*share))


def quality(observation: Observation, truth: Tensor) -> float:
    guess = InvertingGradients(iterations=300).reconstruct(observation, rng()).inputs
    return float(metrics.psnr(SPACE.to_unit(guess), SPACE.to_unit(truth)))


def test_knowing_it_helps_where_weights_are_small_and_so_is_the_noise() -> None:
    model, share = build_model("lenet", SPACE, rng(), activation="tanh"), batch(1)
    ignorant, informed = (
        quality(
            observed(model, share, ALWAYS, threat=ThreatModel(knows_defense=knows)), share.inputs
        )
        for knows in (False, True)
    )
    assert informed > ignorant + 3


def test_stops_it_where_weights_are_large() -> None:
    model, share = build_model("lenet", SPACE, rng()), batch(1)
    assert quality(observed(model, share, ALWAYS), share.inputs) < 15


def test_strength_and_randomness() -> None:
    assert Outpost(noise=0.0).strength == 0 < Outpost().strength < Outpost(noise=2.0).strength
    assert Outpost().stochastic
    assert Outpost(noise=0.0).stochastic  # which steps are pruned is random
    assert not Outpost(noise=0.0, decay=0.0).stochastic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -1.0}, r"noise must be in \[0, inf\), got -1.0"),
        ({"noise": math.nan}, "noise must be"),
        ({"noised_share": 1.1}, r"noised_share must be in \[0, 1\], got 1.1"),
        ({"noised_share": math.nan}, "noised_share must be"),
        ({"pruning_rate": 1.0}, r"pruning_rate must be in \[0, 1\), got 1.0"),
        ({"pruning_rate": math.nan}, "pruning_rate must be"),
        ({"decay": math.inf}, r"decay must be in \[0, inf\), got inf"),
        ({"decay": math.nan}, "decay must be"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outpost(**options)
