from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chisquare

from leakfrontier.defenses.secagg.shamir import (
    PRIME,
    AlteredShares,
    Share,
    combine,
    commitment,
    share_bytes,
    split,
)

SECRET = bytes(range(240, 256))
COMMITTED = commitment(SECRET)


def seeded(seed: int = 0):  # noqa: ANN201
    return np.random.default_rng(seed).bytes


def values(share: Share) -> list[int]:
    return np.frombuffer(share[1], "<u4").tolist()


@pytest.mark.parametrize("secret", [SECRET, bytes(16), b"\xff" * 16])
@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (2, 2), (3, 6), (67, 100)])
def test_the_threshold_recovers_the_secret(secret: bytes, threshold: int, holders: int) -> None:
    shares = split(secret, threshold, holders, seeded())
    assert [number for number, _ in shares] == list(range(1, holders + 1))
    assert all(len(value) == share_bytes(16) for _, value in shares)
    assert combine(shares[-threshold:], commitment(secret)) == secret
    assert combine(shares[:threshold][::-1], commitment(secret)) == secret


def test_every_set_of_holders_will_do_and_none_that_is_smaller() -> None:
    shares = split(SECRET, 3, 6, seeded())
    assert all(combine(some, COMMITTED) == SECRET for some in combinations(shares, 3))
    assert all(combine(some, COMMITTED) == SECRET for some in combinations(shares, 5))
    for some in combinations(shares, 2):
        with pytest.raises(AlteredShares):
            combine(some, COMMITTED)


def test_shares_are_values_of_one_polynomial_in_exact_arithmetic() -> None:
    holders, threshold, words = 900, 700, np.frombuffer(SECRET, "<u2").tolist()
    shares = split(SECRET, threshold, holders, seeded())
    drawn = np.frombuffer(seeded()(4 * (threshold - 1) * 8), "<u4").reshape(threshold - 1, 8)
    for number in (1, 2, 450, holders):
        for place, word in enumerate(words):
            polynomial = [word, *drawn[:, place].tolist()]
            exact = sum(c * pow(number, k, PRIME) for k, c in enumerate(polynomial)) % PRIME
            assert values(shares[number - 1])[place] == exact
    assert combine(shares[-threshold:], COMMITTED) == SECRET


@pytest.mark.parametrize("secret", [bytes(16), b"\xff" * 16])
def test_shares_below_the_threshold_are_uniform_whatever_the_secret(secret: bytes) -> None:
    draws = seeded(1)
    pairs = [split(secret, 3, 5, draws)[:2] for _ in range(4000)]
    for holder in range(2):
        seen = np.array([values(pair[holder]) for pair in pairs]) * 64 // PRIME
        assert chisquare(np.bincount(seen.ravel(), minlength=64)).pvalue > 1e-6
    joint = np.array([[values(share)[0] for share in pair] for pair in pairs]) * 8 // PRIME
    assert chisquare(np.bincount(joint @ [8, 1], minlength=64)).pvalue > 1e-6


def test_what_cannot_be_an_element_of_the_field_is_drawn_again() -> None:
    asked = []

    def largest_first(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * 4 + bytes(count - 4) if len(asked) == 1 else bytes(count)

    shares = split(SECRET, 2, 3, largest_first)
    assert asked == [32, 4]
    assert combine(shares[1:], COMMITTED) == SECRET


@pytest.mark.parametrize("given", [3, 4, 6], ids=["no share to spare", "one", "all"])
@pytest.mark.parametrize("altered", [1, 3], ids=["one altered", "as many as the threshold"])
def test_altered_shares_are_detected(given: int, altered: int) -> None:
    shares = split(SECRET, 3, 6, seeded())[:given]
    others = split(bytes(16), 3, 6, seeded(1))
    changed = [*others[:altered], *shares[altered:]]
    with pytest.raises(AlteredShares, match="one was altered, or there are too few"):
        combine(changed, COMMITTED)
    number, value = shares[0]
    for place in range(len(value)):
        flipped = bytearray(value)
        flipped[place] ^= 1
        with pytest.raises(AlteredShares):
            combine([(number, bytes(flipped)), *shares[1:]], COMMITTED)


def test_sets_of_shares_that_cannot_be_are_refused() -> None:
    shares = split(SECRET, 2, 3, seeded())
    with pytest.raises(ValueError, match=r"of different holders, got \[2, 2\]"):
        combine([shares[1], shares[1]], COMMITTED)
    zero, one = (np.full(8, value, "<u4").tobytes() for value in (0, 1))
    with pytest.raises(AlteredShares):
        combine([(1, zero), (2, one)], COMMITTED)  # of -1, that is 2^16, which is no word


@pytest.mark.parametrize(("threshold", "holders"), [(0, 3), (4, 3), (2, PRIME)])
def test_rejects_thresholds_that_cannot_be(threshold: int, holders: int) -> None:
    with pytest.raises(ValueError, match=rf"got {threshold} of {holders}"):
        split(SECRET, threshold, holders, seeded())
