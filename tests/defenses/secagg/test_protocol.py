from collections.abc import Callable
from itertools import combinations
from time import process_time

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import chisquare

from leakfrontier.defenses.secagg.masks import Vector, keystream
from leakfrontier.defenses.secagg.protocol import (
    Aggregator,
    Graph,
    OtherModel,
    Participant,
    Request,
    TamperedShares,
    TooFewClients,
    UnsafeRequest,
    aggregate,
    circular_graph,
)
from leakfrontier.defenses.secagg.shamir import AlteredShares, combine, commitment

CLIENTS, THRESHOLD = 6, 4
EVERYBODY = frozenset(range(CLIENTS))


def vectors(count: int, length: int = 50, dtype: type = np.uint32) -> list[Vector]:
    """Return vectors over the whole ring, so that every sum wraps around."""
    draws = np.random.default_rng(0)
    return list(draws.integers(np.iinfo(dtype).max, size=(count, length), dtype=dtype))


def seeded(seed: int = 0):  # noqa: ANN201
    return np.random.default_rng(seed).bytes


def exact_sum(vectors: list[Vector], members: set[int] | frozenset[int]) -> list[int]:
    ring = int(np.iinfo(vectors[0].dtype).max) + 1
    return [sum(int(vectors[u][j]) for u in members) % ring for j in range(len(vectors[0]))]


def looks_uniform(vector: Vector) -> bool:
    """Return whether a chi-square test of the vector's bytes finds no fault, at 1e-6.

    That is strict for a flaw, whose p-value is 0 to many digits, and lenient for chance.
    """
    return bool(chisquare(np.bincount(vector.view(np.uint8), minlength=256)).pvalue > 1e-6)


def shared_round(
    graph: Graph | None = None, threshold: int = THRESHOLD
) -> tuple[Aggregator, list[Participant]]:
    """Play a round up to the point where every client holds its shares."""
    graph = graph or circular_graph(range(CLIENTS))
    server = Aggregator(graph, threshold)
    clients = [Participant(u, threshold, seeded(u)) for u in graph]
    keys = server.relay_keys({c.index: c.public_keys for c in clients})
    inboxes = server.relay_shares({c.index: c.share(keys[c.index]) for c in clients})
    for client in clients:
        client.receive(inboxes[client.index])
    return server, clients


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize(("count", "threshold"), [(2, 2), (3, 2), (7, 5)])
def test_the_sum_is_exact_in_the_ring(dtype: type, count: int, threshold: int) -> None:
    inputs = vectors(count, dtype=dtype)
    total = aggregate(inputs, circular_graph(range(count)), threshold).total
    assert total.dtype == dtype
    assert total.tolist() == exact_sum(inputs, set(range(count)))


@pytest.mark.parametrize("before", range(CLIENTS - THRESHOLD + 1))
@pytest.mark.parametrize("after", range(CLIENTS - THRESHOLD + 1))
def test_recovers_every_loss_that_leaves_the_threshold(before: int, after: int) -> None:
    inputs = vectors(CLIENTS)
    for lost in combinations(range(CLIENTS), before):
        left = sorted(EVERYBODY - set(lost))

        def run(lost: tuple[int, ...] = lost, left: list[int] = left) -> Vector:
            return aggregate(
                inputs,
                circular_graph(range(CLIENTS)),
                THRESHOLD,
                lost_before_masking=lost,
                lost_after_masking=left[:after],
                randbytes=seeded(),
            ).total

        if before + after <= CLIENTS - THRESHOLD:
            assert run().tolist() == exact_sum(inputs, set(left))
        else:
            with pytest.raises(TooFewClients, match="at least 4 clients are needed"):
                run()
            return


