import math
from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, convolutional, make_client, mlp, observed, rng
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, InvertingGradients
from leakfrontier.defenses import Batch, Chain, Defense, TopK
from leakfrontier.defenses.ats import ATS
from leakfrontier.defenses.transforms import POOL
from leakfrontier.evaluate.client.client import ThreatModel, make_replay, observe

CERTAIN = ["0", "9-11-8", "2-37-0"]
DRAWN = ["3-1-7", "2-10-14", "3-1-7+43-18-18"]


def fitted(policy: str) -> ATS:
    return ATS(policy).for_space(SPACE.mean, SPACE.std)


@pytest.mark.parametrize("policy", ["", "28-39", "39"])
def test_policies_that_do_nothing_give_the_undefended_gradient(policy: str) -> None:
    model, data, defense = convolutional(), batch(4), fitted(policy)
    trained_on = defense.on_batch(data, rng())
    gradient = defense.gradient(model, cross_entropy, trained_on, rng())
    plain = Defense().gradient(model, cross_entropy, data, rng())
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-6)


def test_the_empty_policy_returns_the_very_batch() -> None:
    data = batch(2)
    assert fitted("").on_batch(data, rng()) is data


def test_transforms_pixels_and_not_normalised_inputs() -> None:
    data = batch(4)
    result = SPACE.to_unit(fitted("0").on_batch(data, rng()).inputs)
    torch.testing.assert_close(result, 1 - SPACE.to_unit(data.inputs))


def test_statistics_may_differ_by_channel() -> None:
    mean, std = (0.2, 0.5, 0.7), (0.1, 0.2, 0.3)
    space = replace(SPACE, mean=mean, std=std)
    pixels = torch.rand(2, *SPACE.shape, generator=rng())
    data = Batch(space.to_inputs(pixels), torch.zeros(2))
    result = ATS("0").for_space(mean, std).on_batch(data, rng())
    torch.testing.assert_close(space.to_unit(result.inputs), 1 - pixels)


