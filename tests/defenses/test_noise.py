import math

import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from federated import batch, convolutional, mlp, rng
from replaying import check_replay
from torch.distributions import Laplace, Normal
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Plan, Update, batch_gradient
from leakfrontier.defenses.noise import Noise

ONCE = Plan(steps=1, sample_rate=1.0, delta=1e-5)
REFERENCE = {"gaussian": Normal, "laplace": Laplace}
DISTRIBUTIONS = pytest.mark.parametrize("distribution", ["gaussian", "laplace"])


def norm(update: Update) -> float:
    return float(torch.cat([value.flatten() for value in update.values()]).norm())


@pytest.mark.parametrize("build", [mlp, convolutional])
@pytest.mark.parametrize("max_norm", [None, 1e6])
@DISTRIBUTIONS
def test_identity_setting_is_the_undefended_update(build, max_norm, distribution) -> None:  # noqa: ANN001
    given = batch_gradient(build(), cross_entropy, batch(2))
    defense = Noise(0.0, distribution, max_norm)
    torch.testing.assert_close(defense.on_update(given, rng()), given, rtol=0, atol=0)
    assert not defense.stochastic
    assert defense.log_likelihood(given, given) is None


@pytest.mark.parametrize("scale", [1e-3, 2.0])
@DISTRIBUTIONS
def test_noise_has_the_stated_distribution(distribution: str, scale: float) -> None:
    size = 100_000
    given = {"w": torch.zeros(size)}
    noise = Noise(scale, distribution).on_update(given, rng(1))["w"]  # type: ignore[arg-type]
    law = REFERENCE[distribution](0.0, scale)
    ranks = law.cdf(noise.sort().values)
    gap = (ranks - torch.arange(1, size + 1) / size).abs().max()
    assert gap < 1.95 / math.sqrt(size)  # Kolmogorov-Smirnov, at 0.1 %
    assert float(noise.std()) == pytest.approx(float(law.stddev), rel=0.02)


@DISTRIBUTIONS
def test_draws_come_from_the_generator_and_differ_between_entries(distribution: str) -> None:
    defense = Noise(1.0, distribution)  # type: ignore[arg-type]
    given = {"a": torch.zeros(3), "b": torch.zeros(3)}
    one, same, other = (defense.on_update(given, rng(seed)) for seed in (1, 1, 2))
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(one["a"], other["a"])
    assert torch.cat([one["a"], one["b"]]).unique().numel() == 6
    assert defense.stochastic


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (5.0, 5.0), (20.0, 13.0)])
def test_clips_the_whole_update(max_norm: float, expected: float) -> None:
    given = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]])}
    sent = Noise(0.0, max_norm=max_norm).on_update(given, rng())
    assert norm(sent) == pytest.approx(expected)
    torch.testing.assert_close(sent["a"] / sent["b"], given["a"] / given["b"])


def test_noise_comes_after_clipping() -> None:
    sent = Noise(1.0, max_norm=0.1).on_update({"w": torch.full((10_000,), 5.0)}, rng())["w"]
    assert float(sent.std()) == pytest.approx(1.0, rel=0.05)
    assert abs(float(sent.mean())) < 0.05


def test_clipping_survives_an_update_of_zeros() -> None:
    defense = Noise(0.0, max_norm=1.0)
    zeros = torch.zeros(3, requires_grad=True)
    sent = defense.on_update({"w": zeros}, rng())["w"]
    (slope,) = torch.autograd.grad(sent.sum(), zeros)
    assert sent.tolist() == [0, 0, 0]
    assert slope.isfinite().all()


@DISTRIBUTIONS
def test_log_likelihood_is_the_density_up_to_a_constant(distribution: str) -> None:
    defense = Noise(0.3, distribution)  # type: ignore[arg-type]
    expected = {"a": torch.zeros(5), "b": torch.ones(2, 2)}
    observed = [
        {
            name: value + torch.randn(value.shape, generator=rng(i))
            for name, value in expected.items()
        }
        for i in range(2)
    ]
    law = REFERENCE[distribution]
    ours = [defense.log_likelihood(one, expected) for one in observed]
    theirs = [
        sum(law(expected[name], 0.3).log_prob(one[name]).sum() for name in one) for one in observed
    ]
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1])  # type: ignore[operator]


def test_replay_is_the_clipping_alone() -> None:
    given = {"w": torch.tensor([3.0, 4.0])}
    clipped = Noise(0.1, "laplace", max_norm=1.0).replay({}).on_update(given, rng())
    torch.testing.assert_close(clipped["w"], torch.tensor([0.6, 0.8]))
    assert Noise(0.1).replay({}).on_update(given, rng())["w"].tolist() == [3, 4]


@pytest.mark.parametrize("max_norm", [None, 0.01])
@DISTRIBUTIONS
def test_replay_is_differentiable_and_can_be_vectorised(
    distribution: str, max_norm: float | None
) -> None:
    check_replay(Noise(0.1, distribution, max_norm))  # type: ignore[arg-type]


