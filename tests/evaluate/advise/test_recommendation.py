from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy.stats import norm

from leakfrontier.defenses import ClientDP, Plan
from leakfrontier.evaluate.advise.advice import Advice
from leakfrontier.evaluate.advise.experiment import Effort, Experiment, TrainingChoice
from leakfrontier.evaluate.advise.levers import changes
from leakfrontier.evaluate.advise.question import AdviceRow, Question, proven
from leakfrontier.evaluate.advise.recommendation import advise, most_private
from leakfrontier.evaluate.engines import engine as engine_module
from leakfrontier.evaluate.engines.engine import Done, Failure, execute
from leakfrontier.evaluate.foundations.statistics import Interval, clopper_pearson
from leakfrontier.evaluate.privacy.accounting import ACCOUNTANTS, Segment, Unreachable, epsilon
from leakfrontier.evaluate.privacy.bounds import Bounds, reconstruction
from leakfrontier.evaluate.run.store import Store
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out most of the table, whose rows take a second each."""
    for name, values in (("PROVEN_LADDER", (1.0, 2.0)), ("EPSILONS", (16.0, 4.0, 2.0))):
        monkeypatch.setattr(f"leakfrontier.evaluate.advise.recommendation.{name}", values)
    monkeypatch.setattr("leakfrontier.evaluate.advise.recommendation.changes", lambda _: iter(()))
    unaudited(monkeypatch)


def unaudited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the audit of every training run, which takes longer than the run."""
    monkeypatch.setattr("leakfrontier.evaluate.privacy.claims._audited", lambda row, *_: row)


SIZES = {"examples": 60_000, "batch_size": 256, "rounds": 1000}


def ask(**change: Any) -> Question:  # noqa: ANN401
    return Question(**{**SIZES, "epsilon": 3.0, **change})


def test_epsilon_sets_the_least_noise() -> None:
    advice = advise(ask(rounds=14040, delta=1e-5))
    row = advice.recommended
    assert row is not None
    assert row.noise_multiplier == pytest.approx(0.9680, rel=1e-3)  # methodology 3.1
    assert 2.997 <= row.epsilon["pld"] <= 3 <= row.epsilon["prv"] <= row.epsilon["rdp"]
    assert row.run_bound == reconstruction(0.01, 256 / 60_000, row.noise_multiplier, 14040)
    assert row.upload_bound == pytest.approx(norm.cdf(norm.ppf(0.01) + 1 / row.noise_multiplier))
    noises = [one.noise_multiplier for one in advice.rows]
    assert noises == sorted(noises)
    assert noises[0] == 0
    assert len(noises) == 3
    assert {tuple(one.epsilon) for one in advice.rows} == {tuple(ACCOUNTANTS)}
    assert "the smallest (rounded up) that keeps epsilon 3" in advice.reasons[0]
    assert "(zero-out: the number of records is public)" in advice.reasons[0]
    assert "in at most 5.24 %" in advice.reasons[1]


@pytest.mark.parametrize(("rounds", "batch_size"), [(1, 256), (1000, 256), (100, 60_000)])
def test_reconstruction_success_holds_for_one_known_upload_and_all_others(
    rounds: int, batch_size: int
) -> None:
    question = ask(rounds=rounds, batch_size=batch_size, epsilon=None, reconstruction_success=0.05)
    row = advise(question).recommended
    assert row is not None
    assert max(row.run_bound, row.upload_bound) <= row.bound + 1e-6 <= 0.05 + 2e-6
    assert proven(question, 0.99 * row.noise_multiplier).bound > 0.05
    known = Segment(1.0, row.noise_multiplier, 1)
    others = (Segment(batch_size / 60_000, row.noise_multiplier, rounds - 1),) if rounds > 1 else ()
    assert row.bound == Bounds((known, *others)).reconstruction(0.01)


def test_zero_noise_is_infinite_and_said_so() -> None:
    advice = advise(ask())
    none = advice.rows[0]
    assert set(none.epsilon.values()) == {math.inf}
    assert none.run_bound == none.upload_bound == 1
    assert any("sigma 0), epsilon is infinite" in warning for warning in advice.warnings)


