from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import watching
from torch import Tensor

from leakfrontier.adversaries import Observation
from leakfrontier.defenses import Defense
from leakfrontier.evaluate.client import clients
from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.privacy.bounds import reconstruction
from leakfrontier.evaluate.run import cells, scenes
from leakfrontier.evaluate.run.cells import (
    AttackTrial,
    ReplayTrial,
    TrainTrial,
    run_trial,
)
from leakfrontier.evaluate.run.upload_log import UploadLog
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

NONE = Method(name="none")
TINY = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 16}),
    candidates=20,
    training=Training(rounds=4, clients=4, clients_per_round=2, batch_size=8),
)
LOCAL = {"epochs": 1, "batch_size": 64, "lr": 0.1}
LATE = TINY.model_copy(
    update={
        "protocol": Method(name="FedBuff", options={**LOCAL, "buffer": 2, "oldest": 2}),
        "checkpoints": (0, 12),
        "training": Training(rounds=12, clients=4, clients_per_round=2, server="sgd", lr=1.0),
    }
)
WATCHING = Method(name="watching:Watching")


def trial(adversary: str | Method = "LinearLeakage", **options: object) -> AttackTrial:
    method = Method(name=adversary) if isinstance(adversary, str) else adversary
    settings: dict[str, object] = {
        "scenario": TINY,
        "defense": NONE,
        "knows_defense": True,
        "seed": 0,
        "checkpoint": 0,
        "observations": tuple(range(5)),
        **options,
    }
    return AttackTrial(adversary=method, **settings)  # type: ignore[arg-type]


def comparable(row: AttackRow) -> AttackRow:
    """Return a row without what depends on the cell's other observations."""
    return replace(row, counterfactual=None, seconds=0.0)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def watched(one: AttackTrial, folder: Path) -> list[Observation]:
    watching.SEEN.clear()
    one.run(folder)
    return list(watching.SEEN)


@pytest.mark.parametrize("defense", ["none", "SecureAggregation", "DPSGD"])
@pytest.mark.parametrize("adversary", ["LinearLeakage", "PriorAware", "PriorGuess"])
def test_a_part_of_the_observations_gives_the_same_rows(defense: str, adversary: str) -> None:
    options: dict[str, dict[str, float]] = {
        "SecureAggregation": {"clients": 3},
        "DPSGD": {"noise_multiplier": 0.1},
    }
    method = Method(name=defense, options={**options.get(defense, {})})
    whole, part = (
        trial(adversary, defense=method, observations=chosen).run(Path())
        for chosen in ((0, 1, 2, 3, 4), (1, 4))
    )
    assert {row.observation for row in part.attacks} == {1, 4}
    expected = [comparable(row) for row in whole.attacks if row.observation in (1, 4)]
    assert [comparable(row) for row in part.attacks] == expected
    assert part.scores == tuple(s for s in whole.scores if s.observation in (1, 4))
    kept = tuple(one for one in whole.renderings if one.observation in (1, 4))
    assert part.renderings == kept


def test_an_upload_is_made_once_for_all_adversaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trial("LinearLeakage").run(tmp_path)
    sent: list[int] = []

    class Counted(clients.Clients):
        def answer(self, *arguments: Any, **options: Any) -> clients.Answer:  # noqa: ANN401
            sent.append(len(sent))
            return super().answer(*arguments, **options)

    monkeypatch.setattr(scenes, "Clients", Counted)
    monkeypatch.setattr(scenes, "_UPLOADS_KEPT", 4)
    assert len(watched(trial(WATCHING, observations=(0, 1)), tmp_path)) == len(sent) == 2
    for observation in watching.SEEN:
        for value in observation.update.values():
            value.zero_()  # as an attack should not
    again = trial("LinearLeakage").run(tmp_path)
    assert len(sent) == 5
    assert [comparable(row) for row in again.attacks] == [comparable(row) for row in alone.attacks]
    assert again.scores == alone.scores

    trial(WATCHING, observations=(0,)).run(tmp_path)  # the oldest of five, and four are kept
    trial(WATCHING, observations=(4,), seed=1).run(tmp_path)
    trial(WATCHING, observations=(4,), defense=Method(name="SignSGD")).run(tmp_path)
    assert len(sent) == 8


