from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from federated import TOKENS, make_client, rng
from torch import Generator, Tensor

from leakfrontier.adversaries import (
    FedAvg,
    FedSGD,
    LearningToInvert,
    NotApplicable,
    Observation,
    Protocol,
    PublicData,
    Reconstruction,
)
from leakfrontier.adversaries.priors.learning_to_invert import Simulator, hidden_products
from leakfrontier.defenses import DPSGD, Batch, Defense, Noise, SecureAggregation, SignSGD, TopK
from leakfrontier.evaluate.client.client import ThreatModel, make_replay, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

DATA = load_dataset("fashion-mini")
SPACE = DATA.space
LENET = build_model("lenet", SPACE, rng())
PUBLIC = PublicData(SPACE.to_inputs(DATA.test.inputs), DATA.test.targets)
PRIVATE = Batch(SPACE.to_inputs(DATA.train.inputs), DATA.train.targets)
VICTIMS = torch.randperm(len(PRIVATE.inputs), generator=rng(7))[:20]
ATTACK = LearningToInvert(uploads=500, features=1024)
CALLS: list[int] = []


def uploads(
    batches: Sequence[Tensor],
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    clients: int = 1,
    knows_targets: bool = False,
    knows_defense: bool = True,
) -> list[Observation]:
    """Observe clients that share a replay."""
    defense, protocol = defense or Defense(), protocol or FedSGD()
    threat = ThreatModel(knows_targets, knows_defense, PUBLIC)
    client = replace(make_client(LENET, defense, protocol), space=SPACE)
    replay = make_replay(client, threat, rng(3), models=[LENET] * clients)
    seen = []
    for index, rows in enumerate(batches):
        shares = [PRIVATE.at(part) for part in rows.chunk(clients)]
        source = rng(100 + index)
        (upload,) = observe(client, shares, threat, source, replay=replay)
        seen.append(counted(upload.observation))
    return seen


def counted(observation: Observation) -> Observation:
    """Count how often the adversary runs a client."""
    run = observation.release
    assert run is not None

    def counting(inputs: Tensor, targets: Tensor, source: Generator) -> Mapping[str, Tensor]:
        CALLS.append(1)
        return run(inputs, targets, source)

    return replace(observation, release=counting)


def attack(
    observations: Sequence[Observation], attack: LearningToInvert = ATTACK
) -> list[Reconstruction]:
    results = attack.reconstruct_all(observations, [rng(i) for i in range(len(observations))])
    assert all(isinstance(result, Reconstruction) for result in results)
    return [result for result in results if isinstance(result, Reconstruction)]


def error(guess: Tensor, rows: Tensor) -> Tensor:
    difference = SPACE.to_unit(guess) - SPACE.to_unit(PRIVATE.inputs[rows])
    return difference.flatten(1).square().mean(dim=1)


def mean_error(defense: Defense | None = None, **options: bool) -> float:
    results = attack(uploads(VICTIMS.split(1), defense, **options))
    return float(error(torch.cat([result.inputs for result in results]), VICTIMS).mean())


BLIND = float(error(PUBLIC.inputs.mean(dim=0, keepdim=True), VICTIMS).mean())


def test_undefended_victims_are_identified() -> None:
    results = attack(uploads(VICTIMS.split(1)))
    guess = SPACE.to_unit(torch.cat([result.inputs for result in results]))
    pixels = DATA.train.inputs
    others = [DATA.modality.look_alikes(int(i), DATA.train, VICTIMS, 99, rng()) for i in VICTIMS]
    found = metrics.identified(guess, pixels[VICTIMS], pixels[torch.stack(others)])
    assert int(found.sum()) >= 10  # chance is 0.2
    labels = torch.cat([result.targets for result in results if result.targets is not None])
    assert torch.equal(labels, PRIVATE.targets[VICTIMS])
    assert all(result.objective is None for result in results)


@pytest.mark.parametrize(
    "defense",
    [SignSGD(scale=False), TopK(0.01, error_feedback=False)],
    ids=["sign", "prune"],
)
def test_knowing_the_defense_is_what_breaks_it(defense: Defense) -> None:
    informed, ignorant = (mean_error(defense, knows_defense=knows) for knows in (True, False))
    assert informed < 0.7 * BLIND
    assert informed < 0.7 * ignorant


def test_it_learns_through_noise_and_what_noise_to_expect() -> None:
    assert mean_error(Noise(0.1)) < 0.7 * BLIND
    assert mean_error(Noise(1e4)) == pytest.approx(BLIND, rel=0.1)
    assert mean_error(Noise(1e4), knows_defense=False) > 1.5 * BLIND


