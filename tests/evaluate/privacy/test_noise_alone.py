import math

import pytest
from noised import noised

from leakfrontier.adversaries import NotApplicable
from leakfrontier.evaluate.privacy import noise_alone
from leakfrontier.evaluate.privacy.noise_alone import local_steps, rare_steps


def test_every_local_step_must_add_its_noise() -> None:
    kept = local_steps(noised())
    assert not kept.violated
    assert "over 8 local steps, the noise is " in kept.verdict
    assert kept.measured_noise == pytest.approx(1, rel=0.05)
    once = local_steps(noised(steps=lambda _: 1.0))  # as if only the first had any
    assert once.violated
    assert once.measured_noise == pytest.approx(1 / math.sqrt(8), rel=0.05)


def test_for_a_whole_client_the_noise_of_one_step_is_enough() -> None:
    assert not local_steps(noised(unit="client")).violated


@pytest.mark.parametrize("fault", [False, True])
def test_single_uploads_without_noise_are_found(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_alone, "MANY", 30)
    silent = {17} if fault else set()
    found = rare_steps(noised(noise=lambda upload: 0.0 if upload in silent else 1.0))
    assert found.violated == fault
    assert ("an upload has only 0 of the noise" in found.verdict) == fault


def test_what_is_not_finite_cannot_be_tested() -> None:
    with pytest.raises(NotApplicable, match="has NaN or infinite values"):
        rare_steps(noised(noise=lambda _: math.nan))
