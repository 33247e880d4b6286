import pytest
from noised import noised

from leakfrontier.adversaries import NotApplicable
from leakfrontier.evaluate.privacy.contributions import clipping, neighbours


def test_canaries_that_contribute_no_more_than_they_may_raise_no_alarm() -> None:
    found = clipping(noised())
    assert not found.violated
    assert "canaries of all norms" in found.verdict


def test_a_gradient_that_is_clipped_too_late_is_found() -> None:
    found = clipping(noised(most=1.5))
    assert found.violated
    assert "standard deviations of their noise, but the claim allows 1" in found.verdict
    assert found.lower_bound > found.claimed


def test_canaries_share_an_upload_where_the_unit_is_a_record() -> None:
    with pytest.raises(NotApplicable, match="only if the unit is a record"):
        clipping(noised(unit="client"))


@pytest.mark.parametrize("unit", ["record", "client"])
def test_an_example_that_moves_uploads_too_far_is_found(unit: str) -> None:
    assert not neighbours(noised(unit=unit)).violated
    found = neighbours(noised(record=3.0, unit=unit))
    assert found.violated
    assert "an example moves uploads by" in found.verdict
    assert found.lower_bound > found.claimed


def test_more_noise_makes_up_for_a_larger_contribution() -> None:
    assert not neighbours(noised(record=3.0, noise=lambda _: 4.0)).violated
