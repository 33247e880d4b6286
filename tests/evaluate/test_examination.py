from __future__ import annotations

import pytest
import unreplayable
from federated import batch, make_client, mlp, rng

from leakfrontier.adversaries import FedAvg, Protocol
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    PRECODE,
    Chain,
    ClientDP,
    Defense,
    DualPruning,
    Mixup,
    Noise,
    Outpost,
    Quantization,
    RandomK,
    SecureAggregation,
    SignSGD,
    Soteria,
    TopK,
)
from leakfrontier.evaluate.examination import examine, findings, mending_of
from leakfrontier.evaluate.mending import AS_GIVEN, Mending
from leakfrontier.evaluate.rows import ReplayRow

LOCAL = FedAvg(epochs=2, batch_size=1, lr=0.1)
OURS = [
    ClientDP(noise_multiplier=0.1),
    DPSGD(noise_multiplier=0.1),
    DualPruning(largest=0.1, smallest=0.5),
    Noise(scale=0.1),
    Noise(scale=0.1, distribution="laplace"),
    Outpost(),
    PRECODE(),
    Quantization(bits=4),
    Quantization(bits=4, stochastic=False),
    RandomK(ratio=0.1),
    SecureAggregation(clients=2),
    SignSGD(),
    Soteria(pruning_rate=0.5),
    TopK(ratio=0.1),
    Chain((Noise(scale=0.01), TopK(ratio=0.5))),
]


def examined(defense: Defense, protocol: Protocol | None = None) -> ReplayRow:
    client = make_client(defense.on_model(mlp()), defense, protocol)
    size = 2 if protocol else 1
    rounds = [[batch(size, 10 * seed + one) for one in range(defense.cohort)] for seed in range(3)]
    return examine(client, rounds, rng())


@pytest.mark.parametrize("defense", OURS, ids=str)
def test_our_own_replays_need_no_mending(defense: Defense) -> None:
    row = examined(defense)
    assert mending_of(row) == AS_GIVEN
    assert findings(row) == []
    assert row.vectorised
    assert row.residual < 0.95 * row.repeat or row.residual < 1e-3


@pytest.mark.parametrize("policy", ["3-1-7", "3-1-7+43-18-18"])
def test_transformations_that_are_drawn_anew_are_told_of(policy: str) -> None:
    row = examined(ATS(policy, mean=(0.5,), std=(0.25,)))
    assert mending_of(row) == AS_GIVEN  # which way an image is turned has no mean
    assert row.vectorised
    (finding,) = findings(row)
    assert finding.problem.startswith("it still draws noise")


@pytest.mark.parametrize("protocol", [None, LOCAL], ids=["FedSGD", "FedAvg"])
@pytest.mark.parametrize(
    ("defense", "mending"),
    [
        (unreplayable.FreshNoise(), Mending("expected")),
        (unreplayable.DerivedNoise(), Mending("averaged")),
        (unreplayable.PublicNoise(), AS_GIVEN),
        (unreplayable.Rounded(), Mending(straight_through=True)),
        (unreplayable.Float8(), Mending(straight_through=True)),
        (unreplayable.ThroughNumpy(), Mending(straight_through=True)),
        (unreplayable.Peeking(), Mending(one_by_one=True)),
        (
            Chain((unreplayable.FreshNoise(), unreplayable.Rounded())),
            Mending("expected", straight_through=True),
        ),
    ],
    ids=lambda value: "" if isinstance(value, Mending) else str(value),
)
def test_what_cripples_an_attack_is_mended(
    defense: Defense, mending: Mending, protocol: Protocol | None
) -> None:
    row = examined(defense, protocol)
    assert mending_of(row) == mending
    assert len(findings(row)) == sum(
        (mending.draws != "given", mending.straight_through, mending.one_by_one)
    )
    assert row.mended_residual <= row.residual


@pytest.mark.parametrize(
    ("defense", "differ"),
    [
        (unreplayable.FreshNoise(), True),
        (unreplayable.DerivedNoise(), True),
        (unreplayable.PublicNoise(), False),
        (unreplayable.Rounded(), False),
        (Mixup(), True),
        (RandomK(ratio=0.1), True),
        (DPSGD(noise_multiplier=0.0), False),
        (Noise(scale=0.0), False),
    ],
    ids=str,
)
def test_randomness_is_detected(defense: Defense, differ: bool) -> None:
    row = examined(defense, LOCAL if isinstance(defense, Mixup) else None)
    assert row.uploads_differ == differ


def test_secret_choice_of_examples_is_randomness() -> None:
    assert examined(unreplayable.Subsampled(), LOCAL).uploads_differ


def test_what_a_later_link_hides_is_named() -> None:
    hidden = Chain((TopK(ratio=0.1), Noise(scale=1e-3)))
    (finding,) = findings(examined(hidden))
    assert "misses the upload" in finding.problem


def test_a_replay_of_something_else_is_named() -> None:
    (finding,) = findings(examined(unreplayable.Elsewhere()))
    assert finding.problem == "at the truth it misses the upload by 200 %"
    assert "def replay" in finding.remedy


def test_an_examination_can_be_repeated() -> None:
    assert examined(unreplayable.DerivedNoise()) == examined(unreplayable.DerivedNoise())
