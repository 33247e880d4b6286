"""What the gradient of the last linear layer reveals about a batch, class by class.

A last layer with logits W x + b has dL/dW = sum_k s_k x_k^T and dL/db = sum_k s_k. Here s_k is the
slope of example k's loss in its logits: softmax minus label, for cross-entropy. If a single example
moves a class, the row of dL/dW is a multiple of its x [1, Eq. 23]. Otherwise the row gives a mean.
Two tests tell whether a row belongs to one example. The slope of x itself must equal the row's
slope, and the layers before must be able to produce x. Found examples are subtracted, which leaves
others alone in their rows.

References:
    [1] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
        through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
        https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

_SAME = 1e-3
"""Two vectors belong to the same example if their relative distance is below this."""
_AGREEMENT = 1e-3
"""Largest relative distance between a row's bias gradient and the slope of its example."""
_LOST = 1e-9
"""After a subtraction, a remainder below this share of what was subtracted is rounding."""


class Head:
    """The last layer's gradient, summed over a batch, minus the examples that were found.

    Args:
        weight: W.
        bias: b.
        weight_gradient: dL/dW, summed over the examples.
        bias_gradient: dL/db, summed over the examples.
        loss: Mean loss of a batch of logits.
        precision: Relative rounding error of the gradients.
        possible: Returns which vectors the layers before can produce.

    Attributes:
        found: The layer's inputs for single examples that were found.
        labels: Their labels; -1 if unknown.
        taken_slopes: The dL/dlogits that was subtracted for each example.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: float,
        possible: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.weight, self.bias, self.loss, self.precision = weight, bias, loss, precision
        self.whole = weight_gradient
        self.rows, self.totals = weight_gradient.clone(), bias_gradient.clone()
        self.taken = precision * bias_gradient.abs()
        self.tolerance = max(_AGREEMENT, 1e4 * precision)
        self.possible = possible
        self.found = weight.new_zeros(0, weight.shape[1])
        self.labels: list[int] = []
        self.taken_slopes: list[Tensor] = []

    def slopes(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return dL/dlogits of each vector, as an example on its own."""
        logits = (vectors @ self.weight.T + self.bias).detach().requires_grad_()
        total = self.loss(logits, labels) * len(labels)  # the loss is a mean
        (slopes,) = torch.autograd.grad(total, logits)
        return slopes

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Return the classes with a gradient, and the vector that each class gives."""
        tiny = 1e3 * torch.finfo(self.totals.dtype).tiny
        classes = (self.totals.abs() > torch.clamp(self.taken, min=tiny)).nonzero().flatten()
        vectors = self.rows[classes] / self.totals[classes].unsqueeze(1)
        finite = vectors.isfinite().all(1)
        return classes[finite], vectors[finite]

    def single(self, classes: Tensor, vectors: Tensor, totals: Tensor) -> Tensor:
        """Return which vectors, taken as single examples, explain the totals of their rows."""
        if not len(classes):
            return classes.bool()
        other = (classes + 1) % len(self.bias)  # any label other than the class itself
        labels = torch.where(totals < 0, classes, other)
        own = self.slopes(vectors, labels).gather(1, classes.unsqueeze(1)).squeeze(1)
        return self._possible((own - totals).abs() <= self.tolerance * totals.abs(), vectors)

    def _possible(self, likely: Tensor, vectors: Tensor) -> Tensor:
        """Return which likely vectors the layers before can produce."""
        if self.possible is None or not likely.any():
            return likely
        found = likely.clone()
        found[likely] = self.possible(vectors[likely])
        return found

    def known(self, vectors: Tensor) -> Tensor:
        """Return which vectors were already found."""
        if not len(self.found) or not len(vectors):
            return torch.zeros(len(vectors), dtype=torch.bool)
        distances = torch.cdist(vectors, self.found) / vectors.norm(dim=1, keepdim=True)
        near: Tensor = (distances < _SAME).any(1)
        return near

    def add(self, vector: Tensor, label: int) -> None:
        """Record an example, and subtract what it explains."""
        self.found = torch.cat([self.found, vector.unsqueeze(0)])
        self.labels.append(label)
        slope = self.slopes(vector.unsqueeze(0), torch.tensor([max(label, 0)]))[0]
        if label < 0:  # rows that may belong to its label are not changed
            slope = torch.where(self.totals < -0.5 * self.totals.abs().max(), 0.0, slope)
            slope[0] = 0.0 if self.totals[0] < 0 else slope[0].clamp(min=0)
        self.taken_slopes.append(slope)
        self._subtract(vector, slope)

    def labelled(self, labels: Sequence[int]) -> Head:
        """Return a copy with labels for found examples that had none, in their order."""
        given, head = iter(labels), copy(self)
        head.labels = [next(given) if label < 0 else label for label in self.labels]
        slopes = head.slopes(head.found, torch.tensor(head.labels, dtype=torch.long))
        for vector, slope, taken in zip(head.found, slopes, self.taken_slopes, strict=True):
            head._subtract(vector, slope - taken)
        head.taken_slopes = [*slopes]
        return head

    def mixed(self, examples: int) -> list[tuple[int, int, Tensor]]:
        """Return the remaining examples by label: the label, their number, and their sum.

        Examples of one label are assumed to have the slope of their mean. The list is empty if this
        does not explain the remainder or the number of examples. It is also empty if labels are
        wrong. Wrong labels show in nonempty rows without a total, and in single examples that were
        not found.

        Args:
            examples: Number of examples that remain.
        """
        labels = (self.totals < -self.tolerance).nonzero().flatten()
        if not len(labels) or any(label < 0 for label in self.labels):
            return []
        means = self.rows[labels] / self.totals[labels].unsqueeze(1)
        slopes = self.slopes(means, labels)
        counts = (self.totals[labels] / slopes.gather(1, labels.unsqueeze(1)).squeeze(1)).round()
        error = (counts @ slopes - self.totals).abs().max()
        if counts.sum() != examples or error > self.tolerance or not counts.min() > 1:
            return []
        empty = self.rows[self.totals.abs() <= self.tolerance].norm(dim=1)
        if (empty > self.tolerance * means.norm(dim=1).mean()).any():
            return []
        sums = means * counts.unsqueeze(1)
        return [
            (int(label), int(count), total)
            for label, count, total in zip(labels, counts, sums, strict=True)
        ]

    def explained_by(self, vectors: Tensor, accuracy: float) -> Tensor | None:
        """Return dL/dlogits of examples if they are the whole batch; None if any are missing.

        If dL/dW = sum_k s_k x_k^T has no other x, it is a linear system in s, which reveals labels.

        Args:
            vectors: The layer's inputs for the examples.
            accuracy: Largest part of the gradient that may be unexplained.
        """
        slopes = torch.linalg.lstsq(vectors.T, self.whole.T).solution
        predicted = (vectors @ self.weight.T + self.bias).argmax(1)
        lowest, labels = slopes.min(1)
        exact = self.slopes(vectors, labels.where(lowest < -self.tolerance, predicted))
        rest = (exact.T @ vectors - self.whole).norm()
        return exact if rest <= accuracy * self.whole.norm() else None

    def _subtract(self, vector: Tensor, slope: Tensor) -> None:
        self.rows = self.rows - torch.outer(slope, vector)
        self.totals = self.totals - slope
        self.taken = self.taken + _LOST * slope.abs()

    def classes_left(self) -> list[int]:
        """Return the classes whose rows are not empty; rows of labels come first."""
        sizes, whole = self.rows.norm(dim=1), self.whole.norm(dim=1)
        left = (sizes > self.tolerance * whole.max()).nonzero().flatten()
        classes: list[int] = left[self.totals[left].argsort()].tolist()
        return classes

    def relabel(self) -> bool:
        """Search for labels of found examples without one; return whether any was found."""
        before = list(self.labels)
        for place, (vector, label) in enumerate(zip(self.found, before, strict=True)):
            if label >= 0:
                continue
            taken = self.taken_slopes[place]
            label = self.label_of(vector, taken)
            if label >= 0:
                slope = self.slopes(vector.unsqueeze(0), torch.tensor([label]))[0]
                self._subtract(vector, slope - taken)
                self.labels[place], self.taken_slopes[place] = label, slope
        return self.labels != before

    def label_of(self, vector: Tensor, taken: Tensor | None = None) -> int:
        """Return the label whose row, minus the example, is another example or empty; else -1.

        Args:
            vector: The layer's input for the example.
            taken: The dL/dlogits that was already subtracted for it.
        """
        classes = torch.arange(len(self.bias))
        own = self.slopes(vector.expand(len(classes), -1), classes).diagonal()
        own = own if taken is None else own - taken
        rest = self.totals - own
        rows = self.rows - own.unsqueeze(1) * vector
        gone = rows.norm(dim=1) < self.tolerance * vector.norm() * own.abs()
        vectors = (rows / rest.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0)
        another = (vectors - vector).norm(dim=1) > _SAME * vector.norm()
        explained = gone | (another & self.single(classes, vectors, rest))
        likeliest = classes[explained][(rest - 1e9 * gone)[explained].argsort()]
        return int(likeliest[0]) if len(likeliest) else -1


def separate(head: Head, examples: int, *, peel: bool = True) -> tuple[Tensor, Tensor]:
    """Return vectors of certainly single examples of a batch; if there are none, mixtures.

    Args:
        head: The last layer's gradient. Found examples are subtracted from it.
        examples: Largest number of vectors.
        peel: Whether to search again after found examples are subtracted.
    """
    rounds = examples if peel else 1
    for _ in range(rounds):
        before = len(head.found)
        _find(head, examples, peel=peel)
        labelled = peel and head.relabel()
        if len(head.found) == examples or (len(head.found) == before and not labelled):
            break
    if len(head.found):  # mixtures would only blur the matching of guesses
        return head.found, torch.ones(len(head.found), dtype=torch.bool)
    classes, vectors = head.candidates()
    vectors = vectors[head.totals[classes].argsort()][:examples]  # rows of labels first
    return vectors, torch.zeros(len(vectors), dtype=torch.bool)


def _find(head: Head, examples: int, *, peel: bool) -> None:
    classes, vectors = head.candidates()
    keep = head.single(classes, vectors, head.totals[classes]) & ~head.known(vectors)
    order = head.totals[classes[keep]].argsort()  # rows of labels first: their label is known
    for place, vector in zip(classes[keep][order].tolist(), vectors[keep][order], strict=True):
        if len(head.found) == examples:
            return
        if bool(head.known(vector.unsqueeze(0))):
            continue
        if not peel:
            head.found = torch.cat([head.found, vector.unsqueeze(0)])
            head.labels.append(place if head.totals[place] < 0 else -1)
            continue
        row_is_label = bool(head.totals[place] < 0)
        head.add(vector, place if row_is_label else head.label_of(vector))
