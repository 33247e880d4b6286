"""One client's local training under a defense, and what the server sees of it.

`release` is the one path: training for utility, the observation that is attacked and the
adversary's own replay all go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from leakfrontier.adversaries import (
    Candidates,
    FedAvg,
    FedSGD,
    InputSpace,
    Observation,
    Protocol,
    PublicData,
)
from leakfrontier.defenses import Batch, Defense, Loss, Update

from .contract import Checked

Replay = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""From guessed inputs, guessed targets and the observed update to a replayed update."""


@dataclass(frozen=True)
class ThreatModel:
    """What the adversary is granted beyond the model and the update.

    Attributes:
        knows_targets: The private labels.
        knows_defense: The defense and its parameters, but never its random draws.
        public: Auxiliary data of the same distribution.
        candidates: Batches among which the private one is.
    """

    knows_targets: bool = False
    knows_defense: bool = True
    public: PublicData | None = None
    candidates: Candidates | None = None


@dataclass(frozen=True)
class Upload:
    """An observation, beside what it must not give away.

    Attributes:
        observation: What the adversary is granted.
        truth: The private examples behind it.
        trained_on: What local training last saw of each of them, e.g. augmented.
    """

    observation: Observation
    truth: Batch
    trained_on: Batch


def release(
    model: nn.Module,
    loss: Loss,
    shares: Sequence[Batch],
    defenses: Sequence[Defense],
    protocol: Protocol,
    rng: Generator,
    *,
    shuffle: bool = True,
) -> list[Update]:
    """Return what the server sees of the clients of one round.

    Args:
        model: The model that the clients received, after the defense's `on_model`.
        loss: Mean loss of a batch.
        shares: Each client's private examples.
        defenses: Each client's own defense.
        protocol: How a client makes an update of its examples.
        rng: Source of all the clients' randomness.
        shuffle: Whether local steps see the examples in random order; a replay keeps the order.

    Returns:
        One update per client, or fewer where the defense aggregates.
    """
    updates = [
        defense.on_update(local_update(model, loss, share, defense, protocol, rng, shuffle), rng)
        for share, defense in zip(shares, defenses, strict=True)
    ]
    return defenses[0].on_round(updates, rng)


def local_update(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    defense: Defense,
    protocol: Protocol,
    rng: Generator,
    shuffle: bool = True,
) -> Update:
    """Return a client's gradient (FedSGD) or its change of weights (FedAvg), before `on_update`."""
    start = {name: value.detach() for name, value in model.named_parameters()}
    step = _Step(model, loss, defense)
    if isinstance(protocol, FedSGD):
        return step.gradient(start, batch, rng)
    weights = start
    for part in _minibatches(batch, defense, protocol, rng, shuffle):
        gradient = step.gradient(weights, part, rng)
        weights = {name: weights[name] - protocol.lr * gradient[name] for name in start}
    return {name: weights[name] - start[name] for name in start}


class _Step(nn.Module):
    """One local step, at weights that may depend on earlier steps.

    A module of its own so that `functional_call` can put these weights into the model for as
    long as the defense looks at it.
    """

    def __init__(self, model: nn.Module, loss: Loss, defense: Defense) -> None:
        super().__init__()
        self.model, self.loss, self.defense = model, loss, defense

    def gradient(self, weights: Mapping[str, Tensor], batch: Batch, rng: Generator) -> Update:
        placed = {f"model.{name}": value for name, value in weights.items()}
        return cast(Update, functional_call(self, placed, (batch, rng)))

    def forward(self, batch: Batch, rng: Generator) -> Update:
        trained_on = self.defense.on_batch(batch, rng)
        return self.defense.gradient(self.model, self.loss, trained_on, rng)


