from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import tricks
import unreplayable
from federated import batch, make_client, mlp, rng

from leakfrontier.adversaries import FedAvg, Protocol
from leakfrontier.defenses import (
    ATS,
    DEFENSES,
    DPSGD,
    Chain,
    Defense,
    Mixup,
    Noise,
    Quantization,
    RandomK,
    TopK,
)
from leakfrontier.evaluate.client.examination import (
    examine,
    failures,
    findings,
    mending_of,
    misleads,
)
from leakfrontier.evaluate.client.mending import AS_GIVEN, Mending
from leakfrontier.evaluate.foundations.rows import ProbeRow, ReplayRow

LOCAL = FedAvg(epochs=2, batch_size=1, lr=0.1)
STEPS = FedAvg(epochs=2, batch_size=2, lr=0.01)
OPTIONS: dict[str, dict[str, Any]] = {
    "DPSGD": {"noise_multiplier": 0.1},
    "ClientDP": {"noise_multiplier": 0.1},
    "Noise": {"scale": 0.1},
    "Quantization": {"bits": 4},
    "TopK": {"ratio": 0.1},
    "RandomK": {"ratio": 0.1},
    "DualPruning": {"largest": 0.1, "smallest": 0.5},
    "ATS": {"mean": (0.5,), "std": (0.25,)},
    "SecureAggregation": {"clients": 2},
    "Soteria": {"pruning_rate": 0.5},
    "DisaggregationSNR": {"threshold": math.inf},  # it refuses no batch
}
OURS = [
    *(cls(**OPTIONS.get(name, {})) for name, cls in DEFENSES.items() if name != "EDA"),  # of texts
    Noise(scale=0.1, distribution="laplace"),
    Quantization(bits=4, stochastic=False),
    ATS("3-1-7", mean=(0.5,), std=(0.25,)),  # with signs that are drawn
    ATS("0-9", mean=(0.5,), std=(0.25,)),  # nothing is drawn
    Mixup(alpha=5.0),
    Chain((Noise(scale=0.01), TopK(ratio=0.5))),
]
HIDDEN_BY_STEPS = {"Soteria"}
"""Those that withhold within local steps what an upload shows only after a single one."""


def examined(
    defense: Defense, protocol: Protocol | None = None, size: int | None = None
) -> ReplayRow:
    client = make_client(defense.on_model(mlp()), defense, protocol)
    size = size or (2 if protocol else 1)
    rounds = [[batch(size, 10 * seed + one) for one in range(defense.cohort)] for seed in range(3)]
    return examine(client, rounds, rng())


@pytest.mark.parametrize(
    ("protocol", "size"),
    [(None, 1), (None, 4), (STEPS, 4)],
    ids=["one example", "a batch", "local steps"],
)
@pytest.mark.parametrize("defense", OURS, ids=str)
def test_our_own_replays_need_no_mending(
    defense: Defense, protocol: Protocol | None, size: int
) -> None:
    row = examined(defense, protocol, size)
    assert mending_of(row) == AS_GIVEN
    assert not row.random
    assert row.vectorised
    if protocol and type(defense).__name__ in HIDDEN_BY_STEPS:
        (finding,) = findings(row)
        assert "misses the upload" in finding.problem
        return
    assert findings(row) == []


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
    assert finding.problem == "at the true examples it misses the upload by 200 %"
    assert "def replay" in finding.remedy


def test_an_examination_can_be_repeated() -> None:
    assert examined(unreplayable.DerivedNoise()) == examined(unreplayable.DerivedNoise())


def test_slopes_that_are_not_numbers_are_replaced() -> None:
    row = examined(tricks.NaNSlopes())
    assert row.slope == 0
    assert row.straight_through
    (finding,) = findings(row)
    assert "slope vanishes" in finding.problem


PROBE = ProbeRow(0.4, 0.4, "", needs_history=False, remaining_noise=1.0)


def test_a_replay_that_misleads_is_replaced_by_an_undefended_client() -> None:
    row = examined(unreplayable.FreshNoise())
    trusted = mending_of(row, replace(PROBE, contrast=0.6, ideal_contrast=0.9))
    assert trusted == mending_of(row) == Mending("expected")
    misled = mending_of(row, replace(PROBE, contrast=0.4, ideal_contrast=0.9))
    assert misled == Mending(undefended=True, no_likelihood=True)


@pytest.mark.parametrize(
    ("contrast", "ideal", "fails"),
    [
        (0.0, 0.0, False),  # noise drowns everything
        (-0.01, 0.1, False),
        (0.1, 0.3, False),
        (0.1, 0.45, True),
        (0.5, 0.9, False),
        (math.nan, 0.9, True),
    ],
)
def test_a_replay_must_discriminate_if_an_undefended_one_does(
    contrast: float, ideal: float, fails: bool
) -> None:
    row, probe = examined(Noise(0.1)), replace(PROBE, contrast=contrast, ideal_contrast=ideal)
    assert misleads(row, probe) == fails
    assert bool(failures(row, probe)) == fails
    assert mending_of(row, probe).undefended == fails


def test_a_replay_that_misses_the_upload_must_discriminate_in_any_case() -> None:
    row = examined(unreplayable.Elsewhere())
    assert misleads(row, replace(PROBE, contrast=0.1))
    assert misleads(replace(row, mended_residual=math.nan), replace(PROBE, contrast=0.1))
    assert not misleads(row, replace(PROBE, contrast=0.3))
