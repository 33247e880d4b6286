from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import unreplayable
from federated import batch, make_client, mlp, rng
from torch import Generator, Tensor
from torch.func import vmap

from leakfrontier.defenses import Noise
from leakfrontier.evaluate.client.client import ThreatModel, make_replay
from leakfrontier.evaluate.client.mending import Expected, ExpectedDraws, Mending

SHAPE = (3, 4)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda g: torch.randn(SHAPE, generator=g), 0.0),
        (lambda g: torch.randn(*SHAPE, generator=g), 0.0),
        (lambda g: torch.randn_like(torch.ones(SHAPE)), 0.0),
        (lambda g: torch.rand(SHAPE, generator=g), 0.5),
        (lambda g: torch.rand_like(torch.ones(SHAPE)), 0.5),
        (lambda g: torch.normal(2.0, 3.0, SHAPE, generator=g), 2.0),
        (lambda g: torch.normal(torch.full(SHAPE, 2.0), 3.0, generator=g), 2.0),
        (lambda g: torch.normal(2.0, torch.ones(SHAPE), generator=g), 2.0),
        (lambda g: torch.empty(SHAPE).normal_(1.0, 5.0, generator=g), 1.0),
        (lambda g: torch.empty(SHAPE).uniform_(1, 4, generator=g), 2.5),
        (lambda g: torch.empty(SHAPE).exponential_(4.0, generator=g), 0.25),
        (lambda g: torch.empty(SHAPE).bernoulli_(0.3, generator=g), 0.3),
        (lambda g: torch.bernoulli(torch.full(SHAPE, 0.3), generator=g), 0.3),
        (lambda g: torch.distributions.Laplace(torch.ones(SHAPE), 2.0).rsample(), 1.0),
        (lambda g: torch.distributions.Normal(torch.ones(SHAPE), 2.0).rsample(), 1.0),
    ],
)
def test_a_secret_draw_is_at_its_mean(draw: Callable[[Generator], Tensor], expected: float) -> None:
    secret = rng()
    with ExpectedDraws(secret):
        drawn = draw(secret)
    torch.testing.assert_close(drawn, torch.full(SHAPE, expected))
    assert not torch.equal(draw(secret), drawn)


def test_a_public_draw_is_as_it_is() -> None:
    with ExpectedDraws(rng()):
        drawn = torch.randn(SHAPE, generator=rng(7))
    assert torch.equal(drawn, torch.randn(SHAPE, generator=rng(7)))


def test_means_are_put_while_vectorised() -> None:
    share, defense = batch(2), Expected(Noise(scale=1.0))
    quiet, plain = (
        make_replay(make_client(mlp(), one), ThreatModel(knows_defense=known), rng())
        for one, known in ((defense, True), (Noise(scale=1.0), False))
    )
    together = vmap(lambda x: quiet(x, share.targets, {}))(torch.stack([share.inputs] * 2))
    for name, value in plain(*share, {}).items():
        torch.testing.assert_close(together[name], torch.stack([value] * 2))


def test_an_average_is_the_same_at_every_call_and_nearer_to_the_mean() -> None:
    share, client = batch(2), make_client(mlp(), unreplayable.FreshNoise(scale=1.0))
    averaged = make_replay(client, ThreatModel(), rng(), mending=Mending("averaged"))
    once = make_replay(client, ThreatModel(), rng())
    mean = make_replay(client, ThreatModel(knows_defense=False), rng())(*share, {})
    first, second = averaged(*share, {}), averaged(*share, {})
    assert all(torch.equal(first[name], second[name]) for name in first)
    noisy = once(*share, {})
    far, near = (
        sum(float((u[name] - mean[name]).square().sum()) for name in mean) for u in (noisy, first)
    )
    assert near == pytest.approx(far / 8, rel=0.2)


def test_straight_through_has_the_value_of_one_and_the_slope_of_the_other() -> None:
    share, client = batch(2), make_client(mlp(), unreplayable.Rounded(step=0.01))
    mended = make_replay(client, ThreatModel(), rng(), mending=Mending(straight_through=True))
    plain = make_replay(client, ThreatModel(knows_defense=False), rng())
    slopes = []
    for replay in (mended, plain):
        guess = share.inputs.clone().requires_grad_()
        replayed = replay(guess, share.targets, {})
        slopes.append(torch.autograd.grad(replayed["1.weight"].sum(), guess)[0])
        if replay is mended:
            steps = replayed["1.weight"] / 0.01
            torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    torch.testing.assert_close(*slopes)
