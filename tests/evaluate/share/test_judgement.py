"""Claims are judged bit by bit, or by all their cells together."""

from dataclasses import replace

import numpy as np
import pytest

from leakfrontier.evaluate.foundations.rows import (
    TABLES,
    AttackRow,
    GuaranteeRow,
    Outcome,
    ProbeRow,
    ReplayRow,
    Score,
    UtilityRow,
)
from leakfrontier.evaluate.share.claims import PackClaim
from leakfrontier.evaluate.share.judgement import (
    Compared,
    Decision,
    Judgement,
    Stored,
    compare,
    judge,
    overall,
)
from leakfrontier.evaluate.share.packed_rows import frame_of, rows_digest

SEEDS, UPLOADS, TESTS = 3, 24, 500
CLAIM = PackClaim("mlp", 0, "Mine", trainings=(0, 1, 2), attacks=(3, 4, 5), chosen=tuple(range(6)))
CONTROL = PackClaim("mlp", 0, "none", control=True, trainings=(6, 7, 8), chosen=(6, 7, 8))


def training(correct: int, rounding: float = 0.0) -> Outcome:
    rows = (UtilityRow(0, 50, TESTS, 2.3), UtilityRow(9, correct, TESTS, 0.123456789 + rounding))
    return Outcome(utility=rows)


def attack(found: int, rounding: float = 0.0) -> Outcome:
    rows = [
        AttackRow(i, 0, identified=i < found, counterfactual=False, candidates=100)
        for i in range(UPLOADS)
    ]
    scores = [Score(i, 0, "psnr", 10 + i / 3 + rounding) for i in range(UPLOADS)]
    return Outcome(attacks=tuple(rows), scores=tuple(scores))


def stored(outcome: Outcome, seed: int, defense: str = "Mine", *, same_code: bool = True) -> Stored:
    kind = "attack" if outcome.attacks else "train"
    return Stored(
        what=f"{kind} of {defense}, seed {seed}",
        kind=kind,
        scenario="mlp",
        defense=defense,
        attack="Inversion" if kind == "attack" else "",
        seed=seed,
        rows={table: frame_of(outcome, table) for table in TABLES},
        digest=rows_digest(outcome),
        same_code=same_code,
    )


def cells(
    given: tuple[int, ...] = (350, 351, 352),
    own: tuple[int, ...] = (350, 351, 352),
    found: tuple[int, int] = (12, 12),
    control: tuple[int, ...] = (),
    *,
    rounding: float = 1e-12,
    same_code: bool = True,
) -> dict[int, Compared]:
    """Return three trainings and attacks, as stored and as run again; and equal controls."""
    pairs = [(training(a), training(b, rounding)) for a, b in zip(given, own, strict=True)]
    pairs += [(attack(found[0]), attack(found[1], rounding))] * SEEDS
    compared = {
        number: compare(stored(a, number % SEEDS, same_code=same_code), b)
        for number, (a, b) in enumerate(pairs)
    }
    for number, correct in enumerate(control):
        compared[6 + number] = compare(stored(training(correct), number, "none"), training(correct))
    return compared


def decided(found: dict[int, Compared], *, same_place: bool = True) -> Judgement:
    (judgement,) = judge([CLAIM], found, same_place=same_place)
    return judgement


def test_equal_bits_confirm_wherever_they_come_from() -> None:
    for same_place in (True, False):
        found = decided(cells(rounding=0.0), same_place=same_place)
        assert (found.decision, found.equal, found.reasons) == ("confirmed", 6, ())


def test_any_bit_refutes_in_the_same_place() -> None:
    found = cells(rounding=0.0)
    outcome = training(350)
    other = replace(outcome, utility=(*outcome.utility[:1], replace(outcome.utility[1], loss=1e-9)))
    found[0] = compare(stored(outcome, 0), other)
    assert found[0].unequal == ("utility",)
    assert decided(found).decision == "refuted"
    assert "train of Mine, seed 0: utility differ" in decided(found).reasons
    hidden = Outcome(utility=(replace(outcome.utility[1], loss=1.00000001),))
    shown = Outcome(utility=(replace(outcome.utility[1], loss=1.00000002),))
    assert compare(stored(hidden, 0), shown).unequal == ("digits that the pack omits",)
    assert compare(replace(stored(hidden, 0), digest="forged"), hidden).unequal


