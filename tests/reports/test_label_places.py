"""Labels have places of their own, near their points."""

import numpy as np
import pytest

from leakfrontier.reports.label_places import MARK, place_labels, text_sizes

ROOM = (0.0, 0.0, 600.0, 400.0)


def crowd(count: int) -> np.ndarray:
    """Return points of which half coincide in a corner."""
    points = np.random.default_rng(0).uniform((0, 0), (600, 400), (count, 2))
    points[: count // 2] = (580, 390)
    return points


def test_no_label_covers_another_or_a_mark() -> None:
    points, sizes = crowd(30), text_sizes([f"Defense {i:02}" for i in range(30)], 11.5)
    places = [place for place in place_labels(points, sizes, ROOM) if place]
    assert len(places) == 30
    marks = [(*point, MARK, MARK) for point in points]
    boxes = marks + [(p.x, p.y, w / 2, h / 2) for p, (w, h) in zip(places, sizes, strict=True)]
    for i, (x, y, w, h) in enumerate(boxes[30:], 30):
        assert w - 1e-6 <= x <= 600 - w + 1e-6
        assert h - 1e-6 <= y <= 400 - h + 1e-6
        for a, b, v, k in boxes[:i]:
            assert abs(x - a) >= w + v - 1e-6 or abs(y - b) >= h + k - 1e-6


def test_a_point_alone_needs_no_line() -> None:
    sizes = text_sizes(["alone", "also"], 11.5)
    alone, beside = place_labels(np.array([[100.0, 100.0], [400.0, 300.0]]), sizes, ROOM)
    assert alone is not None
    assert beside is not None
    assert not alone.joined
    assert np.hypot(alone.end_x - 100, alone.end_y - 100) <= 1.5 * MARK
    near, other = place_labels(np.array([[100.0, 100.0], [108.0, 100.0]]), sizes, ROOM)
    assert near is not None
    assert other is not None
    assert near.joined
    assert other.joined


@pytest.mark.parametrize("room", [(0.0, 0.0, 20.0, 400.0), (0.0, 0.0, 600.0, 5.0)])
def test_without_room_there_is_no_label(room: tuple[float, float, float, float]) -> None:
    assert place_labels(np.array([[10.0, 2.0]]), text_sizes(["too long"], 11.5), room) == [None]


def test_an_empty_label_is_not_placed() -> None:
    assert place_labels(np.array([[10.0, 2.0]]), text_sizes([""], 11.5), ROOM) == [None]
