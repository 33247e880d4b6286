import torch

from leakfrontier.adversaries.text.prefixes import Extended, Prefixes


def memory(prefixes: int, length: int) -> torch.Tensor:
    """Return one head of size 1 that remembers 10 * prefix + place."""
    return (10 * torch.arange(prefixes)[:, None] + torch.arange(length)).view(prefixes, 1, -1, 1)


def test_rows_are_cut_from_all_that_is_remembered() -> None:
    whole = Prefixes(torch.tensor([[1], [2], [3]]), memory(3, 1), -memory(3, 1))
    some = whole.rows(slice(1, 3))
    assert some.tokens.tolist() == [[2], [3]]
    assert some.keys is not None
    assert some.values is not None
    assert some.keys.flatten().tolist() == [10, 20]
    assert some.values.flatten().tolist() == [-10, -20]
    assert Prefixes(torch.zeros(2, 0)).rows(slice(1)).keys is None


def test_a_prefix_that_grows_remembers_itself_and_its_own_candidate() -> None:
    prefixes = Prefixes(torch.tensor([[5, 6], [7, 8]]))
    keys = memory(2, 2 + 3)  # of two tokens and three candidates
    extended = Extended([], prefixes, torch.tensor([20, 21, 22]), keys, -keys)
    longer = extended.keep(torch.tensor([1, 1, 0]), torch.tensor([0, 2, 1]))
    assert longer.tokens.tolist() == [[7, 8, 20], [7, 8, 22], [5, 6, 21]]
    assert longer.keys is not None
    assert longer.values is not None
    assert longer.keys.shape == (3, 1, 3, 1)
    assert longer.keys.flatten(1).tolist() == [[10, 11, 12], [10, 11, 14], [0, 1, 3]]
    assert torch.equal(longer.values, -longer.keys)
