"""GRAB: orders by gradients alone, and dropout masks that are searched for."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from federated import rng
from small_language import observed, right, sentences, space_of, trained
from torch import Tensor, nn
from torch.nn import functional

from leakfrontier.adversaries import GRAB, LanguageGuess, Observation, PublicData
from leakfrontier.adversaries.matching.matching import Update, evaluation
from leakfrontier.adversaries.matching.optimizers import Unknowns
from leakfrontier.adversaries.text.grab import DropoutMasks
from leakfrontier.adversaries.text.texts import Texts
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

BUDGET: dict[str, Any] = {"iterations": 30, "starts": 150, "orders": 100, "reorder_every": 10}
THREAT = ThreatModel(public=PublicData(*sentences(200, 7)))
KNOWN = ThreatModel(knows_targets=True)
RATE = 0.1


def test_reads_sentences_that_a_small_gpt2_learns() -> None:
    reached: list[float] = []
    blind: list[float] = []
    for seed in range(50, 54):
        truth = sentences(1, seed)
        observation = observed(trained("next-token"), space_of("next-token"), truth, threat=THREAT)
        for attack, shares in ((GRAB(**BUDGET), reached), (LanguageGuess(), blind)):
            guess = attack.reconstruct(observation, rng(seed))
            shares.append(right(guess.inputs, truth.inputs))
    assert sum(reached) / 4 > 0.8
    assert sum(blind) / 4 < 0.4


def test_reads_a_sentence_that_a_small_bert_classifies() -> None:
    truth = sentences(1, 50, encoder=True)
    model = trained("classification", encoder=True, steps=10)
    observation = observed(model, space_of("classification", encoder=True), truth)
    guess = GRAB(**BUDGET | {"iterations": 100}).reconstruct(observation, rng())
    words = truth.inputs > 2
    assert float((guess.inputs == truth.inputs)[words].float().mean()) > 0.8


def test_no_round_of_changes_makes_the_update_less_near() -> None:
    truth = sentences(2, 5)
    observation = observed(trained("next-token"), space_of("next-token"), truth)
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    attack = GRAB(orders=30, beams=3)
    noise = torch.randn(*texts.known.shape, texts.table.shape[1], generator=rng())
    near, beams = texts.candidates(noise, 10), texts.nearest(noise)[None]
    lowest = float(attack.distances(texts, texts.embedded(beams), beams))
    distances = attack._remembering(texts, {})
    for _ in range(3):
        beams, values = attack._improved(texts, beams, near, distances, rng())
        assert len(beams) == 3
        assert float(values[0]) <= lowest
        assert values.tolist() == sorted(values.tolist())
        lowest = float(values[0])


def test_no_guess_of_tokens_is_replayed_twice() -> None:
    observation = observed(trained("next-token"), space_of("next-token"), sentences(1, 5))
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    replayed: list[int] = []

    class Counting(GRAB):
        def distances(
            self, texts: Texts, inputs: Tensor, targets: Tensor, others: Unknowns | None = None
        ) -> Tensor:
            replayed.append(len(inputs))
            return super().distances(texts, inputs, targets, others)

    picks = torch.randint(len(texts.allowed), (5, *texts.known.shape), generator=rng())
    guesses = texts.allowed[picks]
    distances = Counting()._remembering(texts, {})
    found = [distances(part) for part in (guesses[:3], guesses[[4, 1, 3, 1]], guesses[:4])]
    assert replayed == [3, 2]
    every = GRAB().distances(texts, texts.embedded(guesses), guesses)
    torch.testing.assert_close(torch.cat(found), every[[0, 1, 2, 4, 1, 3, 1, 0, 1, 2, 3]])


def test_masks_take_the_place_of_dropout() -> None:
    values, mask = torch.randn(3, 4, generator=rng()), torch.tensor([1.0, 0.0, 1.0, 1.0] * 3)
    layer = nn.Dropout(0.25)
    with DropoutMasks(torch.cat([mask, 1 - mask])) as dropout:
        first = layer(values)
        second = functional.dropout(values, 0.5, training=True)
        untouched = functional.dropout(values, 0.5, training=False)
    torch.testing.assert_close(first, values * mask.view(3, 4) / 0.75)
    torch.testing.assert_close(second, values * (1 - mask).view(3, 4) * 2)
    assert torch.equal(untouched, values)
    assert [(site.size, site.kept) for site in dropout.sites] == [(12, 0.75), (12, 0.5)]
    with DropoutMasks():
        assert torch.equal(layer(values), values)  # the mean
    assert (layer(torch.ones(1000)) == 0).any()  # as before


def test_at_the_true_masks_the_update_is_the_clients() -> None:
    truth = sentences(1, 50)
    observation, masks = with_dropout(truth)
    texts, inputs = at_truth(observation)
    targets = truth.targets.unsqueeze(0)
    known, mean = (
        float(GRAB().distances(texts, inputs, targets, others))
        for others in ({"masks": masks * 40 - 20}, {})
    )
    assert known < 1e-4
    assert mean > 0.01


def test_learned_masks_bring_the_update_nearer_than_their_mean() -> None:
    truth = sentences(1, 50)
    observation, masks = with_dropout(truth)
    texts, inputs = at_truth(observation)
    attack = GRAB(iterations=60)
    start = attack.unknowns(replace(texts, targets=truth.targets), inputs)
    assert start["masks"].shape == (1, len(masks))
    torch.testing.assert_close(start["masks"].sigmoid(), torch.full((1, len(masks)), 1 - RATE))

    def replay(unknowns: Unknowns) -> tuple[Update, Tensor]:
        update, prior = attack.replay(
            texts, inputs[0], truth.targets, {"masks": unknowns["masks"][0]}
        )
        return {name: value.unsqueeze(0) for name, value in update.items()}, prior.unsqueeze(0)

    found, _ = attack.optimizer(texts).minimise(
        evaluation(replay, attack.distance(), texts.observed),
        {"masks": start["masks"]},
        lambda unknowns: unknowns,
        torch.randn_like,
    )
    before, after = (
        float(attack.distances(texts, inputs, truth.targets[None], {"masks": part["masks"][0]}))
        for part in (start, found)
    )
    assert after < before / 3


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_masks_act_in_scenarios_in_training_mode(mode: Literal["eval", "train"]) -> None:
    model = Method(name="gpt2", options={"layers": 2, "width": 8, "heads": 2})
    scenario = Scenario(dataset="messages", model=model, mode=mode, length=6, knows_targets=True)
    world = load_world(scenario)
    client = world.client(Defense(), world.model(Defense(), seed=0))
    truth = world.train.at(slice(1))
    (upload,) = observe(client, [truth], world.threat(knows_defense=True), rng())
    texts = Texts.of(upload.observation, rng(), None, use_embedding=False, blocks=None)
    unknowns = GRAB().unknowns(texts, texts.embedded(truth.inputs).unsqueeze(0))
    assert ("masks" in unknowns) is (mode == "train")


def test_without_dropout_there_are_no_masks() -> None:
    observation = observed(trained("next-token"), space_of("next-token"), sentences(1, 50))
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    inputs = texts.settled(torch.ones(1, *texts.known.shape, texts.table.shape[1]))
    assert GRAB().unknowns(texts, inputs).keys() == {"inputs"}


def test_refuses_nonsense() -> None:
    for options in ({"beams": 0}, {"rounds": 0}, {"mask_lr": 0.0}, {"mask_prior": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            GRAB(**options)


def at_truth(observation: Observation) -> tuple[Texts, Tensor]:
    """Return what is searched for, and the embeddings of the answer."""
    texts = Texts.of(observation, rng(), None, use_embedding=False, blocks=None)
    tokens = sentences(1, 50).inputs[:, : texts.known.shape[1]]
    return texts, texts.embedded(tokens).unsqueeze(0)


@cache
def dropping() -> nn.Module:
    """Return a small GPT-2 whose client trains with dropout."""
    model = copy.deepcopy(trained("classification", steps=10))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
    model.model.train()
    return model


def with_dropout(truth: Batch, seed: int = 3) -> tuple[Observation, Tensor]:
    """Return what is seen of a client that trains with dropout, and the masks that it drew."""
    model, space = dropping(), space_of("classification")
    with torch.no_grad(), DropoutMasks() as dropout:
        model(truth.inputs[:, : int(space.real(truth.inputs).sum())])
    size = sum(site.size for site in dropout.sites)
    masks = (torch.rand(size, generator=rng(seed)) > RATE).float()
    short = Batch(truth.inputs[:, : int(space.real(truth.inputs).sum())], truth.targets)
    with DropoutMasks(masks):
        return observed(model, space, short, threat=KNOWN), masks
