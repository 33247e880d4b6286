import pytest
import torch
from federated import batch, mlp, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Batch, Update, batch_gradient
from leakfrontier.defenses.per_example import (
    ClippedGradient,
    check_alone,
    check_apart,
    example_gradients,
)
from leakfrontier.defenses.vector import flatten


def one_by_one(model: nn.Module, data: Batch) -> list[Update]:
    rows = range(len(data.inputs))
    return [batch_gradient(model, cross_entropy, data.at(slice(i, i + 1))) for i in rows]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.GRU(24, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.inner(inputs.reshape(len(inputs), 8, 24))[0][:, -1])
        return outputs


@pytest.mark.parametrize("build", [lambda: mlp(4), Recurrent])
def test_gradients_at_once_are_those_of_each_example_alone(build: type[nn.Module]) -> None:
    model, data = build(), batch(3)
    together = example_gradients(model, cross_entropy, data)
    for place, alone in enumerate(one_by_one(model, data)):
        assert list(together) == list(alone)
        for name, value in alone.items():
            torch.testing.assert_close(together[name][place], value, rtol=1e-4, atol=1e-6)


def test_dropout_differs_from_example_to_example() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 10))
    same = Batch(batch(1).inputs.expand(2, -1, -1, -1), batch(1).targets.expand(2))
    first, second = example_gradients(model, cross_entropy, same)["2.weight"]
    assert not torch.equal(first, second)


def test_each_gradient_is_scaled_to_the_norm_and_no_further() -> None:
    model, data = mlp(4), batch(3)
    alone = [flatten(one).detach() for one in one_by_one(model, data)]
    norms = sorted(float(one.norm()) for one in alone)
    bound = (norms[0] + norms[1]) / 2  # the shortest gradient is left alone
    clipped = ClippedGradient(bound).gradient(model, cross_entropy, data, rng())
    expected = sum(one * min(1.0, bound / float(one.norm())) for one in alone) / 3
    torch.testing.assert_close(flatten(clipped), expected, rtol=1e-4, atol=1e-6)


def test_per_layer_every_parameter_gets_its_share_of_the_norm() -> None:
    defense = ClippedGradient(0.02, clipping="per_layer")
    clipped = defense.gradient(mlp(4), cross_entropy, batch(1), rng())
    assert [float(value.norm()) for value in clipped.values()] == pytest.approx(
        [0.02 / 2] * 4, rel=1e-3
    )


def test_the_sum_is_divided_by_the_size_that_is_expected() -> None:
    model, data, defense = mlp(4), batch(3), ClippedGradient(0.1)
    before = defense.gradient(model, cross_entropy, data, rng())["3.bias"]
    defense.expect(12)
    after = defense.gradient(model, cross_entropy, data, rng())["3.bias"]
    torch.testing.assert_close(after, before * 3 / 12)


class MixedSlopes(torch.autograd.Function):
    """The identity, whose backward pass adds up the slopes of all examples."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, slopes: Tensor) -> Tensor:  # type: ignore[override]
        return slopes.sum(dim=0).expand_as(slopes)


class MixedSlopesOfFunctions(MixedSlopes):
    """The same in the form that `torch.func` takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:  # type: ignore[override]
        return values.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass


class Mixing(nn.Module):
    """A perceptron whose examples see each other, in one way after the other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(192, 8), nn.Linear(8, 10)
        self.attention = nn.MultiheadAttention(8, 2)  # the first axis is the sequence

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs.flatten(1))
        if self.way == "centred":
            values = values - values.mean(dim=0)
        if self.way == "normalised":
            values = nn.functional.batch_norm(values, None, None, training=True)
        if self.way == "three or more" and len(values) > 2:
            values = values - values.mean(dim=0)
        if self.way == "groups" and len(values) % 3 == 0:
            values = values.reshape(-1, 3, 8)
            values = (values / (1 + values.std(dim=1, keepdim=True))).reshape(-1, 8)
        if self.way == "large companions" and bool(inputs.abs().max() > 5):
            values = values - values.mean(dim=0)
        if self.way == "the last alone":
            values = torch.cat([values[:-1], values[-1:] + values[:1]])
        if self.way == "dropout":
            values = nn.functional.dropout(values - values.mean(dim=0), 0.1)
        if self.way == "backward":
            values = MixedSlopes.apply(values)
        if self.way == "backward, for torch.func":
            values = MixedSlopesOfFunctions.apply(values)
        if self.way == "attention":
            values = self.attention(values[:, None], values[:, None], values[:, None])[0][:, 0]
        outputs: Tensor = self.last(values.tanh())
        return outputs


WAYS = [
    *("centred", "normalised", "attention", "three or more", "groups", "large companions"),
    *("the last alone", "dropout", "backward", "backward, for torch.func"),
]
"""How `Mixing` mixes examples."""


@pytest.mark.parametrize("way", WAYS)
def test_models_that_mix_examples_are_refused_by_what_they_do(way: str) -> None:
    with pytest.raises(ValueError, match="the model mixes the examples of a batch"):
        check_apart(Mixing(way), cross_entropy, batch(6))
    check_apart(Mixing("not"), cross_entropy, batch(6))


def test_what_mixes_at_a_size_is_found_at_that_size() -> None:
    for way, sizes in (("three or more", (1, 2)), ("groups", (1, 2, 4, 5))):
        for size in sizes:
            check_apart(Mixing(way), cross_entropy, batch(size))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("way", ["not", "three or more", "backward", "backward, for torch.func"])
def test_a_sum_of_clipped_gradients_is_held_to_that_of_examples_alone(
    way: str, clipping: str
) -> None:
    model, data, clipped = Mixing(way), batch(6), ClippedGradient(0.1, clipping)
    rows, unclipped = torch.arange(6).split(1), ClippedGradient(100.0, clipping)
    apart = Mixing("not")
    apart.load_state_dict(model.state_dict())

    def total(*clipping: ClippedGradient) -> Update:
        ones = [
            one.gradient(apart, cross_entropy, data.at(row), rng())
            for one, row in zip(clipping, rows, strict=True)
        ]
        return {name: torch.stack([one[name] for one in ones]).sum(dim=0) for name in ones[0]}

    check_alone(model, cross_entropy, data, total(*[clipped] * 6), clipped)
    with pytest.raises(ValueError, match="gradients in a batch are not those of each example"):
        check_alone(model, cross_entropy, data, total(*[clipped] * 5, unclipped), clipped)


def test_losses_that_mix_examples_are_refused() -> None:
    weights = torch.arange(10.0) + 1  # normalised over the batch

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, weight=weights)

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="sum")

    for loss in (weighted, summed):
        with pytest.raises(ValueError, match="the loss mixes the examples of a batch"):
            check_apart(mlp(4), loss, batch(6))


def test_dropout_is_no_mixing_and_the_generator_is_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 10))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    check_apart(model, cross_entropy, batch(2))
    assert torch.equal(torch.get_rng_state(), state)
