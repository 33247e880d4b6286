"""Victims, the clients that the server sees only together with them, and their look-alikes.

None of this depends on the adversary, and the victims do not depend on the defense. So all
comparisons are paired.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from leakfrontier.adversaries import Candidates
from leakfrontier.defenses import Batch

from ..data.data import load_dataset
from ..foundations.seeds import generator
from ..users.methods import Method, build_defense, build_protocol
from ..users.names import label
from .scenario import Scenario, World


def victims(world: World, seed: int, observation: int) -> Tensor:
    """Return the indices of an observation's private examples, drawn at random and disjoint."""
    size, available = world.scenario.batch_size, len(world.train.targets)
    needed = (observation + 1) * size
    if needed > available:
        raise ValueError(
            f"{observation + 1} observations of {size} examples need {needed} training examples, "
            f"but {world.scenario.dataset} has {available}"
        )
    rng = generator("victims", world.scenario.data_name, size, seed)
    return torch.randperm(available, generator=rng)[observation * size : needed]


def cohort(
    world: World, sought: Tensor, *, clients: int, seed: int, observation: int
) -> list[Batch]:
    """Return the victims' share, and the shares of the clients seen only together with them."""
    others = torch.ones(len(world.train.targets), dtype=torch.bool)
    others[sought] = False
    spare, needed = others.nonzero().flatten(), (clients - 1) * len(sought)
    if needed > len(spare):
        raise ValueError(f"{clients} clients need {needed} more examples, got {len(spare)}")
    rng = generator("bystanders", world.scenario.data_name, seed, observation)
    bystanders = spare[torch.randperm(len(spare), generator=rng)[:needed]]
    return [world.train.at(rows) for rows in (sought, *bystanders.split(len(sought))) if len(rows)]


def look_alikes(world: World, sought: Tensor, *, seed: int, observation: int) -> Tensor:
    """Return the indices of the look-alikes of each victim of an observation.

    They have the victim's label, so knowing or inferring labels does not help.
    """
    rng = generator("look-alikes", world.scenario.data_name, seed, observation)
    count = candidate_count(world) - 1
    return torch.stack(
        [world.modality.look_alikes(int(i), world.train_values, sought, count, rng) for i in sought]
    )


def candidates(world: World, victim: Tensor, *, seed: int, observation: int) -> Candidates:
    """Return a victim among its look-alikes, in a random order."""
    others = look_alikes(world, victim, seed=seed, observation=observation)[0]
    rows = torch.cat([victim, others])
    rng = generator("candidates", world.scenario.data_name, seed, observation)
    rows = rows[torch.randperm(len(rows), generator=rng)].unsqueeze(1)
    return Candidates(*world.train.at(rows))


def candidate_count(world: World) -> int:
    """Return the number of look-alikes: the requested one, or the most that all classes allow."""
    counts = torch.bincount(world.modality.groups(world.train.targets))
    counts = torch.where(counts > 0, counts, counts.max())
    label, batch_size = int(counts.argmin()), world.scenario.batch_size
    allowed = int(counts[label]) - batch_size + 1
    if allowed < 2:
        raise ValueError(
            f"class {label} of {world.scenario.dataset} has {counts[label]} training examples: "
            f"batches of {batch_size} and their look-alikes need at least {batch_size + 1}"
        )
    return min(world.scenario.candidates, allowed)


def other_cohort(scenario: Scenario, defense: Method) -> str:
    """Return a warning if attacks and training see different numbers of clients together."""
    attacked = build_defense(defense).cohort
    uploads = build_protocol(scenario.protocol).uploads(scenario.training.clients_per_round)
    if attacked == 1 or uploads % attacked == 0:
        return ""
    return (
        f"attacks see sums of {attacked} clients, but a training round has {uploads}: use a "
        f"multiple of {attacked} as clients_per_round"
    )


def other_examples(scenario: Scenario) -> str:
    """Return a warning if attacked and trained uploads have different numbers of examples."""
    attacked, training = scenario.batch_size, scenario.training
    protocol = build_protocol(scenario.protocol)
    if protocol.uploads_gradient:
        fewest = most = scenario.client_batch
        remedy = "give both the same batch_size"
    else:
        data = load_dataset(scenario.dataset, scenario.data_folder, scenario.reading)
        examples = len(data.train.targets)
        fewest, most = examples // training.clients, -(-examples // training.clients)
        remedy = f"use {most} as batch_size, or {max(1, examples // attacked)} as training.clients"
    if fewest <= attacked <= most:
        return ""
    steps = [protocol.local_steps(count) for count in (attacked, most)]
    local = "" if steps == [1, 1] else f" ({steps[0]} and {steps[1]} local steps)"
    return f"attacked uploads have {attacked} examples, trained ones {most}{local}: {remedy}"


def check_sizes(world: World, observations: int, defenses: Iterable[Method]) -> None:
    """Raise if a run needs more examples or clients than there are."""
    scenario, available = world.scenario, len(world.train.targets)
    size, training = scenario.batch_size, scenario.training
    data = f"{scenario.dataset} has {available} training examples"
    if observations > available // size:
        raise ValueError(
            f"observations must be at most {available // size}, got {observations}: {data}, and "
            f"uploads do not share any of their {size}"
        )
    if training.clients > available:
        raise ValueError(
            f"training.clients must be at most {available}, got {training.clients}: {data}"
        )
    uploads = world.protocol.uploads(training.clients_per_round)
    if uploads > training.clients:
        raise ValueError(
            f"training.clients must be at least {uploads}, because a step of the protocol needs "
            f"that many uploads, got {training.clients}"
        )
    for defense in defenses:
        cohort = build_defense(defense).cohort
        if cohort * size > available:
            raise ValueError(
                f"{label(defense)}: the server sees {cohort} clients with {size} examples each "
                f"together, but {data}"
            )
