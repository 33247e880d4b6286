import itertools

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Generator, Tensor

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.modality import Images

IMAGES = Images(ImageSpace((4,), 3))


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=seeded(seed))


def noisy(truth: Tensor, scale: float = 0.2) -> Tensor:
    return truth + scale * torch.randn(truth.shape, generator=seeded(99))


def test_psnr_agrees_with_skimage_on_clamped_images() -> None:
    truth = images(4, 3, 16, 16)
    guess = noisy(truth)
    expected = [
        peak_signal_noise_ratio(t.double().numpy(), g.double().clamp(0, 1).numpy(), data_range=1)
        for t, g in zip(truth, guess, strict=True)
    ]
    assert metrics.psnr(guess, truth).tolist() == pytest.approx(expected, abs=1e-9)


def test_psnr_is_per_example_and_capped_at_200_db() -> None:
    truth = torch.full((3, 1, 4, 4), 0.5)
    guess = truth + torch.tensor([0.0, 0.1, 0.5]).view(3, 1, 1, 1)
    expected = [200.0, 20.0, 10 * np.log10(4)]
    assert metrics.psnr(guess, truth).tolist() == pytest.approx(expected, abs=1e-5)


def test_psnr_resolves_errors_below_single_precision() -> None:
    truth = torch.full((1, 8), 0.5, dtype=torch.float64)
    assert metrics.psnr(truth + 1e-9, truth).item() == pytest.approx(180, abs=1e-3)


@pytest.mark.parametrize(("broken", "looks"), [("nan", 0.0), ("inf", 1.0), ("-inf", 0.0)])
def test_a_broken_guess_scores_as_what_it_looks_like(broken: str, looks: float) -> None:
    truth, other = images(2, 1, 8, 8), images(2, 1, 8, 8, seed=1)
    guess = torch.full_like(truth, float(broken))
    same = torch.full_like(truth, looks)
    pool = torch.stack([other, images(2, 1, 8, 8, seed=2)], 1)
    for score in (metrics.psnr, metrics.ssim, metrics.match):
        assert torch.equal(score(guess, truth), score(same, truth))
    assert torch.equal(
        metrics.identified(guess, truth, pool), metrics.identified(same, truth, pool)
    )
    assert metrics.psnr(guess, truth).max() < 15


def test_ssim_agrees_with_skimage_where_the_window_is_11x11() -> None:
    truth = images(2, 3, 64, 70)
    guess = noisy(truth).clamp(0, 1)
    expected = [
        structural_similarity(
            t.numpy().astype(float),
            g.numpy().astype(float),
            data_range=1,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            channel_axis=0,
        )
        for t, g in zip(truth, guess, strict=True)
    ]
    assert metrics.ssim(guess, truth).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 63, 80), (1, 7, 7)])
def test_ssim_has_a_7x7_window_on_small_images(shape: tuple[int, ...]) -> None:
    # skimage fixes its Gaussian at 11x11, so the reference filters by scipy.ndimage.
    truth = images(2, *shape)
    guess = noisy(truth).clamp(0, 1)
    expected = [
        np.mean([reference_ssim(x, y) for x, y in zip(t, g, strict=True)])
        for t, g in zip(truth.double().numpy(), guess.double().numpy(), strict=True)
    ]
    assert metrics.ssim(guess, truth).tolist() == pytest.approx(expected, abs=1e-9)


