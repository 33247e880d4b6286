"""LAMP and GRAB on one observation each: what both have in common."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from federated import batch, mlp, rng
from federated import observed as observed_images
from small_language import PADDING, Task, loss_of, observed, sentences, space_of, trained
from torch import Tensor

from leakfrontier.adversaries import (
    GRAB,
    LAMP,
    FedAvg,
    FedSGD,
    NotApplicable,
    Observation,
    PublicData,
    Reconstruction,
)
from leakfrontier.adversaries.matching.matching import evaluation, stacked
from leakfrontier.adversaries.text.texts import Texts
from leakfrontier.adversaries.text.token_matching import (
    TokenMatching,
    _apart,
    _Search,
    _side_by_side,
    stepwise_decay,
)
from leakfrontier.defenses import Batch, Defense, Noise
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe

SHORT: dict[str, Any] = {"iterations": 6, "starts": 4, "orders": 6, "reorder_every": 2}
ATTACKS = [LAMP(**SHORT), GRAB(**SHORT, rounds=2)]
both = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)


def next_tokens(truth: Batch, **options: object) -> Observation:
    return observed(trained("next-token"), space_of("next-token"), truth, **options)  # type: ignore[arg-type]


def of_one_client(task: Task) -> list[Observation]:
    """Return what is seen of sentences of six and seven words, which one function replays."""
    space = space_of(task)
    model = trained(task) if task == "next-token" else trained(task, steps=10)
    batches = [sentences(1, seed) for seed in (2, 3, 4)]
    assert {int((b.inputs != PADDING).sum()) for b in batches} == {6, 7}
    shares = [Batch(b.inputs, b.inputs if task == "next-token" else b.targets) for b in batches]
    client = Client(model, loss_of(space), Defense(), FedSGD(), space)
    uploads = observe(client, shares, ThreatModel(knows_targets=task == "classification"), rng(1))
    return [upload.observation for upload in uploads]


@both
def test_guesses_are_sentences_with_padding(attack: TokenMatching) -> None:
    truth = sentences(2, 3)
    guess = attack.reconstruct(next_tokens(truth), rng())
    assert guess.inputs.shape == truth.inputs.shape
    assert guess.inputs.dtype == torch.int64
    assert guess.targets is not None
    assert torch.equal(guess.targets, guess.inputs)
    real = space_of("next-token").real(guess.inputs)
    assert (guess.inputs[~real] == PADDING).all()


@both
def test_the_same_generator_gives_the_same_guess(attack: TokenMatching) -> None:
    observation = next_tokens(sentences(1, 3))
    first, second = (attack.reconstruct(observation, rng(2)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert first.objective == second.objective


@both
@pytest.mark.parametrize("task", ["next-token", "classification"])
def test_observations_of_one_client_are_attacked_together_as_each_alone(
    attack: TokenMatching, task: Task
) -> None:
    observations = of_one_client(task)
    rngs = [rng(number) for number in range(len(observations))]
    for number, guess in enumerate(attack.reconstruct_all(observations, rngs)):
        alone = attack.reconstruct(observations[number], rng(number))
        assert isinstance(guess, Reconstruction)
        assert torch.equal(guess.inputs, alone.inputs)
        assert guess.objective == pytest.approx(alone.objective, rel=1e-5)


@both
@pytest.mark.parametrize("task", ["next-token", "classification"])
def test_the_slopes_of_a_stack_are_those_of_each_guess(attack: TokenMatching, task: Task) -> None:
    searches = [
        _Search(texts, rng(), {"inputs": texts.settled(noise.unsqueeze(0))})
        for texts in (
            Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
            for observation in of_one_client(task)
        )
        for noise in [texts.scale * torch.randn(*texts.known.shape, 48, generator=rng())]
    ]

    def slopes(part: Sequence[_Search]) -> list[Tensor]:
        observed = stacked([search.texts.observation.update for search in part])
        compared = {name: observed[name] for name in part[0].texts.names}
        evaluate = evaluation(attack._replays(part, observed), attack.distance(), compared)
        _, found = evaluate(_side_by_side([search.start for search in part]))
        return [row["inputs"] for row in _apart(found, part)]

    for search, stack in zip(searches, slopes(searches), strict=True):
        torch.testing.assert_close(stack, *slopes([search]), rtol=1e-3, atol=1e-5)


@both
def test_the_objective_is_lowest_at_the_truth(attack: TokenMatching) -> None:
    truth, other = sentences(2, 3), sentences(2, 4)
    observation = next_tokens(truth)
    at_truth = attack.objective(observation, truth.inputs, truth.inputs)
    shuffled = truth.inputs.flip(0)
    assert attack.objective(observation, shuffled, shuffled) == pytest.approx(at_truth, abs=1e-4)
    assert attack.objective(observation, other.inputs, other.inputs) > at_truth + 0.1
    guess = attack.reconstruct(observation, rng())
    assert guess.objective == pytest.approx(
        attack.objective(observation, guess.inputs, guess.inputs)
    )


@both
def test_several_local_steps_are_replayed(attack: TokenMatching) -> None:
    truth = sentences(2, 3)
    protocol = FedAvg(epochs=2, batch_size=1, lr=0.01)
    observation = next_tokens(truth, protocol=protocol)
    assert attack.objective(observation, truth.inputs, truth.inputs) < 0.1
    assert isinstance(attack.reconstruct(observation, rng()), Reconstruction)


@both
def test_noise_is_no_hindrance_to_a_guess(attack: TokenMatching) -> None:
    guess = attack.reconstruct(next_tokens(sentences(1, 3), defense=Noise(scale=0.1)), rng())
    assert guess.inputs.shape == (1, 9)


@both
def test_labels_are_taken_from_public_texts_if_nothing_shows_them(attack: TokenMatching) -> None:
    model, space = trained("classification", steps=10), space_of("classification")
    truth = sentences(1, 3)
    with pytest.raises(NotApplicable, match="labels"):
        attack.reconstruct(observed(model, space, truth), rng())
    threat = ThreatModel(public=PublicData(*sentences(100, 7)))
    found = [
        attack.reconstruct(observed(model, space, sentences(1, seed), threat=threat), rng()).targets
        for seed in range(4)
    ]
    true = [sentences(1, seed).targets for seed in range(4)]
    assert torch.equal(torch.cat([*found]), torch.cat(true))  # type: ignore[list-item]


@both
def test_is_not_applicable_to_other_inputs_and_models(attack: TokenMatching) -> None:
    with pytest.raises(NotApplicable, match="not tokens"):
        attack.reconstruct(observed_images(mlp(), batch(1)), rng())
    no_transformer = replace(observed_images(mlp(), batch(1)), space=space_of("next-token"))
    with pytest.raises(NotApplicable, match="not a transformers model"):
        attack.reconstruct(no_transformer, rng())


@pytest.mark.parametrize("kind", [LAMP, GRAB])
@pytest.mark.parametrize(
    "options",
    [
        {"iterations": 0},
        {"starts": 0},
        {"orders": 0},
        {"reorder_every": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"norm_prior": -1.0},
        {"blocks": 0},
        {"lengths": (3, 0)},
    ],
)
def test_refuses_nonsense(kind: type[TokenMatching], options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be"):
        kind(**options)  # type: ignore[arg-type]


def test_the_step_size_falls_as_in_the_paper() -> None:
    assert [stepwise_decay(i, 2000) for i in (0, 49, 50, 1999)] == pytest.approx(
        [1, 1, 0.89, 0.89**39]
    )
