import math

import pytest
from federated import SPACE, batch, observed, rng

from leakfrontier.adversaries import IDLG, FedAvg, NotApplicable
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())


def test_recovers_an_input_whose_label_it_infers() -> None:
    share = batch(1, 1)
    result = IDLG(iterations=400).reconstruct(observed(LENET, share), rng())
    assert result.targets is not None
    assert result.targets.equal(share.targets)
    assert metrics.psnr(SPACE.to_unit(result.inputs), SPACE.to_unit(share.inputs)) > 40


def test_ends_at_its_tolerance() -> None:
    told: list[float] = []
    attack = IDLG(iterations=400, tolerance=0.1)
    attack.reconstruct_all(
        [observed(LENET, batch(1, 1))], [rng()], lambda _, values: told.append(float(values))
    )
    assert told[-1] <= 0.1 < min(told[:-1])


@pytest.mark.parametrize(
    ("size", "protocol", "reason"),
    [(2, None, "one example, got 2"), (1, FedAvg(epochs=2), "several local steps")],
)
def test_batches_and_local_steps_are_not_applicable(
    size: int, protocol: FedAvg | None, reason: str
) -> None:
    with pytest.raises(NotApplicable, match=reason):
        IDLG().reconstruct(observed(LENET, batch(size), protocol=protocol), rng())


@pytest.mark.parametrize(("name", "value"), [("patience", 0), ("tolerance", math.nan)])
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        IDLG(**{name: value})  # type: ignore[arg-type]
