from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Generator

from leakfrontier.adversaries import (
    Adversary,
    InformedPriorAware,
    InvertingGradients,
    LinearLeakage,
    NotApplicable,
    Observation,
    PriorAware,
    PriorGuess,
    Reconstruction,
)
from leakfrontier.defenses import Defense, Refused, TopK
from leakfrontier.evaluate.client.client import Client, observe
from leakfrontier.evaluate.client.decoders import LAST, Decoder
from leakfrontier.evaluate.client.discrimination import Examined
from leakfrontier.evaluate.foundations.rows import AttackRow, Outcome, ProbeRow, Score
from leakfrontier.evaluate.run.cells import ReplayTrial
from leakfrontier.evaluate.run.scoring import Attempt
from leakfrontier.evaluate.run.server import Server, either
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world
from leakfrontier.evaluate.world.victims import victims

SCENARIO = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 8}), candidates=20)
WORLD = load_world(SCENARIO)


def server(
    adversary: Adversary, defense: Defense | None = None, *, knows_defense: bool = True
) -> Server:
    threat = WORLD.threat(knows_defense)
    return Server(WORLD, defense or Defense(), adversary, threat, 0, ("test",), examined=None)


def client(defense: Defense | None = None) -> Client:
    defense = defense or Defense()
    return WORLD.client(defense, WORLD.model(defense, 0))


def test_candidates_are_granted_to_who_chooses_among_them_if_all_examples_are_scored() -> None:
    chooses, lone = server(PriorAware()), victims(WORLD, 0, 0)
    granted = chooses.granted(lone, 0, examples=1).candidates
    assert granted is not None
    assert granted.inputs.shape[:2] == (20, 1)
    assert chooses.granted(lone, 0, examples=4).candidates is None
    assert chooses.granted(lone[:0], 0, examples=0).candidates is None
    assert server(PriorGuess()).granted(lone, 0, examples=1).candidates is None
    several = torch.arange(3)
    granted = chooses.granted(several, 0, examples=3).candidates
    assert granted is not None
    assert granted.inputs.shape[:2] == (20, 3)
    for column, victim in enumerate(several):
        same = granted.inputs[:, column] == WORLD.train.inputs[victim]
        assert int(same.flatten(1).all(1).sum()) == 1
    alike = (WORLD.train.targets == 3).nonzero().flatten()[:100]  # too many to have candidates
    assert chooses.granted(alike, 0, examples=100).candidates is None


@dataclass(frozen=True)
class Told(Adversary):
    """Return other private examples as its guesses, if it is told them."""

    needs_candidates: ClassVar[bool] = True
    informed: ClassVar[bool] = True

    least: int = 0

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        assert observation.candidates is not None
        inputs = observation.candidates.inputs
        unknown = (inputs != inputs[:1]).flatten(2).any(2).any(0)
        assert unknown.sum() == 1
        assert (inputs[:, unknown].flatten(1).unique(dim=0)).shape[0] == len(inputs)
        return Reconstruction(inputs[0].roll(1, 0)[self.least :])


def test_an_informed_adversary_is_told_all_examples_except_the_one_it_is_scored_on() -> None:
    sought, told = torch.arange(4), server(Told())
    threat, rng = told.granted(sought, 5, examples=4), torch.Generator().manual_seed(0)
    private = WORLD.train.at(sought)
    (upload,) = observe(client(), [private], threat, rng)
    found = told.attack({5: upload.observation})[5]
    assert isinstance(found, Reconstruction)
    assert torch.equal(found.inputs, private.inputs.roll(1, 0))  # each from its own view
    rows = told.outcome([Attempt(5, sought, found, upload)], 1.0, rounds=None, shown=()).attacks
    assert [row.identified for row in rows] == [False] * 4  # it is told all four, but never one
    fewer = server(Told(least=1))
    fewer.granted(sought, 5, examples=4)
    with pytest.raises(ValueError, match="one guess for each of the 4 private examples, got 3"):
        fewer.attack({5: upload.observation})


