import math
from dataclasses import replace

import pytest

from leakfrontier.defenses import Guarantee
from leakfrontier.evaluate.privacy.accounting import epsilon
from leakfrontier.evaluate.privacy.finding import (
    SIGNIFICANCE,
    Audit,
    Symptom,
    compared,
    most_damning,
)
from leakfrontier.evaluate.privacy.promise import Promise, judged

PROMISE = Promise(Guarantee(4.0, 1e-5, "record", "zero-out", "pld"), 1.0, 1, 2.0)


def test_repetitions_are_corrected_for() -> None:
    found = Audit(
        method="step canaries",
        claimed=4.0,
        lower_bound=4.1,
        ceiling=3.0,
        p_value=0.02,
        violated=True,
        words="by a hair",
    )
    fine = replace(found, p_value=0.6, lower_bound=3.0, violated=False)
    assert most_damning([fine, found]) == replace(found, p_value=0.04)
    assert most_damning([fine, found]).verdict == "violated: by a hair (p = 0.04)"


def test_symptoms_are_corrected_for_their_number() -> None:
    just = Symptom(0.9 * SIGNIFICANCE / 2, "too little")
    fine = Symptom(0.5, "")
    found = judged("test", PROMISE, [fine, just], runs=1, fine="nothing")
    assert (found.violated, found.words) == (True, "too little")
    assert found.p_value == pytest.approx(2 * just.p_value)
    for more in (
        {"symptoms": [fine, just, fine], "runs": 1},
        {"symptoms": [fine, just], "runs": 2},
    ):
        cleared = judged("test", PROMISE, **more, fine="nothing")  # type: ignore[arg-type]
        assert (cleared.violated, cleared.words) == (False, "nothing")
    assert judged("test", PROMISE, [fine] * 9, runs=1, fine="").p_value == 1


def test_a_limit_of_the_noise_is_a_lower_bound_of_epsilon() -> None:
    size = Symptom(0.5, "", noise=0.9, measured=0.8)
    found = judged("test", PROMISE, [size], runs=1, fine="", ideal=1.1)
    assert found.claimed == 4.0
    assert found.measured_noise == pytest.approx(2.0 * 0.8)
    assert found.lower_bound == epsilon(1.0, 2.0 * 0.9, 1, 1e-5)
    assert found.ceiling == epsilon(1.0, 2.0 * 1.1, 1, 1e-5)
    unknown = judged("test", PROMISE, [Symptom(0.5, "")], runs=1, fine="")
    assert math.isnan(unknown.lower_bound)
    assert math.isnan(unknown.ceiling)


def test_the_bound_is_that_of_the_guilty() -> None:
    size = Symptom(0.5, "", noise=0.9, measured=1.0)
    guilty = Symptom(0.0, "clipped too late", noise=0.25)
    found = judged("test", PROMISE, [size, guilty], runs=1, fine="")
    assert found.lower_bound == epsilon(1.0, 2.0 * 0.25, 1, 1e-5)
    assert found.measured_noise == 2.0


def test_what_was_found_is_compared_with_the_claim() -> None:
    assert compared(5.0, 4.0, 3.0, violated=True) == ("epsilon is at least 5.00 (claimed: 4.00)")
    assert compared(2.0, 4.0, 3.0, violated=False).endswith(
        "; a perfect implementation would show 3.00"
    )
