import math
from dataclasses import dataclass, field

import pytest

from leakfrontier.defenses import DPSGD, Chain, Defense, Guarantee, Plan, TopK
from leakfrontier.evaluate.privacy.accounting import epsilon
from leakfrontier.evaluate.privacy.promise import (
    SLACK,
    TOLERANCE,
    NoClaim,
    claim_under,
    claiming,
    counted,
    promised,
)

PLAN = Plan(100, 0.1, 1e-5, passes=10)


@dataclass
class Claims(Defense):
    """Claims an epsilon that is the better for whatever it says it counts on."""

    gains: str = ""
    epsilon: float = 8.0
    asked: list[Plan] = field(default_factory=list, compare=False, repr=False)

    def guarantee(self, plan: Plan) -> Guarantee:
        self.asked.append(plan)
        better = ("rate" in self.gains and plan.sample_rate < 1) or (
            "passes" in self.gains and plan.passes is not None
        )
        value = self.epsilon / 2 if better else self.epsilon
        return Guarantee(value, plan.delta, "client", "zero-out", "mine")


@pytest.mark.parametrize(
    ("gains", "expected"), [("", (1.0, 100)), ("rate", (0.1, 100)), ("passes", (1.0, 10))]
)
def test_a_claim_counts_on_what_makes_it_better(gains: str, expected: tuple[float, int]) -> None:
    assert counted(Claims(gains), PLAN) == expected


def test_a_slow_accountant_is_asked_once_for_one_configuration() -> None:
    first, same, other = Claims(epsilon=7.5), Claims(epsilon=7.5), Claims(epsilon=7.25)
    assert claim_under(first, PLAN) == claim_under(same, PLAN)
    assert claim_under(other, PLAN) != claim_under(first, PLAN)
    assert [len(one.asked) for one in (first, same, other)] == [1, 0, 1]


def test_a_chains_claim_is_that_of_one_of_its_links() -> None:
    private = DPSGD(1.0)
    assert claiming(private, 1e-5) is private
    assert claiming(Chain((private, TopK(0.1))), 1e-5) == private
    assert claiming(Chain((Chain((private,)), TopK(0.1))), 1e-5) == private
    nothing = Chain((TopK(0.1),))
    assert claiming(nothing, 1e-5) is nothing


def test_the_promised_noise_has_the_claimed_epsilon_but_for_rounding() -> None:
    promise = promised(Claims(epsilon=4.0), Plan(9, 1.0, 1e-5))
    assert (promise.sample_rate, promise.steps) == (1.0, 9)
    found = epsilon(1.0, promise.noise_multiplier, 9, 1e-5)
    assert 4.0 < found <= 4.0 * (1 + TOLERANCE) + SLACK
    assert promise.separation == 1 / promise.noise_multiplier


def test_more_noise_is_a_smaller_epsilon_and_none_is_infinite() -> None:
    promise = promised(Claims(epsilon=4.0), Plan(9, 1.0, 1e-5))
    assert promise.epsilon(3.0) == epsilon(1.0, 3.0, 9, 1e-5)
    assert promise.epsilon(0.0) == math.inf
    assert promise.epsilon(math.inf) == 0
    assert promise.epsilon(math.nan) == math.inf


def test_without_a_claim_nothing_is_promised() -> None:
    with pytest.raises(NoClaim, match="TopK claims no differential privacy"):
        promised(TopK(0.1), PLAN)
    with pytest.raises(NoClaim, match="Claims claims an infinite epsilon"):
        promised(Claims(epsilon=math.inf), PLAN)
