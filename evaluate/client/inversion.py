"""Test whether uploads still hold the undefended update.

Clients with public examples train under the defense, as in a federation. Decoders learn to undo
the defense on some of these clients and are judged on the others. A defense is found out if a
decoder recovers much more of the update than attacks see. The clients are new, or they remember
what clients of the evaluated training did before an attacked round, because a defense may change
over rounds. Nothing here asks a defense for its `replay` or its `unguarded` client.
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
from .clients import Memory
from .decoders import (
    LEAST_CLIENTS,
    Decoder,
    Histories,
    decoders,
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
        decoder: The best decoder that needs no later upload; None if it recovers less than
            `RECOVERED`.
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
    return _judged(*_histories(client, shares, training, rng))


def invert_trained(
    client: Client,
    shares: Sequence[Batch],
    memories: Sequence[Memory],
    training: PublicTraining,
    rng: Generator,
) -> Inversion:
    """Return the same for clients that remember what others did before a round of training.

    They repeat the round several times with other examples, because a defense may encode every
    round in another way. They also go on for some rounds. The worse result counts. Attacks see
    such uploads, so decoders are compared with what these show as they are.

    Args:
        client: The template of all clients, with the model of the round.
        shares: As for `invert`.
        memories: What each client remembers, one for each share.
        training: How they train.
        rng: Source of all randomness.

    Raises:
        Refused: If too few clients upload.
    """
    again, onwards = (
        _judged(*_histories(client, shares, training, rng, memories, again=once), of_one=once)
        for once in (True, False)
    )
    row = max((again.row, onwards.row), key=severity)
    usable = [one.decoder for one in (again, onwards) if one.decoder is not None]
    return Inversion(
        replace(row, remaining_noise=onwards.row.remaining_noise),
        max(usable, key=lambda one: one.recovered, default=None),
    )


def severity(row: ProbeRow) -> tuple[bool, float]:
    """Return a key that is larger for rows that show more of what a defense hides."""
    return still_holds_update(row), row.decoded


def _histories(
    client: Client,
    shares: Sequence[Batch],
    training: PublicTraining,
    rng: Generator,
    memories: Sequence[Memory] = (),
    *,
    again: bool = False,
) -> tuple[Histories, Histories]:
    """Return what the server sees of clients with public examples, and what attacks see."""
    size = client.defense.cohort if client.defense.cohort > 1 else len(shares)
    with global_draws(rng):
        played = [
            history
            for start in range(0, len(shares), size)
            for history in _play(
                client,
                shares[start : start + size],
                training,
                fork(rng),
                memories[start : start + size],
                again=again,
            )
        ]
    if len(played) < LEAST_CLIENTS:
        raise Refused("too few clients with public examples upload")
    sizes = [value.numel() for value in trainable(client.model).values()]
    uploads, updates, attacked = (
        torch.stack([torch.stack([getattr(turn, name) for turn in turns]) for turns in played])
        for name in _Turn._fields
    )
    return Histories(uploads, updates, sizes), Histories(attacked, updates, sizes)


def decoded(decoder: Decoder, uploads: Sequence[Mapping[str, Tensor]]) -> Update:
    """Return the undefended update that a decoder finds in the last uploads of a client."""
    names, like = [*uploads[-1]], uploads[-1]
    found = decoder.decode([_flat(one, names) for one in uploads])
    parts = found.split([value.numel() for value in like.values()])
    return {
        name: part.reshape(like[name].shape).to(like[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }


def _judged(histories: Histories, attacked: Histories, *, of_one: bool = False) -> Inversion:
    found = [*decoders(histories, of_one=of_one)]
    best = max(found, key=lambda one: one.recovered)
    usable = max((one for one in found if not one.lag), key=lambda one: one.recovered)
    row = ProbeRow(
        decoded=best.recovered,
        plain=plain_recovery(attacked),
        decoder=best.name,
        needs_history=best.needs_history,
        remaining_noise=remaining_noise(histories),
    )
    return Inversion(row, usable.fitted_on(histories) if usable.recovered >= RECOVERED else None)


class _Turn(NamedTuple):
    """One upload of a client, as a vector.

    Attributes:
        upload: What the server sees.
        update: What undefended clients would have sent for the same model and examples.
        attacked: What attacks see of them: the upload of a new client, or this upload.
    """

    upload: Tensor
    update: Tensor
    attacked: Tensor


def _play(
    client: Client,
    shares: Sequence[Batch],
    training: PublicTraining,
    rng: Generator,
    memories: Sequence[Memory],
    *,
    again: bool,
) -> list[list[_Turn]]:
    """Train a federation, and return the first turns of everyone who uploads often enough.

    Args:
        client: As for `invert`.
        shares: The examples of the clients of this federation.
        training: How they train.
        rng: Source of all randomness.
        memories: What they remember. Default: they are new.
        again: Whether they repeat their first round.
    """
    turns: dict[tuple[int, ...], list[_Turn]] = defaultdict(list)
    own = fork(rng)

    def watch(seen: Watched) -> None:
        turns[tuple(sorted(seen.owners))].append(_turn(client, seen, own, new=not memories))

    def start() -> Federation:
        return Federation(
            replace(client, model=copied(client.model)),  # training changes it
            shares,
            clients_per_round=len(shares),
            batch_size=training.batch_size,
            server=training.server,
            lr=training.lr,
            watch=watch,
            memories=[replace(one, epoch=()) for one in memories],
        )

    federation = start()
    for turn in range(PATIENCE * ROUNDS):
        federation = start() if again and turn else federation
        federation.round(rng)
        if turns and min(map(len, turns.values())) >= ROUNDS:
            break
    return [one[:ROUNDS] for one in turns.values() if len(one) >= ROUNDS]


def _turn(client: Client, seen: Watched, rng: Generator, *, new: bool) -> _Turn:
    """Return a turn. Attacks see the upload of a new client if these clients were new."""
    names = [*trainable(client.model)]
    nothing = torch.zeros_like(_flat(seen.update, names))
    if not all(len(share.inputs) for share in seen.shares):  # a Poisson sample may be empty
        return _Turn(_flat(seen.update, names), nothing, nothing)
    clients = [replace(client, model=model, defense=Defense()) for model in seen.models]
    updates = [_flat(one, names) for one in release(clients, seen.shares, rng, in_order=True)]
    if not new:
        upload = _flat(seen.update, names)
        return _Turn(upload, torch.stack(updates).sum(0), upload)
    try:
        attacked = send(client, seen.shares, rng, models=seen.models).updates[0]
    except Refused:
        return _Turn(_flat(seen.update, names), torch.stack(updates).sum(0), nothing)
    return _Turn(_flat(seen.update, names), torch.stack(updates).sum(0), _flat(attacked, names))


def _flat(update: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return all entries of an update as one vector."""
    return torch.cat([update[name].detach().flatten() for name in names])
