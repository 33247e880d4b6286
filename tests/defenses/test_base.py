import math
from dataclasses import dataclass, replace

import pytest
import torch
from federated import batch, make_client, mlp, rng
from torch import Generator, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import Candidates, Observation, PriorAware
from leakfrontier.adversaries.priors import prior_aware
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    ClientDP,
    Defense,
    Noise,
    Plan,
    Refused,
    SecureAggregation,
    SignSGD,
    TopK,
    Update,
)
from leakfrontier.evaluate.client.client import ThreatModel, observe


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


def test_batches_are_cut_and_joined() -> None:
    whole = batch(5)
    parts = [whole.at(slice(0, 2)), whole.at(torch.tensor([2, 3, 4]))]
    joined = Batch.joined(parts)
    assert joined.inputs.equal(whole.inputs)
    assert joined.targets.equal(whole.targets)


def among_candidates(defense: Defense) -> tuple[Observation, int]:
    """Return an upload of one of twenty candidates, and which."""
    pool = Candidates(*(part.unsqueeze(1) for part in batch(20, seed=3)))
    private = [Batch(pool.inputs[11], pool.targets[11])]
    client = make_client(mlp(), defense)
    (upload,) = observe(client, private, ThreatModel(candidates=pool), rng())
    return upload.observation, 11


PRIVATE = DPSGD(0.02)


@pytest.mark.parametrize(
    "links",
    [(PRIVATE, TopK(0.3)), (PRIVATE, SecureAggregation(clients=1)), (TopK(0.5), PRIVATE)],
    ids=repr,
)
def test_an_attack_on_a_chain_uses_the_likelihood_of_its_noisy_link(
    links: tuple[Defense, ...],
) -> None:
    observation, index = among_candidates(Chain(links))
    fit = prior_aware.likelihood(observation)
    assert fit is not None
    assert observation.candidates is not None
    values = prior_aware.fits(observation, *observation.candidates, fit)
    assert int(values.argmax()) == index
    # The density of DP-SGD alone, at what the whole chain would release.
    replayed = observation.simulate(*(part[index] for part in observation.candidates))
    alone = PRIVATE.log_likelihood(observation.update, replayed, batch_size=1)
    torch.testing.assert_close(values[index].float(), alone, rtol=1e-4, atol=1e-2)
    guess = PriorAware().reconstruct(observation, rng())
    assert guess.inputs.equal(observation.candidates.inputs[index])


def test_several_noises_and_none_at_all_have_no_likelihood() -> None:
    update = {"w": torch.ones(3)}
    for links in ((), (TopK(0.5),), (DPSGD(1.0), SignSGD()), (DPSGD(1.0), Noise(0.1))):
        assert Chain(links).log_likelihood(update, update, 1) is None
    assert Chain((Noise(0.1), TopK(0.5))).log_likelihood(update, update) is not None
    # Of several local steps DP-SGD knows no density, and a chain makes none up.
    assert Chain((DPSGD(1.0), TopK(0.5))).log_likelihood(update, update) is None


@dataclass
class Adding(Defense):
    """Put a layer behind the model that it is sent."""

    bias: float

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        layer = nn.Linear(10, 10)
        nn.init.constant_(layer.bias, self.bias)
        return nn.Sequential(model, layer)


@dataclass
class Strict(Defense):
    """Take nothing but the agreed architecture."""

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        if len(list(model.modules())) != len(list(agreed.modules())):
            raise Refused("another architecture")
        return model


def test_each_link_receives_what_the_one_before_it_returns() -> None:
    model = mlp()

    received = Chain((Adding(1.0), Adding(2.0))).on_receive(model, model)
    assert received.get_parameter("0.1.bias").unique().tolist() == [1.0]
    assert received.get_parameter("1.bias").unique().tolist() == [2.0]
    assert Chain((Strict(), Adding(1.0))).on_receive(model, model)(batch(1).inputs).shape == (1, 10)
    with pytest.raises(Refused, match="another architecture"):
        Chain((Adding(1.0), Strict())).on_receive(model, model)
    assert Defense().on_receive(model, mlp()) is model