def test_an_attack_that_applies_to_some_observations_is_scored_on_those() -> None:
    watching.SEEN.clear()
    method = Method(name=WATCHING.name, options={"every": 2})
    rows = trial(method).run(Path()).attacks
    assert [row.outcome for row in rows] == [
        *("not applicable", "scored", "not applicable", "scored", "not applicable"),
    ]
    assert [row.reason for row in rows] == ["not this one", None] * 2 + ["not this one"]


def test_features_are_no_examples() -> None:
    deep = Method(name="SPEARPlusPlus", options={"layer": "3"})
    for row in trial(deep, observations=(0, 1)).run(Path()).attacks:
        assert row.outcome == "not applicable"
        assert row.reason == "recovered features, the inputs of layer '3'"


def test_only_attacks_that_need_candidates_are_granted_them() -> None:
    for name, granted in (("watching:Choosing", True), (WATCHING.name, False)):
        for observation in watched(trial(name), Path()):
            assert (observation.candidates is not None) == granted


def test_granted_candidates_are_those_of_the_score() -> None:
    outcome = trial("PriorAware").run(Path())
    for row in outcome.attacks:
        assert row.identified
        assert row.candidates == 20
        assert row.labels_granted
        assert row.label_correct is None
    assert min(score.value for score in outcome.scores if score.metric == "psnr") > 100
    assert not any(row.labels_granted for row in trial().run(Path()).attacks)


def test_nothing_is_granted_for_the_examples_of_several_clients() -> None:
    defense = Method(name="SecureAggregation", options={"clients": 4})
    rows = trial("PriorAware", defense=defense).run(Path()).attacks
    assert {row.reason for row in rows} == {"no candidates are granted for the 4 private examples"}


@pytest.mark.parametrize("name", ["PriorAware", "InformedPriorAware"])
def test_each_example_of_a_batch_has_candidates_of_its_own(name: str) -> None:
    scenario = TINY.model_copy(update={"batch_size": 3})
    rows = trial(name, scenario=scenario).run(Path()).attacks
    assert [row.identified for row in rows] == [True] * 15
    assert {(row.candidates, row.bound) for row in rows} == {(20, None)}
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    rows = trial(name, scenario=scenario, defense=private).run(Path()).attacks
    for row in rows:  # one guess for each example, though an upload has three
        assert row.bound == pytest.approx(reconstruction(1 / 20, 1.0, 1.0, 1), rel=1e-3)


def test_observations_of_one_model_share_its_replay() -> None:
    seen = watched(trial(WATCHING), Path())
    assert len({id(one.replay) for one in seen}) == 1
    assert len({one.models for one in seen}) == 1


def test_the_attacked_upload_belongs_to_the_version_that_its_client_had(tmp_path: Path) -> None:
    training = TrainTrial(LATE, NONE, seed=0, logged=6)
    training.run(tmp_path)
    options = {"scenario": LATE, "checkpoint": 12, "observations": tuple(range(6))}
    log = UploadLog(training.seen(tmp_path, 12))
    for index, observation in enumerate(watched(trial(WATCHING, **options), tmp_path)):
        assert same(log.upload(index).model, observation.model.state_dict())
    # Only from its version can a client repeat its upload, before it gets a crafted model.
    rows = trial("RobbingTheFedDirectPass", **options).run(tmp_path).attacks
    assert {row.outcome for row in rows} == {"scored"}


def test_an_upload_before_training_is_of_the_initial_model(tmp_path: Path) -> None:
    initial = load_world(LATE).model(Defense(), 0).state_dict()
    for observation in watched(trial(WATCHING, scenario=LATE), tmp_path):
        torch.testing.assert_close(observation.model.state_dict(), initial, rtol=0, atol=0)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="there is no log of the attacked uploads: training failed"
    ):
        trial(checkpoint=2).run(tmp_path)


@pytest.mark.parametrize("defense", ["none", "TopK"])
def test_tied_weights_survive_a_checkpoint(defense: str, tmp_path: Path) -> None:
    scenario = TINY.model_copy(
        update={"model": Method(name="watching:tied"), "checkpoints": (0, 2)}
    )
    method = Method(name=defense, options={"ratio": 0.5} if defense == "TopK" else {})
    training = TrainTrial(scenario, method, seed=0, logged=1)
    first, *_, last = training.run(tmp_path).utility
    assert last.loss != first.loss
    attack = trial(WATCHING, scenario=scenario, defense=method, checkpoint=2, observations=(0,))
    observation, *_ = watched(attack, tmp_path)  # the decoded one may follow
    model = observation.model
    assert isinstance(model, watching.Tied)
    assert model.second.weight is model.third.weight
    assert not model.second.weight.equal(
        load_world(scenario).model(Defense(), 0).get_parameter("second.weight")
    )
    assert set(observation.update) == {name for name, _ in model.named_parameters()}


