from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leakfrontier.evaluate.client import decoders
from leakfrontier.evaluate.client.decoders import (
    Histories,
    best_decoder,
    plain_recovery,
    recovery,
    remaining_noise,
)

SIZES = (3000, 1000)
RNG = torch.Generator().manual_seed(0)
UPDATES = torch.randn(8, 4, sum(SIZES), generator=RNG) * torch.rand(sum(SIZES), generator=RNG)
NOISE = torch.randn(UPDATES.shape, generator=RNG)
PLACES = torch.randperm(sum(SIZES), generator=RNG)
FACTORS = (3 * torch.randn(sum(SIZES), generator=RNG)).exp()
SIGNS = torch.randint(2, (sum(SIZES),), generator=RNG, dtype=torch.int32) << 31
MASK = torch.randint(2**23, (sum(SIZES),), generator=RNG, dtype=torch.int32) | SIGNS


def integers(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def floats(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.float32)


def delayed(updates: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(updates[:, :1]), updates[:, :-1]], dim=1)


def alternating(updates: Tensor) -> Tensor:
    """Each upload is the update minus the upload before."""
    uploads = [NOISE[:, 0]]
    for turn in range(1, updates.shape[1]):
        uploads.append(updates[:, turn] - uploads[-1])
    return torch.stack(uploads, 1)


def smuggled(at: int) -> Callable[[Tensor], Tensor]:
    """Return a function that puts the leading bits of updates into some bits of noise."""

    def hide(updates: Tensor) -> Tensor:
        code = (integers(updates) >> 20) & 0xFFF
        return floats((integers(NOISE) & ~(0xFFF << at)) | (code << at))

    return hide


TRICKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "scaled": (
        lambda g: torch.cat([5 * g[..., :3000], -g[..., 3000:]], -1),
        "a factor per parameter of the upload",
    ),
    "factors": (lambda g: FACTORS * g, "a factor per entry of the upload"),
    "power": (lambda g: g.sign() * g.abs() ** 0.1, "a monotone function of the upload"),
    "low bits": (smuggled(0), "a table of bits 0 to 11 of the upload"),
    "middle bits": (smuggled(8), "a table of bits 8 to 19 of the upload"),
    "flipped": (lambda g: floats(integers(g) ^ MASK), "flipped bits of the upload"),
    "permuted": (lambda g: g[..., PLACES], "a permutation of the upload"),
    "late": (delayed, "a factor per parameter of the upload of the next round"),
    "late and permuted": (
        lambda g: delayed(g)[..., PLACES],
        "a permutation of the upload of the next round",
    ),
    "sums": (
        lambda g: NOISE[:, :1] + g.cumsum(1),
        "a factor per parameter of the difference of two uploads",
    ),
    "alternating": (alternating, "a factor per parameter of the sum of two uploads"),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_each_map_undoes_a_trick_that_one_factor_does_not(trick: str) -> None:
    hide, name = TRICKS[trick]
    uploads = hide(UPDATES)
    shares = {
        one.name: one.recovered for one in decoders.decoders(Histories(uploads, UPDATES, SIZES))
    }
    assert shares[name] > 0.85
    factor = (uploads * UPDATES).sum() / uploads.square().sum()
    scaled = (factor * uploads[4:, 1:]).flatten(0, 1)
    assert recovery(scaled, UPDATES[4:, 1:].flatten(0, 1), UPDATES[0]) < 0.65


@pytest.mark.parametrize("trick", TRICKS)
def test_the_best_decoder_decodes_clients_that_it_has_not_seen(trick: str) -> None:
    hide, _ = TRICKS[trick]
    uploads = hide(UPDATES)
    best = best_decoder(Histories(uploads[:6], UPDATES[:6], SIZES))
    decoder = best.fitted_on(Histories(uploads[:6], UPDATES[:6], SIZES))
    found = decoder.decode([*uploads[7]])
    assert recovery(found[None], UPDATES[7, 3 - best.lag][None], UPDATES[0]) > 0.85