def test_one_network_serves_all_victims_of_a_client() -> None:
    counts = []
    for victims in (1, 6):
        CALLS.clear()
        attack(uploads(VICTIMS[:victims].split(1)))
        counts.append(len(CALLS))
    assert counts[0] == counts[1] > 0


def test_guesses_of_a_batch_come_with_their_labels() -> None:
    rows = torch.stack([(PRIVATE.targets == label).nonzero()[0, 0] for label in (9, 1, 8)])
    for granted in (False, True):
        (result,) = attack(uploads([rows], knows_targets=granted))
        assert result.targets is not None
        assert result.targets.tolist() == [1, 8, 9]
        in_order = rows[PRIVATE.targets[rows].argsort()]
        blind = error(PUBLIC.inputs.mean(dim=0, keepdim=True), in_order).mean()
        assert error(result.inputs, in_order).mean() < 0.7 * blind


def test_granted_labels_help_where_the_upload_hides_them() -> None:
    noise = Noise(10.0)
    assert mean_error(noise, knows_targets=True) < mean_error(noise)


@pytest.mark.parametrize(
    ("protocol", "clients", "defense"),
    [(FedAvg(epochs=1, batch_size=1, lr=0.1), 1, None), (FedSGD(), 2, SecureAggregation(2))],
    ids=["weight update", "sum of clients"],
)
def test_other_uploads_are_learned_as_well(
    protocol: Protocol, clients: int, defense: Defense | None
) -> None:
    batches = VICTIMS.split(2)
    few = replace(ATTACK, uploads=300)  # these clients cannot be vectorised
    guessed = attack(uploads(batches, defense, protocol, clients), few)
    matched = []
    for result, rows in zip(guessed, batches, strict=True):
        guess, truth = SPACE.to_unit(result.inputs), SPACE.to_unit(PRIVATE.inputs[rows])
        matched.append(result.inputs[metrics.match(guess, truth)])
    assert error(torch.cat(matched), VICTIMS).mean() < 0.7 * BLIND


def test_the_same_generators_give_the_same_guesses() -> None:
    (observation,) = uploads([VICTIMS[:1]], Noise(0.1))
    first, second = (ATTACK.reconstruct(observation, rng(5)).inputs for _ in range(2))
    assert torch.equal(first, second)


def test_the_kernel_is_that_of_a_wide_network() -> None:
    left, right = torch.randn(4, 30, generator=rng()), torch.randn(3, 30, generator=rng(1))
    width, draws, layers = 4000, rng(2), [left, right]
    for _ in range(2):
        size = layers[0].shape[1]
        weights = torch.randn(size, width, generator=draws) * (2 / size) ** 0.5
        layers = [(layer @ weights).relu() for layer in layers]
    expected = layers[0] @ layers[1].T / width
    torch.testing.assert_close(hidden_products(left, right).float(), expected, rtol=0.1, atol=0.05)


def test_hashing_keeps_inner_products() -> None:
    (observation,) = uploads([VICTIMS[:1]])
    simulator = Simulator.of(observation, 1024, rng())
    draws = rng(9)
    stack = {
        name: torch.randn(2, *value.shape, generator=draws)
        for name, value in observation.update.items()
    }
    vectors = torch.cat([value.flatten(1) for value in stack.values()], dim=1)
    hashed = simulator.features(stack, None)
    assert hashed.shape == (2, 1024)
    scale = float(vectors.square().sum(dim=1).mean())
    torch.testing.assert_close(
        hashed @ hashed.T / scale, vectors @ vectors.T / scale, rtol=0, atol=0.2
    )


def test_what_it_cannot_do_is_not_applicable() -> None:
    (one,) = uploads([VICTIMS[:1]])
    few = PublicData(PUBLIC.inputs[:19], PUBLIC.targets[:19])
    cases = {
        "no public data": replace(one, public=None),
        "no client code is granted": replace(one, release=None),
        "tokens": replace(one, space=TOKENS),
        "has 9 examples": replace(one, batch_size=9),
        "19 public examples are too few": replace(one, public=few),
    }
    for reason, observation in cases.items():
        with pytest.raises(NotApplicable, match=reason):
            ATTACK.reconstruct(observation, rng())


@pytest.mark.parametrize("name", ["uploads", "features", "max_examples"])
def test_rejects_bad_parameters(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        LearningToInvert(**{name: 0})


def test_clients_that_need_gradients_can_be_run() -> None:
    defended = uploads(VICTIMS[:2].split(1), DPSGD(noise_multiplier=0.1))
    results = LearningToInvert(uploads=30).reconstruct_all(defended, [rng(i) for i in range(2)])
    assert all(isinstance(result, Reconstruction) for result in results)
