import math
from dataclasses import replace

import pytest
import torch
from federated import rng
from recursive import seen
from torch import Tensor, nn

from leakfrontier.adversaries import FedAvg, NotApplicable, Observation, Reconstruction
from leakfrontier.adversaries.recursive.layer_chain import Layer, chain, trace
from leakfrontier.adversaries.recursive.layer_system import Gradients, Known
from leakfrontier.adversaries.recursive.recursion import back, gradients_of, invert, on_cpu, start

CLASSES, WIDTH = 4, 6


def linear(name: str = "", inputs: int = WIDTH, outputs: int = CLASSES) -> Layer:
    weight = torch.randn(outputs, inputs, generator=rng(1), dtype=torch.float64)
    return Layer(name, weight, torch.zeros(outputs).double(), (inputs,), (outputs,))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64)


def test_a_biased_layer_gives_its_input_and_the_slope_there() -> None:
    layer, inputs, slopes = linear(), drawn(WIDTH), drawn(CLASSES, seed=2)
    gradients = Gradients({"weight": torch.outer(slopes, inputs), "bias": slopes}, 1e-16)
    found = start(layer, gradients)
    assert found is not None
    known, noise = found
    torch.testing.assert_close(known.values, inputs)
    torch.testing.assert_close(known.slopes, layer.weight.T @ slopes)
    assert noise < 1e-12


def test_what_no_input_explains_is_the_noise() -> None:
    layer = linear(inputs=3000, outputs=10)
    inputs, slopes = drawn(3000), drawn(10, seed=2)
    noisy = torch.outer(slopes, inputs) + 0.01 * drawn(10, 3000, seed=3)
    found = start(layer, Gradients({"weight": noisy, "bias": slopes}, 1e-16))
    assert found is not None
    known, noise = found
    assert noise == pytest.approx(0.01, rel=0.05)
    assert float(known.deviation) == pytest.approx(noise / float(slopes.norm()), rel=1e-6)
    assert float((known.values - inputs).std()) == pytest.approx(float(known.deviation), rel=0.1)


@pytest.mark.parametrize("bias", [0.0, math.nan, math.inf])
def test_without_a_slope_there_is_nothing_to_start_from(bias: float) -> None:
    values = {"weight": drawn(CLASSES, WIDTH), "bias": torch.full((CLASSES,), bias).double()}
    assert start(linear(), Gradients(values, 1e-16)) is None


def test_back_through_linear_layers_to_the_first_input() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Sigmoid()).double()
    layers = [layer for layer in trace(model, (5,)) if isinstance(layer, Layer)]
    inputs, slopes = drawn(1, 5), drawn(6, seed=4)
    outputs = model(inputs)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((outputs * slopes).sum(), parameters)
    gradients = Gradients(dict(zip(names, found, strict=True)), 1e-16)
    known = Known(outputs[0].detach(), slopes, torch.tensor(1e-16, dtype=torch.float64))
    values, steps = back(layers, known, gradients)
    torch.testing.assert_close(values, inputs[0])
    assert [(step.layer, step.constraints) for step in steps] == [
        ("0", "gradient"),
        ("2", "gradient"),
    ]
    assert all(step.residual < 1e-10 for step in steps)
    broken = Gradients({**gradients.values, "0.weight": drawn(7, 5, seed=9)}, 1e-16)
    assert back(layers, known, broken)[1][0].residual > 0.1
    silent = replace(known, slopes=torch.zeros_like(slopes))
    with pytest.raises(NotApplicable, match="the gradient vanishes at layer '2'"):
        back(layers, silent, gradients)


def flat(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=bias))


def test_an_upload_that_is_no_gradient_is_refused_with_the_reason() -> None:
    observation, _ = seen(model=flat())
    layers = chain(observation.model, observation.space)
    assert set(gradients_of(observation, layers).values) == {"1.weight", "1.bias"}
    frozen = replace(observation, update={"1.weight": observation.update["1.weight"]})
    with pytest.raises(NotApplicable, match=r"'1\.bias' is frozen"):
        gradients_of(frozen, layers)
    others = replace(observation, models=(observation.model, flat()))
    with pytest.raises(NotApplicable, match="different models"):
        gradients_of(others, layers)
    several, _ = seen(model=flat(), protocol=FedAvg(epochs=2))
    with pytest.raises(NotApplicable, match="several local steps"):
        gradients_of(several, layers)


def test_one_example_is_inverted_and_of_nothing_there_is_no_confidence() -> None:
    observation, truth = seen(model=flat())
    layers = chain(observation.model, observation.space)
    guess = invert(observation, layers)
    torch.testing.assert_close(guess.inputs, truth)
    assert guess.confidence is not None
    assert float(guess.confidence) == 1
    for value in observation.update.values():
        value.zero_()
    nothing = invert(observation, layers)
    assert not nothing.inputs.any()
    assert nothing.confidence is not None
    assert float(nothing.confidence) == 0


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, and comes back when asked to."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def test_an_attack_is_made_on_the_cpu_wherever_the_upload_is() -> None:
    met: list[Observation] = []

    class Attack:
        @on_cpu
        def reconstruct(self, observation: Observation, _: torch.Generator) -> Reconstruction:
            met.append(observation)
            raise NotApplicable("this is far enough")

    observation, _ = seen(model=flat())
    update = {name: value.as_subclass(Elsewhere) for name, value in observation.update.items()}
    for given in (observation, replace(observation, update=update)):
        with pytest.raises(NotApplicable, match="far enough"):
            Attack().reconstruct(given, rng())
    assert met[0] is observation
    assert met[1].model is not observation.model
    assert {type(value) for value in met[1].update.values()} == {Tensor}
