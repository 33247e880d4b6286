from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from federated import SPACE, TOKENS, batch, convolutional, make_client, mlp, observed, rng, seeded
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    DLFA,
    DLG,
    IDLG,
    SME,
    FedAvg,
    FedLeak,
    FedSGD,
    GradInversion,
    InvertingGradients,
    NotApplicable,
    Reconstruction,
)
from leakfrontier.adversaries.matching.matching import (
    Distance,
    Matching,
    Update,
    _guesses_at_once,
    absolute_error,
    batch_norm_statistics,
    cosine,
    group_consistency,
    likelihood,
    mean_square,
    squared_error,
    total_variation,
    vectorised,
)
from leakfrontier.defenses import Noise, TopK
from leakfrontier.evaluate.client.client import ThreatModel, make_replay
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())
LOCAL = FedAvg(epochs=2, batch_size=1, lr=0.1)
ATTACKS: list[Matching] = [
    InvertingGradients(iterations=3, restarts=2),
    DLG(iterations=3, restarts=2),
    IDLG(iterations=3, restarts=2),
    GradInversion(iterations=3, restarts=2),
    FedLeak(iterations=3, restarts=2, width=4),
    FedLeak(iterations=3, restarts=2, width=0),
    DLFA(iterations=3, restarts=2),
    SME(iterations=3, restarts=2),
]


def protocol(attack: Matching) -> FedSGD | FedAvg:
    return LOCAL if isinstance(attack, DLFA | SME) else FedSGD()


def updates(seed: int, guesses: int = 3) -> dict[str, Tensor]:
    draws = rng(seed)
    return {
        name: torch.randn(guesses, *value.shape, generator=draws)
        for name, value in mlp(4).named_parameters()
    }


def flat(update: Update) -> Tensor:
    return torch.cat([value.flatten(1) for value in update.values()], dim=1)


@pytest.mark.parametrize(
    ("distance", "formula"),
    [
        (squared_error, lambda a, b: (a - b).square().sum(dim=1)),
        (absolute_error, lambda a, b: (a - b).abs().sum(dim=1)),
        (cosine, lambda a, b: 1 - torch.cosine_similarity(a, b)),
    ],
)
@pytest.mark.parametrize("guesses", [1, 3])
def test_distances_and_their_slopes(
    distance: Distance, formula: Callable[[Tensor, Tensor], Tensor], guesses: int
) -> None:
    replayed, seen = updates(0, guesses), updates(1, guesses)
    values, slopes = distance(replayed, seen)
    leaves = {name: value.requires_grad_() for name, value in replayed.items()}
    expected = formula(flat(leaves), flat(seen))
    torch.testing.assert_close(values, expected.detach())
    gradients = torch.autograd.grad(expected.sum(), list(leaves.values()))
    for slope, gradient in zip(slopes.values(), gradients, strict=True):
        torch.testing.assert_close(slope, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attack", [GradInversion(), FedLeak(), DLFA()], ids=type)
def test_slopes_of_the_attacks_own_distances(attack: Matching) -> None:
    observation = observed(mlp(4), batch(2), protocol=protocol(attack))
    replayed, seen, nudge = (
        {name: value.double() for name, value in updates(seed).items()} for seed in range(3)
    )
    distance = attack.distance(observation)
    _, slopes = distance(replayed, seen)
    ahead, behind = (
        distance({n: value + step * nudge[n] for n, value in replayed.items()}, seen)[0]
        for step in (1e-7, -1e-7)
    )
    expected = (flat(slopes) * flat(nudge)).sum(dim=1)
    torch.testing.assert_close((ahead - behind) / 2e-7, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("distribution", "distance", "scale"),
    [("gaussian", squared_error, 1 / (2 * 0.1**2)), ("laplace", absolute_error, 1 / 0.1)],
)
def test_likelihood_is_the_distance_that_fits_the_noise(
    distribution: str, distance: Distance, scale: float
) -> None:
    defense = Noise(0.1, distribution=distribution)  # type: ignore[arg-type]
    observation = observed(mlp(4), batch(1), defense)
    entries = sum(value.numel() for value in observation.update.values())
    replayed, seen = updates(0), updates(1)
    values, slopes = likelihood(observation, otherwise=cosine)(replayed, seen)
    expected, gradients = distance(replayed, seen)
    torch.testing.assert_close(values, expected * scale / entries)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, gradients[name] * scale / entries)


def test_without_a_likelihood_something_else_stands_in() -> None:
    unknown = observed(mlp(4), batch(1), Noise(0.1), threat=ThreatModel(knows_defense=False))
    for observation in (observed(mlp(4), batch(1)), unknown):
        assert likelihood(observation, otherwise=cosine) is cosine


def test_priors() -> None:
    inputs = torch.randn(6, 2, 3, 8, 8, generator=rng())
    for guess, value in zip(inputs, total_variation(inputs), strict=True):
        rows = (guess[:, :, 1:] - guess[:, :, :-1]).abs().mean()
        columns = (guess[..., 1:] - guess[..., :-1]).abs().mean()
        torch.testing.assert_close(value, rows + columns)
    assert total_variation(torch.randn(2, 3, 5)).tolist() == [0, 0]  # no spatial axes
    torch.testing.assert_close(mean_square(inputs)[0], inputs[0].square().mean())
    together = group_consistency(inputs, 3)
    torch.testing.assert_close(together[4], (inputs[4] - inputs[3:].mean(dim=0)).norm())


def test_batch_norm_statistics_are_those_of_the_batch_that_made_them() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=1.0)))
    share = batch(5)
    model(share.inputs)
    model[1].running_var *= 1 - 1 / (5 * 36)  # type: ignore[index, operator]
    assert batch_norm_statistics(model) is None  # still in training
    statistics = batch_norm_statistics(model.eval())
    assert statistics is not None
    guesses = torch.stack([share.inputs, batch(5, 1).inputs])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values = statistics(guesses)
    assert values[0] < 1e-4 < values[1]
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert batch_norm_statistics(LENET) is None


