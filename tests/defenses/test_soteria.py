import math

import pytest
import torch
from federated import SPACE, batch, convolutional, make_client, mlp, observed, rng, seeded
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, InvertingGradients, LinearLeakage, Observation
from leakfrontier.defenses import Batch, Defense, batch_gradient
from leakfrontier.defenses.soteria import Soteria, feature_scores
from leakfrontier.evaluate.client.client import ThreatModel
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model


def reference_scores(features: nn.Module, inputs: Tensor) -> Tensor:
    """Return the scores by one backward pass per example and feature."""
    total = torch.zeros(())
    for example in inputs:
        point = example.unsqueeze(0).requires_grad_()
        seen = features(point).squeeze(0)
        slopes = [torch.autograd.grad(one, point, retain_graph=True)[0].norm() for one in seen]
        total = total + torch.stack(slopes) / (seen.detach().abs() + 0.1)
    return total


def zero_columns(weight: Tensor) -> Tensor:
    return (weight == 0).all(dim=0)


@pytest.mark.parametrize("build", [mlp, convolutional])
def test_identity_setting_is_the_undefended_gradient(build) -> None:  # noqa: ANN001
    model, data = build(), batch(3)
    plain = batch_gradient(model, cross_entropy, data)
    gradient = Soteria(0.0).gradient(model, cross_entropy, data, rng())
    assert list(gradient) == list(plain)
    for name in plain:
        assert torch.equal(gradient[name], plain[name])


@pytest.mark.parametrize("size", [1, 3])
def test_scores_equal_the_slow_way(size: int) -> None:
    model, data = convolutional(), batch(size)
    assert isinstance(model, nn.Sequential)
    layer = model[4]
    assert isinstance(layer, nn.Linear)
    scores = feature_scores(model, layer, data.inputs)
    torch.testing.assert_close(scores, reference_scores(model[:4], data.inputs))
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.9])
def test_withholds_the_columns_of_the_lowest_scores_and_nothing_else(rate: float) -> None:
    model, data = convolutional(), batch(2)
    assert isinstance(model, nn.Sequential)
    plain = batch_gradient(model, cross_entropy, data)
    gradient = Soteria(rate).gradient(model, cross_entropy, data, rng())
    zero = zero_columns(gradient["4.weight"])
    assert int(zero.sum()) == pytest.approx(rate * 384, abs=1)
    lowest = reference_scores(model[:4], data.inputs).argsort()[: int(zero.sum())]
    assert set(lowest.tolist()) == set(zero.nonzero().flatten().tolist())
    assert torch.equal(gradient["4.weight"][:, ~zero], plain["4.weight"][:, ~zero])
    assert all(torch.equal(gradient[n], plain[n]) for n in plain if n != "4.weight")


def test_features_that_are_off_count_as_withheld() -> None:
    model, data = mlp(hidden=100), batch(1)
    off = zero_columns(batch_gradient(model, cross_entropy, data)["3.weight"])
    fewer = (float(off.sum()) - 2) / 100
    gradient = Soteria(fewer).gradient(model, cross_entropy, data, rng())
    assert torch.equal(zero_columns(gradient["3.weight"]), off)


def test_first_layer_leaks_the_pixels_that_are_kept() -> None:
    share = batch(1)
    observation = observed(mlp(), share, Soteria(0.5, layer="1"))
    kept = ~zero_columns(observation.update["1.weight"])
    guess = LinearLeakage().reconstruct(observation, rng()).inputs.flatten()
    assert int(kept.sum()) == 96
    torch.testing.assert_close(guess[kept], share.inputs.flatten()[kept], rtol=1e-4, atol=1e-5)
    assert share.inputs.flatten()[kept].abs().max() < share.inputs.flatten()[~kept].abs().min()


