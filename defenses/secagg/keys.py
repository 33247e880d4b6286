"""Key agreement of secure aggregation: X25519, and HKDF-SHA256 for one key per purpose."""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .masks import KEY_BYTES


def public(key: X25519PrivateKey) -> bytes:
    """Return a key's public part."""
    return key.public_key().public_bytes_raw()


def agree(key: X25519PrivateKey, public_key: bytes, purpose: bytes) -> bytes:
    """Return the secret that the owners of two keys share, for one purpose."""
    secret = key.exchange(X25519PublicKey.from_public_bytes(public_key))
    return _derive(secret, purpose, KEY_BYTES)


def mask_key(seed: bytes) -> X25519PrivateKey:
    """Return the key of a client's pairwise masks, derived from the seed that it shares."""
    return X25519PrivateKey.from_private_bytes(_derive(seed, b"mask key", 32))


def pairwise_keys(
    own: int, mask_seed: bytes, peers: Mapping[int, bytes]
) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of the masks that a client adds, and of those that it subtracts.

    One of two clients adds what the other subtracts, so the masks cancel in their sum.
    """
    key = mask_key(mask_seed)
    agreed = {peer: agree(key, public_key, b"mask") for peer, public_key in peers.items()}
    return (
        [secret for peer, secret in agreed.items() if peer > own],
        [secret for peer, secret in agreed.items() if peer < own],
    )


def _derive(secret: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=purpose).derive(secret)