def test_clients_who_never_share_their_keys_are_left_out() -> None:
    inputs = vectors(CLIENTS)
    server = Aggregator(circular_graph(range(CLIENTS)), THRESHOLD)
    clients = [Participant(u, THRESHOLD, seeded(u)) for u in range(CLIENTS)]
    keys = server.relay_keys({c.index: c.public_keys for c in clients[1:]})
    inboxes = server.relay_shares({c.index: c.share(keys[c.index]) for c in clients[2:]})
    for client in clients[2:]:
        client.receive(inboxes[client.index])
    requests = server.collect({c.index: c.mask(inputs[c.index]) for c in clients[2:]})
    total = server.unmask({u: clients[u].reveal(asked) for u, asked in requests.items()})
    assert total.tolist() == exact_sum(inputs, {2, 3, 4, 5})


def test_below_the_threshold_no_client_reveals_anything() -> None:
    _, clients = shared_round()
    for client in clients[:3]:
        with pytest.raises(TooFewClients, match=r"4 clients are needed to unmask the sum, got 3"):
            client.reveal(Request(frozenset({0, 1, 2}), frozenset({3, 4, 5})))
        # It gave no share of anybody's self seed then, or this would be refused.
        assert client.reveal(Request(frozenset({2, 3, 4, 5}), frozenset({0, 1}))).mask_seeds


def test_below_the_threshold_the_server_recovers_nothing() -> None:
    server, clients = shared_round()
    requests = server.collect({c.index: c.mask(vectors(CLIENTS)[c.index]) for c in clients})
    replies = {u: clients[u].reveal(requests[u]) for u in range(THRESHOLD)}
    held = [reply.self_seeds[5] for reply in replies.values()]
    seed = clients[5]._self_seed
    assert combine(held, commitment(seed)) == seed
    with pytest.raises(AlteredShares):
        combine(held[:-1], commitment(seed))
    del replies[0]
    with pytest.raises(TooFewClients, match="recover the secret of client 0, got 3"):
        server.unmask(replies)


@pytest.mark.parametrize("lost", [0, 1], ids=["of a self seed", "of a mask key"])
def test_an_altered_share_gives_the_round_up(lost: int) -> None:
    server, clients = shared_round()
    arrived = clients[: CLIENTS - lost]
    requests = server.collect({c.index: c.mask(vectors(CLIENTS)[c.index]) for c in arrived})
    replies = {u: clients[u].reveal(asked) for u, asked in requests.items()}
    shares = replies[0].mask_seeds if lost else replies[0].self_seeds
    number, value = shares[5 if lost else 1]
    shares[5 if lost else 1] = (number, bytes([value[0] ^ 1]) + value[1:])
    with pytest.raises(AlteredShares, match="do not recover the secret"):
        server.unmask(replies)


@pytest.mark.parametrize(("holders", "threshold"), [(9, 3), (9, 4), (8, 4), (4, 2)])
def test_a_threshold_of_half_is_refused(holders: int, threshold: int) -> None:
    with pytest.raises(UnsafeRequest, match=rf"threshold of {threshold} must be above half of the"):
        shared_round(circular_graph(range(holders)), threshold)


@pytest.mark.parametrize(("holders", "threshold"), [(9, 5), (8, 5), (3, 2)])
def test_a_server_that_tells_two_stories_cannot_get_both_secrets(
    holders: int, threshold: int
) -> None:
    _, clients = shared_round(circular_graph(range(holders)), threshold)
    everybody, victim = frozenset(range(holders)), 0
    stories = [Request(everybody, frozenset()), Request(everybody - {victim}, frozenset({victim}))]
    for told in range(holders + 1):
        _, clients = shared_round(circular_graph(range(holders)), threshold)
        replies = [c.reveal(stories[c.index >= told]) for c in clients]
        self_shares = sum(victim in reply.self_seeds for reply in replies)
        mask_shares = sum(victim in reply.mask_seeds for reply in replies)
        assert self_shares + mask_shares == holders
        assert min(self_shares, mask_shares) < threshold


def test_no_upload_without_enough_peers() -> None:
    alone = Participant(0, 2)
    with pytest.raises(TooFewClients, match="share the keys of client 0, got 1"):
        alone.share({})
    alone.share({1: Participant(1, 2).public_keys})
    with pytest.raises(TooFewClients, match="hide the vector of client 0, got 1"):
        alone.mask(vectors(1)[0])


