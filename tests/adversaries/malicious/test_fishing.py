from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federated import SPACE, TOKENS, Sum, batch, make_client, mlp, observed, psnr, rng, seeded
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from leakfrontier.adversaries import (
    FedAvg,
    FedSGD,
    Fishing,
    InvertingGradients,
    NotApplicable,
    Observation,
    PublicData,
    Round,
)
from leakfrontier.adversaries.malicious.fishing import best_query, caught
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.evaluate.client.client import ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.models.models import build_model

ATTACK = Fishing(iterations=200, total_variation=0.0)
FASHION = load_dataset("fashion-mini")
PUBLIC = PublicData(FASHION.space.to_inputs(FASHION.test.inputs), FASHION.test.targets)
PRIVATE = Batch(FASHION.space.to_inputs(FASHION.train.inputs), FASHION.train.targets)


def crafted(model: nn.Module, size: int = 8, clients: int = 1) -> nn.Module:
    known = Round(SPACE, FedSGD(), clients, size)
    return ATTACK.craft(model, known, rng()).models[0]


def target_of(model: nn.Module) -> int:
    return caught(observed(model, batch(1))).target


def with_labels(*labels: int) -> Batch:
    return Batch(batch(len(labels)).inputs, torch.tensor(labels))


def flat(observation: Observation) -> Tensor:
    return torch.cat([value.flatten() for value in caught(observation).body.values()])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_class_fishing_counts_those_of_the_class_and_gives_their_mean_feature(count: int) -> None:
    model = crafted(mlp())
    other, target = (target_of(model) + 1) % 10, target_of(model)
    share = with_labels(*[target] * count, *[other] * (8 - count))
    catch = caught(observed(model, share))
    assert catch.examples == pytest.approx(count, abs=1e-4)
    assert any(value.any() for value in catch.body.values()) == (count > 0)
    if count:
        assert isinstance(model, nn.Sequential)
        features = model[:-1](share.inputs[:count]).mean(dim=0)
        torch.testing.assert_close(catch.feature, features, rtol=1e-4, atol=1e-5)


def fished(defense: Defense | None = None) -> tuple[Observation, Batch]:
    """Return an upload of eight examples with one of the class that is fished for, the first."""
    model = crafted(mlp())
    target = target_of(model)
    share = with_labels(target, *[(target + 1 + i % 9) % 10 for i in range(7)])
    return observed(model, share, defense), share


def test_the_gradient_is_that_of_the_one_example() -> None:
    observation, share = fished()
    alone = observed(observation.model, share.at(torch.tensor([0])))
    assert cosine_similarity(flat(observation), flat(alone), dim=0) > 0.9999


def test_the_example_is_recovered_where_the_honest_server_sees_a_mixture() -> None:
    observation, share = fished()
    guess = ATTACK.reconstruct(observation, rng())
    assert guess.targets is not None
    assert guess.targets.tolist() == share.targets[:1].tolist()
    honest = observed(mlp(), share, threat=ThreatModel(knows_targets=True))
    mixture = InvertingGradients(iterations=200, total_variation=0.0).reconstruct(honest, rng())
    reached = psnr(guess, share.inputs[:1])[0]
    assert reached > 30
    assert reached > psnr(mixture, share.inputs)[0] + 8


def test_noise_hides_it() -> None:
    observation, share = fished(DPSGD(noise_multiplier=1.0))
    assert psnr(ATTACK.reconstruct(observation, rng()), share.inputs[:1]).max() < 10


def test_nothing_caught_is_no_guess() -> None:
    model = crafted(mlp())
    share = with_labels(*[(target_of(model) + 1) % 10] * 4)
    assert ATTACK.reconstruct(observed(model, share), rng()).inputs.shape == (0, *SPACE.shape)


def test_a_sum_of_clients_is_one_batch() -> None:
    model = crafted(mlp(), 2, clients=3)
    target = target_of(model)
    labels = [[target + 1, target + 2], [target, target + 3], [target + 1, target + 1]]
    shares = [Batch(batch(2, i).inputs, torch.tensor(y) % 10) for i, y in enumerate(labels)]
    client = make_client(model, Sum())
    (upload,) = observe(client, shares, ThreatModel(), rng(1), models=[model] * 3)
    assert caught(upload.observation).examples == pytest.approx(1, abs=1e-4)
    guess = ATTACK.reconstruct(upload.observation, rng())
    assert psnr(guess, shares[1].inputs[:1]).min() > 30


