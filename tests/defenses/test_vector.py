import torch

from leakfrontier.defenses import Update
from leakfrontier.defenses.vector import flatten, map_vectors, restore, straight_through, unflatten


def update() -> Update:
    return {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor([5.0])}


def test_a_vector_has_all_entries_in_order_and_goes_back() -> None:
    vector = flatten(update())
    assert vector.tolist() == [1, 2, 3, 4, 5]
    back = unflatten(10 * vector, like=update())
    assert list(back) == ["weight", "bias"]
    assert back["weight"].tolist() == [[10, 20], [30, 40]]
    assert back["bias"].tolist() == [50]


def test_a_function_sees_each_tensor_or_all_of_them_as_one() -> None:
    def largest(vector: torch.Tensor) -> torch.Tensor:
        return vector.max().expand(len(vector))

    apart = map_vectors(largest, update(), per_layer=True)
    assert (apart["weight"].tolist(), apart["bias"].tolist()) == ([[4, 4], [4, 4]], [5])
    together = map_vectors(largest, update(), per_layer=False)
    assert (together["weight"].tolist(), together["bias"].tolist()) == ([[5, 5], [5, 5]], [5])


def test_what_is_rounded_has_the_slope_of_what_was_not() -> None:
    value = torch.tensor([0.4, 1.6], requires_grad=True)
    rounded = straight_through(value**2, (value**2).round())
    assert rounded.tolist() == [0, 3]
    (slope,) = torch.autograd.grad(rounded.sum(), value)
    torch.testing.assert_close(slope, 2 * value.detach())


def test_what_was_dropped_is_added_to_the_next_update() -> None:
    first = restore(update(), None)
    assert flatten(first).tolist() == [1, 2, 3, 4, 5]
    later = restore(update(), torch.tensor([0.0, 0.0, 0.0, 1.0, -5.0]))
    assert later["weight"].tolist() == [[1, 2], [3, 5]]
    assert later["bias"].tolist() == [0]


def test_nothing_is_added_to_an_update_of_another_architecture() -> None:
    torch.testing.assert_close(restore(update(), torch.ones(7)), update())
