from dataclasses import dataclass, replace

import pytest
import torch
from federated import batch, convolutional, mlp, observed, rng
from scipy import integrate
from scipy.stats import norm
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import (
    Candidates,
    FedAvg,
    FedSGD,
    ImageSpace,
    NotApplicable,
    Observation,
    PriorAware,
    Protocol,
)
from leakfrontier.adversaries.priors import prior_aware
from leakfrontier.defenses import DPSGD, Batch, ClientDP, Defense, Quantization, TopK, Update
from leakfrontier.evaluate.client.client import Client, ThreatModel, make_replay, observe
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.privacy.bounds import reconstruction

POOL = Candidates(*(part.unsqueeze(1) for part in batch(20, seed=3)))


def among(
    index: int,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    model: nn.Module | None = None,
    pool: Candidates = POOL,
    **threat: bool,
) -> Observation:
    private = Batch(pool.inputs[index], pool.targets[index])
    granted = ThreatModel(candidates=pool, **threat)  # type: ignore[arg-type]
    return observed(model or mlp(), private, defense, protocol, granted)


def found(observation: Observation, pool: Candidates = POOL) -> int:
    guess = PriorAware().reconstruct(observation, rng()).inputs
    (index,) = (pool.inputs == guess).flatten(1).all(dim=1).nonzero().flatten().tolist()
    return int(index)