def reference_ssim(x: np.ndarray, y: np.ndarray, radius: int = 3) -> float:
    def smooth(image: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(image, sigma=1.5, radius=radius)

    mx, my = smooth(x), smooth(y)
    vx, vy, cov = smooth(x * x) - mx * mx, smooth(y * y) - my * my, smooth(x * y) - mx * my
    quality = ((2 * mx * my + 1e-4) * (2 * cov + 9e-4)) / (
        (mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)
    )
    return float(quality[radius:-radius, radius:-radius].mean())


def test_ssim_of_a_copy_is_one() -> None:
    truth = images(2, 3, 32, 32)
    assert metrics.ssim(truth, truth).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("shape", [(3, 100), (3, 1, 6, 30), (3, 40, 40), (3, 1, 9, 9, 9)])
def test_ssim_is_nan_for_what_is_not_an_image(shape: tuple[int, ...]) -> None:
    score = metrics.ssim(images(*shape), images(*shape, seed=1))
    assert score.shape == (3,)
    assert score.isnan().all()


def test_scores_refuse_to_broadcast() -> None:
    for score in (metrics.psnr, metrics.ssim):
        with pytest.raises(ValueError, match=r"guess must have the truth's shape \(2, 1, 8, 8\)"):
            score(images(1, 1, 8, 8), images(2, 1, 8, 8))
    with pytest.raises(ValueError, match="guesses must have the truths' shape"):
        metrics.match(images(2, 1, 4, 16), images(2, 1, 8, 8))


def test_match_undoes_a_permutation() -> None:
    truth = images(6, 3, 8, 8)
    order = torch.randperm(6, generator=seeded())
    assigned = metrics.match(noisy(truth, 0.05)[order], truth)
    assert assigned.dtype == torch.long
    assert torch.equal(order[assigned], torch.arange(6))


@pytest.mark.parametrize(("guesses", "truths"), [(4, 4), (2, 5), (5, 3)])
def test_match_has_the_least_total_error_of_all_assignments(guesses: int, truths: int) -> None:
    guess, truth = images(guesses, 3), images(truths, 3, seed=1)
    cost = (guess[:, None] - truth).square().mean(2)
    assigned = metrics.match(guess, truth)
    used = assigned[assigned >= 0]
    assert len(used) == len(used.unique()) == min(guesses, truths)
    total = sum(float(cost[g, t]) for t, g in enumerate(assigned.tolist()) if g >= 0)
    size = max(guesses, truths)
    padded = torch.zeros(size, size)
    padded[:guesses, :truths] = cost
    best = min(
        sum(float(padded[g, t]) for t, g in enumerate(p))
        for p in itertools.permutations(range(size))
    )
    assert total == pytest.approx(best, abs=1e-6)


def test_match_without_guesses() -> None:
    assert metrics.match(torch.zeros(0, 1, 4, 4), images(3, 1, 4, 4)).tolist() == [-1, -1, -1]


def test_identified_compares_with_the_nearest_distractor() -> None:
    truth = torch.zeros(3, 1, 2, 2)
    pool = torch.full((3, 4, 1, 2, 2), 0.9)
    pool[:, 2] = 0.4
    guess = torch.tensor([0.1, 0.19, 0.21]).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    assert metrics.identified(guess, truth, pool).tolist() == [True, True, False]


def test_identified_clamps() -> None:
    truth, pool = torch.ones(1, 4), torch.full((1, 1, 4), 0.9)
    assert metrics.identified(torch.full((1, 4), 50.0), truth, pool).item()
    assert not metrics.identified(truth, torch.full((1, 4), 50.0), truth[None]).item()


def test_ties_are_failures_up_to_rounding() -> None:
    truth = images(1, 3, 8, 8)
    twin = ((truth - 0.4914) / 0.247) * 0.247 + 0.4914
    assert not torch.equal(twin, truth)
    for copy in (truth, twin):
        assert not metrics.identified(truth, truth, copy[None]).item()
        assert not metrics.identified(noisy(truth), truth, copy[None]).item()
    assert metrics.identified(truth, truth, (truth * 0.99)[None]).item()


def test_identification_by_a_blind_guess_is_chance() -> None:
    trials, candidates = 20_000, 8
    drawn = images(trials, candidates, 5)
    guess = images(1, 5, seed=1).expand(trials, 5)
    hits = metrics.identified(guess, drawn[:, 0], drawn[:, 1:]).double().mean().item()
    chance = 1 / candidates
    assert abs(hits - chance) < 4 * (chance * (1 - chance) / trials) ** 0.5


@pytest.mark.parametrize("shape", [(2, 0, 4), (3, 5, 4), (2, 5, 3), (2,)])
def test_identified_checks_the_pool(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="pool must hold at least one distractor"):
        metrics.identified(images(2, 4), images(2, 4), torch.zeros(shape))


def test_identified_of_an_empty_batch() -> None:
    assert metrics.identified(images(0, 4), images(0, 4), images(0, 5, 4)).shape == (0,)


def test_look_alikes_are_of_the_class_and_no_duplicates() -> None:
    inputs, targets = images(60, 4), torch.arange(60) % 3
    inputs[9] = inputs[0] + 5e-4  # a near-duplicate of the example, as 12 is not
    inputs[12] = inputs[0] + 5e-3
    exclude = torch.tensor([3, 6, 7])
    drawn = IMAGES.look_alikes(0, Batch(inputs, targets), exclude, 16, seeded())
    assert sorted(drawn.tolist()) == list(range(12, 60, 3))
    again = IMAGES.look_alikes(0, Batch(inputs, targets), exclude, 16, seeded())
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, drawn.sort().values)
    with pytest.raises(ValueError, match=r"\[1, 16\]"):  # the near-duplicate is not the 17th
        IMAGES.look_alikes(0, Batch(inputs, targets), exclude, 17, seeded())


def test_look_alikes_are_drawn_uniformly() -> None:
    inputs, targets, rng = images(6, 4), torch.zeros(6, dtype=torch.long), seeded()
    drawn = [
        IMAGES.look_alikes(2, Batch(inputs, targets), torch.tensor([]).long(), 2, rng)
        for _ in range(2_000)
    ]
    share = torch.bincount(torch.cat(drawn), minlength=6) / 2_000
    assert share[2] == 0
    assert (share[[0, 1, 3, 4, 5]] - 0.4).abs().max() < 4 * (0.4 * 0.6 / 2_000) ** 0.5


@pytest.mark.parametrize("count", [0, 20])
def test_look_alikes_name_the_class_that_is_too_small(count: int) -> None:
    inputs, targets = images(60, 4), torch.arange(60) % 3
    with pytest.raises(ValueError, match=rf"in \[1, 19\], .* class 2 .*got {count}"):
        IMAGES.look_alikes(2, Batch(inputs, targets), torch.tensor([2]), count, seeded())


def test_tiers_ascend() -> None:
    thresholds = list(metrics.TIERS.values())
    assert thresholds == sorted(thresholds)
    assert sorted(s for _, s in thresholds) == [s for _, s in thresholds]
