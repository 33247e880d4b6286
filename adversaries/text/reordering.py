"""Random changes of the order of a sentence's tokens.

References:
    Balunovic, Dimitrov, Jovanovic, Vechev. "LAMP: Extracting Text from Gradients with Language
    Model Priors." NeurIPS 2022. https://arxiv.org/abs/2202.08827 (section 4, discrete optimisation)
"""

import torch
from torch import Generator, Tensor


def reorderings(size: int, count: int, rng: Generator) -> Tensor:
    """Return orders of `size` items (count, size): the current order, then changed ones.

    The changes alternate: two items are swapped, one item is moved, a segment is moved, and the
    beginning is moved to the end.
    """
    orders = [list(range(size))]
    changes = (_swap, _move, _move_segment, _rotate)
    while len(orders) < count:
        places = sorted(torch.randint(size, (3,), generator=rng).tolist())
        orders.append(changes[len(orders) % len(changes)](list(range(size)), *places))
    return torch.tensor(orders)


def _swap(order: list[int], first: int, middle: int, last: int) -> list[int]:
    order[first], order[last] = order[last], order[first]
    return order


def _move(order: list[int], first: int, middle: int, last: int) -> list[int]:
    """Move one item backwards, or forwards if the middle index is even."""
    here, there = (first, last) if middle % 2 else (last, first)
    order.insert(there, order.pop(here))
    return order


def _move_segment(order: list[int], first: int, middle: int, last: int) -> list[int]:
    """Exchange two adjacent segments."""
    return order[:first] + order[middle : last + 1] + order[first:middle] + order[last + 1 :]


def _rotate(order: list[int], first: int, middle: int, last: int) -> list[int]:
    return order[middle:] + order[:middle]
