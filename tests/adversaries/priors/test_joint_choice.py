"""The choice of alternatives for several examples at once."""

from itertools import product

import pytest
import torch
from federated import rng
from torch import Tensor

from leakfrontier.adversaries import NotApplicable
from leakfrontier.adversaries.priors import joint_choice
from leakfrontier.adversaries.priors.joint_choice import (
    Fit,
    check_size,
    choose,
    cosine,
    gaussian,
    measured,
)

EXAMPLES, SIZE, ENTRIES = 4, 6, 10


def parts(seed: int) -> Tensor:
    """Return what each alternative of each example adds to an upload."""
    return torch.randn(EXAMPLES, SIZE, ENTRIES, generator=rng(seed))


def summed(added: Tensor, combinations: Tensor) -> Tensor:
    return added[torch.arange(EXAMPLES), combinations].sum(dim=1)


def upload(seed: int, noise: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return the parts of an upload, and a noisy one."""
    added, draws = parts(seed), rng(seed + 100)
    truth = torch.randint(SIZE, (1, EXAMPLES), generator=draws)
    observed = summed(added, truth)[0] + noise * torch.randn(ENTRIES, generator=draws)
    return added, observed.double()


def fit_of(kind: str, observed: Tensor) -> Fit:
    return gaussian(0.5) if kind == "gaussian" else cosine(float(observed.norm()))


@pytest.mark.parametrize("kind", ["gaussian", "cosine"])
@pytest.mark.parametrize("uploads", [1, 3])
def test_finds_the_best_of_all_combinations(kind: str, uploads: int) -> None:
    every = torch.tensor([*product(range(SIZE), repeat=EXAMPLES)])
    for seed in range(10):
        found, total = [], torch.zeros(len(every), dtype=torch.float64)
        for number in range(uploads):
            added, observed = upload(seed + 10 * number)
            expected = summed(added.double(), every)
            if kind == "gaussian":
                total -= 0.5 * (observed - expected).square().sum(dim=1)
            else:
                total += torch.cosine_similarity(observed[None], expected)

            def replay(rows: Tensor, added: Tensor = added) -> Tensor:
                return summed(added, rows)

            fit = fit_of(kind, observed)
            products, additive = measured(observed, replay, (EXAMPLES, SIZE), fit)
            assert additive
            found.append(products)
        assert choose(found, rng()).tolist() == every[total.argmax()].tolist()


def test_a_replay_that_is_not_a_sum_is_noticed() -> None:
    added, observed = upload(0)
    shape, fit = (EXAMPLES, SIZE), gaussian(0.5)
    for replay, additive in (
        (lambda rows: summed(added, rows) + 5, True),
        (lambda rows: summed(added, rows).tanh(), False),
        (lambda rows: summed(added, rows).sign(), False),
    ):
        assert measured(observed, replay, shape, fit)[1] == additive


def test_too_many_entries_to_keep_are_replayed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    added, observed = upload(0)
    calls = []

    def replay(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return summed(added, rows)

    kept, _ = measured(observed, replay, (EXAMPLES, SIZE), gaussian(0.5))
    few = len(calls)
    monkeypatch.setattr(joint_choice, "_ENTRIES_KEPT", 0)
    again, _ = measured(observed, replay, (EXAMPLES, SIZE), gaussian(0.5))
    assert len(calls) - few > few
    torch.testing.assert_close(again.gram, kept.gram)
    torch.testing.assert_close(again.observed, kept.observed)


def test_all_draws_come_from_the_generator() -> None:
    added, observed = upload(0)
    products, _ = measured(
        observed, lambda rows: summed(added, rows), (EXAMPLES, SIZE), gaussian(0.01)
    )
    before = torch.get_rng_state()
    assert torch.equal(choose([products], rng(3)), choose([products], rng(3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_more_candidates_than_a_gram_matrix_holds_are_refused() -> None:
    check_size((64, 100))
    with pytest.raises(NotApplicable, match="100 unknown examples with 100 candidates each"):
        check_size((100, 100))
