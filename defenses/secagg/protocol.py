"""The parties and messages of secure aggregation, by double masking.

This is one round for clients `u` with vectors `x_u` of integers modulo R. It follows [1], without
its steps against an active adversary:

0. Every client advertises two public keys, one for encryption and one for masks. It also commits to
   the two secrets that it will share.
1. Every client shares its mask key and a seed `b_u` among its neighbours (Shamir), encrypted. If
   clients compare models, a digest of the received model accompanies the shares. If a neighbour's
   digest differs, a client refuses to continue before it has uploaded anything.
2. Every client uploads `y_u = x_u + PRG(b_u) + sum_{v>u} PRG(s_uv) - sum_{v<u} PRG(s_uv)`,
   where `u` and `v` agree on `s_uv`.
3. The server lists the clients whose upload arrived. Clients send it their shares of the
   survivors' seeds and of the lost clients' mask keys. They never send both for one client: with
   both, the server could unmask a vector that arrives late. The server checks the recovered
   secrets against the commitments, which detects altered shares. It then removes the masks from
   the sum.

A server may tell some clients that `u` survived, and others that it is lost. It gets both secrets
of `u` if each has enough shares among the holders. So the threshold must exceed half of the
holders. Clients refuse to share below that.

In [1], every two clients are neighbours. In [2], each client has only a few neighbours, and the
cost grows with their number instead of the number of clients.

The ring follows from the vectors' unsigned type: R = 2^32 or 2^64. Keys are agreed on by X25519 and
HKDF-SHA256. PRG is AES-128 in counter mode (`masks`). Secrets are shared over a prime field
(`shamir`). Shares are encrypted with AES-GCM.

The server is honest but curious. Public keys are not signed, so a malicious server could intercept
the messages between clients. The comparison of models assumes authenticated keys, as by the
signatures of [1]. A server that colludes with `threshold` neighbours of a client can unmask it.

References:
    [1] Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. "Practical
        Secure Aggregation for Privacy-Preserving Machine Learning." CCS 2017.
        https://eprint.iacr.org/2017/281
    [2] Bell, Bonawitz, Gascón, Lepoint, Raykova. "Secure Single-Server Aggregation with
        (Poly)Logarithmic Overhead." CCS 2020. https://eprint.iacr.org/2020/704
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .keys import agree, mask_key, pairwise_keys, public
from .masks import KEY_BYTES, Vector, add_masks
from .shamir import RandomBytes, Share, combine, commitment, share_bytes, split

Graph = Mapping[int, frozenset[int]]
"""Each client's neighbours, with whom it shares masks and keys."""

_NONCE_BYTES = 12
_NUMBER_BYTES = 4
_SHARE_BYTES = _NUMBER_BYTES + share_bytes(KEY_BYTES)


class TooFewClients(ValueError):
    """Fewer clients are left than the threshold. The round is aborted, and its masks stay on."""


class UnsafeRequest(ValueError):
    """A request that could unmask a vector of the client or of a peer."""


class OtherModel(ValueError):
    """A neighbour received a different model from this client's."""


class TamperedShares(ValueError):
    """Encrypted shares differ from those that the peer sent to this client."""


class PublicKeys(NamedTuple):
    """The public keys and commitments that a client advertises.

    Attributes:
        encryption: Public key for encrypting shares to the client.
        masks: Public key for agreeing on pairwise masks with the client.
        self_seed: Commitment to its self-mask seed.
        mask_seed: Commitment to the seed of its mask key.
    """

    encryption: bytes
    masks: bytes
    self_seed: bytes
    mask_seed: bytes


class Request(NamedTuple):
    """The server's request to a client for unmasking the sum. It names the client and neighbours.

    Attributes:
        survivors: Clients whose masked vector arrived.
        lost: Clients that shared their keys, but whose masked vector did not arrive.
    """

    survivors: frozenset[int]
    lost: frozenset[int]


class Reply(NamedTuple):
    """Shares that a client reveals, by the owner of the secret.

    Attributes:
        self_seeds: Shares of the survivors' self-mask seeds.
        mask_seeds: Shares of the lost clients' mask keys.
    """

    self_seeds: dict[int, Share]
    mask_seeds: dict[int, Share]


class _PeerShares(NamedTuple):
    """A client's shares of both of a peer's secrets."""

    of_self_seed: Share
    of_mask_seed: Share


