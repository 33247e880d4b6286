"""Scores per victim, and the matching of guesses to truths, stacked along the first axis.

Images and sound are on the scale of the data, where values lie in [0, 1]. Scores clamp both sides
to that range, read NaN as 0, and use double precision. So a broken guess gets the score of what it
would look like, never NaN.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from leakfrontier.adversaries.spaces import real_tokens

TIERS: dict[str, tuple[float, float]] = {
    "weak": (15.0, 0.5),
    "recognisable": (20.0, 0.7),
    "near-copy": (30.0, 0.9),
}
"""Minimum PSNR (dB) and SSIM of each tier of success, weakest first.

Both must be reached. Single hand-crafted metrics contradict each other and human judgement (Sun et
al., "Privacy Assessment on Reconstructed Images", NeurIPS 2023). The thresholds are a convention of
this toolkit. Reports print them.
"""

LEAST_ERROR = 1e-20
"""Floor of the mean squared error. It limits PSNR to 200 dB, which means exact."""

DUPLICATE_ERROR = 1e-6
"""Two examples with at most this mean squared distance count as the same one."""

TIE = 1e-6
"""Two candidates within this root-mean-square distance are equally near (float32 rounding)."""


def psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each guess in dB, for a data range of 1.

    Values beyond about 100 dB mean "exact up to rounding". The mean squared error is floored at
    `LEAST_ERROR`, which caps the ratio at 200 dB.
    """
    _check_same_shape(guess, truth)
    error = (_pixels(guess) - _pixels(truth)).flatten(1).square().mean(1)
    return -10 * error.clamp(min=LEAST_ERROR).log10()