@DISTRIBUTIONS
def test_noise_without_clipping_guarantees_nothing(distribution: str) -> None:
    assert Noise(1e9, distribution).guarantee(ONCE) is None  # type: ignore[arg-type]


@DISTRIBUTIONS
def test_clipping_without_noise_is_infinitely_bad(distribution: str) -> None:
    guarantee = Noise(0.0, distribution, max_norm=1.0).guarantee(ONCE)  # type: ignore[arg-type]
    assert guarantee is not None
    assert guarantee.epsilon == math.inf


@pytest.mark.parametrize("sample_rate", [1.0, 0.01])
def test_gaussian_guarantee_is_the_clients_and_gains_nothing_by_sampling(
    sample_rate: float,
) -> None:
    guarantee = Noise(3.0, max_norm=3.0).guarantee(Plan(1, sample_rate, 1e-5))
    assert guarantee is not None
    assert guarantee.epsilon == pytest.approx(4.377, rel=1e-3)
    stated = (guarantee.unit, guarantee.adjacency, guarantee.accountant)
    assert stated == ("client", "zero-out", "PLD")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("entries", [1, 10, 100])
def test_laplace_guarantee_holds_however_the_update_is_spread(
    entries: int, scale: float, steps: int
) -> None:
    """An update of norm 1 over several entries, composed exactly, against the stated bound."""
    guarantee = Noise(scale, "laplace", max_norm=1.0).guarantee(Plan(steps, 1.0, 1e-5))
    assert guarantee is not None
    one = privacy_loss_distribution.from_laplace_mechanism(
        scale, sensitivity=1 / math.sqrt(entries), value_discretization_interval=1e-3
    )
    exact = one.self_compose(entries * steps).get_epsilon_for_delta(1e-5)
    assert exact <= guarantee.epsilon


def test_laplace_guarantee_is_never_better_than_the_gaussian_of_the_same_scale() -> None:
    for scale in (0.5, 1.0, 4.0):
        laplace, gaussian = (
            Noise(scale, law, max_norm=1.0).guarantee(ONCE) for law in ("laplace", "gaussian")
        )
        assert laplace is not None
        assert gaussian is not None
        assert gaussian.epsilon <= laplace.epsilon < 1.2 * gaussian.epsilon


def test_strength_is_the_scale() -> None:
    assert Noise(0.0).strength == 0 < Noise(0.1).strength < Noise(1.0).strength


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1}, r"scale must be in \[0, inf\), got -1"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": 1, "distribution": "cauchy"}, "distribution must be 'gaussian' or 'laplace'"),
        ({"scale": 1, "max_norm": 0}, r"max_norm must be in \(0, inf\), or None, got 0"),
        ({"scale": 1, "max_norm": math.nan}, "max_norm"),
        ({"scale": 1, "max_norm": math.inf}, "max_norm"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Noise(**options)  # type: ignore[arg-type]


def test_discrete_noise_is_gaussian_on_a_grid() -> None:
    given = {"a": torch.randn(20_000, generator=rng()), "b": torch.randn(10, 3, generator=rng(1))}
    defense = Noise(0.5, discrete=True)
    noisy = defense.on_update(given, rng(2))
    assert {name: value.dtype for name, value in noisy.items()} == dict.fromkeys(
        given, torch.float32
    )
    for name, value in given.items():
        steps = noisy[name].double() / (0.5 / 2**20)
        torch.testing.assert_close(steps, steps.round(), rtol=2e-7, atol=0)  # as float32 holds it
        assert noisy[name].shape == value.shape
    ranks = Normal(0.0, 0.5).cdf((noisy["a"] - given["a"]).sort().values)
    assert (ranks - torch.arange(1, 20_001) / 20_000).abs().max() < 1.95 / math.sqrt(20_000)


def test_discrete_noise_keeps_the_norm_with_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, what is left is within C even where all entries are rounded up."""
    module = "leakfrontier.defenses.noise"
    monkeypatch.setattr(
        f"{module}.discrete_gaussian", lambda count, *_: torch.zeros(count, dtype=torch.int64)
    )
    monkeypatch.setattr(f"{module}._STEPS", 100)  # coarse
    given = {"w": torch.randn(400, generator=rng())}
    left = Noise(0.5, max_norm=1.0, discrete=True).on_update(given, rng())
    assert 0.85 < norm(left) <= 1
    with pytest.raises(ValueError, match="rounding alone would exceed the norm"):
        Noise(0.5, max_norm=0.05, discrete=True).on_update(given, rng())


def test_discrete_noise_makes_the_same_claim_and_is_gaussian_only() -> None:
    claims = [Noise(2.0, max_norm=1.0, discrete=on).guarantee(ONCE) for on in (False, True)]
    assert claims[0] == claims[1] is not None
    assert Noise(2.0, discrete=True).replay({}) == Noise(0.0, discrete=True)
    with pytest.raises(ValueError, match="discrete noise must be 'gaussian', got 'laplace'"):
        Noise(1.0, "laplace", discrete=True)
