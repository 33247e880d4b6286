from __future__ import annotations

import pytest
import torch

from leakfrontier.defenses import Defense, Refused, SecureAggregation
from leakfrontier.evaluate.client.clients import Answer, Secrets, Seen
from leakfrontier.evaluate.run.scenes import NewScenes, shown_of
from leakfrontier.evaluate.world.scenario import Scenario, load_world


def scenes(defense: Defense, draws: str = "draws") -> NewScenes:
    return NewScenes(load_world(Scenario(dataset="digits")), defense, 0, (draws,), repr(defense))


def test_an_honest_server_sends_the_model_to_all() -> None:
    scene = scenes(SecureAggregation(3)).scene(1)
    assert len(scene.shares) == 3
    honest, again = scene.honest(), scene.answer([scene.model] * 3)
    torch.testing.assert_close(honest.update, again.update, rtol=0, atol=0)
    assert len(honest.models) == len(honest.trained_on) == 3
    other = scenes(SecureAggregation(3), "others").scene(1).answer([scene.model] * 3)
    assert any(not torch.equal(v, other.update[n]) for n, v in honest.update.items())


def test_a_refusal_and_a_broken_cohort_are_told() -> None:
    with pytest.raises(Refused, match="never"):
        shown_of(Answer([], 1, {}, "never"), [0], Defense())
    scene = scenes(Defense()).scene(0)
    secret = Secrets(torch.tensor([0]), scene.shares[0], scene.model)
    answer = Answer([Seen((0, 1), [{}, {}])], 0, {0: secret, 1: secret})
    with pytest.raises(ValueError, match="must return one update for the whole cohort, got 2"):
        shown_of(answer, [0, 1], SecureAggregation(2))
