from dataclasses import dataclass, replace

import pytest
import torch
from federated import batch, rng
from noised import ONCE, linear, subject
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    ClientDP,
    Guarantee,
    Noise,
    Plan,
    TopK,
    batch_gradient,
)
from leakfrontier.evaluate.privacy.canaries import HUGE, CanaryModel, Subject, flat


@dataclass
class Replaced(ClientDP):
    """Claims what is about one client in the place of another."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return replace(super().guarantee(plan), adjacency="replace")


def test_a_canarys_gradient_in_its_layer_is_its_code() -> None:
    audited = subject().beside(4)
    canaries = audited.canaries(torch.tensor([2]), 5.0, weight=0.0)
    gradient = batch_gradient(audited.probe, audited.probe.loss, canaries)
    assert gradient["canary.weight"].tolist() == [[0, 0, 5, 0]]
    assert not any(value.any() for name, value in gradient.items() if name != "canary.weight")


def test_beside_canaries_the_model_is_what_it_was() -> None:
    model, data = linear(), batch(3)
    probe = CanaryModel(model, cross_entropy, data.inputs[0], canaries=2)
    audited = subject().beside(2)
    records = audited.records(torch.arange(3))
    plain = batch_gradient(model, cross_entropy, audited.data.at(slice(3)))
    found = batch_gradient(probe, probe.loss, records)
    for name, value in plain.items():
        torch.testing.assert_close(found[f"model.{name}"], value)
    assert not found["canary.weight"].any()
    inflated = batch_gradient(probe, probe.inflated_loss, records)
    torch.testing.assert_close(flat(inflated), HUGE * flat(found), rtol=1e-3, atol=1.0)


def test_who_contributes_nothing_has_no_gradient() -> None:
    audited = subject()
    gradient = batch_gradient(audited.probe, audited.probe.loss, audited.nobody(3))
    assert not flat(gradient).any()


@pytest.mark.parametrize("defense", [DPSGD(1.0, 0.5), ClientDP(1.0, 0.5)], ids=repr)
def test_what_a_unit_can_contribute_is_what_clipping_leaves(defense: DPSGD | ClientDP) -> None:
    audited = subject(defense)
    assert audited.contribution == pytest.approx((0.5, 0.5), rel=1e-3)
    assert audited.reach == pytest.approx(1, rel=1e-3)
    assert audited.per_record == isinstance(defense, DPSGD)
    share = 10 if audited.per_record else 1
    assert audited.unit_size(10) == pytest.approx(0.5 / share, rel=1e-3)


def test_neighbours_by_replacement_are_twice_as_far_apart() -> None:
    assert (subject(ClientDP(1.0)).distance, subject(Replaced(1.0)).distance) == (1, 2)
    assert subject(Replaced(1.0, 0.5)).sensitivity == pytest.approx(1.0, rel=1e-3)


def test_a_canary_that_is_in_shows_as_one() -> None:
    audited = subject().beside(3)
    upload = audited.replay(audited.canaries(torch.tensor([1, 2])), audited.probe.loss)
    assert audited.canary_values(upload, 2) == pytest.approx([0, 1, 1], abs=1e-2)


def test_the_claim_of_a_chain_is_audited_at_the_link_that_makes_it() -> None:
    assert subject(Chain((DPSGD(1.0), TopK(0.1)))).defense == DPSGD(1.0)


def test_another_plan_is_another_promise_for_the_same_defense() -> None:
    first = subject()
    later = first.under(Plan(9, 1.0, 1e-5))
    assert later.promise.claim.epsilon > first.promise.claim.epsilon
    assert first.promise.steps == 1
    assert later.defense is first.defense


def test_noise_that_is_not_gaussian_is_said_to_be_so() -> None:
    with pytest.raises(NotApplicable, match="the noise is not Gaussian"):
        _ = subject(Noise(1.0, "laplace", max_norm=1.0)).contribution


def test_an_example_is_needed() -> None:
    nobody = Batch(*(values[:0] for values in batch(1)))
    with pytest.raises(ValueError, match="data must have at least one example, got none"):
        Subject(DPSGD(1.0), linear(), cross_entropy, nobody, ONCE, rng())
