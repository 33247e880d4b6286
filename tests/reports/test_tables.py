"""The tables of the page."""

import pytest
from synthetic import SCENARIOS, shared_results

from leakfrontier.evaluate.conclude.analysis import at
from leakfrontier.evaluate.conclude.frontier import make_frontiers
from leakfrontier.reports.tables import (
    ShownTable,
    accuracy_note,
    failure_table,
    guarantee_table,
    headline_table,
    not_applicable_table,
    not_needed_table,
    rate_table,
    refused_table,
)

LENET, MLP = SCENARIOS
TOPK, TOPK_LABEL = "TopK ratio=0.1", "TopK(ratio=0.1)"


def column(table: ShownTable, name: str) -> dict[str, str]:
    """Return a column by the first one, the last row of each."""
    place = table.header.index(name)
    return {row[0]: row[place] for row in table.rows}


def test_stronger_servers_have_columns_if_they_attacked() -> None:
    plain, active = (
        headline_table(make_frontiers(results, draws=20)[0].points)
        for results in (
            shared_results(scenarios=(LENET,)),
            shared_results(scenarios=(LENET,), active=True, candidates=True, refuses=TOPK_LABEL),
        )
    )
    added = ["From nothing, crafted parameters"]
    assert [name for name in active.header if name not in plain.header] == added
    from_nothing = "From nothing, passive server"
    assert column(active, from_nothing) == column(plain, from_nothing)
    assert {*column(plain, "Given candidates").values()} == {"unknown"}
    assert column(active, "Given candidates")[TOPK] == "100.0 % [83.2, 100.0]; blind 1.0 %"
    assert {*column(plain, "Proof allows").values()} == {"no proof"}
    assert column(active, added[0])[TOPK] == "refused by the client"
    assert column(active, added[0])["none"] == "100.0 % [83.2, 100.0]; blind 1.0 %"


def test_rates_of_a_cascade_say_what_they_are_over() -> None:
    rates = at(shared_results(scenarios=(MLP,), cascade=True, candidates=True).rates(), MLP, 0)
    table = rate_table(rates, ["psnr"])
    success = {(row[0], row[1]): row[2] for row in table.rows}
    assert success[TOPK, "LinearLeakage"] == "50.0 % [27.2, 72.8]"
    assert success[TOPK, "InvertingGradients (knows defense)"].endswith(
        " (of 10 uploads still safe; 10 not needed)"
    )
    spared = {(row[2], row[3]): row[4:] for row in not_needed_table(rates).rows}
    found, uploads = spared[TOPK, "InvertingGradients (knows defense)"]
    assert found.endswith(" of 10 victims in 10 uploads still safe")
    assert uploads == "10 uploads"


@pytest.mark.parametrize(
    ("media", "shown"),
    [
        ("image/png", ["PSNR", "SSIM", "Recognisable"]),
        ("audio/wav", ["PSNR", "SNR"]),
        ("tokens", ["Token accuracy"]),
    ],
)
def test_rates_have_the_scores_of_their_modality(media: str, shown: list[str]) -> None:
    results = shared_results(scenarios=(MLP,), media=media)
    metrics = results.scores["metric"].unique().tolist()
    table = rate_table(at(results.rates(), MLP, 0), metrics)
    first, last = table.header.index("Advantage"), table.header.index("Obs.")
    assert list(table.header[first + 1 : last]) == shown
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_a_metric_without_a_name_keeps_its_own() -> None:
    rates = at(shared_results(scenarios=(MLP,), media="image/png").rates(), MLP, 0).assign(
        rouge_l=0.12345
    )
    assert column(rate_table(rates, ["rouge_l"]), "rouge_l")["none"] == "0.123"


def test_a_bound_is_compared_with_rates_over_all_uploads() -> None:
    results = shared_results(
        scenarios=(MLP,), cascade=True, active=True, guaranteed=True, bound=0.9
    )
    claims = results.claims()
    table = guarantee_table(claims[claims["scenario"] == MLP], at(results.rates(), MLP, 0))
    strongest = column(table, "Strongest attack")
    weak = "DPSGD noise_multiplier=0.01"
    assert strongest[weak] == "70.0 % [45.7, 88.1] by LinearLeakage"  # not what Imprint had left


