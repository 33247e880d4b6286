import itertools

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Generator, Tensor

from leakfrontier.evaluate.modality import metrics


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
    for score in (metrics.psnr, metrics.ssim, metrics.snr, metrics.exact_match):
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


def test_snr_agrees_with_the_ratio_of_energies() -> None:
    truth = 2 * images(3, 1, 400) - 1
    guess = noisy(truth, 0.1).clamp(-1, 1)
    signal, noise = truth.double().numpy(), (guess.double() - truth.double()).numpy()
    expected = [
        20 * np.log10(np.linalg.norm(s) / np.linalg.norm(n))
        for s, n in zip(signal, noise, strict=True)
    ]
    assert metrics.snr(guess, truth).tolist() == pytest.approx(expected, abs=1e-9)


def test_snr_knows_silence_from_noise() -> None:
    truth = torch.tensor([[[0.5, -0.5]], [[0.5, -0.5]], [[0.0, 0.0]], [[0.5, -0.5]]])
    guess = torch.tensor([[[0.0, 0.0]], [[0.5, -0.5]], [[0.1, 0.0]], [[torch.nan, 9.0]]])
    silent, exact, undefined, broken = metrics.snr(guess, truth).tolist()
    assert silent == 0.0
    assert exact == pytest.approx(10 * np.log10(0.25 / metrics.LEAST_ERROR))
    assert np.isnan(undefined)
    assert broken == pytest.approx(10 * np.log10(0.5 / (0.5**2 + 1.5**2)))  # as silence, then 1


PAD = 0


def test_token_accuracy_counts_the_tokens_of_the_truth() -> None:
    truth = torch.tensor([[5, 6, 7, PAD], [5, 6, 7, 8], [PAD] * 4])
    guess = torch.tensor([[5, 9, 7, 9], [-1, -1, -1, -1], [5, PAD, PAD, PAD]])
    first, second, undefined = metrics.token_accuracy(guess, truth, PAD).tolist()
    assert (first, second) == (pytest.approx(2 / 3), 0.0)
    assert np.isnan(undefined)
    assert metrics.token_accuracy(guess, truth).tolist() == [0.5, 0.0, 0.75]


def test_an_exact_match_ends_where_the_truth_ends() -> None:
    truth = torch.tensor([[5, 6, PAD]] * 3)
    guess = torch.tensor([[5, 6, PAD], [5, 6, 7], [5, PAD, PAD]])
    assert metrics.exact_match(guess, truth).tolist() == [1.0, 0.0, 0.0]


def test_tokens_are_matched_by_the_fewest_wrong_ones() -> None:
    truth = torch.randint(50, (6, 20), generator=seeded())
    order = torch.randperm(6, generator=seeded(1))
    guess = truth.clone()
    guess[:, ::3] = -1
    assert torch.equal(order[metrics.match_tokens(guess[order], truth)], torch.arange(6))
    assert sorted(metrics.match_tokens(guess[:2], truth).tolist()) == [-1, -1, -1, -1, 0, 1]
    assert metrics.match_tokens(truth[:0], truth[:2]).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="guesses must have the truths' shape"):
        metrics.match_tokens(truth[:, :5], truth)


def test_tokens_are_compared_with_and_without_their_places() -> None:
    truth = torch.tensor([[5, 6, 5, PAD]])
    guesses = {
        (5, 6, 5, PAD): 0.0,
        (6, 5, 5, PAD): 1 - (1 / 3 + 1) / 2,  # all tokens, one in its place
        (5, PAD, PAD, PAD): 1 - (1 / 3 + 2 / 4) / 2,
        (6, 6, 6, 6): 1 - (1 / 4 + 2 / 7) / 2,  # one of them counts
        (PAD, 5, 6, 5): 1 - (0 + 2 * 3 / 7) / 2,  # padding is at the end
        (-1, -1, -1, -1): 1.0,
    }
    for guess, expected in guesses.items():
        distance = metrics.token_distance(torch.tensor([guess]), truth[None], PAD)
        assert distance.item() == pytest.approx(expected)


def test_tokens_are_identified_unless_there_is_a_tie() -> None:
    truth = torch.tensor([[1, 2, 3, 4]] * 3)
    pool = torch.tensor([[[1, 2, 9, 9], [8, 8, 8, 8]]] * 3)
    guess = torch.tensor([[1, 7, 3, 7], [1, 2, 7, 7], [-1, -1, -1, -1]])
    assert metrics.identified_tokens(guess, truth, pool).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="pool must hold at least one distractor"):
        metrics.identified_tokens(guess, truth, pool[:, :0])


@pytest.mark.parametrize("length", [3, 40])
def test_identification_of_tokens_by_a_blind_guess_is_at_most_chance(length: int) -> None:
    trials, candidates = 20_000, 8
    drawn = torch.randint(5, (trials, candidates, length), generator=seeded())
    guess = torch.randint(5, (1, length), generator=seeded(1)).expand(trials, length)
    hits = metrics.identified_tokens(guess, drawn[:, 0], drawn[:, 1:]).double().mean().item()
    chance = 1 / candidates
    assert 0 < hits < chance + 4 * (chance * (1 - chance) / trials) ** 0.5


def test_tiers_ascend() -> None:
    thresholds = list(metrics.TIERS.values())
    assert thresholds == sorted(thresholds)
    assert sorted(s for _, s in thresholds) == [s for _, s in thresholds]
