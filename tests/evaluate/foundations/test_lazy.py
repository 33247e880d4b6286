from __future__ import annotations

import pytest

from leakfrontier.evaluate.foundations.lazy import Lazy


def test_elements_are_made_once_and_only_if_used() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return 10 * number

    numbers = Lazy([lambda n=n: make(n) for n in range(4)])  # type: ignore[misc]
    assert len(numbers) == 4
    assert not made
    assert (numbers[-1], numbers[3], numbers[1:3]) == (30, 30, [10, 20])
    assert made == [3, 1, 2]
    assert [*numbers] == [0, 10, 20, 30]
    assert sorted(made) == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        numbers[4]
    assert [*Lazy[int]([])] == []
