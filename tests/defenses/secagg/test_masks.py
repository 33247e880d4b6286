import numpy as np
import pytest
from Crypto.Cipher import AES

from leakfrontier.defenses.secagg.masks import add_masks, keystream

KEYS = [bytes([number]) * 16 for number in range(5)]


def reference(key: bytes, size: int, dtype: type) -> np.ndarray:
    """Return a keystream by another implementation."""
    cipher = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0)
    return np.frombuffer(cipher.encrypt(bytes(size * np.dtype(dtype).itemsize)), dtype)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 10, 2**15, 2**15 + 1, 100_003])
def test_the_keystream_is_that_of_another_implementation(size: int, dtype: type) -> None:
    found = keystream(KEYS[1], np.ones(size, dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, reference(KEYS[1], size, dtype))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("size", [7, 50_000, 16 * 2**15, 600_003])
def test_masks_are_added_and_subtracted_in_the_ring(size: int, threads: int, dtype: type) -> None:
    vector = np.random.default_rng(0).integers(np.iinfo(dtype).max, size=size, dtype=dtype)
    expected = vector.copy()
    for key in KEYS[:3]:
        expected += reference(key, size, dtype)
    for key in KEYS[3:]:
        expected -= reference(key, size, dtype)
    add_masks(vector, KEYS[:3], KEYS[3:], threads)
    np.testing.assert_array_equal(vector, expected)


def test_what_is_added_and_subtracted_cancels() -> None:
    vector = np.arange(40_000, dtype=np.uint32)
    add_masks(vector, KEYS, KEYS[::-1], threads=2)
    np.testing.assert_array_equal(vector, np.arange(40_000))
