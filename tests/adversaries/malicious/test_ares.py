from __future__ import annotations

import pytest
import torch
from federated import SPACE, TOKENS, make_client, rng, seeded
from torch import Tensor, nn

from leakfrontier.adversaries import (
    ARES,
    FedAvg,
    FedSGD,
    NotApplicable,
    Protocol,
    PublicData,
    Reconstruction,
    Round,
    WaveSpace,
)
from leakfrontier.adversaries.malicious.imprint import expected_recovery
from leakfrontier.adversaries.malicious.sparse_recovery import (
    Measurement,
    inverse_cosine_transform,
    least_squares,
    natural_weights,
)
from leakfrontier.defenses import DPSGD, Batch, Defense, Noise, SecureAggregation
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.modality import metrics

Activation = type[nn.Module]


def photos(count: int, seed: int = 0) -> Tensor:
    """Return inputs with the spectrum of photos."""
    drawn = torch.randn(count, *SPACE.shape, generator=rng(seed)) / natural_weights(SPACE.shape)
    signals = inverse_cosine_transform(drawn)
    return SPACE.clamp(signals / signals.std())


def cnn(kernels: int = 12, rows: int = 256, activation: Activation = nn.ReLU) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, kernels, 3, padding=1),
            activation(),
            nn.Conv2d(kernels, kernels + 2, 3, padding=1),
            activation(),
            nn.Flatten(),
            nn.Linear((kernels + 2) * 64, rows),
            activation(),
            nn.Linear(rows, 10),
        )
    )


def mlp() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    )


def upload(
    attack: ARES,
    model: nn.Module,
    examples: int = 8,
    *,
    clients: int = 1,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
) -> Upload:
    client = make_client(model, defense, protocol)
    public = PublicData(photos(256, seed=9), torch.zeros(256, dtype=torch.long))
    known = Round(SPACE, client.protocol, clients, examples, public)
    crafted = attack.craft(model, known, rng())
    labels = torch.arange(examples) % 10
    shares = [Batch(photos(examples, seed), labels) for seed in range(clients)]
    sent = {"models": crafted.models, "kept": crafted.kept}
    (seen,) = observe(client, shares, ThreatModel(), rng(1), **sent)
    return seen


def psnr(guess: Reconstruction, truth: Tensor) -> Tensor:
    """Return the PSNR of each example; what is missing is grey."""
    missing = torch.zeros(max(0, len(truth) - len(guess.inputs)), *SPACE.shape)
    pixels = SPACE.to_unit(torch.cat([guess.inputs, missing]).double())
    private = SPACE.to_unit(truth.double())
    matched = pixels[metrics.match(pixels, private)]
    return -10 * (matched - private).square().flatten(1).mean(1).log10()


def attacked(seen: Upload, attack: ARES) -> Tensor:
    return psnr(attack.reconstruct(seen.observation, rng()), seen.truth.inputs)


def alone(seen: Upload) -> Tensor:
    """Return which examples have a bin of their own."""
    model = seen.observation.model
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        bins = (model[:7](seen.truth.inputs) > 0).sum(dim=1)
    return (bins[:, None] == bins).sum(dim=1) == 1


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.ELU])
def test_what_is_alone_in_its_bin_is_recovered(activation: Activation) -> None:
    seen = upload(ARES(), cnn(activation=activation))
    assert alone(seen).sum() >= 6
    assert attacked(seen, ARES())[alone(seen)].min() > 60


def test_flat_pictures_can_be_inverted_whatever_the_filters() -> None:
    shape = (3, 24, 24)
    colours = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 3)[:13]
    inputs = colours[:, :, None, None] + 0.01 * torch.randn(13, *shape, generator=rng())
    for seed in range(5):
        (model,) = ARES().craft(cnn(), Round(SPACE, FedSGD(), 1, 8), rng(seed)).models
        first = model.get_submodule("0")
        assert isinstance(first, nn.Conv2d)
        measurement = Measurement(first, shape)
        found = least_squares(measurement, measurement.forward(inputs).clamp(min=0))
        assert (found - inputs).abs().max() < 1e-3


def test_the_share_that_is_alone_is_that_of_independent_examples() -> None:
    shares = [alone(upload(ARES(), cnn(rows=128), 64)).double().mean()]
    attack = ARES()
    known = Round(SPACE, FedSGD(), 1, 64, PublicData(photos(512, 9), torch.zeros(512)))
    (model,) = attack.craft(cnn(rows=128), known, rng()).models
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        bins = [(model[:7](photos(64, seed)) > 0).sum(dim=1) for seed in range(20)]
    shares = [((b[:, None] == b).sum(dim=1) == 1).double().mean() for b in bins]
    assert torch.stack(shares).mean() == pytest.approx(expected_recovery(64, 128), abs=0.05)


def test_a_mixture_has_less_confidence() -> None:
    attack = ARES()
    seen = upload(attack, cnn(rows=16), 8)
    guess = attack.reconstruct(seen.observation, rng())
    assert guess.confidence is not None
    single = int(alone(seen).sum())
    assert 0 < single < 8
    assert (guess.confidence[:single] > 0.999).all()
    assert (guess.confidence[single:] < 0.95).all()


