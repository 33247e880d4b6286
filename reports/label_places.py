"""Places the labels of points: as near as there is room, and joined to them by a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MARK = 7.0
"""Half the side of the square that a point's mark occupies, in pixels."""

_STEP = (6.0, 5.0)  # pixels between tried places
_TRIED = 250  # the nearest free places, among which the clearest is chosen
_CROSSING, _COVERING, _BAR = 60.0, 25.0, 8.0  # penalties, in pixels of distance
_CLEAR = 22.0  # length at which lines from crowded points can be distinguished
_ALONG = np.linspace(0.15, 0.95, 9)[:, None, None]


class Place(NamedTuple):
    """The centre of a label, and the end of the line from its point, in pixels (y upwards).

    `joined` says whether the line is needed. It is needed if the label is not right beside its
    point, or if other points are near.
    """

    x: float
    y: float
    end_x: float
    end_y: float
    joined: bool


def place_labels(
    points: Floats,
    sizes: Floats,
    room: tuple[float, float, float, float],
    bars: Floats | None = None,
) -> list[Place | None]:
    """Return a place for each label where it covers no mark and no other label.

    Labels are placed one after the other, each at the nearest free place. A more distant place is
    preferred if the line would cross another line, a label or a mark.

    Args:
        points: The points, n x 2, in pixels, the most important first.
        sizes: Width and height of their labels, n x 2. A label without width is not placed.
        room: Left, bottom, right and top of the area for labels.
        bars: Boxes that labels should avoid: centres and half sizes, m x 4.

    Returns:
        None for labels that found no room.
    """
    boxes = np.column_stack([points, np.full_like(points, MARK)])
    lines, bars = np.empty((0, 4)), np.empty((0, 4)) if bars is None else bars
    found: list[Place | None] = []
    for point, size in zip(points, sizes, strict=True):
        place = _place(point, size / 2, room, boxes, lines, bars) if size[0] else None
        found.append(place)
        if place is not None:
            boxes = np.vstack([boxes, [place.x, place.y, *size / 2]])
            lines = np.vstack([lines, [*point, place.end_x, place.end_y]])
    return found


def _place(
    point: Floats,
    half: Floats,
    room: tuple[float, float, float, float],
    boxes: Floats,
    lines: Floats,
    bars: Floats,
) -> Place | None:
    centres = _candidates(point, half, room)
    centres = centres[_overlaps(centres, half, boxes) == 0]
    if not len(centres):
        return None
    ends = np.clip(point, centres - half, centres + half)
    gaps = np.hypot(*(ends - point).T)
    crowded = bool((np.abs(boxes[:, :2] - point) < 3 * MARK).all(axis=1).sum() > 1)
    # Of equally near places, the one to the right and above is easiest to read.
    cost = np.abs(gaps - _CLEAR) if crowded else gaps
    cost = cost - 1.5 * (centres[:, 0] > point[0]) - (centres[:, 1] > point[1])
    cost += _BAR * _overlaps(centres, half, bars)
    nearest = np.argsort(cost, kind="stable")[:_TRIED]
    others = boxes[(boxes[:, :2] != point).any(axis=1)]
    cost = cost[nearest] + _CROSSING * _crossings(point, ends[nearest], lines)
    cost += _COVERING * _covered(point, ends[nearest], others)
    best = nearest[int(np.argmin(cost))]
    joined = crowded or bool(gaps[best] > 1.5 * MARK)
    (x, y), (end_x, end_y) = centres[best].tolist(), ends[best].tolist()
    return Place(x, y, end_x, end_y, joined)


def _candidates(point: Floats, half: Floats, room: tuple[float, float, float, float]) -> Floats:
    """Return the places right beside a point, and the places of a grid."""
    (left, bottom), (right, top) = np.array(room[:2]) + half, np.array(room[2:]) - half
    if left > right or bottom > top:
        return np.empty((0, 2))
    reach = half + MARK + 1
    beside = [
        (point[0] + a * reach[0], point[1] + b * reach[1])
        for a in (1, 0, -1)
        for b in (1, 0.5, 0, -0.5, -1)
    ]
    grid = np.meshgrid(np.arange(left, right + 1, _STEP[0]), np.arange(bottom, top + 1, _STEP[1]))
    places = np.vstack([beside, np.column_stack([axis.ravel() for axis in grid])])
    within = (places >= (left, bottom)) & (places <= (right, top))
    return np.asarray(places[within.all(axis=1)])


def _overlaps(centres: Floats, half: Floats, boxes: Floats) -> Floats:
    """Return how many boxes each label would overlap."""
    apart = np.abs(centres[:, None, :] - boxes[None, :, :2]) >= half + boxes[None, :, 2:]
    return np.asarray((~apart.any(axis=2)).sum(axis=1), dtype=float)


def _crossings(point: Floats, ends: Floats, lines: Floats) -> Floats:
    """Return how many lines each line from a point crosses. Lines from one point do not cross."""
    if not len(lines):
        return np.zeros(len(ends))
    starts, stops = lines[:, :2], lines[:, 2:]

    def side(a: Floats, b: Floats, c: Floats) -> Floats:
        (ax, ay), (bx, by), (cx, cy) = (np.moveaxis(one, -1, 0) for one in (a, b, c))
        return np.asarray(np.sign((bx - ax) * (cy - ay) - (by - ay) * (cx - ax)))

    own = ends[:, None, :]
    crossing = (side(point, own, starts) * side(point, own, stops) < 0) & (
        side(starts, stops, point) * side(starts, stops, own) < 0
    )
    return np.asarray(crossing.sum(axis=1), dtype=float)


def _covered(point: Floats, ends: Floats, boxes: Floats) -> Floats:
    """Return how many boxes the line from a point to each end runs over."""
    along = point + _ALONG * (ends - point)[None]
    inside = np.abs(along[:, :, None, :] - boxes[None, None, :, :2]) < boxes[None, None, :, 2:]
    return np.asarray(inside.all(axis=3).any(axis=0).sum(axis=1), dtype=float)


def text_sizes(texts: Sequence[str], font: float) -> Floats:
    """Return the approximate width and height of lines of text, in pixels."""
    return np.array([(0.56 * font * len(text) + 2 if text else 0.0, font + 2) for text in texts])
