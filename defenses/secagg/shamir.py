"""Shamir's secret sharing, for all words of a secret at once.

A secret is cut into words of 16 bits. Each word is the value at 0 of a polynomial over the field of
integers modulo 65537. The polynomial has degree `threshold` - 1 and uniform coefficients. Its
values at 1, 2, ... are the holders' shares. `threshold` shares determine the secret. Fewer shares
reveal nothing, because they are uniform for every secret.

An altered share would give a different secret, as a cheating holder may want [2]. Hence, as in
verifiable secret sharing [3], the owner publishes a commitment that the recovered secret must
match. Here it is a hash of the secret. As a random oracle, it hides a uniform secret of 128 bits,
and nobody can find another secret that matches. It detects any number of altered shares, even
among only `threshold` shares. It does not show which shares were altered.

References:
    [1] Shamir. "How to Share a Secret." Communications of the ACM 22(11), 1979.
    [2] Tompa, Woll. "How to Share a Secret with Cheaters." Journal of Cryptology 1, 1988.
    [3] Feldman. "A Practical Scheme for Non-interactive Verifiable Secret Sharing." FOCS 1987.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest

import numpy as np
from numpy.typing import NDArray

Share = tuple[int, bytes]
"""A share and its number, starting from 1."""

RandomBytes = Callable[[int], bytes]
"""Source of secrets: returns the requested number of random bytes."""

PRIME = 2**16 + 1
"""Size of the field: a prime above every word and above the number of holders."""

_WORD, _VALUE = np.dtype("<u2"), np.dtype("<u4")  # a value of the field may be 2^16


class AlteredShares(ValueError):
    """Shares do not recover the secret that its owner committed to."""


def commitment(secret: bytes) -> bytes:
    """Return a commitment to a uniform secret, which does not reveal it."""
    return sha256(b"commitment to a shared secret" + secret).digest()


def share_bytes(secret_bytes: int) -> int:
    """Return the length of a share of a secret, without its number."""
    return secret_bytes // _WORD.itemsize * _VALUE.itemsize


def split(secret: bytes, threshold: int, holders: int, randbytes: RandomBytes) -> list[Share]:
    """Return a share for each holder. Any `threshold` of them recover the secret."""
    if not 1 <= threshold <= holders < PRIME:
        raise ValueError(
            f"threshold must be in [1, holders] and holders below {PRIME}, got {threshold} of "
            f"{holders}"
        )
    words = np.frombuffer(secret, _WORD)
    drawn = _uniform((threshold - 1) * words.size, randbytes)
    coefficients = np.concatenate([words, drawn]).reshape(threshold, words.size)
    # These sum fewer than 2^17 products below 2^33 each, so floating point is exact, and fast.
    values = _powers(holders, threshold) @ coefficients.astype(np.float64) % PRIME
    return [(number, row.tobytes()) for number, row in enumerate(values.astype(_VALUE), start=1)]


def combine(shares: Sequence[Share], committed: bytes) -> bytes:
    """Return the secret, given at least as many shares as its threshold.

    Args:
        shares: At least as many as the threshold, of different holders.
        committed: The owner's `commitment` to the secret.

    Raises:
        AlteredShares: If they do not recover it: one is altered, or there are too few.
    """
    numbers, values = zip(*shares, strict=True)
    if not len(set(numbers)) == len(numbers):
        raise ValueError(f"shares must be of different holders, got {sorted(numbers)}")
    matrix = np.frombuffer(b"".join(values), _VALUE).reshape(len(shares), -1)
    words = _weights(numbers) @ matrix.astype(np.float64) % PRIME
    are_words = words.max(initial=0) < 2**16
    secret = words.astype(_WORD).tobytes() if are_words else b""
    if not compare_digest(commitment(secret), committed):
        raise AlteredShares(
            f"the shares of holders {sorted(numbers)} do not recover the secret that its owner "
            "committed to: one was altered, or there are too few of them"
        )
    return secret


def _uniform(count: int, randbytes: RandomBytes) -> NDArray[np.uint32]:
    """Return uniform elements of the field."""
    kept = np.empty(0, _VALUE)
    while kept.size < count:
        drawn = np.frombuffer(randbytes(_VALUE.itemsize * (count - kept.size)), _VALUE)
        # 2^32 is 1 modulo the prime. Without the last value, all remainders are equally likely.
        kept = np.concatenate([kept, drawn[drawn < 2**32 - 1]])
    return kept % PRIME


@lru_cache(maxsize=8)
def _powers(holders: int, threshold: int) -> NDArray[np.float64]:
    """Return number^exponent, for every holder's number and every coefficient's exponent."""
    numbers = np.arange(1, holders + 1, dtype=np.uint64)
    powers = np.ones((holders, threshold), np.uint64)
    for exponent in range(1, threshold):
        powers[:, exponent] = powers[:, exponent - 1] * numbers % PRIME
    return powers.astype(np.float64)


@lru_cache(maxsize=256)
def _weights(numbers: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the factors of the shares with these numbers: Lagrange's polynomials at 0."""
    weights = []
    for own in numbers:
        above, below = 1, 1
        for other in numbers:
            if other != own:
                above, below = above * other % PRIME, below * (other - own) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return np.array(weights, np.float64)