def test_every_local_step_masks_at_its_own_weights() -> None:
    data, lr = batch(2), 0.5
    protocol = FedAvg(epochs=1, batch_size=1, lr=lr)
    defense = Soteria(0.7)
    update = make_client(convolutional(), defense, protocol).upload(data, rng(), in_order=True)
    model = convolutional()
    for inputs, target in zip(*data, strict=True):
        part = Batch(inputs[None], target[None])
        gradient = defense.gradient(model, cross_entropy, part, rng())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= lr * gradient[name]
    change = {
        name: after.detach() - before.detach()
        for (name, after), before in zip(
            model.named_parameters(), convolutional().parameters(), strict=True
        )
    }
    torch.testing.assert_close(update, change)
    assert 0 < int(zero_columns(update["4.weight"]).sum()) < round(0.7 * 384)


@pytest.mark.parametrize("layer", [None, "4"])
def test_replay_withholds_the_columns_that_the_upload_shows(layer: str | None) -> None:
    model, data = convolutional(), batch(1)
    defense = Soteria(0.5, layer)
    uploads = [defense.gradient(model, cross_entropy, batch(1, s), rng()) for s in range(2)]
    plain = batch_gradient(model, cross_entropy, data)

    def replayed(observed: dict[str, Tensor]) -> dict[str, Tensor]:
        return defense.replay(observed).on_update(plain, rng())

    together = {name: torch.stack([u[name] for u in uploads]) for name in plain}
    at_once = vmap(replayed)(together)
    for index, upload in enumerate(uploads):
        one = replayed(upload)
        assert torch.equal(zero_columns(one["4.weight"]), zero_columns(upload["4.weight"]))
        assert all(torch.equal(at_once[name][index], one[name]) for name in plain)
        assert all(torch.equal(one[name], plain[name]) for name in plain if name != "4.weight")
    torch.testing.assert_close(replayed(uploads[0]), uploads[0])


def test_more_zeros_than_it_withholds_show_that_it_withheld_nothing_else() -> None:
    weight = torch.ones(2, 100)
    weight[:, :40] = 0
    guess = {"weight": torch.ones(2, 100)}
    for rate, masked in [(0.2, 0), (0.5, 40)]:
        replayed = Soteria(rate).replay({"weight": weight}).on_update(guess, rng())
        assert int(zero_columns(replayed["weight"]).sum()) == masked


def quality(observation: Observation, truth: Tensor) -> float:
    guess = InvertingGradients(iterations=150).reconstruct(observation, rng()).inputs
    return float(metrics.psnr(SPACE.to_unit(guess), SPACE.to_unit(truth)))


def test_stops_an_ignorant_adversary_and_not_an_informed_one() -> None:
    model, share = build_model("lenet", SPACE, rng()), batch(1)
    undefended = quality(observed(model, share), share.inputs)
    ignorant, informed = (
        quality(
            observed(model, share, Soteria(0.5), threat=ThreatModel(knows_defense=knows)),
            share.inputs,
        )
        for knows in (False, True)
    )
    assert ignorant < undefended - 15
    assert informed > undefended - 5


def test_strength_grows_with_what_is_withheld() -> None:
    assert Soteria(0.0).strength == 0 < Soteria(0.1).strength < Soteria(0.9).strength
    assert Soteria(0.9).stochastic is False


@pytest.mark.parametrize("rate", [-0.1, 1, math.nan])
def test_rejects_a_bad_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"pruning_rate must be in \[0, 1\), got"):
        Soteria(rate)


TOKENS = seeded(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 10)))
SEQUENCE = seeded(lambda: nn.Sequential(nn.Linear(8, 10), nn.Flatten(1), nn.Unflatten(1, (10, 24))))


@pytest.mark.parametrize(
    ("model", "defense", "inputs", "message"),
    [
        (mlp(), Soteria(0.5, layer="2"), batch(1).inputs, "layer must be one of 1, 3, got '2'"),
        (nn.Flatten(), Soteria(0.5), batch(1).inputs, "the model has none"),
        (TOKENS, Soteria(0.5), torch.ones(1, 2, dtype=torch.int64), "needs inputs with deriv"),
        (SEQUENCE, Soteria(0.5), batch(1).inputs, "one vector per example, got .*1, 3, 8, 8"),
    ],
)
def test_refuses_what_it_cannot_defend(
    model: nn.Module, defense: Defense, inputs: Tensor, message: str
) -> None:
    data = Batch(inputs, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        defense.gradient(model, lambda outputs, _: outputs.square().mean(), data, rng())
