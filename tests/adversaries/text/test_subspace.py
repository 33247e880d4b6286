import math

import pytest
import torch

from leakfrontier.adversaries.text.subspace import noise_level, row_space, threshold


def low_rank(rank: int, rows: int = 120, width: int = 48, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=draws, dtype=torch.float64)
    return left @ torch.randn(rank, width, generator=draws, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_space_is_that_of_the_singular_value_decomposition(dtype: torch.dtype) -> None:
    gradient = low_rank(12).to(dtype)
    space = row_space(gradient)
    assert space.rank == 12
    assert not space.saturated
    reference = torch.linalg.svd(space.scaled(gradient.double()))
    projector = reference.Vh[:12].T @ reference.Vh[:12]
    torch.testing.assert_close(space.basis.T @ space.basis, projector, rtol=0, atol=1e-6)


def test_distances_are_zero_inside_one_outside_and_do_not_depend_on_scale() -> None:
    gradient = low_rank(12)
    space = row_space(gradient)
    inside = gradient[:5]
    assert space.scale is not None
    outside = torch.randn(4, 48, dtype=torch.float64)
    outside = (outside - (outside @ space.basis.T) @ space.basis) * space.scale
    assert space.distance(inside).max() < 1e-7
    torch.testing.assert_close(space.distance(outside), torch.ones(4, dtype=torch.float64))
    both = inside[0] / space.scaled(inside)[0].norm() + outside[0] / space.scaled(outside)[0].norm()
    assert float(space.distance(1e5 * both)) == pytest.approx(math.sqrt(0.5))
    torch.testing.assert_close(
        space.energy(inside, exact=False).double(), space.energy(inside), rtol=0, atol=1e-5
    )


def uneven(rank: int, rows: int, width: int, size: float = 100.0) -> torch.Tensor:
    """Return a sum of outer products in single precision, as trained models have them.

    Some columns are large, inputs are of very different weight, and one outweighs all others.
    """
    draws = torch.Generator().manual_seed(7)
    inputs, slopes = (torch.randn(rank, n, generator=draws) for n in (width, rows))
    inputs = inputs * torch.logspace(0, -2, width)
    slopes = slopes * torch.logspace(0, -4, rank)[:, None]
    slopes[0] *= size
    return slopes.T @ inputs


@pytest.mark.parametrize(("rank", "width"), [(5, 64), (40, 64), (150, 192)])
@pytest.mark.parametrize("most", [None, 160])
def test_a_direction_that_outweighs_all_others_is_not_the_rank(
    rank: int, width: int, most: int | None
) -> None:
    space = row_space(uneven(rank, 3 * width, width), most=most)
    assert space.rank == rank
    assert space.noise == 0


@pytest.mark.parametrize("most", [None, 1, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3, 1e-5])
def test_half_precision_rounds_small_entries_by_an_absolute_step(
    scale: float, most: int | None
) -> None:
    gradient = scale * low_rank(1, 384, 128)
    assert row_space(gradient.half(), most=most).rank == 1


@pytest.mark.parametrize("most", [None, 64, 100])
def test_rows_that_overflow_are_left_out(most: int | None) -> None:
    draws = torch.Generator().manual_seed(1)
    sizes = 10 ** (1 + torch.randn(384, 1, generator=draws, dtype=torch.float64))
    gradient = (sizes * low_rank(64, 384, 128)).half()
    assert gradient.isinf().any()
    assert row_space(gradient, most=most).rank == 64
    assert row_space(gradient, most=most, noise=torch.full((384, 128), 1e-3)).rank == 64
    assert row_space(torch.full((4, 3), math.nan)).rank == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("most", [None, 1, 4])
def test_a_gap_among_rounding_errors_is_not_the_rank(dtype: torch.dtype, most: int | None) -> None:
    gradient = low_rank(1, 192, 64)
    gradient[:, 1] = gradient[:, 0]  # their errors are the same: one direction has none
    assert row_space(gradient.to(dtype), most=most).rank == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("most", [1, 5, 20])
def test_the_rank_exceeds_its_bound_only_where_the_space_is_everything(
    dtype: torch.dtype, most: int
) -> None:
    for gradient in (low_rank(12), 1e-4 * low_rank(30), low_rank(48) * torch.logspace(0, -3, 48)):
        space = row_space(gradient.to(dtype), most=most, least=12)
        assert space.rank <= most or space.saturated


def test_signal_that_falls_into_rounding_errors_ends_where_they_do() -> None:
    draws = torch.Generator().manual_seed(8)
    weights = torch.logspace(0, -9, 60)  # the weakest are below single precision
    left, right = (torch.randn(n, 60, generator=draws) for n in (300, 96))
    gradient = (left * weights) @ right.T
    for most in (60, 200):
        assert 40 <= row_space(gradient, most=most).rank <= 75
    assert row_space(gradient, most=60, least=58).rank >= 58
    assert row_space(gradient[:, :50], most=60).rank > 35


def test_a_full_gradient_is_saturated_and_a_zero_one_spans_nothing() -> None:
    falling = low_rank(48) * torch.logspace(0, -3, 48)
    assert row_space(falling).saturated
    assert row_space(falling).without(20).rank == 28
    assert row_space(torch.zeros(10, 4)).rank == 0


def test_noise_is_measured_and_what_it_covers_is_left_out() -> None:
    draws = torch.Generator().manual_seed(3)
    noise = torch.randn(400, 100, generator=draws, dtype=torch.float64)
    level = noise_level(torch.linalg.svdvals(0.01 * noise), 400)
    assert level == pytest.approx(0.01, rel=0.05)
    space = row_space(low_rank(5, 400, 100) + 0.5 * noise)
    assert space.rank == 5
    assert space.noise == 0 or space.noise == pytest.approx(0.5, rel=0.1)
    assert row_space(noise).rank <= 2


def test_noise_of_known_deviations_is_made_even_and_left_out() -> None:
    draws = torch.Generator().manual_seed(5)
    across, along = (10 ** -(3 * torch.rand(n, generator=draws)).double() for n in (400, 100))
    deviations = across[:, None] * along
    noise = deviations * torch.randn(400, 100, generator=draws, dtype=torch.float64)
    signal = 0.1 * low_rank(8, 400, 100)
    space = row_space(signal + noise, noise=deviations)
    assert space.rank == 8
    others = torch.randn(200, 100, generator=draws, dtype=torch.float64)
    assert space.distance(signal[:50]).max() < 0.1 * space.distance(others).min()
    blind = row_space(signal + noise)
    assert blind.rank != 8 or blind.distance(signal[:50]).max() > space.distance(signal[:50]).max()


def test_more_noise_than_is_known_is_measured() -> None:
    draws = torch.Generator().manual_seed(6)
    noise = torch.randn(400, 100, generator=draws, dtype=torch.float64)
    space = row_space(low_rank(5, 400, 100) + 0.5 * noise, noise=1e-6 * noise.abs())
    assert space.rank == 5
    assert space.scale is None
    assert row_space(low_rank(5), noise=torch.zeros(120, 48)).noise == 0


def test_the_threshold_is_in_the_widest_gap() -> None:
    distances = torch.tensor([0.5, 2e-5, 0.4, 1e-8, 3e-4, 0.6], dtype=torch.float64)
    limit = threshold(distances, most=5)
    assert 3e-4 < limit < 0.4
    assert threshold(torch.tensor([0.5, 0.51, 0.52]), most=2) == 0


def test_where_every_vector_is_near_all_are_true() -> None:
    near = torch.tensor([1e-8, 2e-5, 3e-4, 1e-6])
    assert threshold(near, most=3) > 3e-4
    assert threshold(torch.tensor([0.5, 0.51]), most=1) == 0
    assert threshold(torch.tensor([]), most=1) == 0
