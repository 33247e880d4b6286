from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import batch, mlp, rng
from replaying import check_replay
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import TopK, Update, batch_gradient
from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import SCENARIOS, Training

RNG = torch.Generator().manual_seed(0)


def update(*values: float) -> Update:
    return {"weight": torch.tensor(values[:2]), "bias": torch.tensor(values[2:])}


def test_keeps_the_largest_entries_over_all_parameters() -> None:
    sent = TopK(ratio=0.5).on_update(update(1, -4, 3, 2), RNG)
    assert sent["weight"].tolist() == [0, -4]
    assert sent["bias"].tolist() == [3, 0]


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, 4), (0.5, 2), (0.01, 1)])
def test_keeps_the_stated_share(ratio: float, kept: int) -> None:
    sent = TopK(ratio).on_update(update(1, -4, 3, 2), RNG)
    assert sum(int((value != 0).sum()) for value in sent.values()) == kept


def test_per_layer_keeps_the_largest_entries_of_each_parameter() -> None:
    sent = TopK(ratio=0.5, per_layer=True).on_update(update(1, -2, 30, 40), RNG)
    assert sent["weight"].tolist() == [0, -2]
    assert sent["bias"].tolist() == [0, 40]
    together = TopK(ratio=0.5).on_update(update(1, -2, 30, 40), RNG)
    assert together["weight"].tolist() == [0, 0]


@pytest.mark.parametrize("per_layer", [True, False])
def test_identity_setting_is_the_undefended_update(per_layer: bool) -> None:
    given = batch_gradient(mlp(), cross_entropy, batch(2))
    sent = TopK(1.0, per_layer=per_layer).on_update(given, rng())
    torch.testing.assert_close(sent, given, rtol=0, atol=0)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.3])
def test_density_is_exact(ratio: float) -> None:
    given = batch_gradient(mlp(), cross_entropy, batch(8))
    sent = TopK(ratio).on_update(given, rng())
    size = sum(value.numel() for value in given.values())
    assert sum(int((value != 0).sum()) for value in sent.values()) == round(ratio * size)
    for name, value in TopK(ratio, per_layer=True).on_update(given, rng()).items():
        assert int((value != 0).sum()) == max(1, round(ratio * value.numel())), name


@pytest.mark.parametrize(("error_feedback", "second"), [(True, 2), (False, 1)])
def test_error_feedback_carries_what_was_dropped(error_feedback: bool, second: float) -> None:
    defense = TopK(ratio=0.25, error_feedback=error_feedback)
    defense.on_update(update(1, -4, 0, 0), RNG)
    fresh = replace(defense)
    assert defense.on_update(update(1, 0, 0, 0), RNG)["weight"][0] == second
    assert fresh.on_update(update(1, 0, 0, 0), RNG)["weight"][0] == 1


def test_replay_applies_the_mask_that_the_upload_shows() -> None:
    replay = TopK(ratio=0.5).replay(update(0, -4, 3, 0))
    assert replay.on_update(update(9, 8, 7, 6), RNG)["weight"].tolist() == [0, 8]
    assert replay.on_update(update(9, 8, 7, 6), RNG)["bias"].tolist() == [7, 0]


@pytest.mark.parametrize("per_layer", [True, False])
def test_replay_is_differentiable_and_can_be_vectorised(per_layer: bool) -> None:
    check_replay(TopK(0.05, per_layer=per_layer))


def test_strength_grows_with_what_is_dropped() -> None:
    assert TopK(1.0).strength == 0 < TopK(0.1).strength < TopK(0.01).strength


@pytest.mark.parametrize("ratio", [0, 1.1, float("nan")])
def test_rejects_a_bad_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        TopK(ratio)


def test_another_architecture_has_nothing_to_add() -> None:
    defense = TopK(0.5)
    defense.on_update(update(1, 2, 3, 4), RNG)
    other = {"weight": torch.arange(7.0)}
    expected = replace(defense).on_update(other, RNG)
    torch.testing.assert_close(defense.on_update(other, RNG), expected)


def test_trains_about_as_well_as_undefended(tmp_path: Path) -> None:
    training = Training(clients=10, clients_per_round=2, batch_size=32)
    scenario = SCENARIOS["fashion-mini/mlp"].model_copy(update={"training": training})

    def accuracy(defense: Method) -> float:
        """Return the mean over the last evaluations: each has 500 examples."""
        rows = TrainTrial(scenario, defense, seed=0).run(tmp_path).utility[-3:]
        return sum(row.correct for row in rows) / sum(row.total for row in rows)

    sparse = accuracy(Method(name="TopK", options={"ratio": 0.05}))
    assert sparse > accuracy(Method(name="none")) - 0.03