def snr(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the signal-to-noise ratio of each guess in dB; NaN if the truth is all zeros.

    Signals are amplitudes in [-1, 1], and clamped to that range. The squared error is floored as
    in `psnr`.
    """
    _check_same_shape(guess, truth)
    error = (_amplitudes(guess) - _amplitudes(truth)).flatten(1).square().mean(1)
    power = _amplitudes(truth).flatten(1).square().mean(1)
    ratio = 10 * (power / error.clamp(min=LEAST_ERROR)).log10()
    return torch.where(power > 0, ratio, torch.nan)


def ssim(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity of each guess, averaged over channels.

    The Gaussian window has sigma 1.5 and covers the region where it fits. It is 11x11 as published
    if the short side has at least 64 pixels, otherwise 7x7. The result is NaN if the input is not
    an NCHW image of at least 7x7.

    References:
        Wang, Bovik, Sheikh, Simoncelli, "Image Quality Assessment: From Error Visibility to
        Structural Similarity", IEEE Transactions on Image Processing 2004,
        https://doi.org/10.1109/TIP.2003.819861
    """
    _check_same_shape(guess, truth)
    short = min(truth.shape[2:]) if truth.dim() == 4 else 0
    if short < 7:
        return torch.full((len(truth),), torch.nan, dtype=torch.float64, device=truth.device)
    window = _gaussian_window(11 if short >= 64 else 7).to(truth.device)

    def average(images: Tensor) -> Tensor:
        rows = functional.conv2d(images.flatten(0, 1)[:, None], window[..., None, :])
        return functional.conv2d(rows, window[..., None])

    x, y = _pixels(guess), _pixels(truth)
    mean_x, mean_y = average(x), average(y)
    variances = average(x * x) - mean_x**2 + average(y * y) - mean_y**2
    covariance = average(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    similarity = luminance * (2 * covariance + c2) / (variances + c2)
    return similarity.mean((1, 2, 3)).view(truth.shape[:2]).mean(1)


def token_accuracy(guess: Tensor, truth: Tensor, padding: int | None = None) -> Tensor:
    """Return the share of each truth's tokens that are guessed at their positions.

    Positions where the truth is padding do not count. The result is NaN if all are padding.
    """
    _check_same_shape(guess, truth)
    counts = real_tokens(truth, padding)
    return ((guess == truth) & counts).sum(dim=1).double() / counts.sum(dim=1)


def exact_match(guess: Tensor, truth: Tensor) -> Tensor:
    """Return 1 for each guess that equals the truth, including padding, and 0 for others."""
    _check_same_shape(guess, truth)
    return (guess == truth).all(dim=1).double()


def match(guess: Tensor, truth: Tensor) -> Tensor:
    """Return, for each truth, the index of the guess assigned to it, or -1 if none is left.

    The assignment minimises the total mean squared error. Choosing it needs the truth and
    flatters the attack, so baselines have to be matched in the same way.

    Args:
        guess: Guesses in any order. Their number may differ from that of the truths.
        truth: Private examples.
    """
    _check_same_example_shape(guess, truth)
    distance = torch.cdist(
        _pixels(guess).flatten(1),
        _pixels(truth).flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",  # the faster mode is imprecise for near-copies
    )
    return assign(distance.square())


def match_tokens(guess: Tensor, truth: Tensor, padding: int | None = None) -> Tensor:
    """Return the assignment with the smallest total `token_distance`, in the form of `match`."""
    _check_same_example_shape(guess, truth)
    return assign(token_distance(guess, truth.expand(len(guess), *truth.shape), padding))


def token_distance(guess: Tensor, others: Tensor, padding: int | None = None) -> Tensor:
    """Return the distance of sequences (n, length) from others (n, m, length), in [0, 1].

    The distance is one minus the mean of two shares. The first is the share of common tokens,
    regardless of position (F1 of the multisets). The second is the share of positions with the same
    token, out of the longer sequence. The first credits tokens found without their order, the
    second credits the order.
    """
    real, their_real = real_tokens(guess, padding), real_tokens(others, padding)
    size, their_size = real.sum(-1)[:, None], their_real.sum(-1)
    same = (guess[:, None] == others) & real[:, None] & their_real
    places = same.sum(-1).double() / torch.maximum(size, their_size).clamp(min=1)
    mine, theirs = _numbered(guess, real), _numbered(others, their_real).flatten(1)
    found = torch.searchsorted(mine, theirs).clamp(max=mine.shape[1] - 1)
    shared = (mine.gather(1, found) == theirs) & (theirs >= 0)
    overlap = shared.view(others.shape).sum(-1).double()
    return 1 - (places + 2 * overlap / (size + their_size).clamp(min=1)) / 2


def assign(costs: Tensor) -> Tensor:
    """Return the row assigned to each column at the smallest total cost, or -1."""
    rows, columns = linear_sum_assignment(costs.cpu().numpy())
    assigned = torch.full((costs.shape[1],), -1)
    assigned[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return assigned.to(costs.device)


def identified(guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
    """Return whether each guess is nearer to its truth than to every distractor, by pixel L2.

    With N - 1 distractors, a guess that does not depend on the victim succeeds with probability 1/N
    if victim and distractors are exchangeable. Ties, up to `TIE`, are failures.

    Args:
        guess: Guesses, (B, *shape).
        truth: Private examples, (B, *shape).
        pool: Distractors of each example, (B, N - 1, *shape).

    References:
        Yin et al., "See through Gradients: Image Batch Recovery via GradInversion", CVPR 2021,
        https://arxiv.org/abs/2104.07586 (image identifiability precision).
    """
    _check_same_shape(guess, truth)
    _check_pool(pool, truth)
    own = _distance(guess, truth)
    # One victim at a time: all pools together may not fit into memory in double precision.
    pairs = zip(guess, pool, strict=True)
    nearest = [_distance(one[None], candidates).amin() for one, candidates in pairs]
    return own + TIE < torch.stack(nearest) if nearest else own < 0


def identified_tokens(
    guess: Tensor, truth: Tensor, pool: Tensor, padding: int | None = None
) -> Tensor:
    """Return whether each guess is nearer to its truth than to all distractors.

    The measure is `token_distance`. Chance is as in `identified`, and ties are failures. With ties,
    a blind guess succeeds less often than 1/N.
    """
    _check_same_shape(guess, truth)
    _check_pool(pool, truth)
    distance = token_distance(guess, torch.cat([truth[:, None], pool], dim=1), padding)
    return distance[:, 0] + TIE < distance[:, 1:].amin(dim=1)


def _numbered(tokens: Tensor, real: Tensor) -> Tensor:
    """Return the sorted tokens of sequences, each combined with its count among equal ones.

    The common tokens of two sequences, as multisets, are then equal numbers. -1 is not a token.
    """
    length = tokens.shape[-1]
    ordered = torch.where(real & (tokens >= 0), tokens, -1).sort(dim=-1).values
    before = torch.arange(length, device=tokens.device) - torch.searchsorted(ordered, ordered)
    return torch.where(ordered >= 0, ordered * length + before, -1)


def _pixels(values: Tensor) -> Tensor:
    return values.double().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)


def _amplitudes(values: Tensor) -> Tensor:
    return values.double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0).clamp(-1, 1)


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the root-mean-square distance of each pair along the first axis."""
    return (_pixels(x) - _pixels(y)).flatten(1).square().mean(1).sqrt()


def _gaussian_window(size: int, sigma: float = 1.5) -> Tensor:
    offset = torch.arange(size, dtype=torch.float64) - size // 2
    weight = torch.exp(-(offset**2) / (2 * sigma**2))
    return (weight / weight.sum())[None, None]


def _check_same_shape(guess: Tensor, truth: Tensor) -> None:
    if guess.shape != truth.shape:
        raise ValueError(
            f"guess must have the truth's shape {tuple(truth.shape)}, got {tuple(guess.shape)}"
        )


def _check_same_example_shape(guess: Tensor, truth: Tensor) -> None:
    if guess.shape[1:] != truth.shape[1:]:
        raise ValueError(
            f"guesses must have the truths' shape {tuple(truth.shape[1:])}, "
            f"got {tuple(guess.shape[1:])}"
        )


def _check_pool(pool: Tensor, truth: Tensor) -> None:
    expected = (len(truth), *truth.shape[1:])
    if not (pool.dim() >= 2 and pool.shape[1] >= 1 and (len(pool), *pool.shape[2:]) == expected):
        raise ValueError(
            f"pool must hold at least one distractor of shape {tuple(truth.shape[1:])} for each "
            f"of {len(truth)} examples, got shape {tuple(pool.shape)}"
        )
