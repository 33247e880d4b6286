"""The cells that run again are those that decide a claim."""

import pytest
from synthetic import SCENARIOS, make_results

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.share.claims import PackClaim, claims_of, escape_probability

LABEL = "TopK(ratio=0.1)"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    folder = tmp_path_factory.mktemp("run")
    return make_results(
        folder,
        scenarios=SCENARIOS[1:],
        seeds=(0, 1, 2),
        active=True,
        candidates=True,
        cascade=True,
    )


def chosen_by(
    results: Conclusions, *, named: tuple[str, ...] = (LABEL,), seeds: int = 3, seed: int = 0
) -> list[PackClaim]:
    return claims_of(results, (), named=named, seeds=seeds, more=0, seed=seed)


def test_a_claim_runs_its_trainings_and_the_attacks_that_decide(results: Conclusions) -> None:
    control, claim = chosen_by(results)
    assert (control.defense, control.control) == ("none", True)
    assert (claim.defense, claim.control) == (LABEL, False)
    cells = results.cells.iloc[[*claim.chosen]]
    assert {*cells["defense"]} == {LABEL}
    assert (cells["kind"] == "train").sum() == 3 == claim.trainings_chosen
    attacks = cells[cells["kind"] == "attack"]
    assert {*attacks["seed"]} == {0, 1, 2}
    assert {*attacks["threat"]} == {"passive", "parameters"}
    assert attacks["candidates_granted"].any()
    assert attacks["baseline"].any()
    rates = results.rates()
    own = rates[(rates["defense"] == LABEL) & (rates["threat"] == "passive")]
    own = own[~own["baseline"] & ~own["candidates_granted"]]
    assert own.sort_values("found")["adversary"].iloc[-1] in {*attacks["adversary"]}


def test_what_proves_nothing_does_not_run(results: Conclusions) -> None:
    assert (results.cells["status"] == "not needed").any()
    for seed in range(20):
        for claim in claims_of(results, (), named=["TopK"], seeds=3, more=9, seed=seed):
            cells = results.cells.iloc[[*claim.chosen]]
            assert {*cells["status"]} == {"ok"}


def _without(results: Conclusions, defense: str | None) -> Conclusions:
    """Return results in which LinearLeakage is not applicable to a defense, or to all."""
    attacks = results.attacks.copy()
    chosen = attacks["adversary_name"] == "LinearLeakage"
    if defense is not None:
        chosen &= attacks["defense"] == defense
    attacks.loc[chosen, "outcome"] = "not applicable"
    attacks.loc[chosen, ["identified", "counterfactual"]] = None
    fields = vars(results) | {"attacks": attacks}
    names = Conclusions.__dataclass_fields__
    return Conclusions(**{name: value for name, value in fields.items() if name in names})


def _ran(results: Conclusions) -> set[str]:
    _, claim = chosen_by(results)
    return {*results.cells.iloc[[*claim.chosen]]["adversary_name"].dropna()}


def test_an_attack_that_is_never_applicable_does_not_run_but_one_that_is_elsewhere_does(
    results: Conclusions,
) -> None:
    """An author could call a success not applicable."""
    assert "LinearLeakage" in _ran(_without(results, LABEL))
    assert "LinearLeakage" not in _ran(_without(results, None))


def test_defenses_are_named_or_have_a_place(results: Conclusions) -> None:
    place = ("fashion-mini/mlp", 0, LABEL)
    found = claims_of(results, [place], seeds=1, more=0, seed=0)
    assert [claim.defense for claim in found] == ["none", LABEL]
    assert claims_of(results, [], seeds=1, more=0, seed=0) == []
    family = chosen_by(results, named=("TopK",))
    assert [claim.defense for claim in family] == ["none", "TopK(ratio=0.5)", LABEL]
    with pytest.raises(UserError, match=r"no attacks on a defense 'Mine': choose from none, "):
        chosen_by(results, named=("Mine",))


def test_seeds_are_drawn_and_their_escape_is_stated(results: Conclusions) -> None:
    drawn = set()
    for seed in range(30):
        _, claim = chosen_by(results, seeds=1, seed=seed)
        cells = results.cells.iloc[[*claim.chosen]]
        (one,) = {*cells.loc[cells["kind"] != "replay", "seed"]}
        drawn.add(one)
        assert claim.escapes[0] == pytest.approx(2 / 3)
    assert drawn == {0, 1, 2}
    _, whole = chosen_by(results, seeds=3)
    assert whole.escapes[0] == 0
    assert whole.escapes[1] == pytest.approx(1 - whole.attacks_chosen / len(whole.attacks))
    _, nothing = chosen_by(results, seeds=0)
    assert nothing.chosen == ()
    assert nothing.escapes == (1, 1)


def test_escape_is_drawn_without_replacement() -> None:
    assert escape_probability(200, 1, 10) == pytest.approx(0.95)
    assert escape_probability(200, 20, 10) == pytest.approx(0.34, abs=0.01)
    assert escape_probability(3, 1, 3) == 0
    assert escape_probability(0, 1, 0) == 1
    with pytest.raises(ValueError, match="altered and checked"):
        escape_probability(10, 1, 11)


def test_the_choice_depends_on_the_seed(results: Conclusions) -> None:
    chosen = {
        claims_of(results, (), named=[LABEL], seeds=2, more=1, seed=seed)[1].chosen
        for seed in range(20)
    }
    assert len(chosen) > 1
    assert chosen_by(results, seed=4) == chosen_by(results, seed=4)
