"""Clients as they were in training, for an audit of their noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import Batch, Defense, Refused, Update

from ..client.client import Client
from ..client.clients import Clients, Invited, Memory
from ..foundations.seeds import generator
from ..privacy.promise import claiming
from ..privacy.trained_noise import TrainedClient
from ..users.alone import fresh
from ..users.state import restored, saved
from ..world.scenario import World
from .trained_scenes import Restored

_DELTA = 1e-5  # the link that makes the claim does not depend on it


def audited_clients(
    world: World, defense: Defense, unit: str, model: nn.Module, pasts: Sequence[Restored]
) -> list[TrainedClient]:
    """Return a new client, and the clients of some rounds as they were before these.

    In a chain, the link that makes the claim is audited. Clients that the server sees only
    together are not.

    Args:
        world: The scenario and its data.
        defense: The clients' defense.
        unit: What its claim protects.
        model: The untrained model.
        pasts: The rounds.
    """
    link = claiming(defense, _DELTA)
    if link.cohort > 1:
        return []
    rows = torch.arange(min(world.scenario.batch_size, len(world.train.targets)))
    new = saved(_prepared(link, len(rows)))
    found = [_client(world, link, unit, new, model, rows, "in the first round")]
    for past in pasts:
        known = claiming(restored(past.memories[0].defense, defense), _DELTA)
        when = f"in round {past.number}"
        found.append(_client(world, link, unit, saved(known), past.model, past.rows, when))
    return found


def _prepared(defense: Defense, batch_size: int) -> Defense:
    """Return a new client that knows its batch size, as in training."""
    new = fresh(defense)
    next(iter(new.batches(batch_size, batch_size, 1, generator("batch size"))), None)
    new.expect(batch_size)
    return new


def _client(
    world: World,
    defense: Defense,
    unit: str,
    memory: bytes,
    model: nn.Module,
    rows: Tensor,
    when: str,
) -> TrainedClient:
    device, targets = next(model.parameters()).device, world.train.targets
    examples = world.train.at(rows).to(device)
    unlike = (targets != targets[rows[:1]]).reshape(len(targets), -1).any(1).nonzero()
    other = unlike[:1, 0] if len(unlike) else rows[:1]
    play = partial(_play, world.client(defense, model), memory)
    steps = 1 if unit == "client" else world.protocol.local_steps(len(rows))
    return TrainedClient(when, play, examples, world.train.at(other).to(device), steps)


def _play(
    client: Client, memory: bytes, examples: Batch, rngs: Sequence[Generator]
) -> list[Update]:
    """Return the uploads of a client in consecutive rounds with the same model and examples."""
    count = len(examples.inputs)
    clients = Clients(client, [examples], [count])
    clients.remember({0: Memory(memory, (torch.arange(count),) * len(rngs))})
    uploads = []
    for rng in rngs:
        answer = clients.answer(Invited((0,), (0,), rng), {0: client.model}, client.model)
        if not answer.seen:
            raise Refused(answer.reason)
        uploads += answer.seen[0].updates
    return uploads
