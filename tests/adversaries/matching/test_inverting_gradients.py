import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from federated import SPACE, TOKENS, batch, make_client, mlp, observed, rng
from torch import Generator

from leakfrontier.adversaries import (
    FedAvg,
    FedSGD,
    InvertingGradients,
    NotApplicable,
    Observation,
    Protocol,
    Reconstruction,
)
from leakfrontier.defenses import DPSGD, Defense, Noise, TopK, Update
from leakfrontier.evaluate.client.client import ThreatModel, make_replay
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())


def quality(observation: Observation, truth: torch.Tensor, **options: float) -> torch.Tensor:
    attack = InvertingGradients(**{"iterations": 150, **options})  # type: ignore[arg-type]
    guess = SPACE.to_unit(attack.reconstruct(observation, rng()).inputs)
    private = SPACE.to_unit(truth)
    return metrics.psnr(guess[metrics.match(guess, private)], private)


@pytest.mark.parametrize(
    ("size", "protocol"),
    [(1, FedSGD()), (2, FedSGD()), (2, FedAvg(epochs=2, batch_size=1, lr=0.01))],
)
def test_recovers_an_undefended_batch(size: int, protocol: Protocol) -> None:
    share = batch(size)
    observation = observed(LENET, share, protocol=protocol)
    assert quality(observation, share.inputs).min() > 15


def test_knowing_the_mask_of_a_sparse_upload_helps() -> None:
    share = batch(1)
    psnr = {
        knows: quality(
            observed(LENET, share, TopK(0.3), threat=ThreatModel(knows_defense=knows)),
            share.inputs,
            iterations=200,
        )
        for knows in (True, False)
    }
    assert psnr[True] > psnr[False] + 3


def test_noise_stops_it() -> None:
    share = batch(1)
    assert quality(observed(LENET, share, DPSGD(1.0)), share.inputs) < 12


def test_the_truth_has_no_lower_objective_than_a_good_guess() -> None:
    share, attack = batch(1), InvertingGradients(iterations=150)
    observation = observed(LENET, share)
    result = attack.reconstruct(observation, rng())
    at_guess = attack.objective(observation, result.inputs, share.targets)
    assert result.objective == pytest.approx(at_guess, abs=1e-5)
    blank = attack.objective(observation, torch.zeros_like(share.inputs), share.targets)
    assert attack.objective(observation, *share) < 0.01 < blank


def test_restarts_keep_the_lowest_objective() -> None:
    observation = observed(LENET, batch(1))
    one = InvertingGradients(iterations=40).reconstruct(observation, rng())
    many = InvertingGradients(iterations=40, restarts=4).reconstruct(observation, rng())
    assert many.objective is not None
    assert one.objective is not None
    assert many.objective <= one.objective


def test_attacking_together_is_the_same_as_one_by_one() -> None:
    shares = [batch(1, seed) for seed in range(3)]
    replay = make_replay(make_client(LENET), ThreatModel(), rng())
    observations = [replace(observed(LENET, share), replay=replay) for share in shares]
    attack = InvertingGradients(iterations=5)
    together = attack.reconstruct_all(observations, [rng(i) for i in range(3)])
    alone = [attack.reconstruct(o, rng(i)) for i, o in enumerate(observations)]
    for a, b in zip(together, alone, strict=True):
        assert isinstance(a, Reconstruction)
        torch.testing.assert_close(a.inputs, b.inputs, rtol=1e-3, atol=1e-3)


@dataclass
class Halved(Defense):
    """Branches on a value, which cannot be vectorised, and keeps state."""

    seen: int = field(default=0, init=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.seen += 1
        big = max(float(value.abs().max()) for value in update.values()) > 1e-9
        return {name: value / 2 if big else value for name, value in update.items()}


def test_replays_a_defense_that_cannot_be_vectorised() -> None:
    share = batch(1)
    attack = InvertingGradients(iterations=3)
    plain = attack.reconstruct(observed(LENET, share), rng())
    halved = attack.reconstruct(observed(LENET, share, Halved()), rng())
    torch.testing.assert_close(halved.inputs, plain.inputs, rtol=1e-3, atol=1e-3)


def test_one_observation_that_is_not_applicable_does_not_stop_the_others() -> None:
    good = observed(LENET, batch(1))
    tokens = replace(good, space=TOKENS)
    results = InvertingGradients(iterations=2).reconstruct_all([tokens, good], [rng(), rng()])
    assert isinstance(results[0], NotApplicable)
    assert isinstance(results[1], Reconstruction)
    with pytest.raises(NotApplicable, match="tokens"):
        InvertingGradients(iterations=2).reconstruct(tokens, rng())


def test_guesses_stay_in_the_range_of_the_data() -> None:
    guess = InvertingGradients(iterations=3).reconstruct(observed(mlp(), batch(2)), rng())
    pixels = SPACE.to_unit(guess.inputs)
    assert pixels.min() >= -1e-5
    assert pixels.max() <= 1 + 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"total_variation": -1.0}, "total_variation must be >= 0"),
        ({"comparison": "best"}, "comparison must be one of cosine, squared, absolute"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InvertingGradients(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("comparison", ["squared", "absolute", "likelihood"])
def test_updates_can_be_compared_in_other_ways(comparison: str) -> None:
    share = batch(1)
    observation = observed(LENET, share, Noise(1e-4))
    options = {"comparison": comparison, "total_variation": 0.0, "iterations": 150}
    assert quality(observation, share.inputs, **options) > 15  # type: ignore[arg-type]
