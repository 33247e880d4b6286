"""Who takes part in a federation, with which examples, and whose uploads are attacked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..data.partition import partition_rows
from ..foundations.seeds import fork, generator
from .scenario import World

SPARE = 3
"""Uploads that may be attacked, for each that is attacked: samples differ in size."""


@dataclass(frozen=True)
class Enrolment:
    """The clients of one repetition of a scenario. They do not depend on the defense.

    Attributes:
        rows: The training examples of each client.
        batch_sizes: Examples that each client draws for a FedSGD update.
        weights: How much the upload of each client counts.
    """

    rows: tuple[Tensor, ...]
    batch_sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def invited(self, world: World, observations: int, *, attacked: bool) -> int:
        """Return the number of clients that the server invites to a round.

        To attacked rounds it invites more, so that most attacked uploads are of one model. Clients
        do not learn whom else it invites.

        Args:
            world: The scenario and its data.
            observations: Number of attacked uploads.
            attacked: Whether uploads of the round may be attacked.
        """
        usual = world.protocol.uploads(world.scenario.training.participants)
        if not attacked or world.protocol.max_staleness:
            return usual
        return min(len(self.rows), max(usual, SPARE * observations))


def enrol(world: World, seed: int, observations: int) -> Enrolment:
    """Return the clients of a repetition.

    If no trained upload has the size of attacked ones, some clients are of the attacked size.

    Args:
        world: The scenario and its data.
        seed: Repetition.
        observations: Number of attacked uploads.
    """
    rng = generator("shares", world.scenario.paired_config(), seed)
    rows, sizes = _shares(world, rng, observations)
    used = sizes if world.protocol.uploads_gradient else [len(part) for part in rows]
    equal = world.scenario.training.weighting == "equal"
    return Enrolment(tuple(rows), tuple(sizes), tuple(1.0 if equal else float(n) for n in used))


def _shares(
    world: World, rng: Generator, observations: int
) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Return the training examples of each client, and how many it draws for a FedSGD update."""
    scenario, training = world.scenario, world.scenario.training
    if training.small_clients or training.size_ratio > 1 or training.batch_size == "all":
        return _unequal(world, rng), world.drawn_sizes
    attacked, usual = scenario.batch_size, training.batch_size or scenario.batch_size
    clients, scheme = training.clients, training.partition
    if world.protocol.uploads_gradient:
        rows = partition_rows(world.train, clients, scheme, rng, alpha=training.alpha)
        return rows, [usual if index % 2 else attacked for index in range(clients)]
    each = len(world.train.targets) / clients
    if int(each) <= attacked <= -int(-each // 1):
        rows = partition_rows(world.train, clients, scheme, rng, alpha=training.alpha)
        return rows, [usual] * clients
    order = torch.randperm(len(world.train.targets), generator=fork(rng))
    small, rest = order[: observations * attacked], order[observations * attacked :]
    parts = partition_rows(world.train.part(rest), clients, scheme, rng, alpha=training.alpha)
    small_parts = small.split(attacked) if observations else ()
    rows = [*small_parts, *(rest[part] for part in parts)]
    return rows, [usual] * len(rows)


def _unequal(world: World, rng: Generator) -> list[Tensor]:
    """Return the training examples of clients of stated sizes."""
    training, sizes = world.scenario.training, world.share_sizes
    small = sizes[: len(sizes) - training.clients]
    order = torch.randperm(len(world.train.targets), generator=fork(rng))
    few, rest = order[: sum(small)], order[sum(small) :]
    parts = partition_rows(
        world.train.part(rest),
        training.clients,
        training.partition,
        rng,
        alpha=training.alpha,
        sizes=sizes[len(small) :],
    )
    return [*few.split([*small]), *(rest[part] for part in parts)]


def attacked_rounds(
    world: World, enrolment: Enrolment, seed: int, last: int, observations: int
) -> list[int]:
    """Return the rounds whose uploads may be attacked, in random order.

    Args:
        world: The scenario and its data.
        enrolment: The clients.
        seed: Repetition.
        last: The last round that may be attacked. The first is the second round, if there is one.
        observations: Number of attacked uploads.
    """
    per_round = enrolment.invited(world, observations, attacked=True)
    rng = generator("attacked rounds", world.scenario.paired_config(), seed, last)
    drawn = torch.randperm(max(last - 1, 1), generator=rng) + min(2, last)
    rounds: list[int] = drawn[: -(-SPARE * observations // per_round) + 1].tolist()
    return rounds


class Attackable(NamedTuple):
    """An upload that may be attacked.

    Attributes:
        round: Its round, from 1.
        client: Its client.
        size: The number of examples that the harness asked for. The defense may draw others.
        share: The number of examples that the client has.
        has_history: Whether the client was invited before.
        empty: Whether no example is behind it.
    """

    round: int
    client: int
    size: int
    share: int
    has_history: bool
    empty: bool = False


def attacked(uploads: Sequence[Attackable], batch_size: int, observations: int) -> list[Attackable]:
    """Return the uploads to attack.

    Uploads of clients with a history, of the wanted size and of different clients come first. The
    last are further uploads of clients that always use all their examples. No
    choice depends on anything that a defense decides: neither on the content of an upload nor on
    the examples that were drawn for it. Only an upload without examples, as Poisson samples may
    give, has a substitute: the next one. So a defense that empties uploads exposes the others.

    Args:
        uploads: The uploads of the attacked rounds, in the order of `attacked_rounds`.
        batch_size: The wanted number of examples.
        observations: The wanted number of uploads. The result may be shorter.
    """
    times: Counter[tuple[int, bool]] = Counter()
    ranked = []
    for one in uploads:
        before = times[one.client, one.has_history]
        times[one.client, one.has_history] += 1
        same = before > 0 and one.size >= one.share
        ranked.append(((same, not one.has_history, abs(one.size - batch_size), before), one))
    ranked.sort(key=lambda pair: pair[0])
    ordered = [one for _, one in ranked]
    substitutes = (one for one in ordered[observations:] if not one.empty)
    found = (next(substitutes, None) if one.empty else one for one in ordered[:observations])
    return [one for one in found if one is not None]
