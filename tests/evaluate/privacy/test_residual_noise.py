import pytest
from federated import batch, mlp, rng
from noised import ONCE, noised
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD
from leakfrontier.evaluate.privacy.canaries import Subject
from leakfrontier.evaluate.privacy.residual_noise import residual_noise


def test_residual_noise_measures_sigma_within_two_percent() -> None:
    found = residual_noise(Subject(DPSGD(2.0), mlp(), cross_entropy, batch(20), ONCE, rng()))
    assert found.measured_noise == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("unit", ["record", "client"])
def test_the_promised_noise_is_enough(unit: str) -> None:
    found = residual_noise(noised(unit=unit))
    assert not found.violated
    assert found.measured_noise == pytest.approx(1, rel=0.05)
    assert found.lower_bound < found.claimed


@pytest.mark.parametrize("unit", ["record", "client"])
def test_less_noise_is_measured_and_refuted(unit: str) -> None:
    found = residual_noise(noised(noise=lambda _: 0.7, unit=unit))
    assert found.violated
    assert found.measured_noise == pytest.approx(0.7, rel=0.05)
    assert found.lower_bound > found.claimed
    assert found.verdict.startswith("violated: the noise is ")


def test_what_records_contribute_is_no_noise() -> None:
    found = residual_noise(noised(record=1000.0))
    assert found.measured_noise == pytest.approx(1, rel=0.05)


def test_a_replay_with_noise_of_its_own_is_told_of() -> None:
    subject = noised()
    vars(subject)["replayable"] = False
    found = residual_noise(subject)
    assert not found.violated
    assert "attacks that know the defense were handicapped" in found.verdict
