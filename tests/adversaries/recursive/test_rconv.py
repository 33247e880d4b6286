from dataclasses import replace

import pytest
import torch
from federated import rng
from recursive import SHAPE, attacked, seen, smooth
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    RCONV,
    FedAvg,
    FedSGD,
    ImageSpace,
    NotApplicable,
    Observation,
    WaveSpace,
)
from leakfrontier.adversaries.recursive.constraints import count
from leakfrontier.adversaries.recursive.layer_chain import chain
from leakfrontier.defenses import Batch, Defense, Noise
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality import metrics


@pytest.mark.parametrize(
    "activation", ["sigmoid", "tanh", "arctan", "softplus", "relu", "leaky_relu"]
)
@pytest.mark.parametrize("name", ["lenet_rconv", "lenet_x"])
def test_one_example_is_recovered_exactly(name: str, activation: str) -> None:
    assert attacked(*seen(name, activation=activation), RCONV()) > 120


@pytest.mark.parametrize("name", ["cnn6_x", "lenet_relu"])
def test_relus_are_no_obstacle(name: str) -> None:
    assert attacked(*seen(name), RCONV()) > 120


def test_single_precision_is_enough() -> None:
    assert attacked(*seen("lenet_rconv", precision=torch.float32), RCONV()) > 60


def test_one_kind_of_constraints_per_layer_as_published() -> None:
    observation, truth = seen("lenet_rconv")
    assert attacked(observation, truth, RCONV(constraints="either")) > 60


def test_residuals_say_where_noise_broke_it() -> None:
    exact, _ = seen()
    noisy, truth = seen(defense=Noise(scale=1e-3))
    clean = RCONV().reconstruct(exact, rng()).residuals
    broken = RCONV().reconstruct(noisy, rng())
    assert clean is not None
    assert broken.residuals is not None
    assert set(clean) == {"0", "2", "4", "6"}
    assert max(clean.values()) < 1e-8
    assert max(broken.residuals.values()) > 1e-3
    assert broken.inputs.isfinite().all()
    assert float(metrics.psnr(broken.inputs, truth)[0]) < 40


def test_a_perceptron_gives_its_input_away() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 20), nn.GELU(), nn.Linear(20, 10))
    assert attacked(*seen(model=model), RCONV()) > 120


def test_weights_and_gradients_together_where_neither_is_enough() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(640, 10)
    )
    counts = count(chain(model, ImageSpace(SHAPE, 10))[0])
    assert counts.enough
    assert not counts.by_weight
    assert not counts.by_gradient
    assert attacked(*seen(model=model), RCONV()) > 60


def test_sound_is_recovered_too() -> None:
    space = WaveSpace((1, 128), 10)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=4, padding=4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 10)
    ).double()
    wave = torch.rand(1, 1, 128, generator=rng(), dtype=torch.float64)
    client = Client(model, cross_entropy, Defense(), FedSGD(), space)
    (upload,) = observe(client, [Batch(wave, torch.tensor([1]))], ThreatModel(), rng(2))
    guess = RCONV().reconstruct(upload.observation, rng())
    assert guess.inputs.shape == wave.shape
    assert float((guess.inputs - wave).abs().max()) < 1e-6


def test_too_few_constraints_are_counted() -> None:
    space = ImageSpace(SHAPE, 10)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))
    assert model(torch.zeros(1, *space.shape)).shape == (1, 10)
    observation, _ = seen(model=model)
    with pytest.raises(NotApplicable, match=r"54 by its gradient.* for 768 unknowns"):
        RCONV().reconstruct(observation, rng())


def test_what_does_not_apply_is_said() -> None:
    def refused(observation: Observation, reason: str) -> None:
        with pytest.raises(NotApplicable, match=reason):
            RCONV().reconstruct(observation, rng())

    flat = nn.Sequential(nn.Flatten(), nn.Linear(768, 10, bias=False))
    refused(seen(model=flat)[0], "no bias")
    refused(seen(activation="gelu")[0], "not a function of its output")
    refused(seen(protocol=FedAvg(epochs=2))[0], "local steps")
    refused(seen("lenet_x", examples=4)[0], "weight constraints")
    refused(seen("lenet_relu", examples=4)[0], "no inverse")


