import math
from dataclasses import dataclass, replace

import pytest
import torch
from federated import batch, mlp, rng
from torch import Generator
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Batch, Chain, ClientDP, Defense, Plan, TopK, Update


@dataclass
class Scale(Defense):
    factor: float

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return Batch(batch.inputs * self.factor, batch.targets)


@dataclass
class Shift(Defense):
    by: float

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {name: value + self.by for name, value in update.items()}


def test_links_are_applied_in_the_order_of_the_list() -> None:
    value = {"w": torch.tensor([1.0, 10.0])}
    first_shift = Chain((Shift(-9.0), TopK(0.5))).on_update(value, rng())
    first_topk = Chain((TopK(0.5), Shift(-9.0))).on_update(value, rng())
    assert first_shift["w"].tolist() == [-8.0, 0.0]
    assert first_topk["w"].tolist() == [-9.0, 1.0]


def test_an_empty_chain_is_the_undefended_client() -> None:
    model, data = mlp(), batch(2)
    torch.testing.assert_close(
        Chain(()).gradient(model, cross_entropy, data, rng()),
        Defense().gradient(model, cross_entropy, data, rng()),
    )


def test_takes_the_gradient_of_the_one_link_that_computes_it() -> None:
    model, data = mlp(), batch(2)
    chain = Chain((TopK(0.5), DPSGD(0.5, 1.0)))
    torch.testing.assert_close(
        chain.gradient(model, cross_entropy, data, rng(1)),
        DPSGD(0.5, 1.0).gradient(model, cross_entropy, data, rng(1)),
    )
    assert chain.stochastic


def test_a_fresh_copy_has_fresh_links() -> None:
    chain = Chain((TopK(0.5),))
    chain.on_update({"w": torch.tensor([1.0, 2.0])}, rng())
    assert chain.links[0]._dropped is not None  # type: ignore[attr-defined]
    assert replace(chain).links[0]._dropped is None  # type: ignore[attr-defined]


def test_guarantee_survives_post_processing_and_nothing_else() -> None:
    plan = Plan(steps=10, sample_rate=0.1, delta=1e-5)
    alone = DPSGD(1.0).guarantee(plan)
    assert Chain((DPSGD(1.0), TopK(0.1))).guarantee(plan) == alone
    assert Chain((Scale(2.0), DPSGD(1.0))).guarantee(plan) is None
    assert Chain((TopK(0.1),)).guarantee(plan) is None
    whole = ClientDP(1.0)
    assert Chain((Scale(2.0), whole, TopK(0.1))).guarantee(plan) == whole.guarantee(plan)


def test_refuses_two_ways_to_compute_a_gradient() -> None:
    with pytest.raises(ValueError, match="at most one link"):
        Chain((DPSGD(1.0), DPSGD(2.0)))
    with pytest.raises(ValueError, match="must be Defense objects"):
        Chain(("TopK",))  # type: ignore[arg-type]


def test_takes_the_batches_of_the_one_link_that_draws_them() -> None:
    chain = Chain((TopK(0.5), DPSGD(1.0)))
    rows = next(chain.batches(1000, 100, 1, rng(2)))
    assert torch.equal(rows, next(DPSGD(1.0).batches(1000, 100, 1, rng(2))))


def test_a_finite_claim_comes_before_an_infinite_one() -> None:
    plan = Plan(steps=10, sample_rate=0.1, delta=1e-5)
    claim = Chain((DPSGD(0.0), ClientDP(1.0))).guarantee(plan)
    assert claim == ClientDP(1.0).guarantee(plan)
    assert Chain((DPSGD(0.0), TopK(0.1))).guarantee(plan).epsilon == math.inf  # type: ignore[union-attr]