def test_clients_share_the_examples_and_server_sees_who_takes_part() -> None:
    records = ask(clients=10)
    assert records.sample_rate == 256 / 6000
    clients = ask(clients=10, unit="client", rounds=20)
    assert clients.sample_rate == 1
    assert (records.units, clients.units) == (60_000, 10)
    row = advise(clients).recommended
    assert row is not None
    claimed = ClientDP(row.noise_multiplier).guarantee(Plan(20, 0.1, clients.used_delta))
    assert row.epsilon["pld"] == pytest.approx(claimed.epsilon, rel=1e-3)


def test_who_sees_what() -> None:
    advice = advise(ask(clients=16, unit="client", rounds=20))
    assert advice.recommended is not None
    assert any("protects all data of one client" in text for text in advice.warnings)
    local, planned, unplanned, bypassed, central = advice.observation_points
    noise, question = advice.recommended.noise_multiplier, advice.question
    assert (local.noise_multiplier, local.epsilon) == (noise, advice.recommended.epsilon["pld"])
    assert question.noise_makers == 12  # of 16, two may be lost, and two collude
    assert (planned.noise_multiplier, planned.epsilon) == (local.noise_multiplier, local.epsilon)
    assert f"noise {noise / math.sqrt(12):.4g}," in planned.sees
    for point, left in ((unplanned, math.sqrt(12 / 16)), (bypassed, 1 / math.sqrt(12))):
        assert point.noise_multiplier == pytest.approx(left * noise)
        assert point.epsilon == epsilon(1.0, point.noise_multiplier, 20, question.used_delta)
        assert point.epsilon > local.epsilon
    assert (central.noise_multiplier, central.epsilon, central.bound) == (0, math.inf, 1)
    alone = advise(ask()).observation_points  # no sum to hide in
    assert [point.name for point in alone] == ["local", "central"]


def test_a_delta_that_is_not_below_one_over_n_warns_and_says_why() -> None:
    (warning,) = (text for text in advise(ask(delta=1e-3)).warnings if "Delta" in text)
    assert "not below 1 / 60000" in warning
    assert "publishes one of the 60000 at random" in warning


def test_shuffled_epochs_count_one_step_each() -> None:
    question = Question(12_000, 100, 240, poisson_sampling=False, epsilon=2.5)
    advice = advise(question)
    row = advice.recommended
    assert row is not None
    assert row.noise_multiplier < 5.2  # 50.6, if every step counted
    assert row.epsilon["pld"] == epsilon(1.0, row.noise_multiplier, 2, question.used_delta) <= 2.5
    assert any("random batches give no extra protection" in warning for warning in advice.warnings)


def test_weak_guarantees_are_called_weak() -> None:
    assert any("Epsilon 20 is above 10" in text for text in advise(ask(epsilon=20.0)).warnings)


def test_unreachable_targets_say_the_closest() -> None:
    with pytest.raises(Unreachable, match=r"success of 0.005 cannot be reached.* is 0.01"):
        advise(ask(epsilon=None, reconstruction_success=0.005))
    with pytest.raises(
        Unreachable, match=r"epsilon 0.001 cannot be reached: the closest value, with"
    ):
        advise(ask(epsilon=0.001, batch_size=60_000, rounds=10**14))
    with pytest.raises(ValueError, match="a target accuracy has to be measured"):
        advise(ask(epsilon=None, min_accuracy=0.8))


def test_the_document_is_strict_json() -> None:
    text = json.dumps(advise(ask()).document(), allow_nan=False)
    document = json.loads(text)
    assert document["rows"][0]["epsilon"] == {"pld": None, "prv": None, "rdp": None}
    assert document["question"]["delta"] == pytest.approx(60_000**-1.1)
    assert document["recommended"]["epsilon"]["pld"] <= 3


DIGITS = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16}))
SMALL = Effort(
    norm_factors=(0.3, 1.0),
    step_sizes=(0.003, 0.03),
    shortening=2,
    survivors=1,
    seeds=3,
    observations=10,
    adversaries=(Method(name="PriorGuess"), Method(name="PriorAware")),
)
ASKED = Question(1438, 128, 15, candidates=20, epsilon=3.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Path]:
    out = tmp_path_factory.mktemp("advise")
    return ask_digits(out), out


