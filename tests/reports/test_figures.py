"""The other figures: strength, PSNR and accuracy."""

import pandas as pd
import pytest
from synthetic import SCENARIOS, shared_results

from leakfrontier.evaluate.conclude.analysis import at, with_scores
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.reports.charts import Figure
from leakfrontier.reports.figures import accuracy_figure, psnr_figure, strength_figure

MLP = SCENARIOS[1]


@pytest.fixture(scope="module")
def results() -> Conclusions:
    return shared_results(scenarios=(MLP,), candidates=True, active=True)


def titles(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [panel["title"] for panel in figure.spec["concat"]]


def test_every_sweep_has_a_panel(results: Conclusions) -> None:
    assert titles(strength_figure(MLP, 0, at(results.worst_case(), MLP, 0))) == ["DPSGD", "TopK"]
    worst = results.worst_case()
    assert strength_figure(MLP, 0, worst[worst["control"]]) is None


def test_psnr_is_that_of_the_closest_passive_guess(results: Conclusions) -> None:
    attacks, scores = at(results.attacks, MLP, 0), at(results.scores, MLP, 0)
    figure = psnr_figure(MLP, 0, attacks, scores)
    assert titles(figure) == ["DPSGD", "TopK"]
    assert figure is not None
    lines = pd.concat([pd.DataFrame(rows) for rows in figure.spec["datasets"].values()])
    drawn = lines[lines["defense"] == "TopK(ratio=0.1)"]
    own = with_scores(attacks[attacks["defense"] == "TopK(ratio=0.1)"], scores)
    own = own[own["adversary"].isin(["LinearLeakage", "InvertingGradients"])]
    closest = own.groupby(["seed", "observation"])["psnr"].max()
    assert (drawn["x"].min(), drawn["x"].max()) == pytest.approx((closest.min(), closest.max()))


def test_without_psnr_there_is_no_figure_of_it() -> None:
    results = shared_results(scenarios=(MLP,), media="tokens")
    assert psnr_figure(MLP, 0, at(results.attacks, MLP, 0), at(results.scores, MLP, 0)) is None


def test_accuracy_needs_several_rounds(results: Conclusions) -> None:
    curve = results.utility_curve()
    curve = curve[curve["scenario"] == MLP]
    assert titles(accuracy_figure(MLP, curve)) == ["DPSGD", "TopK"]
    assert accuracy_figure(MLP, curve[curve["round"] == 40]) is None
    control = accuracy_figure(MLP, curve[curve["control"]])
    assert titles(control) == ["none"]
