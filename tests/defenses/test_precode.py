import copy
import math

import pytest
import torch
from federated import SPACE, batch, convolutional, mlp, observed, rng, seeded
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, softplus

from leakfrontier.adversaries import (
    FedAvg,
    InvertingGradients,
    LinearLeakage,
    Observation,
    infer_targets,
)
from leakfrontier.defenses import Update
from leakfrontier.defenses.precode import PRECODE, VariationalBottleneck
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.modality.modality import Images
from leakfrontier.evaluate.models.models import build_model

SMALL = PRECODE(bottleneck=8)


class Nested(nn.Module):
    """A model that is no sequence, with its classifier inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.heads = nn.ModuleDict({"main": nn.Linear(192, 10)})

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.heads["main"](self.body(inputs))
        return outputs


def same(a: Update, b: Update) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_puts_a_bottleneck_before_the_last_linear_layer() -> None:
    model = SMALL.on_model(mlp())
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes == {
        "1.weight": (32, 192),
        "1.bias": (32,),
        "3.bottleneck.encoder.weight": (16, 32),
        "3.bottleneck.encoder.bias": (16,),
        "3.bottleneck.decoder.weight": (32, 8),
        "3.bottleneck.decoder.bias": (32,),
        "3.classifier.weight": (10, 32),
        "3.classifier.bias": (10,),
    }
    assert torch.equal(model.get_parameter("3.classifier.weight"), mlp().get_parameter("3.weight"))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (seeded(Nested), "heads.main."),
        (seeded(lambda: nn.Linear(8, 10)), ""),
        (convolutional().double(), "4."),
    ],
)
def test_finds_the_last_linear_layer_wherever_it_is(model: nn.Module, names: str) -> None:
    extended = SMALL.on_model(model)
    assert isinstance(extended.get_submodule(f"{names}bottleneck"), VariationalBottleneck)
    dtype = next(model.parameters()).dtype
    assert {parameter.dtype for parameter in extended.parameters()} == {dtype}
    inputs = batch(3).inputs.to(dtype)
    assert extended(inputs).shape == model(inputs).shape


def test_the_extension_is_reproducible_and_leaves_the_model_and_global_state_alone() -> None:
    model, state = mlp(), torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    extended = SMALL.on_model(model).state_dict()
    assert same(dict(SMALL.on_model(mlp()).state_dict()), dict(extended))
    assert same(dict(model.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), state)
    other = SMALL.on_model(mlp(hidden=32 + 1)).state_dict()["3.bottleneck.encoder.bias"]
    assert not torch.equal(other, extended["3.bottleneck.encoder.bias"])


@pytest.mark.parametrize("beta", [0.0, 1e-3, 1.0])
def test_gradient_is_that_of_the_sampled_loss_and_the_divergence(beta: float) -> None:
    defense, data = PRECODE(bottleneck=8, beta=beta), batch(4)
    model = defense.on_model(mlp())
    gradient = defense.gradient(model, cross_entropy, data, rng(5))

    hidden = model.get_submodule("1")(data.inputs.flatten(1)).relu()
    bottleneck = model.get_submodule("3.bottleneck")
    encoded = bottleneck.get_submodule("encoder")(hidden)
    mean, std = encoded[:, :8], softplus(encoded[:, 8:])
    code = mean + std * torch.randn(4, 8, generator=rng(5))
    outputs = model.get_submodule("3.classifier")(bottleneck.get_submodule("decoder")(code))
    nats = kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).sum(dim=1).mean()
    objective = cross_entropy(outputs, data.targets) + beta * nats / math.log(2)
    expected = torch.autograd.grad(objective, list(model.parameters()))
    torch.testing.assert_close(list(gradient.values()), list(expected))
    assert list(gradient) == [name for name, _ in model.named_parameters()]


def test_noise_comes_from_the_generator_alone() -> None:
    model, data = SMALL.on_model(convolutional()), batch(2)
    first, again, other = (
        SMALL.gradient(model, cross_entropy, data, rng(seed)) for seed in (1, 1, 2)
    )
    assert same(first, again)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert SMALL.stochastic


def test_outside_of_local_steps_the_mean_is_decoded() -> None:
    model, data = SMALL.on_model(mlp()), batch(4)
    SMALL.gradient(model, cross_entropy, data, rng())
    hidden = model.get_submodule("1")(data.inputs.flatten(1)).relu()
    bottleneck = model.get_submodule("3.bottleneck")
    mean = bottleneck.get_submodule("encoder")(hidden)[:, :8]
    expected = model.get_submodule("3.classifier")(bottleneck.get_submodule("decoder")(mean))
    for mode in (True, False):
        assert torch.equal(model.train(mode)(data.inputs), expected)


def test_it_learns() -> None:
    defense, data, draws = PRECODE(bottleneck=32), batch(10), rng()
    model = defense.on_model(mlp(hidden=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        gradient = defense.gradient(model, cross_entropy, data, draws)
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name].detach()
        optimizer.step()
    assert Images(SPACE).evaluate(model, data).correct >= 9


def test_a_first_linear_layer_still_leaks_exactly() -> None:
    share, defense = batch(1), PRECODE()
    observation = observed(defense.on_model(mlp()), share, defense)
    guess = LinearLeakage().reconstruct(observation, rng()).inputs
    assert metrics.psnr(SPACE.to_unit(guess), SPACE.to_unit(share.inputs)) > 100


def test_labels_are_still_read_off_the_classifier() -> None:
    defense = PRECODE()
    model = defense.on_model(convolutional())
    for seed in range(10):
        share = batch(1, seed)
        observation = observed(model, share, defense)
        assert infer_targets(observation, rng()).tolist() == share.targets.tolist()


def test_replay_is_the_mean_in_the_layers_before_the_bottleneck() -> None:
    model, data = SMALL.on_model(mlp()), batch(3)
    replay = SMALL.replay({})
    uploads = [
        replay.on_update(replay.gradient(model, cross_entropy, data, rng(seed)), rng())
        for seed in (1, 2)
    ]
    assert same(*uploads)
    assert {name for name, value in uploads[0].items() if value.any()} == {"1.weight", "1.bias"}
    draws = [SMALL.gradient(model, cross_entropy, data, rng(i))["1.weight"] for i in range(300)]
    mean, single = torch.stack(draws).mean(dim=0), draws[0]
    replayed = uploads[0]["1.weight"]
    assert (mean - replayed).norm() < 0.5 * (single - replayed).norm()


def test_replay_keeps_everything_if_nothing_is_before_the_bottleneck() -> None:
    model = SMALL.on_model(seeded(lambda: nn.Linear(8, 10)))
    update: Update = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    assert same(SMALL.replay(update).on_update(update, rng()), update)


@pytest.mark.parametrize("knows", [True, False])
def test_can_be_replayed_through_local_steps(knows: bool) -> None:
    share, defense = batch(4), PRECODE(bottleneck=8)
    observation = observed(
        defense.on_model(convolutional()),
        share,
        defense,
        protocol=FedAvg(epochs=2, batch_size=2, lr=0.1),
        threat=ThreatModel(knows_defense=knows),
    )
    result = InvertingGradients(iterations=2).reconstruct(observation, rng())
    assert result.objective is not None
    assert math.isfinite(result.objective)


def quality(observation: Observation, truth: Tensor) -> float:
    guess = InvertingGradients(iterations=300).reconstruct(observation, rng()).inputs
    return float(metrics.psnr(SPACE.to_unit(guess), SPACE.to_unit(truth)))


def test_stops_an_ignorant_adversary_and_an_informed_one_regains_much() -> None:
    share, defense = batch(1), PRECODE()
    model = build_model("lenet", SPACE, rng(), activation="tanh")
    undefended = quality(observed(model, share), share.inputs)
    ignorant, informed = (
        quality(
            observed(
                defense.on_model(model), share, defense, threat=ThreatModel(knows_defense=knows)
            ),
            share.inputs,
        )
        for knows in (False, True)
    )
    assert ignorant < 10 < undefended - 20
    assert ignorant + 8 < informed < undefended - 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bottleneck": 0}, "bottleneck must be at least 1, got 0"),
        ({"beta": -1.0}, r"beta must be in \[0, inf\), got -1.0"),
        ({"beta": math.nan}, "beta must be"),
        ({"beta": math.inf}, "beta must be"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PRECODE(**options)  # type: ignore[arg-type]


def test_refuses_a_model_it_cannot_extend_or_did_not() -> None:
    with pytest.raises(ValueError, match="the model has none"):
        SMALL.on_model(nn.Flatten())
    with pytest.raises(ValueError, match=r"train the model that PRECODE.on_model returns"):
        SMALL.gradient(mlp(), cross_entropy, batch(1), rng())
