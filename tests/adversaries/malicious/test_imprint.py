"""What the imprint attacks share."""

from __future__ import annotations

from math import comb

import pytest
import torch
from federated import SPACE, TOKENS, convolutional, mlp, rng
from scipy import stats
from torch import Tensor, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.adversaries.malicious.imprint import (
    Isolated,
    calibrated,
    chosen,
    counted_recovery,
    deduplicated,
    direct_pass_,
    dissect,
    equal_columns_,
    expected_recovery,
    isolate,
    laplace_quantiles,
    lognormal_quantiles,
    noise_of,
    normal_quantiles,
    occupied,
    outside,
    seen_by,
    thresholds,
    window_rows,
    windows,
    within,
)


@pytest.mark.parametrize(
    ("bins", "examples", "counted", "independent"),
    [
        (128, 64, 0.440, 0.610),
        (512, 64, 0.791, 0.884),
        (512, 256, 0.443, 0.607),
        (1024, 32, 0.941, 0.970),
        (1024, 64, 0.886, 0.940),
        (1024, 256, 0.640, 0.779),
        (1024, 384, 0.529, 0.688),
    ],
)
def test_expected_recovery(bins: int, examples: int, counted: float, independent: float) -> None:
    assert counted_recovery(examples, bins) == pytest.approx(counted, abs=5e-4)
    assert expected_recovery(examples, bins) == pytest.approx(independent, abs=5e-4)
    drawn = torch.randint(bins, (400, examples), generator=rng())
    alone = torch.stack([torch.bincount(row, minlength=bins) == 1 for row in drawn]).sum()
    assert float(alone) / drawn.numel() == pytest.approx(independent, abs=0.01)


