import math
from pathlib import Path

import pytest
import torch
from federated import SPACE, convolutional, mlp, rng
from torch import Tensor, nn
from toy_imprint import Normalising, ToyImprint

from leakfrontier.adversaries import FedSGD, ImageSpace, PublicData, Round
from leakfrontier.defenses import Refused, WeightInspection
from leakfrontier.defenses.weight_inspection import irregularity, layer_statistics
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

GREY = ImageSpace(shape=(1, 28, 28), classes=10)


def reason(model: nn.Module, agreed: nn.Module) -> str:
    with pytest.raises(Refused) as refusal:
        WeightInspection().on_receive(model, agreed)
    return str(refusal.value)


def public() -> PublicData:
    return PublicData(torch.randn(300, 3, 8, 8, generator=rng()), torch.zeros(300).long())


def weights(outputs: int = 40, inputs: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=rng(seed)) / math.sqrt(inputs)


def grid(count: int) -> Tensor:
    return torch.special.ndtri((torch.arange(count) + 0.5) / count)


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {}), ("mlp", {"width": 32}), ("lenet", {}), ("lenet", {"activation": "relu"})],
)
def test_untrained_models_pass(name: str, options: dict[str, object]) -> None:
    refused = 0
    for seed in range(20):
        model = build_model(name, GREY, rng(seed), **options)
        try:
            assert WeightInspection().on_receive(model, model) is model
        except Refused:
            refused += 1
    assert refused <= 1  # of 20, at a rate of 1 % or less


def test_large_models_pass() -> None:
    small = ImageSpace(shape=(1, 8, 8), classes=10)
    for name in ("cnn", "resnet18"):
        model = build_model(name, small, rng())
        assert WeightInspection().on_receive(model, model) is model


def test_its_loosest_setting_refuses_no_weights() -> None:
    trusting = WeightInspection(1.0, 1.0, 1.0, 1.0, math.inf, 0.0)
    model = mlp()
    nn.init.zeros_(model[1].weight)  # type: ignore[index, arg-type]
    assert trusting.on_receive(model, mlp()) is model
    assert "are zero" in reason(model, mlp())


def test_a_crafted_model_is_refused() -> None:
    for own_blocks in (True, False):
        agreed = mlp(16)
        known = Round(SPACE, FedSGD(), 4, 1, public())
        for sent in ToyImprint(own_blocks).craft(agreed, known, rng()).models:
            assert "layer '1': 75.00% of its rows are zero" in reason(sent, agreed)


def changed(model: nn.Module, position: int, layer: nn.Module) -> nn.Module:
    layers = list(model.children())
    layers[position] = layer
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("position", "layer"),
    [
        (1, nn.Identity()),
        (1, nn.GroupNorm(3, 6)),
        (2, nn.ReLU()),
        (0, nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular")),
        (0, nn.Conv2d(3, 6, 3, padding=1, bias=False)),
    ],
)
def test_another_architecture_is_refused(position: int, layer: nn.Module) -> None:
    sent = changed(convolutional(), position, layer)
    assert "another architecture" in reason(sent, convolutional())


def test_an_inserted_or_missing_module_is_refused_whatever_the_thresholds() -> None:
    trusting, model = WeightInspection(1.0, 1.0, 1.0, 1.0, math.inf, 0.0), mlp()
    (inserted,) = Normalising().craft(model, Round(SPACE, FedSGD(), 1, 1), rng()).models
    for sent, agreed in ((inserted, model), (model, inserted)):
        with pytest.raises(Refused, match="another architecture"):
            trusting.on_receive(sent, agreed)


def test_the_agreed_weights_are_not_looked_at() -> None:
    agreed, sent = mlp(), mlp()
    for parameter in agreed.parameters():
        nn.init.zeros_(parameter)
    assert WeightInspection().on_receive(sent, agreed) is sent


def test_counts_what_is_parallel_zeroed_or_direct() -> None:
    rows = weights()
    honest = layer_statistics(rows, None)
    assert honest[:4] == (0.0, 0.0, 0.0, 0.0)
    assert 0.9 < honest.scale < 1.1
    rows[:10] = rows[0] * torch.linspace(-2, 3, 10)[:, None]  # either sign, any length
    rows[10:14] = 0
    rows[14:22] = torch.eye(64)[:8] + 1e-4 * rows[30]
    found = layer_statistics(rows, None)
    assert found.parallel == pytest.approx(45 / (36 * 35 / 2))
    assert found.aligned == found.parallel
    assert found.zeroed == pytest.approx(4 / 40)
    assert found.direct == pytest.approx(8 / 36)


