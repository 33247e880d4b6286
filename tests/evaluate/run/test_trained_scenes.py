"""What is attacked is what was trained, whatever a defense does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tricks
import two_faced
import watching
from upload_logs import every

from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.run.upload_log import UploadLog
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 32}),
    candidates=20,
    training=Training(rounds=12, clients=6, clients_per_round=6, lr=0.01),
)
NONE = Method(name="none")


def method(name: str) -> Method:
    module = two_faced if hasattr(two_faced, name) else tricks
    return Method(name=f"{module.__file__}:{name}")


def found(defense: Method, adversary: str, folder: Path, checkpoint: int = 12) -> float:
    attack = AttackTrial(
        SCENARIO, defense, Method(name=adversary), True, 0, checkpoint, tuple(range(6))
    )
    rows = attack.run(folder).attacks
    assert {row.outcome for row in rows} == {"scored"}
    return sum(bool(row.identified) for row in rows) / len(rows)


@pytest.mark.parametrize("name", ["FirstIsZero", "UnlessDrawn", "Inspecting"])
def test_a_defense_that_is_plain_in_training_is_plain_under_attack(
    name: str, tmp_path: Path
) -> None:
    TrainTrial(SCENARIO, method(name), 0, logged=6).run(tmp_path)
    assert found(method(name), "LinearLeakage", tmp_path) == 1
    assert found(method(name), "RobbingTheFedDirectPass", tmp_path) == 1


def test_a_new_client_draws_its_batch_as_in_training(tmp_path: Path) -> None:
    assert found(method("UnlessDrawn"), "LinearLeakage", tmp_path, checkpoint=0) == 1
    assert found(method("FirstIsZero"), "LinearLeakage", tmp_path, checkpoint=0) < 1


def test_accuracy_is_that_of_the_uploads(tmp_path: Path) -> None:
    first, *_, last = TrainTrial(SCENARIO, method("InPlace"), 0).run(tmp_path).utility
    assert last.loss == first.loss
    first, *_, last = TrainTrial(SCENARIO, NONE, 0).run(tmp_path).utility
    assert last.loss < first.loss


@pytest.mark.parametrize("name", ["Pooling", "Counting"])
def test_an_upload_that_depends_on_more_than_its_client_is_found(name: str, tmp_path: Path) -> None:
    TrainTrial(SCENARIO, method(name), 0, logged=6).run(tmp_path)
    module = type(method(name))  # the class of this process goes on; a new one starts from nothing
    assert module
    _forget()
    with pytest.raises(ValueError, match="its upload of that round could not be repeated"):
        found(method(name), "RobbingTheFedDirectPass", tmp_path)


def _forget() -> None:
    from leakfrontier.evaluate.foundations.plugins import load_attribute

    load_attribute(method("Pooling").name).pool.clear()
    load_attribute(method("Counting").name).uploads = 0


def test_earlier_uploads_of_the_client_are_observed(tmp_path: Path) -> None:
    trained = TrainTrial(SCENARIO, NONE, 0, logged=6)
    trained.run(tmp_path)
    watching.SEEN.clear()
    attack = Method(name="watching:Watching")
    AttackTrial(SCENARIO, NONE, attack, True, 0, 12, tuple(range(6))).run(tmp_path)
    log = UploadLog(trained.seen(tmp_path, 12))
    assert len(watching.SEEN) == 6
    for index, observation in enumerate(watching.SEEN):
        _, *before = every(log, index)
        assert len(observation.earlier) == len(before) >= 1
        for seen, logged in zip(reversed(observation.earlier), before, strict=True):
            torch.testing.assert_close(dict(seen.update), logged.update, rtol=0, atol=0)
            assert torch.equal(seen.model.get_parameter("1.weight"), logged.model["1.weight"])


def test_only_crafted_models_make_clients_answer_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrainTrial(SCENARIO, NONE, 0, logged=6).run(tmp_path)
    from leakfrontier.evaluate.run import trained_scenes

    def refuse(*_: object) -> None:
        raise AssertionError("a logged upload was computed again")

    monkeypatch.setattr(trained_scenes.TrainedScenes, "_again", refuse)
    assert found(NONE, "LinearLeakage", tmp_path) == 1
    with pytest.raises(AssertionError, match="computed again"):
        found(NONE, "RobbingTheFedDirectPass", tmp_path)


@pytest.mark.parametrize("defense", ["SecureAggregation", "TopK", "DPSGD", "ATS", "PRECODE"])
def test_clients_of_our_defenses_answer_again(defense: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, object]] = {
        "SecureAggregation": {"clients": 2},
        "TopK": {"ratio": 0.1},
        "DPSGD": {"noise_multiplier": 0.1},
        "ATS": {"policy": "3-1-7"},
    }
    chosen = Method(name=defense, options=options.get(defense, {}))  # type: ignore[arg-type]
    TrainTrial(SCENARIO, chosen, 0, logged=6).run(tmp_path)
    attack = AttackTrial(
        SCENARIO, chosen, Method(name="RobbingTheFedDirectPass"), True, 0, 12, tuple(range(6))
    )
    rows = attack.run(tmp_path).attacks
    assert len({row.observation for row in rows}) == 6
    assert torch.isfinite(torch.tensor([row.seconds for row in rows])).all()