def test_the_informed_guess_is_that_of_maximum_likelihood() -> None:
    sought, informed = torch.arange(4), server(InformedPriorAware())
    threat, rng = informed.granted(sought, 0, examples=4), torch.Generator().manual_seed(0)
    (upload,) = observe(client(), [WORLD.train.at(sought)], threat, rng)
    found = informed.attack({0: upload.observation})[0]
    assert isinstance(found, Reconstruction)
    assert torch.equal(found.inputs, upload.truth.inputs)


def test_clients_with_the_same_models_have_one_replay() -> None:
    one, other = client(), client()
    ours = server(PriorGuess())
    assert ours.replay(one, (one.model,)) is ours.replay(one, (one.model,))
    assert ours.replay(one, (one.model,)) is not ours.replay(other, (other.model,))


def test_replays_are_examined_for_who_knows_the_defense_and_replays_it() -> None:
    calls: list[Client] = []

    def examined(one: Client) -> Examined:
        calls.append(one)
        return ReplayTrial(SCENARIO, Method(name="TopK", options={"ratio": 0.5})).examined()

    one = client(TopK(0.5))
    for adversary, knows, count in (
        (PriorGuess(), True, 0),
        (InvertingGradients(), False, 0),
        (InvertingGradients(), True, 1),
    ):
        calls.clear()
        ours = replace(server(adversary, TopK(0.5), knows_defense=knows), examined=examined)
        ours.replay(one, (one.model,))
        ours.replay(one, (one.model,))
        assert len(calls) == count


def test_clients_that_refuse_to_be_examined_are_replayed_as_they_are() -> None:
    def refused(_: Client) -> Examined:
        raise Refused("no")

    one = client()
    ours = replace(server(InvertingGradients()), examined=refused)
    batch = WORLD.train.at(torch.tensor([0]))
    (upload,) = observe(one, [batch], ours.threat, torch.Generator().manual_seed(0))
    replayed = ours.replay(one, (one.model,))(*batch, upload.observation.update)
    torch.testing.assert_close(dict(replayed), dict(upload.observation.update))


@dataclass(frozen=True)
class Says(Adversary):
    """Return what it was told to."""

    cost: ClassVar[int] = 0

    result: object = None
    times: int = 1

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        return self.result  # type: ignore[return-value]

    def reconstruct_all(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction | NotApplicable]:
        return super().reconstruct_all(observations, rngs) * self.times


def seen() -> Observation:
    rng, batch = torch.Generator().manual_seed(0), WORLD.train.at(torch.tensor([0]))
    return observe(client(), [batch], WORLD.threat(knows_defense=True), rng)[0].observation


def test_results_of_another_kind_or_number_are_named() -> None:
    guess = Reconstruction(torch.zeros(1, 1, 8, 8))
    for result, reason in (
        (Says(), "Says must return a Reconstruction, got NoneType"),
        (Says(guess, times=2), "Says.reconstruct_all must return 1 results, got 2"),
    ):
        with pytest.raises(ValueError, match=reason):
            server(result).attack({0: seen()})
    assert server(Says(guess)).attack({7: seen()}) == {7: guess}
    features = server(Says(replace(guess, layer="1"))).attack({0: seen()})[0]
    assert isinstance(features, NotApplicable)
    assert "layer '1'" in str(features)
    assert server(Says()).attack({}) == {}


def test_attempts_become_rows() -> None:
    attempts = [Attempt(i, victims(WORLD, 0, i), NotApplicable("no")) for i in range(2)]
    outcome = server(PriorGuess()).outcome(attempts, 3.0, rounds=None, shown=())
    assert [(row.observation, row.outcome, row.reason) for row in outcome.attacks] == [
        (0, "not applicable", "no"),
        (1, "not applicable", "no"),
    ]
    assert outcome.busy == 3.0


