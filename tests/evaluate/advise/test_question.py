import math
from typing import Any

import dp_accounting
import pytest

from leakfrontier.evaluate.advise.question import (
    AdviceRow,
    Question,
    noise_near,
    proven,
)
from leakfrontier.evaluate.advise.tables import sigma
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.foundations.statistics import Interval, finite, rounded_up
from leakfrontier.evaluate.privacy.accounting import ACCOUNTANTS, NOISE_RANGE, epsilon
from leakfrontier.evaluate.privacy.bounds import reconstruction

SIZES = {"examples": 60_000, "batch_size": 256, "rounds": 1000}
EVERYBODY = {"examples": 100, "batch_size": 100, "rounds": 4}


def ask(**change: Any) -> Question:  # noqa: ANN401
    return Question(**{**SIZES, "epsilon": 3.0, **change})


def test_the_default_delta_suits_the_number_of_units() -> None:
    assert ask().used_delta == pytest.approx(60_000**-1.1)
    assert ask(examples=1000).used_delta == 1e-5
    assert ask(delta=1e-7).used_delta == 1e-7


@pytest.mark.parametrize(("batch_size", "steps"), [(142, 5), (143, 10)])
def test_shuffled_batches_count_for_the_client_that_has_the_fewest(
    batch_size: int, steps: int
) -> None:
    """Some of ten clients have 143 of 1437 examples, others 144: an epoch of one batch, or two."""
    question = Question(1437, batch_size, 10, clients=10, poisson_sampling=False, epsilon=4.0)
    (segment,) = question.schedule(1.0)
    assert (segment.sample_rate, segment.steps) == (1.0, steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples must be a positive whole number, got 0"),
        ({"rounds": 1.5}, "rounds must be a positive whole number, got 1.5"),
        ({"rounds": math.nan}, "rounds must be a positive"),
        ({"local_epochs": 0}, "local_epochs must be a positive whole number, got 0"),
        ({"local_steps": 1.5}, "local_steps must be a positive whole number, got 1.5"),
        ({"local_epochs": 1, "local_steps": 1}, "local_epochs or local_steps, not both"),
        ({"clients": 5, "clients_per_round": 6}, "at most the 5 clients, got 6"),
        ({"max_participations": 0}, "max_participations must be a positive"),
        (
            {"clients": 10, "clients_per_round": 2, "rounds": 10, "max_participations": 1},
            "max_participations must be at least 2, got 1: 10 rounds with 2 of 10 clients",
        ),
        ({"rounds": 10, "max_participations": 9}, "max_participations must be at least 10, "),
        ({"batch_size": 70_000}, r"at most the 60000 examples.*sample rate would be above 1"),
        ({"batch_size": 256, "clients": 300}, "at most the 200 examples of a client, got 256"),
        ({"clients": 70_000}, "clients must be at most the 60000 examples"),
        ({"unit": "user"}, "unit must be record or client, got 'user'"),
        ({"delta": 0.0}, r"delta must be in \(0, 1\), got 0.0"),
        ({"delta": math.nan}, "delta must be in"),
        ({"candidates": 1}, "candidates must be at least 2, got 1"),
        ({"epsilon": None}, "exactly one of epsilon, .* must be given, got None"),
        ({"min_accuracy": 0.5}, "must be given, got epsilon, min_accuracy"),
        ({"epsilon": 0.0}, r"epsilon must be in \(0, inf\), got 0.0"),
        ({"epsilon": math.nan}, "epsilon must be in"),
        ({"epsilon": None, "min_accuracy": 80}, r"min_accuracy must be in \(0, 1\), got 80.0"),
        ({"epsilon": None, "reconstruction_success": 1.0}, "reconstruction_success must be in"),
    ],
)
def test_rejects_bad_questions(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(**change)


HOSPITALS = {"examples": 40_000, "clients": 5, "batch_size": 64, "rounds": 30}


def reference(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Return epsilon by dp-accounting itself."""
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    event = dp_accounting.PoissonSampledDpEvent(rate, gaussian) if rate < 1 else gaussian
    accountant = dp_accounting.pld.PLDAccountant()
    return float(accountant.compose(event, steps).get_epsilon(delta))


@pytest.mark.parametrize(
    ("local", "steps", "noise"),
    [
        ({}, 30, 0.587),
        ({"local_steps": 1}, 30, 0.587),
        ({"local_epochs": 1}, 3750, 0.970),
        ({"local_steps": 125}, 3750, 0.970),
        ({"local_epochs": 2, "clients_per_round": 2, "max_participations": 15}, 3750, 0.970),
        ({"clients_per_round": 2}, 30, 0.587),
    ],
    ids=str,
)
def test_all_local_steps_count(local: dict[str, int], steps: int, noise: float) -> None:
    question = ask(**HOSPITALS, **local)
    assert question.steps == steps
    assert question.least_noise() == pytest.approx(noise, abs=6e-4)
    expected = reference(noise, 64 / 8000, steps, question.used_delta)
    assert question.epsilon_of(noise) == pytest.approx(expected, rel=0.01)
    assert expected == pytest.approx(3, rel=0.01)


def test_what_thirty_steps_promise_is_not_kept_by_thirty_epochs() -> None:
    question = ask(**HOSPITALS, local_epochs=1)
    assert question.epsilon_of(0.587) == pytest.approx(11.6, abs=0.1)
    assert reference(0.587, 64 / 8000, 3750, question.used_delta) == pytest.approx(11.6, abs=0.1)


@pytest.mark.parametrize(("most", "noise"), [(1, 1.63), (2, 2.31), (5, 3.65), (None, 51.56)])
def test_clients_count_the_rounds_that_they_may_be_in(most: int | None, noise: float) -> None:
    question = Question(
        *(10**8, 10, 1000),
        clients=10**6,
        clients_per_round=100,
        max_participations=most,
        local_epochs=3,  # which the client as a whole does not count
        unit="client",
        epsilon=3.0,
    )
    assert question.least_noise() == pytest.approx(noise, rel=2e-3)
    expected = reference(noise, 1.0, most or 1000, question.used_delta)
    assert expected == pytest.approx(3, rel=0.01)


def test_shuffled_local_epochs_are_as_many_passes() -> None:
    for local, passes in (
        ({"local_epochs": 2}, 60),
        ({"local_steps": 10}, 30),  # every round begins an epoch of its own
        ({"local_steps": 126}, 60),
        ({"local_steps": 1}, 1),
        ({}, 1),
    ):
        question = ask(**HOSPITALS, poisson_sampling=False, **local)  # type: ignore[arg-type]
        (segment,) = question.schedule(1.0)
        assert (segment.sample_rate, segment.steps) == (1.0, passes)


def test_an_upload_of_several_steps_tells_more_than_one_of_a_single_step() -> None:
    one, several = ask(**HOSPITALS), ask(**HOSPITALS, local_epochs=1)
    assert one.upload_bound(1.0) == reconstruction(one.prior, 1.0, 1.0, 1)
    assert one.upload_bound(1.0) < several.upload_bound(1.0) < several.bound(1.0)


def test_the_fewest_examples_and_the_longest_epoch_count() -> None:
    question = ask(examples=11, clients=2, batch_size=5, rounds=3, local_epochs=1)
    (segment,) = question.schedule(1.0)
    assert (segment.sample_rate, segment.steps) == (1.0, 3 * 2)
    assert question.summary.startswith("2 clients x about 5 examples = 11 examples in all; ")


def test_the_summary_says_what_counts() -> None:
    sizes = {"examples": 6000, "clients": 10, "batch_size": 60, "rounds": 30, "local_epochs": 1}
    assert ask(**sizes).summary.endswith("30 rounds x 10 local steps = 300 steps of a client")
    clients = ask(**sizes, unit="client").summary
    assert clients.endswith("; 30 rounds of a client count as a whole, each with 10 local steps")
    shuffled = ask(**sizes, poisson_sampling=False).summary
    assert shuffled.endswith("= 300 steps of a client; a record is in 30 of them, which count")
    once = ask(examples=6000, batch_size=60, rounds=10, poisson_sampling=False).summary
    assert once.endswith("= 10 steps of a client; a record is in 1 of them, which counts")


@pytest.mark.parametrize(
    ("change", "misread"),
    [
        ({}, True),
        ({"clients": 10}, True),
        ({"poisson_sampling": False}, True),
        ({"local_steps": 1}, False),
        ({"batch_size": 60_000}, False),
        ({"clients": 10, "unit": "client"}, False),
    ],
    ids=str,
)
def test_a_round_of_any_number_of_clients_may_be_misread(
    change: dict[str, Any], misread: bool
) -> None:
    assert ask(**change).may_be_misread == misread


def test_printed_noise_keeps_the_target() -> None:
    for target in (0.73, 1.1, 2.5, 7.0):
        question = ask(epsilon=target, batch_size=60_000, rounds=40)
        found = question.least_noise()
        assert question.epsilon_of(float(sigma(found))) <= target
        assert question.epsilon_of(0.998 * found) > target


def test_clients_share_the_examples_and_each_is_a_unit_if_asked_for() -> None:
    records, clients = ask(clients=10), ask(clients=10, unit="client")
    assert (records.share, records.units, clients.units) == (6000, 60_000, 10)
    assert records.sample_rate == 256 / 6000
    assert clients.sample_rate == 1  # the server sees who takes part
    assert records.update_noise(2.0) == pytest.approx(2.0 / 256 / math.sqrt(10))
    assert clients.update_noise(2.0) == pytest.approx(2.0 / math.sqrt(10))


def test_noise_that_the_server_does_not_know_is_of_those_who_stay_and_keep_silent() -> None:
    assert ask(clients=16).noise_makers == 12  # two may be lost, and two collude
    assert ask(clients=16, dropout=0.0, colluders=0.0).noise_makers == 16
    assert ask(clients=2, dropout=0.6, colluders=0.6).noise_makers == 0


def test_what_is_proven_of_one_noise_multiplier() -> None:
    question = ask(**EVERYBODY, candidates=10)
    row = proven(question, 4.0)
    assert row.epsilon["pld"] == epsilon(1.0, 4.0, 4, question.used_delta)
    assert row.run_bound == pytest.approx(reconstruction(0.1, 1.0, 4.0, 4))
    assert row.upload_bound == pytest.approx(reconstruction(0.1, 1.0, 4.0, 1))
    assert row.bound == pytest.approx(row.run_bound)  # sampling hides nothing here
    assert row.rounds == 4


def test_without_noise_nothing_is_proven() -> None:
    row = proven(ask(**EVERYBODY), 0.0)
    assert row.epsilon == dict.fromkeys(ACCOUNTANTS, math.inf)
    assert (row.run_bound, row.upload_bound, row.bound) == (1, 1, 1)


def test_a_reconstruction_target_is_kept_with_the_least_noise() -> None:
    question = ask(**EVERYBODY, epsilon=None, reconstruction_success=0.2)
    found = question.least_noise()
    assert question.bound(found) <= 0.2 < question.bound(0.998 * found)
    with pytest.raises(UserError, match="give a model"):
        ask(epsilon=None, min_accuracy=0.5).least_noise()


@pytest.mark.parametrize("guess", [0.01, 1.9, 2.0, 2.1, 300.0])
def test_noise_is_found_from_any_guess(guess: float) -> None:
    found = noise_near(guess, 0.5, lambda noise: 1 / noise)
    assert 2.0 <= found <= 2.0 * (1 + 1e-3)
    assert noise_near(guess, 0.5, lambda _: 0.0) == NOISE_RANGE[0]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(1.23401, 1.235), (1.234, 1.234), (0.00012341, 0.0001235), (99999.0, 100000.0), (0.0, 0.0)],
)
def test_noise_is_rounded_up_to_what_is_printed(value: float, rounded: float) -> None:
    assert rounded_up(value, 4) == rounded
    assert rounded_up(math.inf, 4) == math.inf


def test_a_row_is_json_without_what_json_cannot_hold() -> None:
    row = AdviceRow(
        0.0, {"pld": math.inf}, 1.0, 1.0, 1.0, 4, accuracy=Interval(0.5, -math.inf, math.inf, 3)
    )
    document = row.document()
    assert document["epsilon"] == {"pld": None}
    assert document["accuracy"] == {"value": 0.5, "low": None, "high": None, "n": 3}
    assert document["success"] is None
    assert [finite(value) for value in (math.nan, 1.5, "x", None)] == [None, 1.5, "x", None]
