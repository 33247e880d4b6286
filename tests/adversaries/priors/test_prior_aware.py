from dataclasses import dataclass, replace

import pytest
import torch
from federated import batch, convolutional, mlp, observed, rng, seeded
from scipy import integrate
from scipy.stats import norm
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import (
    Candidates,
    FedAvg,
    FedSGD,
    ImageSpace,
    InformedPriorAware,
    NotApplicable,
    Observation,
    PriorAware,
    Protocol,
)
from leakfrontier.adversaries.priors import prior_aware
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    ClientDP,
    Defense,
    Noise,
    Quantization,
    TopK,
    Update,
)
from leakfrontier.evaluate.client.client import Client, ThreatModel, make_replay, observe
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.privacy.bounds import reconstruction
from leakfrontier.evaluate.world.victims import all_but_one_known

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


def orthogonal(examples: int, candidates: int) -> Candidates:
    """Return candidates whose gradients under `outputs_mean` are orthogonal and of norm one."""
    size = examples * candidates
    basis = torch.linalg.qr(torch.randn(size, size, generator=rng())).Q
    targets = torch.zeros(candidates, examples, dtype=torch.long)
    return Candidates(basis.view(candidates, examples, size), targets)


def batch_successes(
    defense: Defense,
    pool: Candidates,
    uploads: int,
    *,
    informed: bool = False,
) -> int:
    """Attack uploads of batches; count the examples that are found."""
    candidates, examples, size = pool.inputs.shape
    draws, threat = rng(), ThreatModel(candidates=pool)
    space = ImageSpace((size,), 1)
    client = Client(nn.Linear(size, 1, bias=False), outputs_mean, defense, FedSGD(), space)
    replay, right = make_replay(client, threat, draws), 0
    for _ in range(uploads):
        rows = torch.randint(candidates, (examples,), generator=draws)
        private = Batch(pool.inputs[rows, torch.arange(examples)], pool.targets[0])
        (upload,) = observe(client, [private], threat, draws, replay=replay)
        last = upload.observation
        if not informed:
            guess = PriorAware().reconstruct(last, draws).inputs
        else:
            guess = torch.stack(
                [
                    InformedPriorAware()
                    .reconstruct(replace(last, candidates=view), draws)
                    .inputs[victim]
                    for victim, view in enumerate(all_but_one_known(pool, private))
                ]
            )
        right += int((guess == private.inputs).all(dim=1).sum())
    return right


def best_success(sigma: float, candidates: int) -> float:
    """Return the success of the optimal attack on orthogonal gradients."""
    exact, _ = integrate.quad(
        lambda x: norm.pdf(x - 1 / sigma) * norm.cdf(x) ** (candidates - 1), -10, 20
    )
    return float(exact)


@pytest.mark.parametrize("informed", [True, False], ids=["informed", "joint"])
@pytest.mark.parametrize(
    ("sigma", "candidates", "success", "uploads"),
    [(0.447, 100, 0.405, 25), (0.5, 10, 0.6736, 30), (1.0, 10, 0.3409, 30)],
)
def test_a_batch_protects_no_better_than_one_example(
    sigma: float, candidates: int, success: float, uploads: int, informed: bool
) -> None:
    exact, pool = best_success(sigma, candidates), orthogonal(8, candidates)
    assert exact == pytest.approx(success, abs=1e-3)
    right = batch_successes(DPSGD(sigma), pool, uploads, informed=informed)
    interval = clopper_pearson(right, 8 * uploads, 0.99)
    assert interval.low <= exact <= interval.high
    assert interval.low <= reconstruction(1 / candidates, 1.0, sigma, 1)
    assert interval.low > reconstruction(1 / candidates, 1.0, 2 * sigma, 1)  # it can be told