def test_never_both_shares_of_one_client() -> None:
    _, clients = shared_round()
    request = Request(EVERYBODY - {5}, frozenset({5}))
    reply = clients[0].reveal(request)
    assert set(reply.self_seeds) == {0, 1, 2, 3, 4}
    assert set(reply.mask_seeds) == {5}
    assert clients[0].reveal(request) == reply
    for survivors, lost in [(EVERYBODY, {}), (EVERYBODY - {4, 5}, {4, 5})]:
        with pytest.raises(
            UnsafeRequest, match=r"other secret of clients \[[45]\], and never reveals"
        ):
            clients[0].reveal(Request(survivors, frozenset(lost)))
    with pytest.raises(UnsafeRequest, match=r"clients \[5\] cannot be both survivors and lost"):
        clients[1].reveal(Request(EVERYBODY, frozenset({5})))
    assert clients[1].reveal(request).mask_seeds.keys() == {5}


def test_never_two_vectors_under_the_same_masks() -> None:
    _, clients = shared_round()
    clients[0].mask(vectors(1)[0])
    with pytest.raises(
        UnsafeRequest, match="two vectors under the same masks would reveal their difference"
    ):
        clients[0].mask(vectors(1)[0])


@pytest.mark.parametrize("position", [0, 12, -1], ids=["nonce", "share", "tag"])
def test_tampered_shares_are_detected(position: int) -> None:
    clients = [Participant(u, 2, seeded(u)) for u in range(2)]
    clients[1].share({0: clients[0].public_keys})
    text = bytearray(clients[0].share({1: clients[1].public_keys})[1])
    text[position] ^= 1
    with pytest.raises(TamperedShares, match="from client 0 to client 1 were altered"):
        clients[1].receive({0: bytes(text)})


def test_shares_cannot_be_sent_back_to_their_sender() -> None:
    clients = [Participant(u, 2, seeded(u)) for u in range(2)]
    sent = clients[0].share({1: clients[1].public_keys})
    with pytest.raises(TamperedShares):
        clients[0].receive({1: sent[1]})


def test_ciphertexts_hide_the_shares() -> None:
    clients = [Participant(u, 2, seeded(u)) for u in range(3)]
    keys = {c.index: c.public_keys for c in clients}
    sent = clients[0].share({1: keys[1], 2: keys[2]})
    clients[1].share({0: keys[0], 2: keys[2]})
    clients[1].receive({0: sent[1]})
    for _, share in clients[1]._shares[0]:
        assert share not in sent[1]


def test_masked_vectors_look_uniform() -> None:
    inputs = [np.full(50_000, u, np.uint32) for u in range(4)]
    assert not looks_uniform(inputs[0])
    view = aggregate(inputs, circular_graph(range(4)), 3, randbytes=seeded())
    for masked in view.masked.values():
        assert looks_uniform(masked)
    for one, other in combinations(view.masked.values(), 2):
        assert looks_uniform(one - other)
        assert looks_uniform(one + other)


def test_the_self_mask_protects_a_vector_that_arrives_late() -> None:
    server, clients = shared_round()
    inputs = [np.zeros(50_000, np.uint32)] * CLIENTS
    masked = {c.index: c.mask(inputs[c.index]) for c in clients}
    late = masked.pop(0)
    requests = server.collect(masked)
    total = server.unmask({u: clients[u].reveal(asked) for u, asked in requests.items()})
    assert not total.any()
    # With the lost client's pairwise masks the server can strip these off its late vector.
    stripped = (
        late
        + sum(masked.values())
        - sum((keystream(clients[u]._self_seed, late) for u in masked), np.zeros_like(late))
    )
    np.testing.assert_array_equal(stripped, keystream(clients[0]._self_seed, late))
    assert looks_uniform(stripped)