def test_draws_come_from_the_generator() -> None:
    data, defense = batch(16), fitted("15")
    first, again, other = (defense.on_batch(data, rng(seed)).inputs for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_labels_and_arguments_stay_as_they_are() -> None:
    data = batch(4)
    before = data.inputs.clone()
    result = fitted("3-1-7").on_batch(data, rng())
    assert torch.equal(result.targets, data.targets)
    assert torch.equal(data.inputs, before)
    assert not torch.equal(result.inputs, before)


@pytest.mark.parametrize(
    ("policy", "stochastic"),
    [("", False), ("0-9", False), ("39", False), ("0+0", False), ("0+9", True), ("3", True)],
)
def test_says_whether_anything_is_drawn(policy: str, stochastic: bool) -> None:
    defense = fitted(policy)
    assert defense.stochastic is stochastic
    data = batch(16)
    results = [defense.on_batch(data, rng(seed)).inputs for seed in range(3)]
    assert all(torch.equal(results[0], one) for one in results) is not stochastic


@pytest.mark.parametrize("policy", CERTAIN)
def test_what_is_not_drawn_is_replayed_exactly(policy: str) -> None:
    data, defense = batch(4), fitted(policy)
    replayed = defense.replay({}).on_batch(data, rng(5))
    assert torch.equal(replayed.inputs, defense.on_batch(data, rng(6)).inputs)


@pytest.mark.parametrize("policy", DRAWN)
def test_draws_are_left_out_of_a_replay(policy: str) -> None:
    assert fitted(policy).replay({}) == Defense()


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=1, batch_size=1, lr=0.1)])
@pytest.mark.parametrize("policy", CERTAIN + DRAWN)
def test_replay_is_differentiable_and_can_be_vectorised(
    policy: str, protocol: FedSGD | FedAvg
) -> None:
    replay = make_replay(make_client(mlp(), fitted(policy), protocol), ThreatModel(), rng(7))
    data = batch(6)
    guesses = data.inputs.view(3, 2, *SPACE.shape).clone().requires_grad_()

    def size(guess: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([v.square().sum() for v in replay(guess, targets, {}).values()]).sum()

    values = vmap(size, randomness="different")(guesses, data.targets.view(3, 2))
    (slope,) = torch.autograd.grad(values.sum(), guesses)
    assert slope.isfinite().all()
    assert (slope.flatten(1).abs().sum(1) > 0).all()


@pytest.mark.parametrize("informed", [True, False])
def test_an_attack_finds_the_original_only_if_it_knows_the_policy(informed: bool) -> None:
    data, defense = batch(1), fitted("0")
    threat = ThreatModel(knows_defense=informed)
    observation = observed(mlp(), data, defense, threat=threat)
    attack = InvertingGradients(iterations=150, total_variation=0.0)
    guess = attack.reconstruct(observation, rng()).inputs
    inverted = defense.on_batch(data, rng()).inputs
    near, far = (data.inputs, inverted) if informed else (inverted, data.inputs)
    assert (guess - near).square().mean() < 0.1 * (guess - far).square().mean()


def test_an_attack_that_knows_a_drawn_policy_finds_what_was_trained_on() -> None:
    client = make_client(mlp(), fitted("3-1-7"))
    (upload,) = observe(client, [batch(1)], ThreatModel(), rng(1))
    attack = InvertingGradients(iterations=150, total_variation=0.0)
    guess = attack.reconstruct(upload.observation, rng()).inputs
    near, far = (one.inputs for one in (upload.trained_on, upload.truth))
    assert (guess - near).square().mean() < 0.1 * (guess - far).square().mean()


def test_a_chain_passes_the_space_on() -> None:
    chain = Chain((TopK(0.5), ATS("0"))).for_space((0.5,), (0.25,))
    assert isinstance(chain, Chain)
    assert chain.links == (TopK(0.5), ATS("0", (0.5,), (0.25,)))
    assert Defense().for_space((0.5,), (0.25,)) == Defense()


def test_makes_no_claim() -> None:
    assert ATS().strength is None
    assert ATS().log_likelihood({}, {}) is None


def test_the_default_is_the_published_hybrid() -> None:
    names = [[POOL[int(i)].operation for i in p.split("-")] for p in ATS().policy.split("+")]
    assert names == [
        ["translateX", "contrast", "translateY"],
        ["translateY", "contrast", "contrast"],
    ]


def test_works_on_grey_images() -> None:
    data = Batch(torch.rand(3, 1, 8, 8, generator=rng()), torch.zeros(3))
    for entry in range(len(POOL)):
        assert ATS(str(entry)).on_batch(data, rng()).inputs.shape == data.inputs.shape


@pytest.mark.parametrize("policy", ["50", "a-b", "1-2-3-4", 7])
def test_explains_the_format_of_a_policy(policy: str) -> None:
    with pytest.raises(ValueError, match=r"policy must be .* from 0 to 49, as in '3-1-7'"):
        ATS(policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (math.nan,)}, "mean must be finite"),
        ({"std": (0.0,)}, "std must be positive"),
        ({"std": (math.nan,)}, "std must be positive"),
    ],
)
def test_rejects_bad_statistics(options: dict[str, tuple[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ATS("0", **options)


def test_says_so_if_inputs_are_no_pixels() -> None:
    with pytest.raises(ValueError, match=r"needs images in \[0, 1\], got -2 to 2: .* for_space"):
        ATS("0").on_batch(Batch(torch.tensor([-2.0, 2.0]).view(1, 1, 1, 2), torch.ones(1)), rng())


@pytest.mark.parametrize("shape", [(2, 8), (2, 2, 8, 8)])
def test_says_so_if_inputs_are_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="images with 1 or 3 channels, got inputs of shape"):
        ATS("0").on_batch(Batch(torch.zeros(shape), torch.zeros(2)), rng())