@pytest.mark.parametrize(("noise", "seen"), [(0.01, "parallel"), (0.1, "aligned"), (1.0, None)])
def test_noise_turns_parallel_rows_into_aligned_ones(noise: float, seen: str | None) -> None:
    found = layer_statistics(weights(1).expand(40, -1) + noise * weights(seed=1), None)
    assert found.parallel == (1.0 if seen == "parallel" else 0.0)
    assert found.aligned == (1.0 if seen else 0.0)


def test_pairs_are_counted_in_blocks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = weights()[torch.randint(30, (40,), generator=rng(1))]
    whole = layer_statistics(rows, None).parallel
    monkeypatch.setattr("leakfrontier.defenses.weight_inspection._BLOCK", 7)
    assert layer_statistics(rows, None).parallel == whole > 0


def test_rows_of_few_inputs_have_no_direction() -> None:
    found = layer_statistics(torch.randn(50, 1, generator=rng()), None)
    assert (found.parallel, found.direct) == (0.0, 0.0)


@pytest.mark.parametrize("count", [16, 64, 1024])
@pytest.mark.parametrize("transform", [lambda x: x, lambda x: -3 + x / 9, lambda x: -torch.exp(x)])
def test_quantiles_are_more_regular_than_any_sample(count: int, transform) -> None:  # noqa: ANN001
    least = WeightInspection().irregularity
    assert irregularity(transform(grid(count))) < least
    drawn = [irregularity(transform(torch.randn(count, generator=rng(s)))) for s in range(200)]
    assert sum(value < least for value in drawn) == 0
    uniform = [irregularity(torch.rand(count, generator=rng(s)) - 0.5) for s in range(200)]
    assert sum(value < least for value in uniform) == 0


def test_an_outlier_does_not_hide_quantiles() -> None:
    biases = torch.cat([grid(64), torch.tensor([-10.0])])
    assert irregularity(biases) < WeightInspection().irregularity


def test_few_or_equal_biases_tell_nothing() -> None:
    assert irregularity(grid(15)) == math.inf
    assert irregularity(torch.zeros(1000)) == math.inf


def test_biases_at_quantiles_are_refused() -> None:
    model = mlp(64)
    with torch.no_grad():
        model[1].bias.copy_(grid(64))  # type: ignore[index, operator, union-attr]
    assert "placed like quantiles" in reason(model, mlp(64))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_unusual_scales_are_refused(factor: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[3].weight.mul_(factor)  # type: ignore[index, operator, union-attr]
    assert "as large as usual" in reason(model, mlp())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[1].weight[3, 3] = value  # type: ignore[index, union-attr]
    assert reason(model, mlp())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": -0.1}, r"parallel must be in \[0, 1\], got -0.1"),
        ({"zeroed": 1.1}, r"zeroed must be in \[0, 1\], got 1.1"),
        ({"direct": math.nan}, r"direct must be in \[0, 1\], got nan"),
        ({"scale": 0.5}, "scale must be at least 1, got 0.5"),
        ({"irregularity": -1.0}, "irregularity must not be negative, got -1.0"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightInspection(**options)


SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 16}),
    candidates=20,
    training=Training(rounds=4, clients=4, clients_per_round=2, batch_size=8),
)
INSPECTING = Method(name="WeightInspection")


def test_a_run_tells_detections_and_false_alarms(tmp_path: Path) -> None:
    for adversary, outcome in (("toy_imprint:ToyImprint", "refused"), ("PriorGuess", "scored")):
        trial = AttackTrial(SCENARIO, INSPECTING, Method(name=adversary), True, 0, 0, (0, 1))
        assert [row.outcome for row in trial.run(tmp_path).attacks] == [outcome] * 2
    strict = Method(name="WeightInspection", options={"scale": 1.0})
    for defense, alarms in ((INSPECTING, 0), (strict, 8)):
        assert TrainTrial(SCENARIO, defense, seed=0).run(tmp_path).utility[-1].refused == alarms