class Participant:
    """One client in one round. Its secrets are never used for a second round.

    Attributes:
        index: Its number among the clients.
        threshold: Number of shares that recover a secret. With fewer clients, it reveals nothing.
        digest: Digest of the model that it received; empty if clients do not compare.
    """

    def __init__(
        self,
        index: int,
        threshold: int,
        randbytes: RandomBytes = os.urandom,
        digest: bytes = b"",
    ) -> None:
        if not threshold >= 2:  # a single share would be the secret itself
            raise ValueError(f"threshold must be at least 2, got {threshold}")
        self.index, self.threshold, self.digest = index, threshold, digest
        self._randbytes = randbytes
        self._encryption_key = X25519PrivateKey.from_private_bytes(randbytes(32))
        self._mask_seed = randbytes(KEY_BYTES)  # the mask key derives from this secret
        self._self_seed = randbytes(KEY_BYTES)
        self._peers: Mapping[int, PublicKeys] = {}
        self._channels: dict[int, AESGCM] = {}
        self._shares: dict[int, _PeerShares] = {}
        self._gave_self_seed: set[int] = set()
        self._gave_mask_seed: set[int] = set()
        self._has_masked = False

    @property
    def public_keys(self) -> PublicKeys:
        """Return the public keys and commitments that it advertises."""
        return PublicKeys(
            public(self._encryption_key),
            public(mask_key(self._mask_seed)),
            commitment(self._self_seed),
            commitment(self._mask_seed),
        )

    def share(self, peers: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Return encrypted shares of its two secrets for each neighbour. It keeps one share itself.

        Raises:
            UnsafeRequest: If the threshold is at most half of the holders of shares.
            TooFewClients: If there are fewer holders than the threshold.
        """
        holders = sorted({*peers, self.index})
        check_enough(len(holders), self.threshold, f"share the keys of client {self.index}")
        if not 2 * self.threshold > len(holders):
            raise UnsafeRequest(
                f"a threshold of {self.threshold} must be above half of the {len(holders)} holders "
                "of shares: a server that tells them different lists of survivors could get both "
                "secrets of a client"
            )
        self._peers = dict(peers)
        self._channels = {peer: self._channel(keys) for peer, keys in peers.items()}
        of_both = (
            split(secret, self.threshold, len(holders), self._randbytes)
            for secret in (self._self_seed, self._mask_seed)
        )
        shares = {
            holder: _PeerShares(*pair) for holder, *pair in zip(holders, *of_both, strict=True)
        }
        self._shares[self.index] = shares.pop(self.index)
        return {peer: self._encrypt(peer, share) for peer, share in shares.items()}

    def receive(self, ciphertexts: Mapping[int, bytes]) -> None:
        """Store the shares of the neighbours that sent any. The others are out of the round.

        Raises:
            OtherModel: If one of them received a different model.
        """
        self._shares |= {peer: self._decrypt(peer, text) for peer, text in ciphertexts.items()}

    def mask(self, vector: Vector, threads: int = 1) -> Vector:
        """Return the upload: the vector under its self mask and its pairwise masks."""
        check_enough(len(self._shares), self.threshold, f"hide the vector of client {self.index}")
        if self._has_masked:
            raise UnsafeRequest(
                f"client {self.index} masks one vector per round: two vectors under the same masks "
                "would reveal their difference"
            )
        self._has_masked = True
        peers = {peer: self._peers[peer].masks for peer in self._shares if peer != self.index}
        added, subtracted = pairwise_keys(self.index, self._mask_seed, peers)
        masked = vector.copy()
        add_masks(masked, [self._self_seed, *added], subtracted, threads)
        return masked

    def reveal(self, request: Request) -> Reply:
        """Return its shares of the survivors' self seeds and of the lost clients' mask keys.

        Raises:
            UnsafeRequest: If it would then have revealed its shares of both secrets of one client.
            TooFewClients: If fewer clients than the threshold survived in its neighbourhood.
        """
        survivors, lost = (self._shares.keys() & part for part in request)
        check_enough(len(survivors), self.threshold, "unmask the sum")
        if survivors & lost:
            raise UnsafeRequest(
                f"clients {sorted(survivors & lost)} cannot be both survivors and lost"
            )
        both = survivors & self._gave_mask_seed | lost & self._gave_self_seed
        if both:
            raise UnsafeRequest(
                f"client {self.index} already revealed its share of the other secret of clients "
                f"{sorted(both)}, and never reveals both"
            )
        self._gave_self_seed |= survivors
        self._gave_mask_seed |= lost
        return Reply(
            {owner: self._shares[owner].of_self_seed for owner in survivors},
            {owner: self._shares[owner].of_mask_seed for owner in lost},
        )

    def _encrypt(self, peer: int, share: _PeerShares) -> bytes:
        plain = b"".join(number.to_bytes(_NUMBER_BYTES) + value for number, value in share)
        nonce = self._randbytes(_NONCE_BYTES)
        sealed = self._channels[peer].encrypt(nonce, plain + self.digest, _route(self.index, peer))
        return nonce + sealed

    def _decrypt(self, peer: int, text: bytes) -> _PeerShares:
        nonce, sealed = text[:_NONCE_BYTES], text[_NONCE_BYTES:]
        try:
            plain = self._channels[peer].decrypt(nonce, sealed, _route(peer, self.index))
        except InvalidTag:
            raise TamperedShares(
                f"the shares from client {peer} to client {self.index} were altered in transit"
            ) from None
        first, second, digest = (
            plain[:_SHARE_BYTES],
            plain[_SHARE_BYTES : 2 * _SHARE_BYTES],
            plain[2 * _SHARE_BYTES :],
        )
        if digest != self.digest:
            raise OtherModel(f"clients {self.index} and {peer} were sent different models")
        return _PeerShares(_parse(first), _parse(second))

    def _channel(self, peer: PublicKeys) -> AESGCM:
        return AESGCM(agree(self._encryption_key, peer.encryption, b"shares"))


class Aggregator:
    """Relays messages, adds masked vectors up, and removes the masks from their sum.

    Attributes:
        graph: The neighbours of each client.
        threshold: Number of shares that recover a secret.
        masked: The masked vectors that arrived. It never holds any other vector of a client.
    """

    def __init__(self, graph: Graph, threshold: int) -> None:
        self.graph, self.threshold = graph, threshold
        self.masked: dict[int, Vector] = {}
        self._keys: dict[int, PublicKeys] = {}
        self._shared: frozenset[int] = frozenset()

    def relay_keys(self, keys: Mapping[int, PublicKeys]) -> dict[int, dict[int, PublicKeys]]:
        """Return, for each client that advertised its keys, the keys of its neighbours."""
        self._keys = dict(keys)
        return {u: {v: keys[v] for v in self.graph[u] if v in keys} for u in keys}

    def relay_shares(self, sent: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Return, for each client that shared its keys, the shares that its neighbours sent."""
        self._shared = frozenset(sent)
        return {u: {v: sent[v][u] for v in self.graph[u] if v in sent} for u in sent}

    def collect(self, masked: Mapping[int, Vector]) -> dict[int, Request]:
        """Store the masked vectors. Return the request to each client that sent one."""
        self.masked = dict(masked)
        survivors = frozenset(masked)
        lost = self._shared - survivors
        around = {u: self.graph[u] | {u} for u in survivors}
        return {u: Request(near & survivors, near & lost) for u, near in around.items()}

    def unmask(self, replies: Mapping[int, Reply], threads: int = 1) -> Vector:
        """Return the sum of the vectors of all clients whose masked vector arrived.

        Raises:
            TooFewClients: If a secret has fewer shares than the threshold. Then none is recovered.
            AlteredShares: If shares do not recover the secret that their owner committed to.
        """
        survivors = self.masked.keys()
        check_enough(len(survivors), self.threshold, "unmask the sum")
        lost = self._shared - survivors
        self_shares = self._gather(survivors, [reply.self_seeds for reply in replies.values()])
        mask_shares = self._gather(lost, [reply.mask_seeds for reply in replies.values()])

        first, *others = self.masked.values()
        total = first.copy()
        for masked in others:
            total += masked
        self_seeds = [combine(s, self._keys[u].self_seed) for u, s in self_shares.items()]
        mask_seeds = {v: combine(s, self._keys[v].mask_seed) for v, s in mask_shares.items()}
        add_masks(total, [], self_seeds, threads)
        for v, seed in mask_seeds.items():
            # What the lost client would have added cancels what its neighbours added.
            peers = {u: self._keys[u].masks for u in self.graph[v] & survivors}
            add_masks(total, *pairwise_keys(v, seed, peers), threads)
        return total

    def _gather(
        self, owners: Iterable[int], revealed: Sequence[Mapping[int, Share]]
    ) -> dict[int, list[Share]]:
        """Return enough shares of each owner's secret to recover it."""
        gathered = {owner: [held[owner] for held in revealed if owner in held] for owner in owners}
        for owner, shares in gathered.items():
            check_enough(len(shares), self.threshold, f"recover the secret of client {owner}")
        return {owner: shares[: self.threshold] for owner, shares in gathered.items()}


@dataclass(frozen=True)
class ServerView:
    """What the server holds at the end of a round.

    Attributes:
        masked: Each surviving client's masked vector.
        total: The sum of the survivors' vectors.
    """

    masked: Mapping[int, Vector]
    total: Vector


def aggregate(
    vectors: Iterable[Vector],
    graph: Graph,
    threshold: int,
    *,
    lost_before_masking: Collection[int] = (),
    lost_after_masking: Collection[int] = (),
    digests: Sequence[bytes] | None = None,
    randbytes: RandomBytes = os.urandom,
    threads: int = 1,
) -> ServerView:
    """Run one round among clients that all share their keys, and return what the server holds.

    Args:
        vectors: Each client's vector, in the order of their numbers. An iterator makes each vector
            when it is needed.
        graph: The neighbours of each client, e.g. a `circular_graph`.
        threshold: Number of shares that recover a secret, held by a client and its neighbours.
        lost_before_masking: Clients whose masked vector never arrives. They are not in the sum.
        lost_after_masking: Clients that are in the sum, but do not help to unmask it.
        digests: Digest of the model that each client received, if they compare.
        randbytes: Source of the clients' secrets.
        threads: Number of threads that make masks.

    Raises:
        OtherModel: If neighbours received different models. The round is aborted.
        UnsafeRequest: If the threshold is at most half of a client's neighbours and itself.
        TooFewClients: If more clients are lost than the threshold allows.
    """
    server = Aggregator(graph, threshold)
    digests = digests or [b""] * len(graph)
    clients = {u: Participant(u, threshold, randbytes, digest) for u, digest in enumerate(digests)}
    keys = server.relay_keys({u: client.public_keys for u, client in clients.items()})
    inboxes = server.relay_shares({u: clients[u].share(peers) for u, peers in keys.items()})
    for u, inbox in inboxes.items():
        clients[u].receive(inbox)
    masked = {
        u: client.mask(vector, threads)
        for (u, client), vector in zip(clients.items(), vectors, strict=True)
        if u not in lost_before_masking
    }
    requests = server.collect(masked)
    replies = {
        u: clients[u].reveal(asked) for u, asked in requests.items() if u not in lost_after_masking
    }
    total = server.unmask(replies, threads)
    return ServerView(server.masked, total)


def circular_graph(order: Sequence[int], neighbours: int | None = None) -> Graph:
    """Connect each client to its nearest clients around a circle, half of them on either side.

    Args:
        order: The clients around the circle. In a random order, as in [2], clients cannot choose
            their neighbours.
        neighbours: Number of neighbours of each client, even; None connects all with all.
    """
    count = len(order)
    reach = count // 2 if neighbours is None else min(neighbours, count) // 2
    return {
        u: frozenset(order[(place + step) % count] for step in range(-reach, reach + 1)) - {u}
        for place, u in enumerate(order)
    }


def _parse(share: bytes) -> Share:
    return int.from_bytes(share[:_NUMBER_BYTES]), share[_NUMBER_BYTES:]


def _route(sender: int, recipient: int) -> bytes:
    """Return the text that binds a ciphertext to its sender and recipient."""
    return sender.to_bytes(_NUMBER_BYTES) + recipient.to_bytes(_NUMBER_BYTES)


def check_enough(count: int, threshold: int, purpose: str) -> None:
    """Raise `TooFewClients` if a count is below a threshold."""
    if not count >= threshold:
        raise TooFewClients(
            f"at least {threshold} clients are needed to {purpose}, got {count}: "
            "the round is aborted and nothing is unmasked"
        )
