import os
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Generator, Tensor

from leakfrontier.adversaries import FedSGD, ImageSpace
from leakfrontier.defenses import DPSGD, Batch, ClientDP, Defense, Noise
from leakfrontier.evaluate.client.client import Client, release
from leakfrontier.evaluate.foundations.seeds import SystemGenerator
from leakfrontier.evaluate.foundations.system_draws import SystemDraws, system_draws

COUNT = 20_000

CONTINUOUS: dict[str, tuple[Callable[[Generator], Tensor], str]] = {
    "randn": (lambda g: torch.randn(COUNT, generator=g), "norm"),
    "normal": (lambda g: torch.normal(3.0, 2.0, (COUNT,), generator=g).sub(3) / 2, "norm"),
    "normal, named": (
        lambda g: torch.normal(mean=0.0, std=2.0, size=(COUNT,), generator=g) / 2,
        "norm",
    ),
    "normal of tensors": (
        lambda g: (
            torch.normal(torch.full((COUNT,), 5.0), torch.full((COUNT,), 2.0), generator=g)
            .sub(5)
            .div(2)
        ),
        "norm",
    ),
    "normal_": (lambda g: torch.empty(COUNT).normal_(1, 3, generator=g).sub(1) / 3, "norm"),
    "normal_, default": (lambda g: torch.empty(COUNT).normal_(generator=g), "norm"),
    "rand": (lambda g: torch.rand(COUNT, generator=g), "uniform"),
    "uniform_": (lambda g: torch.empty(COUNT).uniform_(-1, 3, generator=g).add(1) / 4, "uniform"),
    "exponential_": (lambda g: torch.empty(COUNT).exponential_(2.0, generator=g) * 2, "expon"),
    "normal_, std named": (lambda g: torch.empty(COUNT).normal_(std=2.0, generator=g) / 2, "norm"),
    "uniform_, end named": (
        lambda g: torch.empty(COUNT).uniform_(to=5.0, generator=g) / 5,
        "uniform",
    ),
    "uniform_, one named": (
        lambda g: torch.empty(COUNT).uniform_(-1, to=3.0, generator=g).add(1) / 4,
        "uniform",
    ),
    "uniform_, both named": (
        lambda g: torch.empty(COUNT).uniform_(**{"from": -1.0, "to": 3.0}, generator=g).add(1) / 4,
        "uniform",
    ),
    "rand, double": (
        lambda g: torch.rand(COUNT, dtype=torch.float64, generator=g).float(),
        "uniform",
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_draws_have_the_distribution_that_torch_has(name: str) -> None:
    draw, law = CONTINUOUS[name]
    with system_draws() as rng:
        drawn = draw(rng)
    assert drawn.dtype == torch.float32
    assert stats.kstest(drawn.double().numpy(), law).pvalue > 1e-6  # unseeded: one of a million


def test_integers_permutations_and_masks() -> None:
    with system_draws() as rng:
        assert torch.randperm(100, generator=rng).sort().values.equal(torch.arange(100))
        for drawn, values in (
            (torch.randint(3, (COUNT,), generator=rng), [0, 1, 2]),
            (torch.randint(3, 6, (COUNT,), generator=rng), [3, 4, 5]),
            (torch.randint(low=-2, high=0, size=(COUNT,), generator=rng), [-2, -1]),
        ):
            found = [int((drawn == value).sum()) for value in values]
            assert sum(found) == COUNT
            assert stats.chisquare(found).pvalue > 1e-6
        for mask in (
            torch.bernoulli(torch.full((COUNT,), 0.3), generator=rng),
            torch.empty(COUNT).bernoulli_(0.3, generator=rng),
        ):
            assert stats.binomtest(int(mask.sum()), COUNT, 0.3).pvalue > 1e-6


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.empty(3).log_normal_(generator=g),
        lambda g: torch.multinomial(torch.ones(3), 2, generator=g),
        lambda g: torch.randn(3, dtype=torch.complex64, generator=g),
        lambda g: torch.vmap(lambda x: x + torch.randn(3, generator=g), randomness="different")(
            torch.zeros(4, 3)
        ),
        lambda g: torch.vmap(
            lambda x: x + torch.empty_like(x).normal_(0, 1, generator=g), randomness="different"
        )(torch.zeros(4, 3)),
    ],
    ids=["unknown", "multinomial", "complex", "vmap", "in place in vmap"],
)
def test_what_is_not_known_exactly_is_refused(draw: Callable[[Generator], Tensor]) -> None:
    with system_draws() as rng, pytest.raises(ValueError, match=r"draw"):
        draw(rng)


def test_names_of_torchs_arguments() -> None:
    with system_draws() as rng:
        assert torch.randperm(n=5, generator=rng).sort().values.tolist() == [0, 1, 2, 3, 4]
        assert torch.bernoulli(input=torch.ones(3), generator=rng).tolist() == [1, 1, 1]
        assert torch.bernoulli(torch.ones(3), 0.0, generator=rng).tolist() == [0, 0, 0]
        assert torch.randint(5, high=6, size=(3,), generator=rng).tolist() == [5, 5, 5]
        assert torch.rand(size=(2, 2), generator=rng).shape == (2, 2)


def test_a_forked_process_draws_something_else() -> None:
    with system_draws() as rng:
        torch.randn(1, generator=rng)
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, torch.randn(8, generator=rng).numpy().tobytes())
            os._exit(0)
        os.waitpid(child, 0)
        theirs = os.read(read, 64)
        assert theirs != torch.randn(8, generator=rng).numpy().tobytes()
        assert len(theirs) == 32


def test_shapes_and_types_are_those_that_were_asked_for() -> None:
    with system_draws() as rng:
        assert torch.rand((), generator=rng).shape == ()
        assert torch.rand(0, 3, generator=rng).shape == (0, 3)
        assert torch.randn(2, 3, dtype=torch.float64, generator=rng).dtype == torch.float64
        assert float(torch.rand(COUNT, generator=rng).max()) < 1


def test_draws_are_not_those_of_torchs_generator() -> None:
    """Its state, known before or after, tells nothing of them."""
    with SystemDraws():
        rng = SystemGenerator()
        before = rng.get_state()
        drawn = torch.randn(32, generator=rng)
        after = rng.get_state()
    for state in (before, after):
        known = Generator()
        known.set_state(state)
        assert not torch.isin(drawn, torch.randn(5000, generator=known)).any()


def test_other_draws_are_left_alone() -> None:
    first, second = (Generator().manual_seed(0) for _ in range(2))
    with SystemDraws():
        inside = torch.randn(4, generator=first)
    assert inside.equal(torch.randn(4, generator=second))


@pytest.mark.parametrize(
    "defense", [DPSGD(0.5), DPSGD(0.5, per_example="ghost"), Noise(0.5), ClientDP(0.5)], ids=repr
)
def test_noise_of_a_whole_upload_is_drawn_from_the_stream(
    defense: Defense, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of zeros leaves no noise: none is drawn elsewhere."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    batch = Batch(torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2]))
    space = ImageSpace((1, 4, 4), 4)
    client = Client(model, torch.nn.functional.cross_entropy, defense, FedSGD(), space)

    def upload() -> Tensor:
        with system_draws() as rng:
            (update,) = release([client], [batch], rng, in_order=True)
        return torch.cat([value.flatten() for value in update.values()])

    assert not upload().equal(upload())
    stream = "leakfrontier.evaluate.foundations.system_draws._Stream.normal"
    monkeypatch.setattr(stream, lambda _, shape: torch.zeros(tuple(shape)).double())
    assert upload().equal(upload())
