"""Choose one alternative for each of several examples that together explain an upload.

The expected upload is a base plus one shift per example. Inner products of these vectors determine
how well each combination explains the observed upload, so the search never touches an upload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..spaces import NotApplicable

STARTS, SWEEPS = 6, 24
"""Random starts, and sweeps with falling temperature over all examples."""

_HOTTEST, _COLDEST = 1.0, 0.01  # temperatures, relative to the spread of the fit
_MOST_GREEDY = 50  # sweeps at temperature zero; each one improves the fit or is the last

_MOST_ALTERNATIVES = 2**13  # of all examples together; their Gram matrix takes half a gigabyte
_ENTRIES_KEPT = 2**28  # entries of shifts that are held; more are replayed again
_ROUNDING = 1e-2  # relative error by which a sum over examples may be wrong

Replayed = Callable[[Tensor], Tensor]
"""Maps combinations (one alternative per example, stacked) to their expected uploads, as rows."""

Fit = Callable[[Tensor, Tensor], Tensor]
"""Maps <o, m> and |m|^2 to how well the expected upload m explains the observed upload o."""


@dataclass(frozen=True)
class Products:
    """Inner products for one upload o, a base b and shifts d of K examples with N alternatives.

    Attributes:
        observed: <o, d>, of shape K x N.
        base: <b, d>, of shape K x N.
        gram: <d, d'>, of shape KN x KN.
        start: <o, b> and |b|^2.
        fit: How well an expected upload explains o.
    """

    observed: Tensor
    base: Tensor
    gram: Tensor
    start: tuple[float, float]
    fit: Fit


def check_size(shape: tuple[int, int]) -> None:
    """Refuse more alternatives than a Gram matrix can hold.

    Args:
        shape: K x N.

    Raises:
        NotApplicable: If there are too many.
    """
    if shape[0] * shape[1] > _MOST_ALTERNATIVES:
        raise NotApplicable(
            f"{shape[0]} unknown examples with {shape[1]} candidates each are too many to choose "
            f"jointly: at most {_MOST_ALTERNATIVES} candidates in all"
        )


def gaussian(weight: float) -> Fit:
    """Return the log-density of Gaussian noise, up to a constant: -weight |o - m|^2."""
    return lambda product, square: weight * (2 * product - square)


def cosine(norm: float) -> Fit:
    """Return the cosine similarity to an upload with a norm."""
    return lambda product, square: product / (norm * square.clamp(min=1e-300).sqrt())


def measured(
    observed: Tensor, replay: Replayed, shape: tuple[int, int], fit: Fit
) -> tuple[Products, bool]:
    """Return the inner products for one upload, and whether its replay is a sum over examples.

    The base is the combination of all first alternatives. Two other combinations test whether
    shifts add up.

    Args:
        observed: The upload, as a vector in double precision.
        replay: Replays combinations.
        shape: K x N.
        fit: How well an expected upload explains the observed one.
    """
    examples, size = shape
    first = torch.zeros(examples, dtype=torch.long)
    others = torch.stack([first + (size - 1), (torch.arange(examples) + 1) % size])
    base = replay(first[None])[0].double()
    predicted = base.repeat(2, 1)

    def shifts(example: int) -> Tensor:
        combinations = first.repeat(size, 1)
        combinations[:, example] = torch.arange(size)
        replayed = replay(combinations)
        return replayed - base.to(replayed)

    kept = examples * size * len(base) <= _ENTRIES_KEPT
    every = [shifts(example) for example in range(examples)] if kept else []
    gram = base.new_zeros(examples, size, examples, size)
    products = base.new_zeros(2, examples, size)
    for example in range(examples):
        own = every[example] if kept else shifts(example)
        products[:, example] = torch.stack([_dots(own, observed), _dots(own, base)])
        predicted += own[others[:, example]]
        for other in range(example + 1):
            block = own @ (every[other] if kept else shifts(other)).T
            gram[example, :, other], gram[other, :, example] = block, block.T
    wrong = (replay(others).double() - predicted).norm(dim=1)
    additive = bool((wrong <= _ROUNDING * (predicted - base).norm(dim=1)).all())
    start = float(observed @ base), float(base @ base)
    flat = gram.flatten(2).flatten(0, 1)
    return Products(products[0], products[1], flat, start, fit), additive


def _dots(rows: Tensor, vector: Tensor) -> Tensor:
    """Return inner products in double precision, a part of the rows at a time."""
    return torch.cat([part.double() @ vector for part in rows.split(16)])


def choose(uploads: Sequence[Products], rng: Generator, starts: int = STARTS) -> Tensor:
    """Return the alternative of each example in the best combination found.

    Several random starts are annealed by coordinate updates: each update draws one example's
    alternative, given those of the others, at a falling temperature.

    Args:
        uploads: Uploads of the same examples; their fits add up.
        rng: Source of all randomness.
        starts: Number of random starts.
    """
    shape = (starts, len(uploads[0].observed))
    alternatives = uploads[0].observed.shape[1]
    drawn = torch.randint(alternatives, shape, generator=rng, device=rng.device)
    search = _Search(uploads, drawn.to(uploads[0].observed.device))
    spread = torch.stack([search.fits(k).std(dim=1) for k in range(shape[1])]).mean()
    for step in torch.linspace(0, 1, SWEEPS).tolist():
        search.sweep(float(spread) * _HOTTEST ** (1 - step) * _COLDEST**step, rng)
    for _ in range(_MOST_GREEDY):
        if not search.sweep(0.0, rng):
            break
    totals = search.fits(0).gather(1, search.choice[:, :1]).squeeze(1)
    return search.choice[totals.argmax()]


class _Search:
    """The current choice of every start, of shape starts x examples."""

    def __init__(self, uploads: Sequence[Products], choice: Tensor) -> None:
        self.choice, self.sums = choice, [_Sums(one, choice) for one in uploads]

    def fits(self, example: int) -> Tensor:
        """Return the fit if one example had each of its alternatives, of shape starts x N."""
        current = self.choice[:, example]
        return torch.stack([sums.fits(example, current) for sums in self.sums]).sum(dim=0)

    def sweep(self, temperature: float, rng: Generator) -> bool:
        """Update every example in turn; return whether anything changed."""
        before = self.choice.clone()
        for example in range(self.choice.shape[1]):
            values, current = self.fits(example), self.choice[:, example].clone()
            if temperature > 0:
                drawn = torch.rand(values.shape, generator=rng, device=rng.device).to(values)
                values = values - temperature * (-drawn.clamp(min=1e-12).log()).log()  # Gumbel
            best = values.argmax(dim=1)
            for sums in self.sums:
                sums.move(example, current, best)
            self.choice[:, example] = best
        return not torch.equal(before, self.choice)


class _Sums:
    """<o, m>, |m|^2 and <m - b, d> for the current expected upload m of every start."""

    def __init__(self, products: Products, choice: Tensor) -> None:
        self.products, self.alternatives = products, products.observed.shape[1]
        self.squares = products.gram.diagonal().view_as(products.observed)
        place = torch.arange(choice.shape[1], device=choice.device)
        rows = place * self.alternatives + choice
        self.field = products.gram[rows].sum(dim=1)
        self.product = products.start[0] + products.observed[place, choice].sum(dim=1)
        crossed = 2 * products.base[place, choice].sum(dim=1)
        self.square = products.start[1] + crossed + self.field.gather(1, rows).sum(dim=1)

    def fits(self, example: int, current: Tensor) -> Tensor:
        """Return the fit of every alternative of an example, given its current ones."""
        return self.products.fit(*self._after(example, current))

    def _after(self, example: int, current: Tensor) -> tuple[Tensor, Tensor]:
        """Return <o, m> and |m|^2 for every alternative of an example."""
        products, own = self.products, example * self.alternatives
        observed, squares = products.observed[example], self.squares[example]
        place = slice(own, own + self.alternatives)
        others = self.field[:, place] - products.gram[own + current, place]
        linear = 2 * (products.base[example] + others) + squares
        product = self.product[:, None] + observed - observed[current][:, None]
        return product, self.square[:, None] + linear - linear.gather(1, current[:, None])

    def move(self, example: int, current: Tensor, best: Tensor) -> None:
        """Replace the current alternatives of an example."""
        product, square = self._after(example, current)
        self.product = product.gather(1, best[:, None]).squeeze(1)
        self.square = square.gather(1, best[:, None]).squeeze(1)
        own, gram = example * self.alternatives, self.products.gram
        self.field += gram[own + best] - gram[own + current]