@pytest.mark.parametrize(
    ("given", "decision"),
    [
        ((351, 350, 352), "confirmed"),  # nearly no difference, all seeds together
        ((365, 366, 367), "undecided"),  # three points in each seed
        ((335, 336, 337), "undecided"),  # a rival that was made worse
        ((385, 386, 387), "refuted"),
        ((365, 336, 352), "confirmed"),  # three points up, three down: chance
    ],
)
def test_the_accuracy_of_all_seeds_is_judged_together(
    given: tuple[int, ...], decision: Decision
) -> None:
    found = decided(cells(given), same_place=False)
    assert found.decision == decision, found.reasons
    assert decided(cells(given)).decision == "refuted"  # with the versions of the pack


def test_few_predictions_confirm_nothing() -> None:
    few = replace(CLAIM, chosen=(0, 3, 4, 5))
    found = cells((351, 351, 351))
    assert judge([few], found, same_place=False)[0].decision == "undecided"
    assert judge([CLAIM], found, same_place=False)[0].decision == "confirmed"


def test_a_pack_that_lies_about_its_versions_is_found_by_equal_trainings() -> None:
    """Three points per seed, and a claim of another version of torch."""
    higher = cells((365, 366, 367), rounding=0.0, control=(380, 381, 382))
    found = judge([CONTROL, CLAIM], higher, same_place=False)
    assert found[1].decision == "undecided"  # the defense itself may compute otherwise
    one_seed = decided(cells((351, 351, 353), rounding=0.0), same_place=False)  # one is equal
    assert one_seed.decision == "refuted"
    assert "train of Mine, seed 0: utility differ" in one_seed.reasons
    altered = cells((351, 351, 353), rounding=0.0, same_code=False)
    other_code = decided(altered, same_place=False)
    assert other_code.decision == "confirmed"


@pytest.mark.parametrize(
    ("found", "decision"),
    [
        ((12, 12), "confirmed"),
        ((11, 12), "confirmed"),
        ((10, 12), "undecided"),
        ((1, 24), "refuted"),
        ((0, 9), "refuted"),
    ],
)
def test_attacks_are_judged_over_all_seeds(found: tuple[int, int], decision: Decision) -> None:
    judged = decided(cells(found=found, control=()), same_place=False)
    assert judged.decision == decision, judged.reasons


def test_single_uploads_may_change() -> None:
    compared = cells()
    outcome = attack(12)
    rows = (replace(outcome.attacks[0], identified=False), *outcome.attacks[1:])
    compared[3] = compare(stored(outcome, 0), replace(outcome, attacks=rows))
    assert decided(compared, same_place=False).decision == "confirmed"


def _changed(**values: object) -> Outcome:
    outcome = attack(12)
    rows = (replace(outcome.attacks[0], **values), *outcome.attacks[1:])
    return replace(outcome, attacks=rows)


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "refused"},
        {"identified": None},
        {"counterfactual": None},
        {"candidates": 50},
        {"transformed": True},
        {"observation": 77},
    ],
    ids=str,
)
def test_other_victims_refute(change: dict[str, object]) -> None:
    compared = cells()
    compared[3] = compare(stored(_changed(**change), 0), attack(12))
    found = decided(compared, same_place=False)
    assert found.decision == "refuted"
    assert found.reasons[0].endswith("other uploads were scored")


def test_a_raised_counterfactual_is_found() -> None:
    """It would lower the advantage."""
    compared = cells()
    for number in (3, 4, 5):
        outcome = attack(12)
        rows = tuple(replace(row, counterfactual=row.observation < 12) for row in outcome.attacks)
        compared[number] = compare(stored(replace(outcome, attacks=rows), number % 3), outcome)
    found = decided(compared, same_place=False)
    assert found.decision == "refuted"
    assert "victims of other uploads" in found.reasons[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epsilon": 1.1}, "epsilon differs"),
        ({"violated": True}, "the verdict of the audit differs"),
    ],
    ids=str,
)
def test_other_claims_refute(change: dict[str, object], reason: str) -> None:
    row = GuaranteeRow(1.0, 1e-5, "record", "add", "rdp", 1.0, 0.1, 10, violated=False)
    outcome = replace(training(350), guarantees=(row,))
    other = replace(outcome, guarantees=(replace(row, **change),))
    compared = cells()
    compared[0] = compare(stored(outcome, 0), other)
    found = decided(compared, same_place=False)
    assert found.decision == "refuted"
    assert found.reasons == (f"train of Mine, seed 0: {reason}",)