def here(function: Any, tasks: Sequence[Any], **_: object) -> Iterator[Done[Any, Any]]:  # noqa: ANN401
    """Run cells in this process: workers of their own take longer to start than these cells."""
    for task in tasks:
        yield Done(task, function(task), 1.0)


def ask_digits(out: Path) -> Advice:
    with pytest.MonkeyPatch.context() as patch:
        unaudited(patch)
        patch.setattr("leakfrontier.evaluate.advise.recommendation.MEASURED_LADDER", (1.0, 4.0))
        patch.setattr("leakfrontier.evaluate.advise.recommendation.changes", changes)
        if engine_module.execute is execute:
            patch.setattr(engine_module, "execute", here)
        return advise(ASKED, DIGITS, out=out, effort=SMALL)


def test_a_measured_advice_recommends_the_best_of_its_search(
    measured: tuple[Advice, Path],
) -> None:
    advice, _ = measured
    searched = [row for row in advice.rows if row.searched]
    final = [row for row in advice.rows if not row.searched]
    row = advice.recommended
    assert row is not None
    assert row in final
    assert row.noise_multiplier == ASKED.least_noise()
    assert len(final) == 3
    at_target = [one for one in searched if one.noise_multiplier == row.noise_multiplier]
    assert len(at_target) == 4 + 3  # two step sizes, and a norm: of two, the best is at an edge
    best = max(at_target, key=lambda one: one.accuracy.value if one.accuracy else 0)
    assert (row.max_norm, row.lr) == (best.max_norm, best.lr)
    sizes = {0.003, 0.03, row.lr}
    for one in (final[0], final[2]):  # the step size is searched for at every noise
        tried = [other for other in searched if other.noise_multiplier == one.noise_multiplier]
        assert {other.lr for other in tried} == sizes
        assert one.lr in sizes
    assert all(one.success is not None and one.success.n == 30 for one in final)
    control = final[0]
    assert control.success is not None
    assert row.success is not None
    assert control.success.low > 0.8  # the attacks work where there is no noise
    assert control.success.value > row.success.value
    assert row.strongest == "PriorAware"
    assert row.any_attack is not None
    assert row.any_attack.value >= row.success.value
    assert "The norm was tuned at noise multiplier" in " ".join(advice.reasons)
    assert (control.max_norm, control.noise_multiplier) == (None, 0)  # undefended
    assert not any("above the proven bound" in text for text in advice.warnings)


def test_what_is_reported_was_not_searched_with(measured: tuple[Advice, Path]) -> None:
    _, out = measured
    cells = Store(out).results().cells  # of the last stage
    assert set(cells.loc[cells["kind"] != "replay", "seed"]) == {1, 2, 3}
    assert set(cells["kind"]) == {"replay", "train", "attack"}