IDENTITY = (
    Method(name="Noise", options={"scale": 0.0}),
    Method(name="RandomK", options={"ratio": 1.0}),
    Method(name="Chain", links=(Method(name="TopK", options={"ratio": 1.0}), NONE)),
)


@pytest.mark.parametrize("defense", IDENTITY, ids=lambda method: method.name)
@pytest.mark.parametrize("scenario", [TINY, LATE], ids=["FedSGD", "FedBuff"])
def test_identity_defenses_train_and_upload_as_the_undefended(
    scenario: Scenario, defense: Method, tmp_path: Path
) -> None:
    scenario = scenario.model_copy(update={"checkpoints": (0, 3), "batch_size": 3})
    undefended, defended = (TrainTrial(scenario, one, seed=0, logged=3) for one in (NONE, defense))
    assert undefended.run(tmp_path).utility == defended.run(tmp_path).utility
    for checkpoint in (0, 3):
        plain, seen = (
            watched(
                trial(
                    WATCHING,
                    scenario=scenario,
                    defense=one,
                    checkpoint=checkpoint,
                    observations=(0, 2),
                ),
                tmp_path,
            )
            for one in (NONE, defense)
        )
        for one, other in zip(plain, seen, strict=True):
            torch.testing.assert_close(dict(one.update), dict(other.update), rtol=0, atol=0)