@pytest.mark.parametrize("examples", [1, 4])
def test_uploads_of_the_same_examples_add_up(examples: int) -> None:
    """The best choice among orthogonal gradients is nearest to the sum of all uploads."""
    pool, draws = orthogonal(examples, 10), rng()
    protocol, size = FedAvg(epochs=1, batch_size=8, lr=1.0), examples * 10
    defense = ClientDP(examples**-0.5, max_update_norm=examples**-0.5)
    model, threat = nn.Linear(size, 1, bias=False), ThreatModel(candidates=pool)
    client = Client(model, outputs_mean, defense, protocol, ImageSpace((size,), 1))
    replay, place = make_replay(client, threat, draws), torch.arange(examples)
    rights = torch.zeros(2)
    for _ in range(80 // examples):
        rows = torch.randint(10, (examples,), generator=draws)
        private = [Batch(pool.inputs[rows, place], pool.targets[0])]
        *earlier, last = [
            observe(client, private, threat, draws, replay=replay)[0].observation for _ in range(4)
        ]
        for number, before in enumerate(((), tuple(earlier))):
            total = sum(one.update["weight"][0] for one in (*before, last))
            best = (pool.inputs @ -torch.as_tensor(total)).argmax(dim=0)
            guess = PriorAware().reconstruct(replace(last, earlier=before), draws).inputs
            assert torch.equal(guess, pool.inputs[best, place])
            rights[number] += (best == rows).sum()
    once, often = (clopper_pearson(int(right), 80, 0.99) for right in rights)
    assert once.value < often.value
    assert often.low <= best_success(0.5, 10) <= often.high
    assert often.low <= reconstruction(1 / 10, 1.0, 1.0, 4)


def test_earlier_uploads_of_other_examples_say_nothing() -> None:
    observation, other = among(5, DPSGD(1.0)), among(7)
    alone, together = (
        PriorAware().reconstruct(replace(observation, earlier=earlier), rng())
        for earlier in ((), (other,) * 100)
    )
    assert torch.equal(alone.inputs, together.inputs)
    assert alone.objective == together.objective


BATCHES = Candidates(*(part.unflatten(0, (10, 4)) for part in batch(40, seed=3)))
ROWS = torch.tensor([3, 0, 9, 5])


def mixing() -> nn.Module:
    """Return a model with batch statistics: updates are not sums over examples."""
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 32),
            nn.BatchNorm1d(32, track_running_stats=False),
            nn.Linear(32, 10),
        )
    )


@pytest.mark.parametrize("knows_defense", [True, False])
@pytest.mark.parametrize(
    ("defense", "model"),
    [
        (Defense(), mlp()),
        (Defense(), mixing()),
        (DPSGD(0.001, 0.1), mlp()),
        (ClientDP(0.001, 0.1), mlp()),
        (Noise(0.0001, "laplace"), mlp()),
        (TopK(0.1), mlp()),
        (Quantization(8), mlp()),
    ],
    ids=lambda value: repr(value).partition("(\n")[0],
)
def test_finds_every_example_of_a_batch_where_little_is_hidden(
    defense: Defense, model: nn.Module, knows_defense: bool
) -> None:
    private = Batch(*(part[ROWS, torch.arange(4)] for part in BATCHES))
    threat = ThreatModel(candidates=BATCHES, knows_defense=knows_defense)
    observation = observed(model, private, defense, threat=threat)
    guess = PriorAware().reconstruct(observation, rng())
    assert torch.equal(guess.inputs, private.inputs)
    assert guess.objective == pytest.approx(PriorAware().objective(observation, *private))


def test_a_known_example_is_not_chosen() -> None:
    private = Batch(*(part[ROWS, torch.arange(4)] for part in BATCHES))
    known = Candidates(*(part.clone() for part in BATCHES))
    for part, truth in zip(known, private, strict=True):
        part[:, 2:] = truth[2:]
    threat = ThreatModel(candidates=known)
    guess = PriorAware().reconstruct(observed(mlp(), private, DPSGD(0.001), threat=threat), rng())
    assert torch.equal(guess.inputs, private.inputs)


def test_more_examples_than_can_be_chosen_at_once_are_refused() -> None:
    many = Candidates(*(part.repeat(1, 300, *[1] * (part.dim() - 2)) for part in BATCHES))
    private = Batch(many.inputs[0], many.targets[0])
    observation = observed(mlp(), private, threat=ThreatModel(candidates=many))
    with pytest.raises(NotApplicable, match="1200 unknown examples with 10 candidates each"):
        PriorAware().reconstruct(observation, rng())


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
