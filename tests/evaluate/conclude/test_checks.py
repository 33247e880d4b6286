"""Every check passes on a sound evaluation, and speaks up on the one fault it is for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import SCENARIOS, make_results, shared_results

from leakfrontier.evaluate.conclude.checks import (
    Check,
    conclusion,
    failed_checks,
    of_arm,
    overall,
)
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import CHANGED_MODEL

NAMES = [
    "undefended control",
    "blind guess",
    "optimiser",
    "monotone",
    "oracle inputs",
    "randomness",
    "convergence",
    "learning",
    "adaptive",
    "changed model",
    "replay",
    "invertibility",
    "completeness",
    "proven bound",
    "claimed noise",
    "trained upload",
    "private baseline",
    "power",
]


@pytest.fixture(scope="module")
def results() -> Conclusions:
    return shared_results()


@pytest.fixture(scope="module")
def rising() -> Conclusions:
    """Return an evaluation in which stronger DPSGD leaks more."""
    return shared_results(monotone=False, scenarios=SCENARIOS[:1])


def with_weakest(results: Conclusions, options: dict[str, Any]) -> Conclusions:
    """Return an evaluation whose weakest DPSGD has other options."""
    weakest = {"noise_multiplier": 0.01, "max_grad_norm": 1.0}
    known = results.attacks["defense_options"]
    return with_attacks(
        results, defense_options=known.map(lambda own: options if own == weakest else own)
    )


def troubles(results: Conclusions) -> dict[str, Check]:
    return {check.name: check for check in results.checks() if check.verdict in ("warn", "fail")}


def with_attacks(results: Conclusions, **columns: Any) -> Conclusions:  # noqa: ANN401 - as pandas has it
    return replace(results, attacks=results.attacks.assign(**columns))


def test_all_questions_are_answered_and_a_sound_evaluation_passes(results: Conclusions) -> None:
    checks = results.checks()
    assert [check.name for check in checks] == NAMES
    asked = {check.name for check in checks if check.verdict == "pass"}
    assert {check.name for check in checks if check.verdict == "n/a"} == {*NAMES} - asked
    assert {*NAMES} - asked == {"proven bound", "claimed noise"}  # nothing is claimed here


@pytest.mark.parametrize(
    ("fault", "verdicts", "detail"),
    [
        (
            {"control": False},
            {"undefended control": "fail", "blind guess": "warn"},
            "fashion-mini/lenet, round 0: none tried",
        ),
        (
            {"attack_success": 0.05},
            {"undefended control": "fail", "blind guess": "warn"},
            "InvertingGradients: never",
        ),
        (
            {"blind_success": 0.9},
            {"undefended control": "fail", "blind guess": "warn"},
            "-20 % to 20 % above the blind guess: InvertingGradients against none, "
            "fashion-mini/lenet, round 0",
        ),
        (
            {"blind_success": 0.3},
            {"blind guess": "warn"},
            "look-alikes are not exchangeable: blind guess 30.0 % [11.9, 54.3], chance 1 %, "
            "fashion-mini/mlp, round 0",
        ),
        (
            {"counterfactual": 0.9},
            {"undefended control": "fail", "blind guess": "warn"},
            "-20 % to 20 % above the blind guess: InvertingGradients against none, "
            "fashion-mini/lenet, round 0",
        ),
        ({"baseline": False}, {"blind guess": "warn"}, None),
        (
            {"optimiser_failures": 0.5},
            {"optimiser": "warn"},
            "35 % of victims: InvertingGradients against DPSGD(noise_multiplier=0.1, "
            "max_grad_norm=1.0) without knowledge of it, fashion-mini/lenet, round 0",
        ),
        (
            {"monotone": False},
            {"monotone": "warn"},
            "65.0 % [40.8, 84.6] instead of <= 16.8 % under DPSGD(noise_multiplier=0.01, "
            "max_grad_norm=1.0): a passive server against DPSGD(noise_multiplier=1.0, "
            "max_grad_norm=1.0), fashion-mini/lenet, round 0",
        ),
        (
            {"labels_granted": True},
            {"oracle inputs": "warn"},
            "InvertingGradients, fashion-mini/lenet",
        ),
        (
            {"seeds": (0,), "observations": 20},
            {"randomness": "warn"},
            "accuracy from one seed: DPSGD(noise_multiplier=0.1, max_grad_norm=1.0), "
            "fashion-mini/mlp",
        ),
        (
            {"adaptive": False},
            {"adaptive": "warn"},
            "TopK(ratio=0.1), fashion-mini/mlp, round 0",
        ),
        (
            {"informed": 0.0},
            {"adaptive": "warn"},
            "8 uploads broken only without knowledge of the defense, at most 0 only with it: "
            "InvertingGradients against TopK(ratio=0.5), fashion-mini/lenet, round 0",
        ),
        (
            {"informed": 0.0, "cascade": True},
            {"adaptive": "warn"},
            "8 uploads broken only without knowledge of the defense, at most 0 only with it: "
            "InvertingGradients against TopK(ratio=0.5), fashion-mini/lenet, round 0",
        ),
        ({"informed": 0.4}, {}, None),
        (
            {"replay": {"random": True, "draws": "expected"}},
            {"replay": "warn"},
            "TopK(ratio=0.1), fashion-mini/mlp: it draws new secrets, which were replaced "
            "by their means",
        ),
        (
            {"replay": {"slope": 0.0, "straight_through": True}},
            {"replay": "warn"},
            "TopK(ratio=0.1), fashion-mini/mlp: its slope vanishes; a straight-through slope "
            "replaced it",
        ),
        (
            {"replay": {"uploads_differ": True}, "seeds": (0,), "observations": 20},
            {"randomness": "warn"},
            "accuracy from one seed: TopK(ratio=0.1), fashion-mini/mlp",
        ),
        ({"failed": 1}, {"completeness": "fail"}, "first error: ValueError: loss is not finite"),
        ({"missing": 1}, {"completeness": "fail", "power": "warn"}, "missing: 1 cells"),
        (
            {"bound": 0.3},
            {"proven bound": "fail"},
            "65.0 % [40.8, 84.6] against a bound of 30 %: InvertingGradients against "
            "DPSGD(noise_multiplier=0.01, max_grad_norm=1.0), fashion-mini/lenet, round 0",
        ),
        ({"bound": 0.6}, {}, None),
        ({"candidates": True, "bound": 0.8}, {}, None),  # p = 0.01, of many comparisons
        (
            {"batch_size": 2, "bound": 0.2},
            {"proven bound": "fail"},
            "70.0 % [55.0, 85.0] against a bound of 20 %: LinearLeakage against "
            "DPSGD(noise_multiplier=0.01, max_grad_norm=1.0), fashion-mini/mlp, round 0",
        ),
        (
            {"guaranteed": True, "measured": 0.8},
            {"claimed noise": "fail", "private baseline": "warn"},
            "DPSGD(noise_multiplier=0.1, max_grad_norm=1.0), fashion-mini/mlp: "
            "0.8 of the claimed noise",
        ),
        (
            {"guaranteed": True, "measured": None},
            {"claimed noise": "warn"},
            "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0), fashion-mini/mlp: "
            "not audited: the noise is not Gaussian",
        ),
        ({"guaranteed": True, "candidates": True}, {}, None),
        (
            {"other_examples": "attacked uploads have 1 examples, trained ones 16"},
            {"trained upload": "fail"},
            "fashion-mini/lenet: attacked uploads have 1 examples, trained ones 16",
        ),
        (
            {"other_cohort": "attacks see sums of 8 clients, but a training round has 2"},
            {"trained upload": "fail"},
            "TopK(ratio=0.1), fashion-mini/mlp: attacks see sums of 8 clients, but a training "
            "round has 2",
        ),
        ({"private": False}, {"private baseline": "warn"}, "fashion-mini/lenet"),
        (
            {"candidates": True, "attack_success": 0.05},  # candidates do not save the control
            {"undefended control": "fail", "blind guess": "warn"},
            "fashion-mini/lenet, round 0: no attack",
        ),
        (
            {"candidates": True, "bound": 0.7},
            {"proven bound": "fail"},
            ">= 83.2 % against a bound of 70 %: PriorAware against "
            "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0), fashion-mini/lenet, round 0",
        ),
        (
            {"observations": 8},
            {"power": "warn"},
            "16 of 17 observations cannot exclude a rate of 21 %: fashion-mini/mlp",
        ),
        (
            {"active": True, "attack_success": 0.05},  # nor does an active server
            {"undefended control": "fail", "blind guess": "warn"},
            "fashion-mini/lenet, round 0: no attack",
        ),
        ({"active": True, "refuses": "TopK(ratio=0.1)"}, {}, None),
        ({"cascade": True}, {}, None),
        ({"cascade": True, "active": True, "candidates": True, "attack_success": 1.2}, {}, None),
        (
            {"cascade": True, "adaptive": False},
            {"adaptive": "warn"},
            "TopK(ratio=0.1), fashion-mini/mlp, round 0",
        ),
        ({"cascade": True, "monotone": False}, {"monotone": "warn"}, None),
        (
            {"cascade": True, "optimiser_failures": 0.5},
            {"optimiser": "warn"},
            None,
        ),
        (
            {"cascade": True, "bound": 0.3},
            {"proven bound": "fail"},
            "65.0 % [40.8, 84.6] against a bound of 30 %: InvertingGradients against "
            "DPSGD(noise_multiplier=0.01, max_grad_norm=1.0), fashion-mini/lenet, round 0",
        ),
        # All of the six uploads that were left, which says nothing of the fourteen others.
        ({"cascade": True, "active": True, "bound": 0.75}, {}, None),
        ({"batch_size": 2}, {}, None),
        ({"checkpoints": (0, 20)}, {}, None),
    ],
    ids=str,
)
def test_each_fault_is_noticed_and_nothing_else(
    tmp_path: Path, fault: dict[str, Any], verdicts: dict[str, str], detail: str | None
) -> None:
    named = tuple(name for name in SCENARIOS if name in (detail or ""))
    found = troubles(make_results(tmp_path, scenarios=named or SCENARIOS, **fault))
    assert {name: check.verdict for name, check in found.items()} == verdicts
    if detail is not None:
        assert detail in [case for check in found.values() for case in check.details]
    for check in found.values():
        assert check.text.endswith(".")
        sentences = check.text.split(". ")
        assert len(sentences) <= 2
        assert max(len(sentence.split()) for sentence in sentences) <= 25


def test_a_run_without_any_outcome_is_not_trusted(tmp_path: Path) -> None:
    found = troubles(make_results(tmp_path, failed=1000))
    assert found["undefended control"].verdict == found["completeness"].verdict == "fail"
    assert {"blind guess", "adaptive", "power"} <= set(found)
    assert "error: 126 cells" in found["completeness"].details


@pytest.mark.parametrize("fault", ["failed", "missing"])
def test_no_check_passes_without_a_finished_cell(tmp_path: Path, fault: str) -> None:
    checks = make_results(tmp_path, **{fault: 1000}).checks()
    assert "pass" not in {check.verdict for check in checks}
    assert {"n/a"} == {check.verdict for check in checks if check.name in ("optimiser", "monotone")}


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ({"missing": 1}, "Run again"),
        ({"failed": 1}, "Repeat failed cells with `--retry-failed`"),
        ({"failed": 1, "missing": 1}, "Repeat failed cells with `--retry-failed`"),
    ],
    ids=str,
)
def test_what_mends_an_incomplete_run_is_said(
    tmp_path: Path, fault: dict[str, int], remedy: str
) -> None:
    found = troubles(make_results(tmp_path, scenarios=SCENARIOS[:1], **fault))  # type: ignore[arg-type]
    text = found["completeness"].text
    assert text.endswith(f"could have succeeded. {remedy}.")


@pytest.mark.parametrize(
    ("verdicts", "line", "worst"),
    [
        ("pass n/a pass", "Evaluation: YES", "pass"),
        ("warn pass warn", "Evaluation: YES, with caveats (a, c)", "warn"),
        ("warn fail n/a", "Evaluation: NO (b)", "fail"),
        ("fail fail pass", "Evaluation: NO (a, b)", "fail"),
    ],
)
def test_one_line_concludes(verdicts: str, line: str, worst: str) -> None:
    checks = [
        Check(name, verdict, "")  # type: ignore[arg-type]
        for name, verdict in zip("abc", verdicts.split(), strict=True)
    ]
    assert conclusion(checks) == line
    assert overall(checks) == worst


def test_a_run_of_training_only_is_not_trusted(tmp_path: Path) -> None:
    found = troubles(make_results(tmp_path, checkpoints=()))
    assert found["undefended control"].verdict == "fail"


def test_one_useless_attack_is_named_where_another_works(results: Conclusions) -> None:
    useless = results.attacks["adversary"] == "LinearLeakage"
    identified = results.attacks["identified"].mask(useless & results.attacks["identified"], False)
    found = troubles(with_attacks(results, identified=identified))
    assert found["undefended control"].verdict == "warn"
    assert found["undefended control"].details == ("LinearLeakage: never",)


def test_a_scenario_that_no_attack_breaks_fails(results: Conclusions) -> None:
    here = results.attacks["scenario"] == "fashion-mini/lenet"
    identified = results.attacks["identified"].mask(here & results.attacks["identified"], False)
    check = troubles(with_attacks(results, identified=identified))["undefended control"]
    assert check.verdict == "fail"
    assert check.details == ("fashion-mini/lenet, round 0: no attack",)


def test_a_success_short_of_the_truth_s_objective_is_no_failed_optimiser(
    results: Conclusions,
) -> None:
    objective = results.attacks["objective"].mask(results.attacks["identified"] == True, 9.0)  # noqa: E712
    assert "optimiser" not in troubles(with_attacks(results, objective=objective))


def test_strengths_are_compared_only_if_all_other_options_agree(rising: Conclusions) -> None:
    other = with_weakest(rising, {"noise_multiplier": 0.01, "max_grad_norm": 9.0})
    assert "monotone" in troubles(rising)
    assert "monotone" not in troubles(other)


def test_an_option_left_at_its_default_is_part_of_the_sweep(rising: Conclusions) -> None:
    assert "monotone" in troubles(with_weakest(rising, {"max_grad_norm": 1.0}))


def test_options_may_be_lists_and_mappings(rising: Conclusions) -> None:
    """As those of a chain: what is equal is compared, whatever it is made of."""

    def wrapped(options: dict[str, Any]) -> dict[str, Any]:
        return {
            "1 DPSGD noise_multiplier": options.get("noise_multiplier"),
            "layers": [1, {"a": 2}],
        }

    chained = with_attacks(rising, defense_options=rising.attacks["defense_options"].map(wrapped))
    assert "monotone" in troubles(chained)


def test_a_cell_with_nothing_left_to_find_is_complete(tmp_path: Path) -> None:
    results = make_results(
        tmp_path, scenarios=SCENARIOS[1:], cascade=True, active=True, attack_success=1.2
    )
    (check,) = (check for check in results.checks() if check.name == "completeness")
    spared = (results.cells["status"] == "not needed").sum()
    assert spared
    assert check.text == (
        f"All {len(results.cells)} cells finished, {spared} of them with nothing left to find."
    )


def test_seventeen_observations_are_enough(tmp_path: Path) -> None:
    found = troubles(make_results(tmp_path, scenarios=SCENARIOS[:1], seeds=(0,), observations=17))
    assert "power" not in found


def test_a_replay_that_needed_mending_shows_the_code(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=SCENARIOS[:1], replay={"straight_through": True})
    (check,) = troubles(results).values()
    assert check.name == "replay"
    compile(check.remedy, "remedy", "exec")


def test_a_replay_that_misleads_fails(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=SCENARIOS[:1], probe={"contrast": 0.1})
    (check,) = troubles(results).values()
    assert (check.name, check.verdict) == ("replay", "fail")
    assert "does not tell the true examples from others (contrast 0.10" in check.details[0]
    compile(check.remedy, "remedy", "exec")


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        ({"unguarded": 1.4, "repeat": 0.2}, "`unguarded` client differ from those of the client"),
        ({"preferred": 0.5}, "`log_likelihood` prefers the truth to 50 % of other examples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_whatever_else_misleads_fails_alike(
    tmp_path: Path, probe: dict[str, Any], problem: str
) -> None:
    (check,) = troubles(make_results(tmp_path, scenarios=SCENARIOS[:1], probe=probe)).values()
    assert (check.name, check.verdict) == ("replay", "fail")
    assert problem in check.details[0]


HELD = {"decoded": 0.95, "plain": 0.1}


def test_uploads_that_hold_the_update_fail_if_attacks_found_less(tmp_path: Path) -> None:
    results = make_results(tmp_path / "a", scenarios=SCENARIOS[:1], probe=HELD)
    (check,) = troubles(results).values()
    assert (check.name, check.verdict) == ("invertibility", "fail")
    assert "recovers 95 % of the update's energy, the attacked upload shows 10 %" in str(check)
    worst = results.worst_case()
    full = worst.loc[worst["control"], "rate"].iloc[0]
    named = {detail.partition(", fashion")[0] for detail in check.details}
    assert named == {*worst.loc[worst["rate"] < full - 0.1, "defense"]}
    assert named
    assert named != {*worst.loc[~worst["control"], "defense"]}


def test_uploads_that_hold_the_update_and_are_broken_need_a_caveat(results: Conclusions) -> None:
    broken = with_attacks(results, identified=True)
    probes = broken.probes.assign(**HELD)
    check = troubles(replace(broken, probes=probes))["invertibility"]
    assert check.verdict == "warn"
    assert "about as often as without a defense" in check.text


def test_noise_that_cancels_refutes_a_claim_only(tmp_path: Path) -> None:
    cancelling = {"remaining_noise": 0.14}
    options: dict[str, Any] = {"scenarios": SCENARIOS[:1], "probe": cancelling}
    assert not troubles(make_results(tmp_path / "a", **options))
    audited = make_results(tmp_path / "c", **options, guaranteed=True)
    assert "invertibility" not in troubles(audited)  # noise may be correlated, as in DP-FTRL
    options |= {"measured": None}
    check = troubles(make_results(tmp_path / "b", **options, guaranteed=True))["invertibility"]
    assert check.verdict == "fail"
    assert all(detail.startswith("DPSGD") for detail in check.details)
    assert "has 14 % of the energy of fresh noise" in check.details[0]


def test_runs_of_older_versions_are_not_tested(results: Conclusions) -> None:
    old = replace(results, probes=results.probes.iloc[:0])
    (check,) = (one for one in old.checks() if one.name == "invertibility")
    assert check.verdict == "n/a"
    assert not troubles(old)


def with_accuracy(results: Conclusions, where: Any, accuracy: float) -> Conclusions:  # noqa: ANN401
    """Return an evaluation in which some models have another accuracy."""
    utility = results.utility
    correct = utility["correct"].mask(where, (accuracy * utility["total"]).astype(int))
    return replace(results, utility=utility.assign(correct=correct))


def test_a_control_that_still_learns_has_not_converged(results: Conclusions) -> None:
    utility = results.utility
    middle = utility["round"].between(1, 39)
    early = with_accuracy(results, middle & utility["control"], 0.5)
    found = troubles(early)
    assert {*found} == {"convergence"}
    assert "points between rounds 20 and 40" in found["convergence"].details[0]
    assert "convergence" not in troubles(with_accuracy(results, middle & ~utility["control"], 0.5))
    assert "convergence" not in troubles(with_accuracy(results, middle & utility["control"], 0.9))


def test_a_model_at_chance_has_learned_nothing(results: Conclusions) -> None:
    utility = results.utility
    one = utility["defense"].eq(utility.loc[~utility["control"], "defense"].iloc[0])
    found = troubles(with_accuracy(results, one & utility["round"].gt(0), 0.1))
    assert "10.0 % after training" in found["learning"].details[0]
    assert "learning" not in troubles(with_accuracy(results, one & utility["round"].gt(0), 0.3))


MINE = "TopK(ratio=0.1)"
GUARDED = "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)"


def not_applicable(results: Conclusions, attacks: tuple[str, ...], reason: str) -> Conclusions:
    """Return an evaluation in which some attacks do not apply to one defense."""
    frame = results.attacks.copy()
    chosen = frame["adversary"].isin(attacks) & (frame["defense"] == MINE)
    frame.loc[chosen, "outcome"], frame.loc[chosen, "reason"] = "not applicable", reason
    frame.loc[chosen, ["identified", "counterfactual"]] = None
    return replace(results, attacks=frame)


@pytest.mark.parametrize("attack", ["LinearLeakage", "Imprint"])
def test_attacks_that_a_changed_model_evades_are_assumed_to_succeed(attack: str) -> None:
    known = shared_results(scenarios=SCENARIOS[1:], active=True)
    evading = not_applicable(known, (attack,), f"no linear layer{CHANGED_MODEL}")
    check = troubles(evading)["changed model"]
    assert check.verdict == "warn"
    assert check.details == (f"{attack}: {MINE}, {SCENARIOS[1]}, round 0",)
    frontier = evading.frontier()
    points = frontier.points.set_index("defense")
    column = "success_assumed" if attack == "LinearLeakage" else "parameters_assumed"
    assert points.loc[MINE, column] == points.loc["none", column] == 1
    assert (
        points.loc[GUARDED, column]
        == points.loc[
            GUARDED, column.replace("_assumed", "_rate") if attack == "Imprint" else "success"
        ]
    )
    if attack == "LinearLeakage":  # nothing is left of its gain
        assert points.loc[MINE, "verdict"].startswith("no privacy gain shown")
        other = not_applicable(known, (attack,), "it needs uploads of single clients")
        assert "changed model" not in troubles(other)
        assert other.frontier().points.set_index("defense").loc[MINE, "gains"]


def test_an_attack_that_fails_anyway_is_not_missed() -> None:
    weak = shared_results(scenarios=SCENARIOS[1:], attack_success=0.05)
    evading = not_applicable(weak, ("LinearLeakage",), f"no linear layer{CHANGED_MODEL}")
    assert "changed model" not in troubles(evading)


def test_a_failure_concerns_the_defense_that_it_names() -> None:
    known = shared_results(scenarios=SCENARIOS[1:], other_cohort="sums of 4 clients")
    checks, place = known.checks(), SCENARIOS[1]
    assert failed_checks(checks) == "trained upload"
    assert conclusion(checks).startswith("Evaluation: NO")
    assert failed_checks(of_arm(checks, place, MINE)) == "trained upload"
    assert failed_checks(of_arm(checks, place, GUARDED)) == ""
    points = known.frontier().points.set_index("defense")
    assert points.loc[MINE, "verdict"] == "its evaluation fails its checks (trained upload)"
    assert points.loc[GUARDED, "verdict"] == "Pareto-optimal"
    everywhere = shared_results(scenarios=SCENARIOS[1:], other_examples="8 instead of 1").checks()
    assert failed_checks(of_arm(everywhere, place, GUARDED)) == "trained upload"


@pytest.mark.parametrize("defense", ["none", MINE])
def test_cells_without_result_concern_their_defense_or_all_if_it_is_the_control(
    defense: str,
) -> None:
    known = shared_results(scenarios=SCENARIOS[1:])
    chosen = (known.cells["defense"] == defense) & (known.cells["kind"] == "replay")
    chosen |= (known.cells["defense"] == defense) & (known.cells["kind"] == "train")
    crashed = known.cells.assign(status=known.cells["status"].where(~chosen, "error"))
    checks = replace(known, cells=crashed).checks()
    assert failed_checks(of_arm(checks, SCENARIOS[1], defense)) == "completeness"
    others = failed_checks(of_arm(checks, SCENARIOS[1], GUARDED))
    assert others == ("completeness" if defense == "none" else "")


def test_power_counts_uploads_that_an_attack_could_not_use() -> None:
    known = shared_results(scenarios=SCENARIOS[1:])
    few = known.attacks["observation"] < 2  # of ten, in both seeds: 16 are left
    spoilt = known.attacks["adversary"].eq("LinearLeakage") & few & ~known.attacks["control"]
    frame = known.attacks.copy()
    frame.loc[spoilt, "outcome"], frame.loc[spoilt, "reason"] = "not applicable", "no signal"
    frame.loc[spoilt, ["identified", "counterfactual"]] = None
    assert "power" not in troubles(replace(known, attacks=frame))


def test_randomness_is_not_asked_where_nothing_is_random() -> None:
    known = shared_results(scenarios=SCENARIOS[1:], private=False)
    (check,) = (one for one in known.checks() if one.name == "randomness")
    assert check.verdict == "n/a"