def test_without_a_success_no_attack_is_the_strongest() -> None:
    results = shared_results(scenarios=(MLP,), attack_success=0.0, guaranteed=True, bound=0.9)
    claims = results.claims()
    table = guarantee_table(claims[claims["scenario"] == MLP], at(results.rates(), MLP, 0))
    assert {*column(table, "Strongest attack").values()} == {"none succeeded (<= 16.8 %)"}
    assert {*column(table, "Its bound \u03b3").values()} == {"90.0 %"}


@pytest.mark.parametrize(("measured", "refuted"), [(0.8, True), (1.0, False)])
def test_a_refuted_epsilon_is_struck_out(measured: float, refuted: bool) -> None:
    results = shared_results(scenarios=(MLP,), guaranteed=True, measured=measured)
    claims, strong = results.claims(), "DPSGD noise_multiplier=1.0"
    headline = headline_table(make_frontiers(results, draws=20)[0].points)
    guarantees = guarantee_table(claims[claims["scenario"] == MLP], at(results.rates(), MLP, 0))
    shown = "<s>4</s> refuted" if refuted else "4"
    assert column(headline, "\u03b5")[strong] == shown
    assert column(guarantees, "\u03b5 at \u03b4")[strong].startswith(f"{shown} at 1e-05 (PLD)")
    assert (column(headline, "Verdict")[strong] == "its privacy claim is refuted") == refuted


@pytest.mark.parametrize(
    ("seeds", "contains"),
    [
        ((0,), "test sampling only, of one seed"),
        ((0, 1), "test sampling and the range of 2 seeds"),
        ((0, 1, 2, 3, 4), "test sampling and the mean of 5 seeds"),
    ],
)
def test_accuracies_say_of_which_round_they_are_and_what_their_intervals_contain(
    seeds: tuple[int, ...], contains: str
) -> None:
    points = make_frontiers(shared_results(scenarios=(LENET,), seeds=seeds), draws=20)[0].points
    assert "Accuracy, final round 40" in headline_table(points).header
    assert accuracy_note(points) == f"Intervals of accuracy contain: {contains}."


def test_tracebacks_keep_their_lines() -> None:
    cells = shared_results(scenarios=(LENET,), failed=1).cells
    error = "ValueError: <bad>\n  File 'x.py'\n    raise"
    cells = cells.assign(error=cells["error"].where(cells["status"] == "ok", error))
    (row,) = failure_table(cells).rows
    assert row[4] == (
        "<details><summary>ValueError: &lt;bad&gt;</summary>"
        "<pre>  File &#39;x.py&#39;\n    raise</pre></details>"
    )


def test_gaps_have_their_reasons() -> None:
    results = shared_results(active=True, refuses=TOPK_LABEL, failed=1, missing=1)
    rates = results.rates()
    assert not_applicable_table(rates).rows == (
        (LENET, "0", "LinearLeakage", "all", "the first layer is a convolution"),
    )
    assert refused_table(rates).rows == (
        (LENET, "0", "Imprint", TOPK, "the first layer isolates examples"),
        (MLP, "0", "Imprint", TOPK, "the first layer isolates examples"),
    )
    assert [row[0] for row in failure_table(results.cells).rows] == ["error", "missing"]
    assert not_needed_table(rates).rows == ()


def test_what_was_not_needed_is_no_failure() -> None:
    results = shared_results(scenarios=(MLP,), cascade=True, active=True, attack_success=1.2)
    assert (results.cells["status"] == "not needed").any()
    assert failure_table(results.cells).rows == ()
    assert ("", "20 uploads") in [row[4:] for row in not_needed_table(results.rates()).rows]


def test_what_all_rows_share_is_said_once() -> None:
    table = ShownTable(
        ("Defense", "A", "B", "C"), (("x", "1", "2", "3"), ("x", "1", "4", "3")), ("", "m")
    )
    collapsed = table.collapsed()
    assert collapsed == ShownTable(
        ("Defense", "B"), (("x", "2"), ("x", "4")), ("", "m"), (("A", "1"), ("C", "3"))
    )
    assert collapsed.collapsed() == collapsed
    for whole in (ShownTable(("Defense", "A"), (("x", "1"),)), ShownTable(("Defense", "A"), ())):
        assert whole.collapsed() == whole  # nothing to compare with