def uploads(query: str, size: int, count: int) -> tuple[float, list[Upload]]:
    """Return what a query promises, and what it catches of batches of Fashion-MNIST."""
    space = FASHION.space
    model = build_model("lenet", space, rng(), activation="relu")
    assert isinstance(model, nn.Sequential)
    chance = best_query(model[:-1](PUBLIC.inputs).detach(), PUBLIC.targets, size).chance
    known = Round(space, FedSGD(), 1, size, PUBLIC if query == "feature" else None)
    (sent,) = ATTACK.craft(model, known, rng()).models
    client = replace(make_client(sent), space=space)
    rows = [torch.randperm(len(PRIVATE.inputs), generator=rng(i))[:size] for i in range(count)]
    shares = [PRIVATE.at(part) for part in rows]
    return chance, observe(client, shares, ThreatModel(), rng(1))


def alone(upload: Upload) -> bool:
    """Return whether the gradient that was fished is that of one of the private examples."""
    observation, target = upload.observation, caught(upload.observation).target
    single = [
        replace(observation, update=observation.simulate(x[None], y[None]))
        for x, y in zip(*upload.truth, strict=True)
        if y == target
    ]
    seen = flat(observation)
    return any(cosine_similarity(seen, flat(one), dim=0) > 0.999 for one in single)


def test_feature_fishing_catches_one_of_many_as_often_as_public_data_say() -> None:
    chance, batches = uploads("feature", size=64, count=30)
    assert 0.3 < chance < 0.4
    assert sum(map(alone, batches)) / 30 == pytest.approx(chance, abs=0.2)
    _, batches = uploads("class", size=64, count=10)
    assert not any(map(alone, batches))  # a class has about six examples


def test_the_query_with_the_best_chance() -> None:
    features = torch.rand(1000, 3, generator=rng())
    targets = (torch.arange(1000) % 10).sort().values
    assert best_query(features, targets, 10).feature is None  # one of a class, as it is
    features[:, 1] += 10.0 * (targets == 4)  # nothing of other classes is beyond any cut
    found = best_query(features, targets, 50)
    assert (found.target, found.feature, found.side) == (4, 1, 1)
    assert found.chance == pytest.approx(50 * 0.02 * 0.98**49, rel=0.1)
    features[:, 1] = 0.0  # off
    features[:20, 1] = 1.0 + torch.arange(20) / 20
    found = best_query(features, targets, 50)
    assert (found.target, found.feature) == (0, 1)


def test_what_cannot_be_fished_is_not_applicable() -> None:
    headless = nn.Sequential(mlp(), nn.Softmax(dim=1))
    unbiased = nn.Sequential(nn.Flatten(), nn.Linear(192, 10, bias=False))
    known = Round(SPACE, FedSGD(), 1, 8)
    local = replace(known, protocol=FedAvg(epochs=2, batch_size=8))
    cases: list[tuple[str, nn.Module, Round]] = [
        ("tokens", mlp(), replace(known, space=TOKENS)),
        ("a single example", mlp(), replace(known, batch_size=1)),
        ("over 2 local steps", mlp(), local),
        ("does not end in a linear layer", headless, known),
        ("has no bias", seeded(lambda: unbiased), known),
    ]
    for reason, model, round in cases:
        with pytest.raises(NotApplicable, match=reason):
            ATTACK.craft(model, round, rng())
    with pytest.raises(NotApplicable, match="was not crafted"):
        ATTACK.reconstruct(observed(mlp(), batch(2)), rng())


def test_the_given_model_is_left_as_it_is() -> None:
    model = mlp()
    assert crafted(model) is not model
    torch.testing.assert_close(model.state_dict(), mlp().state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("class_multiplier", 0.0), ("feature_multiplier", -1.0), ("iterations", 0), ("restarts", 0)],
)
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        Fishing(**{name: value})  # type: ignore[arg-type]