def test_a_defense_with_layers_of_its_own_leaves_the_others_as_they_are() -> None:
    world = load_world(TINY)
    plain, extended = (
        world.model(world.defense(Method(name=name)), 0).state_dict()
        for name in ("none", "PRECODE")
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    world.model(world.defense(Method(name="PRECODE")), 1)
    assert torch.get_rng_state().equal(before)
    names = [name for name in plain if name in extended]
    assert names
    assert all(plain[name].equal(extended[name]) for name in names)


def test_labels_carry_what_tells_cells_apart() -> None:
    long, short = (
        trial(Method(name="InvertingGradients", options={"iterations": n})).cell.labels
        for n in (300, 100)
    )
    assert long["adversary"] != short["adversary"]
    assert long["adversary_name"] == short["adversary_name"] == "InvertingGradients"
    assert short["adversary_options"]["iterations"] == 100
    chained = Method(name="Chain", links=(Method(name="TopK", options={"ratio": 0.1}), NONE))
    labels = trial(defense=chained).cell.labels
    assert labels["family"] == "TopK then none"
    assert labels["defense_options"] == {"1 TopK ratio": 0.1}
    assert labels["threat"] == "passive"
    assert trial("PriorGuess").cell.labels["baseline"]


def test_a_cell_is_the_same_wherever_it_runs(tmp_path: Path) -> None:
    torch.manual_seed(1)
    once = run_trial((trial(), tmp_path))
    torch.manual_seed(2)
    again = run_trial((trial(), tmp_path))
    assert [comparable(row) for row in once.attacks] == [comparable(row) for row in again.attacks]
    assert once.scores == again.scores


DROPPING = """
def build(space):
    wide = [torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5)]
    return torch.nn.Sequential(*wide, torch.nn.Linear(16, space.classes))
"""


@pytest.mark.usefixtures("uploads_are_kept")
def test_what_a_client_drops_does_not_depend_on_who_attacked_before(
    tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    model = Method(name=f"{user_file(DROPPING)}:build")
    dropping = {"scenario": TINY.model_copy(update={"model": model, "mode": "train"})}
    search = Method(name="InvertingGradients", options={"iterations": 2})
    defended = Method(name="TopK", options={"ratio": 0.5})
    found = []
    for before in ("", "PriorGuess", "LinearLeakage"):
        scenes._SHOWN.clear()
        cells._EXAMINED.clear()
        if before:
            run_trial((trial(before, **dropping, defense=defended), tmp_path))
        found.append(run_trial((trial(search, **dropping, defense=defended), tmp_path)).scores)
    assert found[0] == found[1] == found[2]


def dropping(user_file: Callable[..., Path], mode: str) -> Scenario:
    model = Method(name=f"{user_file(DROPPING)}:build")
    return TINY.model_copy(update={"model": model, "mode": mode})


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    return max(float((value - right[name]).abs().max()) for name, value in left.items())


@pytest.mark.parametrize("defense", ["none", "DPSGD"])
def test_masks_are_drawn_in_training_mode_alone(
    tmp_path: Path, user_file: Callable[..., Path], defense: str
) -> None:
    options = {"DPSGD": {"noise_multiplier": 0.0, "max_grad_norm": 1e6}}.get(defense, {})
    method = Method(name=defense, options=dict(options))
    found = {}
    for mode in ("eval", "train"):
        one = trial(WATCHING, scenario=dropping(user_file, mode), defense=method)
        first, again = watched(one, tmp_path), watched(one, tmp_path)
        assert len(first) >= 5  # decoded ones may follow
        assert {apart(a.update, b.update) for a, b in zip(first, again, strict=True)} == {0.0}
        found[mode] = first[0]
    assert apart(found["eval"].update, found["train"].update) > 1e-2
    assert not found["eval"].model.training
    assert found["train"].model.training


def test_a_replay_draws_masks_of_its_own(tmp_path: Path, user_file: Callable[..., Path]) -> None:
    for mode, different in (("eval", False), ("train", True)):
        where = dropping(user_file, mode)
        world = load_world(where)
        (seen, *_) = watched(trial(WATCHING, scenario=where), tmp_path)
        truth = world.train.at(cells.victims(world, 0, 0))
        replays = [seen.simulate(*truth) for _ in range(8)]
        distances = [apart(seen.update, one) for one in replays]
        assert all((distance > 1e-3) is different for distance in distances)
        assert (apart(replays[0], replays[1]) > 1e-3) is different


def test_accuracy_is_without_masks(tmp_path: Path, user_file: Callable[..., Path]) -> None:
    one = TrainTrial(dropping(user_file, "train"), NONE, 0)
    losses = [row.loss for row in run_trial((one, tmp_path)).utility]
    other = TrainTrial(dropping(user_file, "eval"), NONE, 0)
    expected = [row.loss for row in run_trial((other, tmp_path)).utility]
    assert losses[0] == expected[0]  # the same weights
    assert losses[-1] != expected[-1]


def test_a_defense_is_examined_without_masks(user_file: Callable[..., Path]) -> None:
    for mode in ("eval", "train"):
        half = Method(name="TopK", options={"ratio": 0.5})
        row = ReplayTrial(dropping(user_file, mode), half).examined().replay
        assert not row.random
        assert not row.uploads_differ


def test_who_refuses_all_models_claims_nothing(
    tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    code = """
from leakfrontier.defenses import DPSGD, Refused

class Refusing(DPSGD):
    def on_receive(self, model, agreed):
        raise Refused("never")
"""
    refusing = Method(name=f"{user_file(code)}:Refusing", options={"noise_multiplier": 1.0})
    outcome = run_trial((TrainTrial(TINY, refusing, 0), tmp_path))
    assert outcome.guarantees == ()
    assert outcome.utility[-1].refused


MEDDLING = """
STASH = []

@dataclass
class Meddling(Defense):
    def on_model(self, model):
        STASH.append(model)
        return model

    def on_receive(self, model, agreed):
        STASH.extend([model, agreed])
        return model

    def on_round(self, updates, rng):
        for model in STASH:
            for value in model.parameters():
                value.data.zero_()
        return updates
"""


def test_a_defense_cannot_reach_the_model_that_the_adversary_knows(
    user_file: Callable[..., Path], tmp_path: Path
) -> None:
    """It leaves uploads as they are, and spoils every model that it was handed."""
    meddling = Method(name=f"{user_file(MEDDLING)}:Meddling")
    expected = watched(trial(WATCHING), tmp_path)
    found = watched(trial(WATCHING, defense=meddling), tmp_path)
    for one, other in zip(found, expected, strict=True):
        weights = [list(each.model.state_dict().values()) for each in (one, other)]
        assert all(map(torch.equal, *weights))
        assert all(torch.equal(one.update[name], other.update[name]) for name in other.update)