def hiding(*, factor: float = -2.0, lag: int = 0) -> Examined:
    """Return what is known of a defense that halves and negates updates."""
    replay = ReplayTrial(SCENARIO, Method(name="TopK", options={"ratio": 0.5})).examined().replay
    probe = ProbeRow(1.0, 1.0, "", needs_history=False, remaining_noise=1.0, ideal_contrast=1.0)
    decoder = Decoder("", LAST, lag, lambda *_: torch.neg, 1.0, lambda seen: factor * seen)
    return Examined(replay, probe, decoder)


def attempted(ours: Server) -> Attempt:
    rows, rng = victims(WORLD, 0, 0), torch.Generator().manual_seed(0)
    (upload,) = observe(client(), [WORLD.train.at(rows)], ours.threat, rng)
    hidden = {name: -0.5 * value for name, value in upload.observation.update.items()}
    seen = replace(upload, observation=replace(upload.observation, update=hidden))
    return Attempt(0, rows, NotApplicable("not attacked"), seen)


def test_passive_attacks_also_see_the_decoded_update() -> None:
    ours = replace(server(LinearLeakage()), examined=lambda _: hiding())
    attempt = attempted(ours)
    (decoded,) = ours.attack_decoded([attempt])
    assert decoded.upload is not None
    assert attempt.upload is not None
    seen = decoded.upload.observation
    truth = dict(seen.replay(*attempt.upload.truth, seen.update))
    torch.testing.assert_close(dict(seen.update), truth)
    (row,) = ours.outcome([decoded], 1.0, rounds=None, shown=()).attacks
    assert row.identified


@pytest.mark.parametrize(
    ("adversary", "known", "examined"),
    [
        (PriorGuess(), True, hiding()),
        (LinearLeakage(), False, hiding()),
        (LinearLeakage(), True, hiding(factor=0.5)),
        (LinearLeakage(), True, hiding(lag=1)),
        (LinearLeakage(), True, replace(hiding(), decoder=None)),
    ],
    ids=["baseline", "ignorant", "nothing hidden", "needs history", "no decoder"],
)
def test_nothing_is_decoded_in_vain(adversary: Adversary, known: bool, examined: Examined) -> None:
    ours = replace(server(adversary, knows_defense=known), examined=lambda _: examined)
    assert ours.attack_decoded([attempted(ours)]) == []


def test_decoders_of_the_attacked_rounds_come_first() -> None:
    numbers: list[int] = []

    def none(number: int) -> None:
        numbers.append(number)

    ours = replace(server(LinearLeakage()), examined=lambda _: hiding(), decoder=none)
    assert ours.attack_decoded([attempted(ours)]) == []
    assert numbers == [0]


def test_identified_victims_are_not_attacked_again() -> None:
    ours = replace(server(LinearLeakage()), examined=lambda _: hiding())
    for identified in (True, False, None):
        outcome = Outcome(attacks=(AttackRow(0, 0, identified=identified),))
        found = ours.attack_decoded([attempted(ours)], outcome)
        assert len(found) == (not identified)


def test_victims_count_that_either_attack_finds() -> None:
    def outcome(*found: bool, score: float) -> Outcome:
        rows = tuple(AttackRow(i, 0, identified=one) for i, one in enumerate(found))
        scores = tuple(Score(i, 0, "psnr", score) for i in range(len(found)))
        return Outcome(attacks=rows, scores=scores, busy=1.0)

    own, decoded = outcome(True, False, False, score=1), outcome(True, True, False, score=2)
    merged = either(own, decoded)
    assert {row.observation: row.identified for row in merged.attacks} == {0: 1, 1: 1, 2: 0}
    assert {row.observation: row.value for row in merged.scores} == {0: 1, 1: 2, 2: 1}
    assert merged.busy == 1
    assert either(own, Outcome()) == own