def outputs_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of a linear model under which the gradient of an example is the example."""
    return outputs.mean()


def successes(defense: Defense, candidates: int, trials: int) -> int:
    """Attack uploads of gradients that are orthogonal and of norm one."""
    size, draws = max(candidates, 32), rng()
    basis = torch.linalg.qr(torch.randn(size, candidates, generator=draws)).Q.T.contiguous()
    pool = Candidates(basis.unsqueeze(1), torch.zeros(candidates, 1, dtype=torch.long))
    model, space, threat = nn.Linear(size, 1, bias=False), ImageSpace((size,), 1), ThreatModel()
    threat = replace(threat, candidates=pool)
    client = Client(model, outputs_mean, defense, FedSGD(), space)
    replay = make_replay(client, threat, draws)
    right = 0
    for index in torch.randint(candidates, (trials,), generator=draws).tolist():
        private = [Batch(pool.inputs[index], pool.targets[index])]
        (upload,) = observe(client, private, threat, draws, replay=replay)
        right += found(upload.observation, pool) == index
    return right


@pytest.mark.parametrize(
    ("defense", "candidates", "success", "trials"),
    [
        (ClientDP(0.5), 10, 0.6736, 500),
        (ClientDP(1.0), 10, 0.3409, 500),
        (ClientDP(2.0, max_update_norm=0.5), 10, 0.1992, 500),
        (DPSGD(0.5, max_grad_norm=0.1), 10, 0.6736, 250),
        (DPSGD(0.5), 100, 0.3232, 250),
        (ClientDP(1.0), 100, 0.0825, 500),
        (ClientDP(0.5), 1000, 0.1203, 100),
    ],
)
def test_success_on_orthogonal_gradients_is_the_closed_form(
    defense: DPSGD | ClientDP, candidates: int, success: float, trials: int
) -> None:
    sigma = defense.noise_multiplier
    exact, _ = integrate.quad(
        lambda x: norm.pdf(x - 1 / sigma) * norm.cdf(x) ** (candidates - 1), -10, 20
    )
    assert exact == pytest.approx(success, abs=1e-4)
    interval = clopper_pearson(successes(defense, candidates, trials), trials, 0.99)
    assert interval.low <= exact <= interval.high
    assert interval.low <= reconstruction(1 / candidates, 1.0, sigma, 1)


@pytest.mark.parametrize("knows_defense", [True, False])
@pytest.mark.parametrize(
    "defense",
    [Defense(), DPSGD(0.0, 0.1), ClientDP(0.001, 0.1), TopK(0.1), Quantization(8)],
    ids=repr,
)
def test_finds_the_private_example_where_little_is_hidden(
    defense: Defense, knows_defense: bool
) -> None:
    for index in (0, 7, 19):
        observation = among(index, defense, knows_defense=knows_defense)
        assert (observation.log_likelihood is not None) == knows_defense
        assert found(observation) == index


@pytest.mark.parametrize("defense", [Defense(), DPSGD(0.001), ClientDP(0.001)], ids=repr)
def test_replays_several_local_steps(defense: Defense) -> None:
    protocol = FedAvg(epochs=3, batch_size=2, lr=0.05)
    assert found(among(4, defense, protocol, convolutional())) == 4


def test_does_not_depend_on_the_order_of_the_candidates() -> None:
    observation = among(5, DPSGD(0.7))
    order = torch.randperm(20, generator=rng())
    moved = replace(observation, candidates=Candidates(POOL.inputs[order], POOL.targets[order]))
    assert torch.equal(
        PriorAware().reconstruct(observation, rng()).inputs,
        PriorAware().reconstruct(moved, rng()).inputs,
    )


def test_noise_reduces_it_to_chance() -> None:
    chosen = [found(among(index, ClientDP(1e4))) for index in range(20)]
    assert clopper_pearson(sum(a == b for a, b in enumerate(chosen)), 20, 0.99).low < 1 / 20


def test_what_all_candidates_share_of_a_batch_is_known() -> None:
    known = batch(3, seed=5)
    pool = Candidates(
        torch.cat([POOL.inputs, known.inputs.expand(20, -1, -1, -1, -1)], dim=1),
        torch.cat([POOL.targets, known.targets.expand(20, -1)], dim=1),
    )
    assert found(among(11, DPSGD(0.01), pool=pool), pool) == 11


def test_the_guess_is_never_worse_than_the_truth_by_its_own_objective() -> None:
    attack = PriorAware()
    for index, defense in [(0, DPSGD(2.0)), (1, ClientDP(2.0)), (2, TopK(0.01))]:
        observation = among(index, defense)
        result = attack.reconstruct(observation, rng())
        truth = attack.objective(observation, POOL.inputs[index], POOL.targets[index])
        assert result.objective is not None
        assert result.objective <= truth + 1e-9


def test_small_differences_survive_large_updates() -> None:
    """A million noisy entries: in single precision the digits that differ would be rounded off."""
    size = 2**20
    pool = Candidates(torch.eye(3, size).unsqueeze(1), torch.zeros(3, 1, dtype=torch.long))
    model, defense = nn.Linear(size, 1, bias=False), ClientDP(30.0)
    client = Client(model, outputs_mean, defense, FedSGD(), ImageSpace((size,), 1))
    private = Batch(pool.inputs[0], pool.targets[0])
    (upload,) = observe(client, [private], ThreatModel(candidates=pool), rng())
    observation = upload.observation
    fit = prior_aware.likelihood(observation)
    assert fit is not None
    values = prior_aware.fits(observation, *pool, fit)
    products = observation.update["weight"][0, :3].double()
    expected = (products - products[0]) / 30**2  # of norm one all of them
    torch.testing.assert_close(values - values[0], expected, rtol=0, atol=1e-6)
    assert float(expected.abs().max()) < 0.2


def test_a_part_of_the_candidates_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    observation = among(5, DPSGD(0.7))
    together = PriorAware().reconstruct(observation, rng())
    monkeypatch.setattr(prior_aware, "_ENTRIES_AT_ONCE", 1)
    alone = PriorAware().reconstruct(observation, rng())
    assert torch.equal(together.inputs, alone.inputs)
    assert together.objective == pytest.approx(alone.objective, rel=1e-6)


@dataclass
class Halved(Defense):
    """Branches on a value, which cannot be vectorised."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        big = max(float(value.abs().max()) for value in update.values()) > 1e-9
        return {name: value / 2 if big else value for name, value in update.items()}


def test_replays_a_defense_that_cannot_be_vectorised() -> None:
    assert found(among(9, Halved())) == 9


def test_needs_candidates() -> None:
    with pytest.raises(NotApplicable, match="no candidates are granted for the 2 private examples"):
        PriorAware().reconstruct(observed(mlp(), batch(2)), rng())
