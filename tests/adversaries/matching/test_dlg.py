import pytest
import torch
from federated import SPACE, batch, observed, rng
from torch import Tensor

from leakfrontier.adversaries import DLG, FedAvg, NotApplicable, Observation
from leakfrontier.defenses import DPSGD
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())


def quality(observation: Observation, truth: Tensor, attack: DLG) -> float:
    guess = SPACE.to_unit(attack.reconstruct(observation, rng()).inputs)
    private = SPACE.to_unit(truth)
    return float(metrics.psnr(guess[metrics.match(guess, private)], private).min())


@pytest.mark.parametrize("protocol", [None, FedAvg(epochs=1, batch_size=1, lr=0.1)])
def test_recovers_an_input_and_its_label_exactly(protocol: FedAvg | None) -> None:
    share = batch(1)
    result = DLG(iterations=400).reconstruct(observed(LENET, share, protocol=protocol), rng())
    assert metrics.psnr(SPACE.to_unit(result.inputs), SPACE.to_unit(share.inputs)) > 60
    assert result.targets is not None
    assert result.targets.equal(share.targets)


def test_recovers_a_small_batch_in_any_order() -> None:
    share = batch(2)
    assert quality(observed(LENET, share), share.inputs, DLG(iterations=600)) > 40


def test_fails_with_relus_as_published() -> None:
    model, share = build_model("lenet", SPACE, rng(), activation="relu"), batch(1)
    assert quality(observed(model, share), share.inputs, DLG(iterations=300)) < 20


def test_noise_stops_it() -> None:
    share = batch(1)
    observation = observed(LENET, share, DPSGD(1.0))
    assert quality(observation, share.inputs, DLG(iterations=100)) < 12


def test_ends_early_once_nothing_improves() -> None:
    told: list[int] = []
    DLG(patience=20).reconstruct_all(
        [observed(LENET, batch(1))], [rng()], lambda iteration, _: told.append(iteration)
    )
    assert 50 < len(told) < 1500


def test_its_labels_are_searched_for_even_where_granted() -> None:
    observation = observed(LENET, batch(1))
    start = DLG(restarts=3).start(observation, rng())
    assert start["logits"].shape == (3, 1, 10)
    assert start["inputs"].shape == (3, 1, *SPACE.shape)
    assert not torch.equal(start["inputs"][0], start["inputs"][1])


def test_several_local_steps_are_not_applicable() -> None:
    observation = observed(LENET, batch(2), protocol=FedAvg(epochs=2, batch_size=2))
    with pytest.raises(NotApplicable, match="several local steps"):
        DLG().reconstruct(observation, rng())


def test_more_unknowns_than_equations_are_not_applicable() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))  # 1930 entries
    DLG().check(observed(model, batch(10)))
    with pytest.raises(NotApplicable, match="2112 unknown values do not follow from 1930"):
        DLG().check(observed(model, batch(11)))


def test_rejects_no_patience() -> None:
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        DLG(patience=0)