def test_a_gradient_of_nothing_gives_nothing() -> None:
    observation, _ = seen()
    for value in observation.update.values():
        value.zero_()
    guess = RCONV().reconstruct(observation, rng())
    assert not guess.inputs.any()
    assert guess.confidence is not None
    assert not guess.confidence.any()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="constraints must be"):
        RCONV(constraints="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="separation must be"):
        RCONV(separation="none")  # type: ignore[arg-type]


def batch_network(
    classes: int, kernel: int = 3, filters: tuple[int, int] = (16, 20)
) -> nn.Sequential:
    """Return convolutions with more outputs than inputs, and saturated logits."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(
            nn.Conv2d(3, filters[0], 5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(*filters, kernel, padding=kernel // 2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(filters[1] * 64, classes),
        )
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def test_a_batch_with_distinct_labels_is_recovered() -> None:
    observation, truth = seen(examples=8, classes=20, model=batch_network(20))
    guess = RCONV().reconstruct(observation, rng())
    assert guess.confidence is not None
    assert guess.confidence.sum() == len(guess.inputs) >= 7
    matched = guess.inputs[metrics.match(guess.inputs, truth)]
    assert (metrics.psnr(matched, truth) > 60).sum() == len(guess.inputs)


def test_peeling_finds_more_than_rows() -> None:
    observation, _ = seen(examples=14, classes=12, model=batch_network(12))
    rows = RCONV(separation="rows").reconstruct(observation, rng())
    peeled = RCONV().reconstruct(observation, rng())
    assert len(peeled.inputs) > len(rows.inputs)
    assert peeled.confidence is not None
    assert peeled.confidence.all()


def test_gradients_of_the_whole_batch_lose_less_than_weights() -> None:
    observation, truth = seen("lenet_ex", examples=4, classes=20)
    worst = {}
    for separation in ("rows", "peeling"):
        guess = RCONV(separation=separation).reconstruct(observation, rng()).inputs
        worst[separation] = float(metrics.psnr(guess[metrics.match(guess, truth)], truth).min())
    assert worst["peeling"] > worst["rows"] + 10


def alike(labels: list[int], classes: int = 12) -> tuple[Observation, Tensor]:
    """Return the gradient of images that all have one saturated prediction, and these labels."""
    model = batch_network(classes, 5, (32, 40))
    space, head = ImageSpace(SHAPE, classes), model[-1]
    assert isinstance(head, nn.Linear)
    head.bias.data[0] += 1e4
    client = Client(model.double(), cross_entropy, Defense(), FedSGD(), space)
    images = smooth(len(labels))
    (upload,) = observe(client, [Batch(images, torch.tensor(labels))], ThreatModel(), rng(2))
    return upload.observation, images


@pytest.mark.parametrize("labels", [[1, 3, 3], [3, 3]])
def test_examples_of_one_label_and_prediction_are_told_apart(labels: list[int]) -> None:
    observation, truth = alike(labels)
    peeled = RCONV(separation="peeling").reconstruct(observation, rng())
    assert peeled.confidence is not None
    assert peeled.confidence.sum() == labels.count(1)
    guess = RCONV().reconstruct(observation, rng())
    assert guess.confidence is not None
    assert guess.confidence.sum() == len(truth)
    matched = guess.inputs[metrics.match(guess.inputs, truth)]
    assert float(metrics.psnr(matched, truth).min()) > 60


def test_what_cannot_be_told_apart_is_not_made_up() -> None:
    observation, _ = alike([1, *[2] * 12])  # more unknowns than the last convolution has equations
    guess = RCONV().reconstruct(observation, rng())
    assert len(guess.inputs) == 1


def test_the_sum_of_clients_is_a_batch() -> None:
    observation, truth = seen(examples=4, classes=20, model=batch_network(20))
    halves = replace(observation, protocol=replace(observation.protocol, clients=2))
    halves = replace(
        halves,
        models=(observation.model,) * 2,
        update={name: 2 * value for name, value in observation.update.items()},
    )
    guess = RCONV().reconstruct(halves, rng())
    matched = guess.inputs[metrics.match(guess.inputs, truth)]
    assert float(metrics.psnr(matched, truth).min()) > 60
    others = replace(halves, models=(observation.model, batch_network(20).double()))
    with pytest.raises(NotApplicable, match="different models"):
        RCONV().reconstruct(others, rng())
