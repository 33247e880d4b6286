import pytest
from federated import rng

from leakfrontier.adversaries.text.reordering import reorderings


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_are_orders_and_the_first_is_the_present_one(size: int) -> None:
    orders = reorderings(size, 50, rng())
    assert orders.shape == (50, size)
    assert orders[0].tolist() == list(range(size))
    assert (orders.sort(dim=1).values == orders[0]).all()


def test_there_are_swaps_moves_moved_segments_and_rotations() -> None:
    orders = {tuple(order) for order in reorderings(5, 2000, rng()).tolist()}
    swapped, moved_back, moved_on = (0, 3, 2, 1, 4), (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)
    segments, rotated = (2, 3, 0, 1, 4), (3, 4, 0, 1, 2)
    assert orders >= {swapped, moved_back, moved_on, segments, rotated}


def test_they_are_drawn_from_the_generator_alone() -> None:
    assert (reorderings(6, 30, rng(4)) == reorderings(6, 30, rng(4))).all()
    assert (reorderings(6, 30, rng(4)) != reorderings(6, 30, rng(5))).any()
