import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from federated import Sum, batch, make_client, mlp, rng
from scipy.stats import chisquare, norm
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedBuff, FedSGD, Protocol
from leakfrontier.defenses import Batch, batch_gradient
from leakfrontier.evaluate.client.client import ThreatModel, observe

DRAWS = 5000


@pytest.mark.parametrize(
    ("protocol", "steps", "passes", "size"),
    [
        (FedSGD(), 1, 1, 5),
        (FedAvg(epochs=3, batch_size=2), 9, 3, 2),
        (FedAvg(epochs=2, batch_size=9), 2, 2, 5),
        (FedBuff(epochs=3, batch_size=2), 9, 3, 2),
    ],
    ids=repr,
)
def test_local_steps_on_five_examples(
    protocol: Protocol, steps: int, passes: int, size: int
) -> None:
    assert protocol.local_steps(5) == steps
    assert protocol.passes == passes
    assert protocol.step_size(5) == size


def test_a_round_draws_one_batch_or_takes_all_examples() -> None:
    rows = torch.tensor([4, 2])
    assert FedSGD().drawn(9, lambda: iter([rows])).equal(rows)
    assert FedAvg().drawn(9, lambda: iter([rows])).equal(torch.arange(9))


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize(
    ("protocol", "tolerance"),
    [
        (FedSGD(), 1e-5),
        (FedAvg(epochs=2, batch_size=2, lr=1e-4), 0.01),
        (FedBuff(epochs=3, batch_size=1, lr=1e-4), 0.01),
    ],
    ids=repr,
)
def test_as_gradient_is_the_mean_gradient_to_first_order(
    protocol: Protocol, tolerance: float, clients: int
) -> None:
    """The weights hardly move, so that every local step is at those that were received."""
    model, shares = mlp().double(), [batch(4, seed) for seed in range(clients)]
    shares = [Batch(share.inputs.double(), share.targets) for share in shares]
    client = make_client(model, Sum(), protocol)
    (upload,) = observe(client, shares, ThreatModel(), rng())
    true = batch_gradient(model, cross_entropy, upload.truth)
    for name, value in true.items():
        seen = upload.observation.as_gradient(name)
        assert (seen - value).norm() < tolerance * value.norm(), name


def test_rounded_weights_err_as_much_as_is_said() -> None:
    draws = rng(4)
    sizes = 10 ** -(3 * torch.rand(300, generator=draws))
    start = sizes * (1 + torch.rand(300, 300, generator=draws))
    slopes = 0.01 * torch.randn(20, 300, 300, generator=draws)
    protocol = FedAvg(epochs=10, batch_size=2, lr=1e-4)

    def trained(dtype: torch.dtype) -> torch.Tensor:
        """Return the mean gradient as the server sees it."""
        change = protocol.train(
            {"w": start.to(dtype)},
            slopes,
            lambda size, epochs: iter(slopes.to(dtype)),
            lambda weights, slope: {"w": slope},
        )
        return protocol.as_gradient(change["w"], 4).double()

    errors = trained(torch.float32) - trained(torch.float64)
    relative = (errors / protocol.rounding(start, 4)).square().mean(0).sqrt()
    torch.testing.assert_close(relative, torch.ones_like(relative), rtol=0.25, atol=0)
    assert not FedSGD().rounding(start, 4).any()


def test_the_server_descends_along_gradients_and_against_changes() -> None:
    value = torch.tensor([1.0, -2.0])
    assert FedSGD().descent(value).equal(value)
    assert FedAvg().descent(value).equal(-value)


def test_synchronous_clients_have_the_newest_model() -> None:
    for protocol in (FedSGD(), FedAvg()):
        assert protocol.staleness(100, rng()) == protocol.max_staleness == 0
        assert protocol.weight(0) == 1
        assert protocol.uploads(7) == 7


@pytest.mark.parametrize("oldest", [0, 1, 4])
@pytest.mark.parametrize("delays", ["uniform", "half-normal"])
def test_staleness_is_distributed_as_stated(delays: str, oldest: int) -> None:
    protocol = FedBuff(oldest=oldest, delays=delays)  # type: ignore[arg-type]
    draws = rng()
    drawn = Counter(protocol.staleness(100, draws) for _ in range(DRAWS))
    edges = [2 * k / (oldest + 1) for k in range(oldest + 1)] + [math.inf]
    expected = {
        "uniform": [1 / (oldest + 1)] * (oldest + 1),
        "half-normal": [2 * (norm.cdf(b) - norm.cdf(a)) for a, b in pairwise(edges)],
    }[delays]
    counts = [drawn[age] for age in range(oldest + 1)]
    assert sum(counts) == DRAWS
    if oldest:
        assert chisquare(counts, [DRAWS * share for share in expected]).pvalue > 1e-3


def test_there_are_no_versions_before_the_first() -> None:
    protocol, draws = FedBuff(oldest=4), rng()
    for rounds in range(6):
        assert max(protocol.staleness(rounds, draws) for _ in range(200)) == min(rounds, 4)


def test_old_uploads_are_damped() -> None:
    assert [FedBuff(exponent=0.5).weight(age) for age in (0, 3)] == [1, 0.5]
    assert [FedBuff(exponent=0.0).weight(age) for age in (0, 3)] == [1, 1]
    assert FedBuff(buffer=6).uploads(2) == 6
    assert FedBuff(oldest=3).max_staleness == 3


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        (FedSGD(), {"clients": 0}, "clients must be at least 1, got 0"),
        (FedAvg(), {"epochs": 0}, "epochs must be at least 1, got 0"),
        (FedAvg(), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (FedAvg(), {"lr": math.inf}, "lr must be positive and finite, got inf"),
        (FedAvg(), {"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        (FedBuff(), {"lr": math.nan}, "lr must be positive and finite, got nan"),
        (FedBuff(), {"buffer": 0}, "buffer must be at least 1, got 0"),
        (FedBuff(), {"oldest": -1}, "oldest must be at least 0, got -1"),
        (FedBuff(), {"delays": "poisson"}, "delays must be 'uniform' or 'half-normal'"),
        (FedBuff(), {"exponent": -0.1}, "exponent must be >= 0 and finite, got -0.1"),
        (FedBuff(), {"exponent": math.nan}, "exponent must be >= 0 and finite, got nan"),
    ],
)
def test_rejects_bad_parameters(
    protocol: Protocol, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(protocol, **options)  # type: ignore[arg-type]
