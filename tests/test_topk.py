from dataclasses import replace

import pytest
import torch

from leakfrontier.defenses import TopK, Update

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


def test_strength_grows_with_what_is_dropped() -> None:
    assert TopK(1.0).strength == 0 < TopK(0.1).strength < TopK(0.01).strength


@pytest.mark.parametrize("ratio", [0, 1.1, float("nan")])
def test_rejects_a_bad_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        TopK(ratio)


def test_one_copy_per_client() -> None:
    defense = TopK(0.5)
    defense.on_update(update(1, 2, 3, 4), RNG)
    with pytest.raises(ValueError, match="one TopK per client"):
        defense.on_update({"weight": torch.ones(7)}, RNG)
