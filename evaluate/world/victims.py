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


def look_alikes(
    world: World, sought: Tensor, *, seed: int, observation: int, disjoint: bool = False
) -> Tensor:
    """Return the indices of the look-alikes of each victim of an observation.

    They have the victim's label, so knowing or inferring labels does not help.

    Args:
        world: The scenario and its data.
        sought: Indices of the victims.
        seed: Repetition.
        observation: Number of the observation.
        disjoint: Whether no two victims share look-alikes, as an adversary needs that is given
            those of all victims. It could otherwise rule out what two victims share, because no
            victim is a look-alike of another one.
    """
    rng = generator("look-alikes", world.scenario.data_name, seed, observation)
    count = (disjoint_count(world, sought) if disjoint else candidate_count(world)) - 1
    rows: list[Tensor] = []
    for victim in sought:
        taken = torch.cat([sought, *rows]) if disjoint else sought
        rows.append(world.modality.look_alikes(int(victim), world.train_values, taken, count, rng))
    return torch.stack(rows)


def candidates(
    world: World, sought: Tensor, *, seed: int, observation: int, disjoint: bool = False
) -> Candidates:
    """Return each victim among its look-alikes, in a random order.

    Args:
        world: The scenario and its data.
        sought: Indices of the victims.
        seed: Repetition.
        observation: Number of the observation.
        disjoint: See `look_alikes`.
    """
    others = look_alikes(world, sought, seed=seed, observation=observation, disjoint=disjoint)
    rng = generator("candidates", world.scenario.data_name, seed, observation)
    columns = [
        rows[torch.randperm(len(rows), generator=rng)]
        for rows in torch.cat([sought.unsqueeze(1), others], dim=1)
    ]
    return Candidates(*world.train.at(torch.stack(columns, dim=1)))


def all_but_one_known(among: Candidates, private: Batch) -> list[Candidates]:
    """Return for each victim the candidates of an adversary that knows the others."""
    known = []
    for victim in range(len(private.inputs)):
        parts = []
        for part, truth in zip(among, private, strict=True):
            alternatives = truth.unsqueeze(0).repeat(len(part), *[1] * truth.dim())
            alternatives[:, victim] = part[:, victim]
            parts.append(alternatives)
        known.append(Candidates(*parts))
    return known


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


def disjoint_count(world: World, sought: Tensor) -> int:
    """Return the number of candidates of each victim if victims share none; it may be 0.

    Victims with the same label share its examples. A tenth is spared, because near-duplicates of a
    victim are not its look-alikes.
    """
    groups = world.modality.groups(world.train.targets)
    labels, together = groups[sought].unique(return_counts=True)
    sizes = torch.stack([(groups == label).sum() for label in labels])
    most = candidate_count(world)
    allowed = torch.where(together > 1, sizes * 9 // (10 * together), most)
    return min(most, int(allowed.min()))


def other_cohort(scenario: Scenario, defense: Method) -> str:
    """Return a warning if attacks and training see different numbers of clients together."""
    attacked = build_defense(defense).cohort
    uploads = build_protocol(scenario.protocol).uploads(scenario.training.participants)
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
    if attacked in training.small_clients:
        return ""
    if protocol.uploads_gradient and training.batch_size != "all":
        fewest = most = training.batch_size or attacked
        remedy = "give both the same batch_size"
    else:
        data = load_dataset(scenario.dataset, scenario.data_folder, scenario.reading)
        examples = scenario.clients_examples(len(data.train.targets))
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
    if observations > training.small_clients.get(size, observations):
        raise ValueError(
            f"observations must be at most {training.small_clients[size]}, the number of clients "
            f"with {size} examples in training.small_clients, got {observations}"
        )
    uploads = world.protocol.uploads(training.participants)
    if uploads > training.all_clients:
        raise ValueError(
            f"training.clients must be at least {uploads}, because a step of the protocol needs "
            f"that many uploads, got {training.all_clients}"
        )
    for defense in defenses:
        cohort = build_defense(defense).cohort
        if cohort * size > available:
            raise ValueError(
                f"{label(defense)}: the server sees {cohort} clients with {size} examples each "
                f"together, but {data}"
            )