def test_a_measured_advice_is_continued_not_repeated(
    measured: tuple[Advice, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice, out = measured

    def nothing(_: object, tasks: list[object], **__: object) -> Iterator[object]:
        assert not tasks
        return iter(())

    monkeypatch.setattr(engine_module, "execute", nothing)
    assert ask_digits(out) == advice


def test_run_afresh_the_recommended_row_keeps_its_promise(
    measured: tuple[Advice, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice, out = measured
    row = advice.recommended
    assert row is not None
    monkeypatch.setattr(engine_module, "execute", here)
    experiment = Experiment(advice.question, DIGITS, out, SMALL)
    (afresh,) = experiment.measure([experiment.setting(row)], repetition=1)
    assert row.accuracy is not None
    assert afresh.accuracy is not None
    assert afresh.success is not None
    assert afresh.accuracy != row.accuracy
    assert row.accuracy.low <= afresh.accuracy.value <= row.accuracy.high
    assert row.success is not None
    assert (afresh.success.value + row.success.value) / 2 <= row.upload_bound


def failing(function: Any, tasks: Sequence[Any], **_: object) -> Iterator[Done[Any, Any]]:  # noqa: ANN401
    """Run cells in this process, but for an attack that crashes."""
    for task in tasks:
        crashes = getattr(task[0], "adversary", None) == Method(name="LinearLeakage")
        yield Done(task, Failure("error", "boom") if crashes else function(task), 1.0)


def test_attacks_that_crash_are_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = (Method(name="PriorGuess"), Method(name="PriorAware"), Method(name="LinearLeakage"))
    effort = replace(SMALL, seeds=2, adversaries=attacks)
    experiment = Experiment(replace(ASKED, rounds=1), DIGITS, tmp_path, effort)
    monkeypatch.setattr(engine_module, "execute", failing)
    (row,) = experiment.measure([TrainingChoice(0.1, 1.0, 0.01)])
    assert row.failed == 2
    assert row.strongest == "PriorAware"
    advice = Advice(ASKED, "digits", (row, row), row, ())
    assert any("2 attacks crashed or ran out of time" in text for text in advice.warnings)
    monkeypatch.setattr(engine_module, "execute", here)
    (row,) = experiment.measure([TrainingChoice(0.1, 1.0, 0.01)])
    assert row.failed == 0


def test_the_interval_allows_for_the_choice_of_the_strongest(measured: tuple[Advice, Path]) -> None:
    success = measured[0].rows[1].success
    assert success is not None
    alone = clopper_pearson(round(success.value * success.n), success.n)
    assert success == alone  # PriorGuess is the baseline: there is one attack


def test_a_success_above_its_bound_is_an_alarm(measured: tuple[Advice, Path]) -> None:
    advice, _ = measured
    high = replace(advice.rows[1], success=Interval(0.5, 0.4, 0.6, 30), upload_bound=0.2)
    lucky = replace(high, success=Interval(10 / 30, 0.25, 0.4, 30))
    alarms = [
        [text for text in replace(advice, rows=(advice.rows[0], one)).warnings if "above" in text]
        for one in (high, lucky)
    ]
    assert len(alarms[0]) == 1
    assert alarms[1] == []


@pytest.mark.parametrize("change", [{"clients": 200}, {"batch_size": 2000}])
def test_data_that_is_too_small_is_refused_before_anything_runs(
    change: dict[str, int], tmp_path: Path
) -> None:
    question = replace(ASKED, examples=60_000, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the dataset has 1438 training examples"):
        advise(question, DIGITS, out=tmp_path)


def test_fewer_candidates_than_asked_for_are_said_so(measured: tuple[Advice, Path]) -> None:
    advice, _ = measured
    assert not any("question is about" in text for text in advice.warnings)
    more = replace(advice, asked_candidates=1000)
    assert any("question is about 1000 candidates" in text for text in more.warnings)


def test_for_clients_the_epsilon_of_a_replacement_is_said_too() -> None:
    advice = advise(ask(clients=10, unit="client", rounds=20))
    row = advice.recommended
    assert row is not None
    halved = epsilon(1.0, row.noise_multiplier / 2, 20, advice.question.used_delta)
    assert any(f"epsilon is {halved:.3g}" in text for text in advice.warnings)
    assert "protects one client that contributes or does not" in advice.reasons[0]
    assert advice.document()["question"]["adjacency"] == "zero-out"


def rows_of(accuracies: list[tuple[float, float]]) -> list[AdviceRow]:
    return [
        AdviceRow(
            sigma, {"pld": 4 / sigma}, 0.1, 0.1, 0.1, 15, 1.0, 0.1, Interval(value, low, 1.0, 5)
        )
        for sigma, (value, low) in enumerate(accuracies, start=1)
    ]


def test_most_private_stops_at_the_first_failure() -> None:
    rows = rows_of([(0.9, 0.85), (0.85, 0.8), (0.75, 0.7), (0.9, 0.85)])
    assert most_private(rows, 0.8) is rows[1]
    assert most_private(rows, 0.86) is None
    assert most_private(rows, 0.5) is rows[3]


class Canned(Experiment):
    """Measures nothing: accuracy is 0.9 at the least noise, and 0.1 less at each step."""

    def search(self, noise_multiplier: float) -> tuple[TrainingChoice, list[AdviceRow]]:
        return TrainingChoice(noise_multiplier, 1.0, 0.01), []

    def retune(
        self, best: TrainingChoice, noise: Sequence[float]
    ) -> tuple[list[TrainingChoice], list[AdviceRow]]:
        return [best._replace(noise_multiplier=sigma) for sigma in noise], []

    def measure(self, settings: Any, *, repetition: int | None = None) -> list[AdviceRow]:  # noqa: ANN401
        return [
            replace(
                proven(self.question, one.noise_multiplier),
                max_norm=one.max_norm,
                lr=0.01,
                accuracy=Interval(0.9 - 0.1 * step, 0.86 - 0.1 * step, 1.0, 5),
                success=Interval(0.0, 0.0, 0.1, 30),
                strongest=None if step else "PriorAware",
            )
            for step, one in enumerate(settings)
        ]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakfrontier.evaluate.advise.recommendation.Experiment", Canned)


def accurate(least: float) -> Advice:
    question = replace(ASKED, epsilon=None, min_accuracy=least)
    return advise(question, DIGITS, workers=1, effort=Effort(what_if=False))


@pytest.mark.usefixtures("canned")
def test_an_accuracy_is_kept_with_the_most_noise() -> None:
    advice = accurate(0.55)
    assert len(advice.rows) == 4
    assert advice.recommended is not None
    assert advice.recommended.epsilon["pld"] == pytest.approx(2.0, rel=1e-3)
    assert "the largest tested one that keeps the accuracy" in advice.reasons[0]
    assert any(
        "no attack is significantly better than a blind guess" in text for text in advice.warnings
    )
    said = next(text for text in advice.reasons if "attack succeeded" in text)
    assert said.startswith("No attack succeeded; each identified <= 10.0 % of 30 uploads")
    assert "Without a defense: The strongest attack, PriorAware, identified" in said


@pytest.mark.usefixtures("canned")
def test_an_accuracy_that_no_noise_keeps() -> None:
    advice = accurate(0.95)
    assert advice.recommended is None
    assert "The closest accuracy is 80.0 %" in advice.reasons[0]
    assert "Without clipping and noise, it is 90.0 %" in advice.reasons[0]
    assert advice.observation_points == ()
    assert "Another model or another run may help" in advice.reasons[1]
    assert "The estimate suffices" in accurate(0.78).reasons[1]


def test_rounds_of_the_search_are_shown(measured: tuple[Advice, Path]) -> None:
    advice, _ = measured
    rounds = {row.rounds for row in advice.rows if row.searched}
    assert rounds == {8, 15}
    assert {row.rounds for row in advice.rows if not row.searched} == {15}
    short = next(row for row in advice.rows if row.rounds == 8)
    assert short.epsilon == proven(replace(ASKED, rounds=8), short.noise_multiplier).epsilon
    assert "rounds" in advice.columns
    assert "rounds" not in advise(ask(batch_size=60_000, rounds=10)).columns


def test_what_other_choices_would_have_brought(measured: tuple[Advice, Path]) -> None:
    advice, _ = measured
    row = advice.recommended
    assert row is not None
    assert len(advice.levers) == 5
    assert all(lever.accuracy is not None and lever.accuracy.n == 3 for lever in advice.levers)
    norms = [point.max_norm for point in advice.clipping]
    assert norms == sorted(norms)
    assert row.max_norm in norms
    shares = [point.first.share for point in advice.clipping]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9  # of a third of the median
    assert [*advice.tables] == ["What else could be changed", "Clipping norms"]
    json.dumps(advice.document(), allow_nan=False)


def test_proofs_that_take_long_leave_out_what_is_around(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("left out" in one for one in advise(ask(batch_size=60_000, rounds=10)).reasons)
    monkeypatch.setattr("leakfrontier.evaluate.advise.recommendation.BUDGET", 0.0)
    advice = advise(ask(batch_size=60_000, rounds=10))
    assert advice.recommended in advice.rows
    assert len(advice.rows) == 2
    assert "are left out" in advice.reasons[-1]


def test_progress_is_shown_where_there_is_a_terminal() -> None:
    shown = io.StringIO()
    advise(ask(batch_size=60_000, rounds=10), console=Console(file=shown, force_terminal=True))
    assert "accounting" in shown.getvalue()
