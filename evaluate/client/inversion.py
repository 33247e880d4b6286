"""Test whether uploads still hold the undefended update.

Clients with public examples train under the defense, as in a federation. Decoders learn to undo
the defense on some of these clients and are judged on the others. A defense is found out if a
decoder recovers much more of the update than attacks see. Nothing here asks a defense for its
`replay` or its `unguarded` client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from leakfrontier.defenses import Batch, Defense, Refused, Update, trainable

from ..foundations.rows import ProbeRow
from ..foundations.seeds import fork, global_draws
from ..users.copies import copied
from .client import Client, release, send
from .decoders import (
    LEAST_CLIENTS,
    Decoder,
    Histories,
    best_decoder,
    plain_recovery,
    remaining_noise,
)
from .federation import Federation, Watched

PAIRS = 8
"""Clients from which decoders learn."""

GROUPS = 4
"""Groups of clients from which they learn, if clients are seen together."""

ROUNDS = 4
"""Uploads of each of them."""

PATIENCE = 3
"""If clients do not take part in every round, there are at most this many times as many rounds."""

RECOVERED = 0.5
"""A decoder that recovers less of the update than this does not undo a defense."""

EXCESS = 0.25
"""An honest upload shows nearly what decoders recover. Averaging two rounds adds 0.17 at most."""

CANCELLED = 0.5
"""Noise whose sum over rounds has less than this share of the energy of fresh noise cancels."""


@dataclass(frozen=True)
class Inversion:
    """The result of the test.

    Attributes:
        row: What was measured.
        decoder: The best decoder; None if it recovers less than `RECOVERED`.
    """

    row: ProbeRow
    decoder: Decoder | None


@dataclass(frozen=True)
class PublicTraining:
    """How clients with public examples train: as in the federation that is evaluated.

    Attributes:
        batch_size: Examples that a client draws for a FedSGD update.
        server: The server's optimizer.
        lr: Its learning rate.
    """

    batch_size: int
    server: str = "adam"
    lr: float = 0.005


def public_clients(defense: Defense) -> int:
    """Return the number of clients with public examples that the test of a defense needs."""
    return PAIRS if defense.cohort == 1 else GROUPS * defense.cohort


def still_holds_update(row: ProbeRow) -> bool:
    """Return whether a decoder recovers much more of updates than attacked uploads show."""
    return row.decoded >= RECOVERED and row.decoded - row.plain >= EXCESS


def noise_cancels(row: ProbeRow) -> bool:
    """Return whether the noise of later uploads cancels that of earlier ones."""
    return row.remaining_noise < CANCELLED


def invert(
    client: Client, shares: Sequence[Batch], training: PublicTraining, rng: Generator
) -> Inversion:
    """Return how much of the undefended update uploads still hold.

    Args:
        client: The template of all clients.
        shares: The public examples of each client, as many as `public_clients` says.
        training: How they train.
        rng: Source of all randomness.

    Raises:
        Refused: If too few clients upload.
    """
    with global_draws(rng):
        played = [
            history
            for group in _federations(shares, client.defense.cohort)
            for history in _play(client, group, training, fork(rng))
        ]
    if len(played) < LEAST_CLIENTS:
        raise Refused("too few clients with public examples upload")
    sizes = [value.numel() for value in trainable(client.model).values()]
    uploads, updates, attacked = (
        torch.stack([torch.stack([getattr(turn, name) for turn in turns]) for turns in played])
        for name in _Turn._fields
    )
    return _judged(Histories(uploads, updates, sizes), Histories(attacked, updates, sizes))


def decoded(decoder: Decoder, uploads: Sequence[Mapping[str, Tensor]]) -> Update:
    """Return the undefended update that a decoder finds in the last uploads of a client."""
    names, like = [*uploads[-1]], uploads[-1]
    found = decoder.decode([_flat(one, names) for one in uploads])
    parts = found.split([value.numel() for value in like.values()])
    return {
        name: part.reshape(like[name].shape).to(like[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }


def _judged(histories: Histories, attacked: Histories) -> Inversion:
    best = best_decoder(histories)
    row = ProbeRow(
        decoded=best.recovered,
        plain=plain_recovery(attacked),
        decoder=best.name,
        needs_history=best.needs_history,
        remaining_noise=remaining_noise(histories),
    )
    return Inversion(row, best.fitted_on(histories) if best.recovered >= RECOVERED else None)


def _federations(shares: Sequence[Batch], cohort: int) -> list[Sequence[Batch]]:
    """Return the clients of each federation: all, or one for each group that is seen together."""
    if cohort == 1:
        return [shares]
    return [shares[start : start + cohort] for start in range(0, len(shares), cohort)]


class _Turn(NamedTuple):
    """One upload of a client, as a vector.

    Attributes:
        upload: What the server sees.
        update: What undefended clients would have sent for the same model and examples.
        attacked: What attacks are shown for them: the upload of a new client.
    """

    upload: Tensor
    update: Tensor
    attacked: Tensor


def _play(
    client: Client, shares: Sequence[Batch], training: PublicTraining, rng: Generator
) -> list[list[_Turn]]:
    """Train a federation, and return the first turns of everyone who uploads often enough."""
    client = replace(client, model=copied(client.model))  # training changes it
    turns: dict[tuple[int, ...], list[_Turn]] = defaultdict(list)
    own = fork(rng)

    def watch(seen: Watched) -> None:
        turns[tuple(sorted(seen.owners))].append(_turn(client, seen, own))

    federation = Federation(
        client,
        shares,
        clients_per_round=len(shares),
        batch_size=training.batch_size,
        server=training.server,
        lr=training.lr,
        watch=watch,
    )
    for _ in range(PATIENCE * ROUNDS):
        federation.round(rng)
        if turns and min(map(len, turns.values())) >= ROUNDS:
            break
    return [one[:ROUNDS] for one in turns.values() if len(one) >= ROUNDS]


def _turn(client: Client, seen: Watched, rng: Generator) -> _Turn:
    names = [*trainable(client.model)]
    nothing = torch.zeros_like(_flat(seen.update, names))
    if not all(len(share.inputs) for share in seen.shares):  # a Poisson sample may be empty
        return _Turn(_flat(seen.update, names), nothing, nothing)
    clients = [replace(client, model=model, defense=Defense()) for model in seen.models]
    updates = [_flat(one, names) for one in release(clients, seen.shares, rng, in_order=True)]
    try:
        attacked = send(client, seen.shares, rng, models=seen.models).updates[0]
    except Refused:
        return _Turn(_flat(seen.update, names), torch.stack(updates).sum(0), nothing)
    return _Turn(_flat(seen.update, names), torch.stack(updates).sum(0), _flat(attacked, names))


def _flat(update: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return all entries of an update as one vector."""
    return torch.cat([update[name].detach().flatten() for name in names])