def test_vectorised_code_gives_what_one_guess_after_the_other_gives() -> None:
    def simple(inputs: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": inputs.sum() + options["shift"]}

    def branching(inputs: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
        return simple(inputs, options) if inputs.sum() > 0 else {"sum": options["shift"]}

    inputs, options = torch.ones(4, 2), {"shift": torch.arange(4.0)}
    for function in (simple, branching):
        torch.testing.assert_close(
            vectorised(function)(inputs, options), {"sum": 2 + torch.arange(4.0)}
        )
    assert float(vectorised(torch.sum)(inputs[:1])) == 2
    pair = vectorised(lambda inputs: (inputs.sum(), {"twice": 2 * inputs}))
    for part in (inputs, inputs[:1]):
        torch.testing.assert_close(pair(part), (part.sum(1), {"twice": 2 * part}))


def test_the_slope_is_that_of_a_plain_double_backward() -> None:
    model, share = convolutional(), batch(2)
    observation = observed(model, share)
    attack = InvertingGradients(total_variation=0.1)
    inputs = torch.randn(3, 2, *SPACE.shape, generator=rng())
    stacked = {n: torch.stack([value] * 3) for n, value in observation.update.items()}
    evaluate = attack._evaluation(observation, torch.stack([share.targets] * 3), stacked)
    values, slopes = evaluate({"inputs": inputs})
    for guess, value, slope in zip(inputs, values, slopes["inputs"], strict=True):
        leaf = guess.clone().requires_grad_()
        loss = cross_entropy(model(leaf), share.targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        angle = torch.cosine_similarity(
            torch.cat([g.flatten() for g in gradients]),
            torch.cat([u.flatten() for u in observation.update.values()]),
            dim=0,
        )
        variation = leaf.diff(dim=2).abs().mean() + leaf.diff(dim=3).abs().mean()
        objective = 1 - angle + 0.1 * variation
        torch.testing.assert_close(value, objective.detach(), rtol=1e-4, atol=1e-5)
        (expected,) = torch.autograd.grad(objective, leaf)
        torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_every_attack_returns_a_guess_with_its_objective(attack: Matching) -> None:
    shares = [batch(1, seed) for seed in range(3)]
    replay = make_replay(make_client(LENET, protocol=protocol(attack)), ThreatModel(), rng())
    observations = [
        replace(observed(LENET, share, protocol=protocol(attack)), replay=replay)
        for share in shares
    ]
    told: list[Tensor] = []
    results = attack.reconstruct_all(
        observations, [rng(i) for i in range(3)], lambda _, values: told.append(values)
    )
    assert [len(values) for values in told] == [6, 6, 6]
    for index, (observation, result) in enumerate(zip(observations, results, strict=True)):
        assert isinstance(result, Reconstruction)
        assert result.inputs.shape == (1, *SPACE.shape)
        assert result.inputs.isfinite().all()
        assert not result.inputs.requires_grad
        assert result.targets is not None
        again = attack.objective(observation, result.inputs, result.targets)
        assert result.objective == pytest.approx(again, rel=1e-4)
        assert attack.objective(observation, *shares[index]) < again
        alone = attack.reconstruct(observation, rng(index))
        torch.testing.assert_close(result.inputs, alone.inputs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_granted_labels_are_used_and_others_inferred(attack: Matching) -> None:
    share = batch(1)
    wrong = (share.targets + 1) % 10
    observation = observed(LENET, share, protocol=protocol(attack))
    inferred = attack.reconstruct(observation, rng()).targets
    granted = attack.reconstruct(replace(observation, targets=wrong), rng()).targets
    assert inferred is not None
    assert granted is not None
    if not isinstance(attack, DLG):  # which searches for the label
        assert inferred.equal(share.targets)
        assert granted.equal(wrong)


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_tokens_are_not_applicable(attack: Matching) -> None:
    observation = observed(LENET, batch(1), protocol=protocol(attack))
    tokens = replace(observation, space=TOKENS)
    with pytest.raises(NotApplicable, match="tokens"):
        attack.reconstruct(tokens, rng())


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
@pytest.mark.parametrize("name", ["iterations", "restarts"])
def test_rejects_no_iterations_and_no_starts(attack: Matching, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        replace(attack, **{name: 0})  # type: ignore[arg-type]


def test_an_update_that_depends_on_nothing_is_no_error() -> None:
    observation = observed(LENET, batch(1), TopK(0.5))
    blind = replace(observation, replay=lambda inputs, targets, seen: dict(seen))
    assert DLG(iterations=3).reconstruct(blind, rng()).objective == pytest.approx(0, abs=1e-9)


def test_local_steps() -> None:
    observation = observed(LENET, batch(5), protocol=FedAvg(epochs=3, batch_size=2))
    assert observation.local_steps == 9
    assert observed(LENET, batch(5)).local_steps == 1


def test_larger_models_are_attacked_in_smaller_stacks() -> None:
    sizes = [_guesses_at_once(observed(mlp(hidden), batch(1))) for hidden in (8, 64, 512)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 1
    many = _guesses_at_once(observed(LENET, batch(8)))
    assert many < _guesses_at_once(observed(LENET, batch(1)))


def test_a_model_is_left_as_it_was() -> None:
    model = seeded(lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 10)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _guesses_at_once(replace(observed(LENET, batch(1)), models=(model,)))
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert functional_call(model, before, (batch(2).inputs,)).shape == (2, 10)
    assert not any(module._forward_hooks for module in model.modules())