def test_decoders_know_whether_one_upload_is_enough() -> None:
    for trick, needs in (("permuted", False), ("late", True), ("sums", True)):
        hide, _ = TRICKS[trick]
        best = best_decoder(Histories(hide(UPDATES), UPDATES, SIZES))
        assert best.needs_history == needs
    with pytest.raises(ValueError, match="needs 2 uploads, got 1"):
        best.decode([UPDATES[0, 0]])


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_noise_leaves_what_the_upload_shows(scale: float) -> None:
    histories = Histories(UPDATES + scale * NOISE, UPDATES, SIZES)
    plain = plain_recovery(histories)
    assert best_decoder(histories).recovered == pytest.approx(plain, abs=0.05)
    energy = UPDATES.square().mean()
    assert plain == pytest.approx(float(energy / (energy + scale**2)), abs=0.1)


def test_nothing_is_recovered_from_noise() -> None:
    assert best_decoder(Histories(NOISE, UPDATES, SIZES)).recovered < 0.05
    assert plain_recovery(Histories(NOISE, UPDATES, SIZES)) < 0.05
    assert best_decoder(Histories(torch.zeros_like(NOISE), UPDATES, SIZES)).recovered < 1e-3


def test_maps_are_chosen_on_a_sample_and_then_fitted_on_all_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoders, "ENTRIES", 1000)
    monkeypatch.setattr(decoders, "MOST_ENTRIES", 3000)
    histories = Histories(FACTORS * UPDATES, UPDATES, SIZES)
    assert sum(histories.sampled().sizes) == 1000
    assert 700 < histories.sampled().sizes[0] < 800
    best = best_decoder(histories)
    assert best.name == "a factor per entry of the upload"
    torch.testing.assert_close(
        best.fitted_on(histories).decode([FACTORS * UPDATES[0, 0]]),
        UPDATES[0, 0],
        rtol=1e-3,
        atol=1e-5,
    )
    assert not any("permutation" in one.name for one in decoders.decoders(histories))


def test_recovery_counts_updates_alike_and_ignores_what_is_known_anyway() -> None:
    known = UPDATES[:4, 0]
    sought = torch.cat([1000 * UPDATES[4:5, 0], UPDATES[5:6, 0]])
    assert recovery(sought, sought, known) == 1
    half = torch.stack([sought[0], torch.zeros_like(sought[0])])
    assert recovery(half, sought, known) == pytest.approx(0.5, abs=0.01)
    same = torch.ones(4, 10)
    assert recovery(same[:2], same[:2] + 0.1 * NOISE[0, :2, :10], same) == 0
    assert recovery(torch.full_like(sought, torch.nan), sought, known) == 0


def test_noise_that_cancels_over_rounds_is_measured() -> None:
    fresh = torch.randn(UPDATES.shape, generator=RNG)
    cancelling = torch.cat([fresh[:, :1], fresh.diff(dim=1)], 1)
    assert remaining_noise(Histories(UPDATES + fresh, UPDATES, SIZES)) == pytest.approx(1, abs=0.1)
    found = remaining_noise(Histories(UPDATES + cancelling, UPDATES, SIZES))
    assert found == pytest.approx(1 / 7, abs=0.02)
    repeated = fresh[:, :1].expand_as(fresh)
    assert remaining_noise(Histories(UPDATES + repeated, UPDATES, SIZES)) > 3
    assert remaining_noise(Histories(2 * UPDATES, UPDATES, SIZES)) == 1


@pytest.mark.parametrize(("clients", "rounds"), [(3, 4), (4, 1)])
def test_too_few_pairs_are_refused(clients: int, rounds: int) -> None:
    few = UPDATES[:clients, :rounds]
    with pytest.raises(ValueError, match=f"got {clients} in {rounds}"):
        best_decoder(Histories(few, few, SIZES))
