"""What the heat map says of attacks that ran, and of those that did not."""

from typing import Any

import pandas as pd
import pytest
from synthetic import SCENARIOS, shared_results

from leakfrontier.evaluate.conclude.analysis import at
from leakfrontier.reports.heatmap import heatmap_figure

LENET, MLP = SCENARIOS
STRONGEST = "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)"


def squares(scenario: str, **options: Any) -> pd.DataFrame:  # noqa: ANN401
    rates = shared_results(scenarios=(scenario,), **options).rates()
    figure = heatmap_figure(scenario, 0, at(rates, scenario, 0))
    assert figure is not None
    (values,) = figure.spec["datasets"].values()
    return pd.DataFrame(values).set_index(["attack", "defense"])


def test_not_applicable_is_not_zero() -> None:
    cells = squares(LENET)
    absent = cells.loc["LinearLeakage"]
    assert set(absent["shown"]) == {"n/a"}
    assert set(absent["note"]) == {"not applicable: the first layer is a convolution"}
    assert not absent["ran"].any()
    zero = cells.loc[("InvertingGradients (knows defense)", STRONGEST)]
    assert zero["shown"] == "<= 16 %"
    assert zero["ran"]
    assert ("InvertingGradients (ignorant)", "none") in cells.index


def test_refused_is_neither() -> None:
    cells = squares(MLP, active=True, refuses="TopK(ratio=0.1)")
    refused = cells.loc[("Imprint (crafts parameters)", "TopK(ratio=0.1)")]
    assert (refused["shown"], refused["ran"]) == ("refused", False)
    assert refused["note"] == "refused by the client: the first layer isolates examples"
    assert cells.loc[("Imprint (crafts parameters)", STRONGEST), "shown"] == "100 %"


@pytest.mark.parametrize(
    ("scenario", "success", "texts"),
    [
        (LENET, 1.0, ["100 %", "of 4 left", "of 4 uploads still safe; 16 not needed"]),
        (MLP, 1.2, ["not needed", "", "not needed: nothing left to find"]),
    ],
)
def test_a_cascade_is_seen(scenario: str, success: float, texts: list[str]) -> None:
    cells = squares(scenario, cascade=True, active=True, attack_success=success)
    square = cells.loc[("Imprint (crafts parameters)", "TopK(ratio=0.5)")]
    assert square[["shown", "below", "note"]].tolist() == texts
    assert square["ran"] == (scenario == LENET)


def test_without_attacks_there_is_no_map() -> None:
    rates = shared_results(scenarios=(LENET,)).rates()
    assert heatmap_figure(LENET, 0, rates[rates["baseline"]]) is None
