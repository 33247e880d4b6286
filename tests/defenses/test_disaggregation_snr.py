import copy
import math
from pathlib import Path

import pytest
import torch
from federated import batch, convolutional, make_client, mlp, observed, rng
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg
from leakfrontier.defenses import Batch, Chain, Defense, DisaggregationSNR, Refused, TopK
from leakfrontier.defenses.disaggregation_snr import disaggregation_snr
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training


def singling_out() -> nn.Module:
    """Return a model whose first layer reacts to bright examples alone."""
    model = copy.deepcopy(mlp())
    with torch.no_grad():
        model[1].weight.fill_(1.0)  # type: ignore[index, union-attr, operator]
        model[1].bias.fill_(-100.0)  # type: ignore[index, union-attr, operator]
    return model


def one_bright(size: int = 4) -> Batch:
    share = batch(size)
    inputs = -share.inputs.abs()
    inputs[1] = 2.0
    return Batch(inputs, share.targets)


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_is_the_largest_norm_over_the_sum_of_the_others(build) -> None:  # noqa: ANN001
    model, share = build(), batch(5)
    examples = [
        Defense().gradient(model, cross_entropy, share.at(slice(i, i + 1)), rng()) for i in range(5)
    ]
    found = disaggregation_snr(model, cross_entropy, share)
    assert set(found) == {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    for name, ratio in found.items():
        norms = sorted(float(gradient[f"{name}.weight"].detach().norm()) for gradient in examples)
        assert ratio == pytest.approx(norms[-1] / sum(norms[:-1]), rel=1e-4)


def test_examples_that_are_alike_share_the_gradient() -> None:
    share = batch(1)
    same = Batch(share.inputs.repeat(8, 1, 1, 1), share.targets.repeat(8))
    for ratio in disaggregation_snr(mlp(), cross_entropy, same).values():
        assert ratio == pytest.approx(1 / 7, rel=1e-4)


def test_a_model_that_singles_out_an_example_is_refused() -> None:
    assert disaggregation_snr(singling_out(), cross_entropy, one_bright())["1"] == math.inf
    with pytest.raises(Refused, match="one example dominates layer '1': D-SNR inf"):
        observed(singling_out(), one_bright(), DisaggregationSNR())
    dead = Batch(-batch(4).inputs.abs(), batch(4).targets)
    assert disaggregation_snr(singling_out(), cross_entropy, dead)["1"] == 0


@pytest.mark.parametrize("defense", [DisaggregationSNR(math.inf), DisaggregationSNR(1e9)])
def test_what_passes_is_uploaded_as_it_is(defense: Defense) -> None:
    expected = observed(mlp(), batch(4)).update
    found = observed(mlp(), batch(4), defense).update
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_batch_of_one_passes_unprotected() -> None:
    assert disaggregation_snr(mlp(), cross_entropy, batch(1)) == {}
    observed(singling_out(), one_bright().at(slice(1, 2)), DisaggregationSNR(1e-9))
    with pytest.raises(Refused):
        observed(mlp(), batch(2), DisaggregationSNR(1e-9))


def test_every_local_step_is_looked_at() -> None:
    protocol = FedAvg(epochs=1, batch_size=2, lr=0.1)
    with pytest.raises(Refused):
        observed(singling_out(), one_bright(6), DisaggregationSNR(), protocol)
    observed(mlp(), batch(6), DisaggregationSNR(1e3), protocol)


def test_an_adversary_simulates_the_undefended_client() -> None:
    defense = DisaggregationSNR(1e-9)
    assert type(defense.replay({})) is Defense
    chain = Chain((defense, TopK(0.5)))
    assert chain.unguarded() == Chain((Defense(), TopK(0.5)))
    (upload,) = observe(make_client(mlp(), defense), [batch(1)], ThreatModel(), rng())
    assert upload.observation.release is not None
    upload.observation.release(*batch(4), rng())  # its own examples are not refused


def test_layers_that_work_in_place_are_looked_at_too() -> None:
    plain, in_place = mlp(), mlp()
    in_place[2] = nn.ReLU(inplace=True)
    found = [disaggregation_snr(model, cross_entropy, batch(4)) for model in (plain, in_place)]
    assert found[0] == found[1]
    assert in_place[2].inplace


def test_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), mlp())
    with pytest.raises(Refused, match="BatchNorm"):
        DisaggregationSNR().on_receive(model, mlp())


def test_is_described_by_its_threshold() -> None:
    assert DisaggregationSNR(1.0).strength > DisaggregationSNR(2.0).strength
    assert DisaggregationSNR(math.inf).strength == 0
    for threshold in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="threshold must be positive"):
            DisaggregationSNR(threshold)


SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 16}),
    candidates=20,
    batch_size=4,
    training=Training(rounds=3, clients=4, clients_per_round=2, batch_size=8),
)
STRICT = Method(name="DisaggregationSNR", options={"threshold": 1e-3})


@pytest.mark.parametrize("adversary", ["PriorGuess", "InvertingGradients"])
def test_a_run_keeps_what_was_refused_on_sight_of_the_batch(adversary: str, tmp_path: Path) -> None:
    method = Method(name=adversary, options={} if adversary == "PriorGuess" else {"iterations": 2})
    rows = AttackTrial(SCENARIO, STRICT, method, True, 0, 0, (0, 1)).run(tmp_path).attacks
    assert [row.outcome for row in rows] == ["refused"] * 8
    assert all("one example dominates" in str(row.reason) for row in rows)
    alone = SCENARIO.model_copy(update={"batch_size": 1})
    rows = AttackTrial(alone, STRICT, method, True, 0, 0, (0, 1)).run(tmp_path).attacks
    assert [row.outcome for row in rows] == ["scored"] * 2


@pytest.mark.parametrize(("threshold", "refused"), [(1e-3, 6), (1e6, 0)])
def test_training_counts_false_alarms(threshold: float, refused: int, tmp_path: Path) -> None:
    defense = Method(name="DisaggregationSNR", options={"threshold": threshold})
    rows = TrainTrial(SCENARIO, defense, seed=0).run(tmp_path).utility
    assert rows[-1].refused == refused