@pytest.mark.parametrize("lost", [0, 3])
def test_few_neighbours_among_many_clients(lost: int) -> None:
    draws = np.random.default_rng(1)
    graph = circular_graph(draws.permutation(30).tolist(), neighbours=8)
    inputs = vectors(30)
    gone = set(draws.permutation(30)[:lost].tolist())
    view = aggregate(inputs, graph, 5, lost_before_masking=gone, randbytes=seeded())
    assert view.total.tolist() == exact_sum(inputs, set(range(30)) - gone)


@pytest.mark.parametrize(
    ("count", "neighbours", "degree"), [(30, 8, 8), (9, 8, 8), (8, 8, 7), (7, None, 6), (2, 4, 1)]
)
def test_graphs_are_regular_symmetric_and_connected(
    count: int, neighbours: int | None, degree: int
) -> None:
    graph = circular_graph(np.random.default_rng(0).permutation(count).tolist(), neighbours)
    assert set(graph) == set(range(count))
    for u, near in graph.items():
        assert len(near) == degree
        assert u not in near
        assert all(u in graph[v] for v in near)
    reached = {0}
    for _ in range(count):
        reached |= {v for u in reached for v in graph[u]}
    assert reached == set(range(count))


def test_a_client_shares_only_with_its_neighbours() -> None:
    graph = circular_graph(range(8), neighbours=2)
    server = Aggregator(graph, 2)
    clients = [Participant(u, 2, seeded(u)) for u in graph]
    keys = server.relay_keys({c.index: c.public_keys for c in clients})
    assert clients[0].share(keys[0]).keys() == {1, 7}


def test_secrets_come_from_the_operating_system_by_default() -> None:
    assert Participant(0, 2).public_keys != Participant(0, 2).public_keys
    assert Participant(0, 2, seeded()).public_keys == Participant(0, 2, seeded()).public_keys


def test_a_threshold_of_one_would_share_the_secret_itself() -> None:
    with pytest.raises(ValueError, match="threshold must be at least 2, got 1"):
        Participant(0, 1)


def test_clients_that_were_sent_one_model_go_on() -> None:
    given, graph = vectors(CLIENTS), circular_graph(range(CLIENTS), 2)
    compared = aggregate(given, graph, 2, digests=[b"same" * 8] * CLIENTS)
    assert compared.total.tolist() == exact_sum(given, EVERYBODY)


@pytest.mark.parametrize(("neighbours", "threshold"), [(None, 4), (2, 2)])
def test_a_single_other_model_stops_the_round(neighbours: int | None, threshold: int) -> None:
    digests = [b"same" * 8] * CLIENTS
    digests[3] = b"else" * 8
    with pytest.raises(OtherModel, match=r"clients \d and \d were sent different models"):
        aggregate(
            vectors(CLIENTS), circular_graph(range(CLIENTS), neighbours), threshold, digests=digests
        )


def test_the_server_learns_no_digest_and_cannot_change_it() -> None:
    one, other = (Participant(u, 2, seeded(u), b"model" * 8) for u in range(2))
    sent = one.share({1: other.public_keys})[1]
    other.share({0: one.public_keys})
    assert b"model" not in sent
    with pytest.raises(TamperedShares):
        other.receive({0: sent[:-20] + bytes(20)})
    other.receive({0: sent})


def test_a_round_costs_little_more_than_its_cipher() -> None:
    """Key agreement, secret sharing and sums together, against AES alone on as many bytes."""
    clients, entries = 24, 500_000
    cipher = Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))).encryptor()
    zeros, buffer = bytes(4 * entries), bytearray(4 * entries + 16)
    given = vectors(clients, entries)

    def timed(work: Callable[[], object]) -> float:
        start = process_time()
        work()
        return process_time() - start

    def encrypt() -> None:
        for _ in range(clients * (clients + 1)):  # a mask per pair and side, and two self masks
            cipher.update_into(zeros, buffer)

    def play() -> None:
        aggregate(iter(given), circular_graph(range(clients)), 17)

    ratio = min(timed(play) / timed(encrypt) for _ in range(3))
    assert ratio < 4