def test_what_did_not_run_confirms_nothing() -> None:
    compared = cells(rounding=0.0)
    compared[0] = compare(stored(training(350), 0), "out of memory")
    assert decided(compared).decision == "undecided"
    assert decided(compared).reasons == ("train of Mine, seed 0 failed: out of memory",)
    trained = {number: cells(rounding=0.0)[number] for number in range(3)}
    assert decided(trained).reasons == ("no attack ran again",)
    assert overall([]) == "undecided"
    assert overall([decided(cells(rounding=0.0)), decided(trained)]) == "undecided"
    assert overall([decided(cells(rounding=0.0))]) == "confirmed"


def test_honest_scatter_of_the_size_of_test_sampling_is_never_refuted() -> None:
    rng = np.random.default_rng(0)
    spread = np.sqrt(TESTS * 0.7 * 0.3)
    decisions = []
    for _ in range(25):
        own = (350 + spread * rng.standard_normal(3)).round().astype(int)
        found = cells((350, 350, 350), tuple(own.tolist()))
        decisions.append(decided(found, same_place=False).decision)
    assert "refuted" not in decisions
    assert decisions.count("confirmed") > 8


REPLAY = ReplayRow(False, False, 0.0, 0.0, 1.0, 1.0, True, "as given", False, False, 0.0)
PROBE = ProbeRow(0.9, 0.1, "a factor", False, 1.0)


def examined(*, probes: bool, same_code: bool, digest: bool = True) -> Compared:
    """Return the comparison of an examination whose pack has no probes, or a digest of them."""
    full = Outcome(replays=(REPLAY,), probes=(PROBE,))
    short = replace(full, probes=())
    given = stored(full if probes else short, 0, same_code=same_code)
    return compare(replace(given, digest=rows_digest(short if digest else full)), full)


def test_only_other_code_may_lack_a_table() -> None:
    assert examined(probes=False, same_code=False).equal
    assert examined(probes=False, same_code=True).unequal == ("probes",)
    assert not examined(probes=False, same_code=False, digest=False).equal
    assert examined(probes=True, same_code=False, digest=False).equal


@pytest.mark.parametrize("same_place", [True, False])
@pytest.mark.parametrize("digest", [True, False])
def test_deleted_rows_refute(same_place: bool, digest: bool) -> None:
    compared = cells(rounding=0.0)
    compared[6] = examined(probes=False, same_code=True, digest=digest)
    claim = replace(CLAIM, chosen=tuple(range(7)))
    (found,) = judge([claim], compared, same_place=same_place)
    assert found.decision == "refuted"
    compared[6] = examined(probes=False, same_code=False)
    (found,) = judge([claim], compared, same_place=same_place)
    assert found.decision == "confirmed"


@pytest.mark.parametrize("same_place", [True, False])
@pytest.mark.parametrize("table", ["attacks", "utility", "guarantees", "replays", "probes"])
def test_thinned_rows_refute(table: str, same_place: bool) -> None:
    """Whatever the digest says."""
    claim = GuaranteeRow(1.0, 1e-5, "record", "add", "rdp", 1.0, 0.1, 10, violated=True)
    whole = Outcome(
        attacks=attack(12).attacks,
        utility=training(350).utility,
        guarantees=(claim, claim),
        replays=(REPLAY, REPLAY),
        probes=(PROBE, PROBE),
    )
    given = stored(replace(whole, **{table: getattr(whole, table)[1:]}), 0)
    compared = cells(rounding=0.0) | {6: compare(given, whole)}
    chosen = replace(CLAIM, chosen=tuple(range(7)))
    (found,) = judge([chosen], compared, same_place=same_place)
    assert found.decision == "refuted"