def _minibatches(
    batch: Batch, defense: Defense, protocol: FedAvg, rng: Generator, shuffle: bool
) -> Iterator[Batch]:
    """Yield the local steps' examples: drawn by the defense, or in order for a replay."""
    size = len(batch.inputs)
    drawn = defense.batches(size, protocol.batch_size, protocol.epochs, rng)
    in_order = torch.arange(size).split(protocol.batch_size) * protocol.epochs
    for rows in drawn if shuffle else in_order:
        yield Batch(batch.inputs[rows], batch.targets[rows])


def observe(
    model: nn.Module,
    loss: Loss,
    shares: Sequence[Batch],
    defense: Defense,
    protocol: Protocol,
    space: InputSpace,
    threat: ThreatModel,
    rng: Generator,
    replay: Replay | None = None,
) -> list[Upload]:
    """Return what the server sees when clients under `defense` train on their shares.

    Observations of the same model may share one `replay`, made by `make_replay`.
    """
    if not all(len(share.inputs) for share in shares):
        raise ValueError("the private batch is empty")
    clients = [Checked(replace(defense), share) for share in shares]
    updates = release(model, loss, shares, clients, protocol, rng)
    together = len(shares) if len(updates) < len(shares) else 1
    replay = replay or make_replay(model, loss, defense, protocol, threat, together, rng)
    uploads = []
    for index, update in enumerate(updates):
        behind = slice(index, index + together)
        truth = _joined(shares[behind])
        likelihood = partial(
            replace(defense).log_likelihood,  # a copy: the client's own holds its secrets
            batch_size=len(truth.inputs) if isinstance(protocol, FedSGD) else None,
        )
        observation = Observation(
            model=model,
            update=update,
            protocol=replace(protocol, clients=together),
            space=space,
            batch_size=len(truth.inputs),
            replay=replay,
            targets=truth.targets if threat.knows_targets else None,
            log_likelihood=likelihood if threat.knows_defense else None,
            public=threat.public,
            candidates=threat.candidates,
            release=_another_client(model, loss, defense, protocol, threat, together),
        )
        trained_on = _joined(
            [
                client.trained_on or share
                for client, share in zip(clients[behind], shares[behind], strict=True)
            ]
        )
        uploads.append(Upload(observation, truth, trained_on))
    return uploads


def _joined(shares: Sequence[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*shares, strict=True)))


def make_replay(
    model: nn.Module,
    loss: Loss,
    defense: Defense,
    protocol: Protocol,
    threat: ThreatModel,
    clients: int,
    rng: Generator,
) -> Replay:
    """Return the function by which an adversary replays the clients on a guess."""
    believed = defense if threat.knows_defense else Defense()
    replay_rng = fork(rng)  # the adversary must never draw the client's own noise

    def replay(inputs: Tensor, targets: Tensor, observed: Mapping[str, Tensor]) -> Update:
        shares = _shares(inputs, targets, clients)
        informed = [replace(believed).replay(observed) for _ in shares]
        return release(model, loss, shares, informed, protocol, replay_rng, shuffle=False)[0]

    return replay


def _another_client(
    model: nn.Module,
    loss: Loss,
    defense: Defense,
    protocol: Protocol,
    threat: ThreatModel,
    clients: int,
) -> Callable[[Tensor, Tensor, Generator], Update]:
    """Return the function by which an adversary runs clients on examples of its own."""
    believed = defense if threat.knows_defense else Defense()

    def run(inputs: Tensor, targets: Tensor, rng: Generator) -> Update:
        shares = _shares(inputs, targets, clients)
        return release(model, loss, shares, [replace(believed) for _ in shares], protocol, rng)[0]

    return run


def _shares(inputs: Tensor, targets: Tensor, clients: int) -> list[Batch]:
    parts = zip(inputs.chunk(clients), targets.chunk(clients), strict=True)
    return [Batch(*part) for part in parts]


def fork(rng: Generator) -> Generator:
    """Return a new generator on the same device, seeded from `rng`."""
    seed = torch.randint(2**62, (), generator=rng, device=rng.device)
    return Generator(rng.device).manual_seed(int(seed))
