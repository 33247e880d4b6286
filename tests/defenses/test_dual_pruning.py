import math
from dataclasses import replace

import pytest
import torch
from federated import batch, convolutional, mlp, rng
from replaying import check_replay
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import TopK, Update, batch_gradient
from leakfrontier.defenses.dual_pruning import DualPruning


def update(*values: float) -> Update:
    return {"weight": torch.tensor(values[:4]), "bias": torch.tensor(values[4:])}


EIGHT = update(-1, 8, 3, -4, 50, -70, 60, 20)


@pytest.mark.parametrize("build", [mlp, convolutional])
@pytest.mark.parametrize("per_layer", [True, False])
def test_identity_setting_is_the_undefended_update(build, per_layer: bool) -> None:  # noqa: ANN001
    given = batch_gradient(build(), cross_entropy, batch(2))
    sent = DualPruning(0, 0, per_layer).on_update(given, rng())
    torch.testing.assert_close(sent, given, rtol=0, atol=0)


def test_drops_the_largest_and_the_smallest_of_each_tensor() -> None:
    sent = DualPruning(largest=0.25, smallest=0.25).on_update(EIGHT, rng())
    assert sent["weight"].tolist() == [0, 0, 3, -4]
    assert sent["bias"].tolist() == [50, 0, 60, 0]


def test_or_those_of_the_whole_update() -> None:
    sent = DualPruning(largest=0.25, smallest=0.5, per_layer=False).on_update(EIGHT, rng())
    assert sent["weight"].tolist() == [0, 0, 0, 0]
    assert sent["bias"].tolist() == [50, 0, 0, 20]


@pytest.mark.parametrize(("largest", "smallest"), [(0.05, 0.75), (0.0, 0.9), (0.5, 0.0)])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 1001])
def test_drops_the_stated_shares_of_tensors_of_any_size(
    largest: float, smallest: float, size: int
) -> None:
    given = torch.randn(size, generator=rng())
    sent = DualPruning(largest, smallest).on_update({"w": given}, rng())["w"]
    assert int((sent != 0).sum()) == size - round(largest * size) - round(smallest * size)
    if kept := sent[sent != 0].abs().tolist():
        assert sum(given.abs() > max(kept)) == round(largest * size)
        assert sum(given.abs() < min(kept)) == round(smallest * size)


def test_without_largest_it_is_top_k() -> None:
    given = batch_gradient(mlp(), cross_entropy, batch(2))
    ours = DualPruning(0.0, 0.9, per_layer=False).on_update(given, rng())
    torch.testing.assert_close(ours, TopK(0.1).on_update(given, rng()), rtol=0, atol=0)


def test_error_feedback_carries_what_was_dropped() -> None:
    given = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    defense = DualPruning(0.25, 0.25)
    assert defense.on_update(given, rng())["w"].tolist() == [0, 2, 3, 0]
    assert defense._dropped is not None
    assert defense._dropped.tolist() == [1, 0, 0, 4]
    # Now 2, 2, 3, 8: the largest stays away, one of the smallest comes.
    later = defense.on_update(given, rng())["w"]
    assert later[2] == 3
    assert later[3] == 0
    assert later[:2].sum() == 2
    assert replace(defense)._dropped is None
    plain = DualPruning(0.25, 0.25, error_feedback=False)
    for _ in range(2):
        assert plain.on_update(given, rng())["w"].tolist() == [0, 2, 3, 0]


def test_replay_of_the_true_update_is_the_upload() -> None:
    defense = DualPruning(0.05, 0.75)
    true = batch_gradient(mlp(), cross_entropy, batch(2))
    observed = defense.on_update(true, rng())
    torch.testing.assert_close(defense.replay(observed).on_update(true, rng()), observed)


def test_replay_is_differentiable_and_can_be_vectorised() -> None:
    check_replay(DualPruning(0.05, 0.75))


def test_strength_grows_with_what_is_dropped() -> None:
    assert DualPruning(0, 0).strength == 0
    assert DualPruning(0.05, 0.5).strength < DualPruning(0.05, 0.75).strength
    assert not DualPruning(0.05, 0.75).stochastic


@pytest.mark.parametrize(
    ("largest", "smallest", "message"),
    [
        (-0.1, 0.5, r"largest must be in \[0, 1\), got -0.1"),
        (1.0, 0.0, r"largest must be in \[0, 1\)"),
        (math.nan, 0.0, "largest"),
        (0.0, 1.0, r"smallest must be in \[0, 1\), got 1.0"),
        (0.0, math.nan, "smallest"),
        (0.5, 0.5, r"largest \+ smallest must be less than 1"),
    ],
)
def test_rejects_bad_fractions(largest: float, smallest: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DualPruning(largest, smallest)