def test_the_papers_bins_and_no_public_data_do_too() -> None:
    for attack in (ARES(bins="paper"), ARES()):
        model = cnn()
        known = Round(SPACE, FedSGD(), 1, 8)
        models = attack.craft(model, known, rng()).models
        share = Batch(photos(8), torch.arange(8))
        (seen,) = observe(make_client(model), [share], ThreatModel(), rng(1), models=models)
        assert alone(seen).sum() >= 4
        assert attacked(seen, attack)[alone(seen)].min() > 60


def test_a_perceptron_gives_away_more_than_its_bins() -> None:
    seen = upload(ARES(), mlp(), 32)
    assert (attacked(seen, ARES()) > 60).double().mean() > 0.95


def test_noise_of_dpsgd_leaves_nothing() -> None:
    for model in (cnn(), mlp()):
        seen = upload(ARES(), model, defense=DPSGD(noise_multiplier=1.0, max_grad_norm=1.0))
        assert attacked(seen, ARES()).max() < 22


def test_little_noise_costs_little() -> None:
    defense = Noise(scale=1e-7, distribution="laplace")
    seen = upload(ARES(), cnn(), defense=defense)
    assert attacked(seen, ARES())[alone(seen)].min() > 40
    naive = ARES(clearance=0.0)
    assert attacked(seen, naive).median() < attacked(seen, ARES()).median() - 10


def test_local_steps() -> None:
    seen = upload(ARES(), cnn(), protocol=FedAvg(epochs=2, batch_size=4, lr=0.01))
    assert (attacked(seen, ARES()) > 30).sum() >= 6


def test_sums_of_clients_are_told_apart() -> None:
    summed = SecureAggregation(clients=2)
    own_rows = ARES(separation="rows")
    seen = upload(own_rows, cnn(), 4, clients=2, defense=summed)
    assert (attacked(seen, own_rows) > 40).sum() >= 6
    seen = upload(ARES(), cnn(kernels=24), 4, clients=2, defense=summed)
    assert (attacked(seen, ARES()) > 40).sum() >= 6


def test_fewer_kernels_give_likenesses_and_lifted_ones_the_examples() -> None:
    summed = SecureAggregation(clients=2)
    medians = []
    for attack in (ARES(), ARES(lift=3.0)):
        seen = upload(attack, cnn(kernels=6), 4, clients=2, defense=summed)
        medians.append(float(attacked(seen, attack).median()))
    assert 18 < medians[0] < 45
    assert medians[1] > 90  # the bin alone tells the scale to some 60 dB, d exactly


def test_sound() -> None:
    space = WaveSpace(shape=(1, 200), classes=4, mean=(0.5,), std=(0.1,))
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv1d(1, 6, 9, padding=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1200, 128),
            nn.ReLU(),
            nn.Linear(128, 4),
        )
    )
    waves = torch.randn(4, 1, 200, generator=rng())
    client = Client(model, nn.functional.cross_entropy, Defense(), FedSGD(), space)
    models = ARES().craft(model, Round(space, FedSGD(), 1, 4), rng()).models
    share = Batch(space.clamp(waves), torch.arange(4))
    (seen,) = observe(client, [share], ThreatModel(), rng(1), models=models)
    guess = ARES().reconstruct(seen.observation, rng()).inputs
    nearest = torch.cdist(seen.truth.inputs.flatten(1), guess.flatten(1)).amin(dim=1)
    assert (nearest < 1e-3).sum() >= 3


def layers(*between: nn.Module, bias: bool = True, stride: int = 1) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            *between,
            nn.Conv2d(6, 6, 3, padding=1, stride=stride),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(32, bias=bias),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (layers(nn.ReLU(), bias=False), "has no bias for thresholds"),
        (layers(nn.ReLU(), stride=2), "stride"),
        (layers(nn.ReLU(), nn.MaxPool2d(2)), "pooling, normalisation or another function"),
        (layers(nn.GroupNorm(2, 6), nn.ReLU()), "pooling, normalisation or another function"),
        (layers(nn.Tanh()), "pooling, normalisation or another function"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), "needs 3 linear layers"),
        (
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(216, 10)),
            "needs 2 linear layers",
        ),
    ],
)
def test_where_it_does_not_apply(model: nn.Module, reason: str) -> None:
    model(torch.zeros(1, *SPACE.shape))  # lazy layers
    with pytest.raises(NotApplicable, match=reason):
        ARES().craft(model, Round(SPACE, FedSGD(), 1, 4), rng())


def test_tokens_and_too_many_clients_are_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="token"):
        ARES().craft(mlp(), Round(TOKENS, FedSGD(), 1, 4), rng())
    with pytest.raises(NotApplicable, match="do not suffice"):
        ARES().craft(cnn(), Round(SPACE, FedSGD(clients=13), 13, 4), rng())


def test_the_given_model_is_left_as_it_is() -> None:
    model = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ARES().craft(model, Round(SPACE, FedSGD(), 1, 4), rng())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": "mine"}, "bins must be"),
        ({"separation": "mine"}, "separation must be"),
        ({"lift": -1.0}, "lift must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"iterations": 0}, "iterations must be"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ARES(**options)  # type: ignore[arg-type]
