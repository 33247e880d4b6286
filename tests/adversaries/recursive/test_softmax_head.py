import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries.recursive.softmax_head import Head, separate

CLASSES, FEATURES = 7, 12


def batch(pairs: list[tuple[int, int]]) -> tuple[Head, Tensor]:
    """Return the gradient of vectors with these labels and saturated predictions, and they."""
    rng = torch.Generator().manual_seed(0)
    weight = 1e4 * torch.randn(CLASSES, FEATURES, generator=rng, dtype=torch.float64)
    drawn = [*torch.randn(300, FEATURES, generator=rng, dtype=torch.float64)]
    vectors = torch.stack(
        [
            drawn.pop(
                next(i for i, x in enumerate(drawn) if int((weight @ x).argmax()) == predicted)
            )
            for _, predicted in pairs
        ]
    )
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    logits = (vectors @ weight.T).requires_grad_()
    labels = torch.tensor([label for label, _ in pairs])
    (slopes,) = torch.autograd.grad(cross_entropy(logits, labels, reduction="sum"), logits)

    def possible(guesses: Tensor) -> Tensor:  # as if the layers before gave nothing else
        return torch.cdist(guesses, vectors).amin(1) < 1e-6

    gradient, totals = slopes.T @ vectors, slopes.sum(0)
    return Head(weight, bias, gradient, totals, cross_entropy, 1e-16, possible), vectors


def test_a_label_is_found_in_a_row_whose_total_vanishes() -> None:
    # row 1 is the first one's label and the second one's prediction; two stay mixed in 4 and 5
    head, vectors = batch([(1, 0), (2, 1), (2, 4), (5, 4), (5, 4)])
    assert abs(float(head.totals[1])) < 1e-12
    found, certain = separate(head, 5)
    assert certain.all()
    assert sorted(head.labels) == [1, 2, 2]
    torch.testing.assert_close(torch.cdist(vectors[:3], found).amin(1), torch.zeros(3).double())


def test_examples_are_the_whole_batch_or_not() -> None:
    head, vectors = batch([(1, 0), (2, 1), (2, 4), (3, 3)])
    slopes = head.explained_by(vectors, 1e-9)
    assert slopes is not None
    torch.testing.assert_close(slopes.T @ vectors, head.whole)
    assert head.explained_by(vectors[:2], 1e-9) is None
