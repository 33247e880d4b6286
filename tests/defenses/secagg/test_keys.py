import pytest
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from leakfrontier.defenses.secagg.keys import agree, mask_key, pairwise_keys, public
from leakfrontier.defenses.secagg.masks import KEY_BYTES

ALICE, BOB, EVE = (X25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))


def test_two_clients_agree_and_a_third_does_not() -> None:
    assert len(agree(ALICE, public(BOB), b"mask")) == KEY_BYTES
    assert agree(ALICE, public(BOB), b"mask") == agree(BOB, public(ALICE), b"mask")
    assert agree(ALICE, public(BOB), b"mask") != agree(EVE, public(BOB), b"mask")


def test_every_purpose_has_a_key_of_its_own() -> None:
    assert agree(ALICE, public(BOB), b"mask") != agree(ALICE, public(BOB), b"shares")


def test_the_key_is_that_of_another_implementation() -> None:
    secret = ALICE.exchange(X25519PublicKey.from_public_bytes(public(BOB)))
    theirs = HKDF(secret, KEY_BYTES, b"", SHA256, context=b"mask")
    assert agree(ALICE, public(BOB), b"mask") == theirs


def test_masks_follow_from_the_secret_that_a_client_shares() -> None:
    assert public(mask_key(b"seed")) == public(mask_key(b"seed"))
    assert public(mask_key(b"seed")) != public(mask_key(b"other"))


def test_of_two_clients_one_adds_what_the_other_subtracts() -> None:
    seeds = {client: bytes([client]) * 16 for client in (3, 5, 9)}
    keys = {client: public(mask_key(seed)) for client, seed in seeds.items()}
    added: list[bytes] = []
    subtracted: list[bytes] = []
    counts = []
    for own, seed in seeds.items():
        peers = {peer: key for peer, key in keys.items() if peer != own}
        more, less = pairwise_keys(own, seed, peers)
        added += more
        subtracted += less
        counts.append((len(more), len(less)))
    assert counts == [(2, 0), (1, 1), (0, 2)]
    assert sorted(added) == sorted(subtracted)
    assert len({*added}) == 3  # each pair has its own


def test_a_public_key_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        agree(ALICE, b"short", b"mask")
    with pytest.raises(ValueError, match="shared key"):
        agree(ALICE, bytes(32), b"mask")  # whose secret everybody would know
