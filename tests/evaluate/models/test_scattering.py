"""The scattering transform, against values of kymatio."""

import pytest
import torch
from torch import Tensor

from leakfrontier.evaluate.models.scattering import Scattering


def picture(shape: tuple[int, int, int]) -> Tensor:
    y, x = (torch.arange(size) for size in shape[1:])
    y = y.unsqueeze(1)
    return torch.stack([((k + 1) * y * y + 3 * x * y + x) % 17 / 16 for k in range(shape[0])])


# Of Scattering2D(J, shape, L=L)(picture(shape)) of kymatio.torch 0.3.0, with its colours and
# channels flattened: the shape, the mean, the root mean square, and values at (channel, 1, 2).
KYMATIO = [
    (
        ((1, 28, 28), 2, 8),
        (81, 7, 7),
        (0.019909, 0.057707),
        {0: 0.472205, 3: 0.077505, 16: 0.02509, 17: 0.008779, 40: 0.005513, 80: 0.013355},
    ),
    (
        ((3, 32, 32), 2, 8),
        (243, 8, 8),
        (0.019969, 0.058906),
        {0: 0.472205, 3: 0.077505, 16: 0.025145, 17: 0.008771, 121: 0.001398, 242: 0.008944},
    ),
    (
        ((1, 30, 29), 3, 6),
        (127, 3, 3),
        (0.014346, 0.045841),
        {0: 0.428426, 3: 0.078193, 18: 0.02598, 19: 0.008678, 63: 0.007369, 126: 0.003451},
    ),
]


@pytest.mark.parametrize(("case", "shape", "moments", "values"), KYMATIO)
def test_equals_kymatio(
    case: tuple[tuple[int, int, int], int, int],
    shape: tuple[int, int, int],
    moments: tuple[float, float],
    values: dict[int, float],
) -> None:
    transform = Scattering(*case)
    found = transform(picture(case[0]).unsqueeze(0))[0]
    assert found.shape == transform.shape == shape
    assert found.mean().item() == pytest.approx(moments[0], rel=1e-4)
    assert found.square().mean().sqrt().item() == pytest.approx(moments[1], rel=1e-4)
    for channel, value in values.items():  # kymatio takes pi to be 3.1415
        assert found[channel, 1, 2].item() == pytest.approx(value, rel=2e-4, abs=1e-6)


def test_transforms_each_image_alone() -> None:
    transform = Scattering((1, 28, 28))
    images = torch.rand(25, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([transform(image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(transform(images), alone)
    torch.testing.assert_close(torch.func.vmap(lambda i: transform(i[None])[0])(images), alone)
    assert transform(images[:0]).shape == (0, 81, 7, 7)


def test_has_nothing_to_train_or_to_save() -> None:
    transform = Scattering((1, 28, 28))
    assert not [*transform.parameters()]
    assert not transform.state_dict()


def test_gradients_are_those_of_differences() -> None:
    transform = Scattering((1, 8, 8), angles=2).double()
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(transform, image.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gradients_of_a_constant_image_are_finite(value: float) -> None:
    image = torch.full((1, 1, 28, 28), value, requires_grad=True)
    (slope,) = torch.autograd.grad(
        Scattering((1, 28, 28))(image).square().sum(), image, create_graph=True
    )
    slope.square().sum().backward()
    assert slope.isfinite().all()
    assert image.grad is not None
    assert image.grad.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 4, 28), {}),
        ((1, 28, 28), {"scales": 0}),
        ((1, 28, 28), {"scales": 5}),
        ((1, 28, 28), {"angles": 0}),
        ((1, 28, 28), {"angles": 10**9}),
    ],
)
def test_says_what_fits(shape: tuple[int, int, int], options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"angles in \[1, 64\].*larger than 2\^scales pixels, got"):
        Scattering(shape, **options)


@pytest.mark.parametrize("size", [5, 6, 9, 31])
def test_takes_every_size_above_the_scale(size: int) -> None:
    transform = Scattering((2, size, size + 1))
    assert transform(torch.rand(1, 2, size, size + 1)).shape[1:] == transform.shape