@pytest.mark.parametrize(("examples", "bins"), [(1, 2), (2, 2), (5, 3), (6, 16), (20, 33)])
def test_counted_recovery_is_the_papers_sum(examples: int, bins: int) -> None:
    """Compare with Eq. 16 as it is printed, in integers."""
    n, k = examples, bins
    some = sum(
        i * comb(k, i) * comb(k - i, j) * comb(n - i - j - 1, j - 1)
        for i in range(1, n - 1)
        for j in range(1, (n - i) // 2 + 1)
    )
    expected = (some + n * comb(k, n)) / comb(k + n - 1, k - 1) - n / k
    assert counted_recovery(n, k) == pytest.approx(expected / n)


def test_bins_must_be_enough() -> None:
    for make in (lambda: thresholds(1, normal_quantiles()), lambda: counted_recovery(3, 1)):
        with pytest.raises(ValueError, match="bins must be at least 2, got 1"):
            make()
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        windows(0, normal_quantiles())


def test_quantiles_are_those_of_scipy() -> None:
    masses = torch.tensor([0.001, 0.3, 0.5, 0.99], dtype=torch.float64)
    samples = torch.randn(50, generator=rng()).exp()
    log = samples.double().log()
    for quantile, expected in (
        (normal_quantiles(1.0, 2.0), stats.norm(1.0, 2.0)),
        (laplace_quantiles(1.0, 2.0), stats.laplace(1.0, 2.0 / 2**0.5)),
        (lognormal_quantiles(samples), stats.lognorm(float(log.std()), scale=log.mean().exp())),
    ):
        torch.testing.assert_close(quantile(masses), torch.from_numpy(expected.ppf(masses)))


def test_a_fit_is_lognormal_where_all_is_positive() -> None:
    masses = torch.tensor([0.01, 0.99])
    positive = torch.randn(500, generator=rng()).exp()
    assert bool((calibrated(positive)(masses) > 0).all())
    assert bool((calibrated(positive - 1)(masses)[0] < -1).all())
    for useless in (torch.ones(5), torch.tensor([1.0])):
        with pytest.raises(NotApplicable, match="the same for all public examples"):
            calibrated(useless)


@pytest.mark.parametrize("quantile", [normal_quantiles(), laplace_quantiles(2.0, 0.1)])
@pytest.mark.parametrize("bins", [2, 1000])
def test_thresholds_rise_from_below_everything(quantile: object, bins: int) -> None:
    edges = thresholds(bins, quantile)  # type: ignore[arg-type]
    assert len(edges) == bins
    assert bool((edges.diff() > 0).all())
    assert edges[0] < quantile(torch.tensor(1e-9, dtype=torch.float64))  # type: ignore[operator]


def gradients(bins: list[list[int]], inputs: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Return what cumulative rows sum up, given which inputs are in each bin."""
    held = [torch.tensor([x for later in bins[k:] for x in later]).long() for k in range(len(bins))]
    weight = torch.stack([(deltas[x, None] * inputs[x]).sum(dim=0) for x in held])
    return weight, torch.stack([deltas[x].sum() for x in held])


def test_neighbouring_rows_isolate() -> None:
    inputs, deltas = torch.rand(4, 6, generator=rng()), torch.tensor([0.5, -1.0, 2.0, 1.0])
    weight, bias = gradients([[], [0], [], [1, 2], [3]], inputs, deltas)
    found = isolate(weight, bias)
    assert found.bins.tolist() == [1, 3, 4]
    torch.testing.assert_close(found.deltas, torch.tensor([0.5, 1.0, 1.0]))
    mixture = (2 * inputs[2] - inputs[1]) / (2 - 1)
    torch.testing.assert_close(found.inputs, torch.stack([inputs[0], mixture, inputs[3]]))

    two = isolate(torch.cat([weight, weight]), torch.cat([bias, bias]), groups=2)
    assert two.bins.tolist() == [1, 3, 4, 6, 8, 9]
    torch.testing.assert_close(two.inputs, found.inputs.repeat(2, 1))
    sparse = isolate(weight[:2], bias[:2], cumulative=False)
    torch.testing.assert_close(sparse.inputs, weight[:2] / bias[:2, None])
    assert len(isolate(torch.zeros(5, 6), torch.zeros(5)).bins) == 0


def test_noise_shows_in_the_empty_bins() -> None:
    inputs, deltas = torch.rand(3, 400, generator=rng()), torch.tensor([0.5, -1.0, 2.0])
    bins: list[list[int]] = [[] for _ in range(100)]
    bins[10], bins[50], bins[99] = [0], [1], [2]
    weight, bias = gradients(bins, inputs, deltas)
    weight, bias = (
        value + 0.01 * torch.randn(value.shape, generator=rng(1)) for value in (weight, bias)
    )
    assert len(isolate(weight, bias).bins) == 100
    found = isolate(weight, bias, examples=3)
    assert found.bins.tolist() == [10, 50, 99]
    assert (found.inputs - inputs).square().mean().sqrt() < 0.03
    noise = 0.01 * torch.randn(100, 400, generator=rng(2))
    assert noise_of(noise, 10) == pytest.approx(0.01, rel=0.05)
    assert noise_of(noise, 100) == 0


def test_windows_lie_side_by_side() -> None:
    edges = windows(8, normal_quantiles(2.0, 0.5))
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weight, bias = window_rows(query, edges)
    values = torch.tensor([[float(edges[0]) - 1, 5.0], *([float(x), 5.0] for x in edges + 1e-6)])
    inside = occupied(values.double() @ weight.T + bias, cumulative=False)
    assert inside.sum(dim=1).tolist() == [0] + [1] * 8 + [0]
    assert inside.double().argmax(dim=1)[1:-1].tolist() == list(range(8))


def test_an_example_lies_in_its_own_bin_and_in_no_empty_one() -> None:
    edges = torch.tensor([[0.0], [1.0], [2.0]])
    outputs = torch.tensor([-0.5, 0.5, 1.5, 9.0]) - edges
    assert occupied(outputs.T).double().tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    both = torch.cat([outputs.T, outputs.flip(1).T], dim=1)[1:3]
    bins = occupied(both, groups=2)
    assert bins.nonzero()[:, 1].tolist() == [0, 4, 1, 3]
    isolated = Isolated(torch.rand(2, 1), torch.tensor([0, 1]), torch.ones(2))
    assert within(isolated, occupied(outputs.T)[1:3]).all()
    assert not within(isolated, occupied(outputs.T)[[2, 1]]).any()  # not their own
    assert not within(isolated, bins).any()  # bins 3 and 4 hold nothing
    nothing = Isolated(torch.zeros(0, 1), torch.zeros(0).long(), torch.zeros(0))
    assert within(nothing, occupied(torch.zeros(0, 3))).shape == (0,)


def test_mixtures_leave_the_range_of_the_data() -> None:
    pixels = torch.full((2, *SPACE.shape), 0.5)
    pixels[1, 0] = 1.2
    torch.testing.assert_close(outside(SPACE.to_inputs(pixels), SPACE), torch.tensor([0.0, 1 / 3]))


def test_sound_repeated_and_large_ones_are_chosen_once_each() -> None:
    inputs = torch.rand(4, 5, generator=rng())[[0, 1, 2, 3, 0]]
    inputs[0] *= 1.0001
    isolated = Isolated(inputs, torch.arange(5), torch.tensor([0.5, -4.0, 2.0, 3.0, -1.0]))
    sound = torch.tensor([True, False, True, True, True])
    assert chosen(isolated, sound, 9).tolist() == [4, 3, 2, 1]
    assert chosen(isolated, sound, 2).tolist() == [4, 3]
    assert len(chosen(isolated.at(torch.zeros(0).long()), sound[:0], 2)) == 0
    assert torch.equal(deduplicated(inputs), inputs[:4])


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(3, 7, 3, padding=1),
        nn.Conv2d(3, 3, (5, 1), padding="same", bias=False),
        nn.Conv2d(3, 4, 3, padding=2, dilation=2),
        nn.Conv1d(2, 4, 9, padding=4),
    ],
)
def test_direct_pass_copies(convolution: nn.Conv1d | nn.Conv2d) -> None:
    direct_pass_(convolution)
    channels = convolution.in_channels
    inputs = torch.randn(2, channels, *[10] * len(convolution.kernel_size), generator=rng())
    outputs = convolution(inputs)
    assert torch.equal(outputs[:, :channels], inputs)
    assert not outputs[:, channels:].any()


@pytest.mark.parametrize(
    ("convolution", "reason"),
    [
        (nn.Conv2d(3, 6, 3, padding=1, stride=2), "stride"),
        (nn.Conv2d(3, 2, 3, padding=1), "from 3 to 2 channels"),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), "in 2 groups"),
        (nn.Conv2d(3, 6, 4, padding=2), "no centre"),
        (nn.Conv2d(3, 6, 3), "no centre"),
    ],
)
def test_direct_pass_cannot_always_be(convolution: nn.Conv2d, reason: str) -> None:
    before = convolution.weight.clone()
    with pytest.raises(NotApplicable, match=reason):
        direct_pass_(convolution)
    assert torch.equal(convolution.weight, before)


@pytest.mark.parametrize("classes", [2, 3, 10, 11])
def test_equal_columns_give_every_class_a_gradient(classes: int) -> None:
    head = nn.Linear(20, classes)
    equal_columns_(head, 0.1)
    assert torch.equal(head.weight, head.weight[:, :1].expand(-1, 20))
    hidden = torch.rand(classes, 20, generator=rng()).requires_grad_()
    nn.functional.cross_entropy(head(hidden), torch.arange(classes)).backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, hidden.grad[:, :1].expand(-1, 20))
    assert bool((hidden.grad[:, 0].abs() > 0.9 * 0.1 / 20 / classes).all())
    with pytest.raises(NotApplicable, match="one output"):
        equal_columns_(nn.Linear(20, 1))


def test_a_model_is_dissected() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.layer = nn.Linear(16, 10), nn.Linear(384, 16)
            self.second, self.first = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = torch.relu(self.second(torch.relu(self.first(inputs)))).flatten(1)
            outputs: Tensor = self.head(torch.relu(self.layer(hidden)))
            return outputs

    model = Functional()
    anatomy = dissect(model, SPACE)
    assert anatomy.convolutions == (model.first, model.second)
    assert (anatomy.layer, anatomy.head, anatomy.name) == (model.layer, model.head, "layer")
    inputs = torch.rand(2, *SPACE.shape, generator=rng())
    for convolution in anatomy.convolutions:
        direct_pass_(convolution)
    assert torch.equal(seen_by(model.layer, model, inputs)[:, :192], inputs.flatten(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (convolutional(), "two linear layers"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(192, 8, bias=False), nn.ReLU(), nn.Linear(8, 9)),
            "no bias",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sigmoid(), nn.Linear(8, 9)),
            "not followed by a ReLU",
        ),
    ],
)
def test_what_cannot_be_imprinted(model: nn.Module, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        dissect(model, SPACE)


def test_tokens_cannot_be_imprinted() -> None:
    with pytest.raises(NotApplicable, match="token"):
        dissect(mlp(), TOKENS)
