"""The server of a federation: it invites clients and steps along the mean of what it sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, nn

from leakfrontier.adversaries import Protocol
from leakfrontier.defenses import Update, trainable

from ..foundations.seeds import fork
from .clients import Invited, Seen, mean_weight

SERVER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
"""How the server applies the mean update: averaging, with momentum (FedAvgM, Hsu et al. 2019), or
FedAdam (Reddi et al. 2021)."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2.0,
}
"""The learning rate relative to the first one, given the share of rounds that are done."""


@dataclass
class Averaging:
    """The server's side of a federation. It holds no defense, and uses nothing but uploads.

    Attributes:
        model: The global model, which is trained in place.
        protocol: The protocol.
        clients: Number of clients.
        clients_per_round: Clients sampled per round.
        server: `sgd` or `adam`.
        lr: The server's learning rate.
        momentum: Momentum of `sgd`.
        schedule: How the learning rate changes over the rounds.
        rounds: Number of rounds, for the schedule.
        weights: How much the upload of each client counts. Default: all the same.
    """

    model: nn.Module
    protocol: Protocol
    clients: int
    clients_per_round: int
    server: str = "adam"
    lr: float = 0.01
    momentum: float = 0.0
    schedule: str = "constant"
    rounds: int = 1
    weights: Sequence[float] | None = None
    _steps: int = field(default=0, init=False, repr=False)
    _versions: list[nn.Module] = field(default_factory=list, init=False, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.uploads <= self.clients:
            raise ValueError(
                f"a round must have from 1 to {self.clients} clients, got {self.uploads}"
            )
        if self.server not in SERVER_OPTIMIZERS:
            raise ValueError(f"server must be one of {[*SERVER_OPTIMIZERS]}, got {self.server!r}")
        parameters = trainable(self.model).values()
        options = {"momentum": self.momentum} if self.server == "sgd" else {}
        self._optimizer = SERVER_OPTIMIZERS[self.server](parameters, lr=self.lr, **options)

    @property
    def uploads(self) -> int:
        """Return the number of uploads in a step of the server."""
        return self.protocol.uploads(self.clients_per_round)

    def invite(self, rng: Generator, uploads: int | None = None) -> Invited:
        """Return the clients of the next round, and what their randomness comes from.

        Args:
            rng: Source of all randomness.
            uploads: Number of clients. Default: as many as in every round.
        """
        versions = len(self._versions)
        return invite(self.protocol, self.clients, uploads or self.uploads, versions, rng)

    def sent(self, invited: Invited) -> dict[int, nn.Module]:
        """Return the version of the model that each client has."""
        return {
            index: self._versions[-age] if age else self.model
            for index, age in zip(invited.clients, invited.ages, strict=True)
        }

    def step(self, invited: Invited, seen: Sequence[Seen]) -> None:
        """Step along the mean of what the server sees of a round."""
        if oldest := self.protocol.max_staleness:
            self._versions = [*self._versions, copy.deepcopy(self.model)][-oldest:]
        done, self._steps = self._steps / self.rounds, self._steps + 1
        ages = dict(zip(invited.clients, invited.ages, strict=True))
        parts: list[tuple[float, Update]] = []
        total_weight = 0.0
        for one in seen:
            several = [self.protocol.weight(ages[index]) for index in one.clients]
            if len(one.updates) < len(several) and len({*several}) > 1:
                raise ValueError(
                    "uploads have different weights by their age, but the server sees only their "
                    "sum: set exponent: 0 in the protocol, or use a defense that does not aggregate"
                )
            own = mean_weight(self.weights, one.clients)
            parts += [(own * w, update) for w, update in zip(several, one.updates, strict=False)]
            total_weight += own * len(several)
        if (total := _sum(parts)) is None:
            return
        for name, parameter in trainable(self.model).items():
            parameter.grad = self.protocol.descent(total[name] / total_weight)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr * SCHEDULES[self.schedule](done)
        self._optimizer.step()


def invite(
    protocol: Protocol, clients: int, uploads: int, versions: int, rng: Generator
) -> Invited:
    """Return the clients of a round.

    Args:
        protocol: The protocol.
        clients: Number of clients.
        uploads: Number of uploads of a round.
        versions: Number of older versions of the model.
        rng: Source of the round's randomness. It advances by one step for each round.
    """
    own = fork(rng)
    chosen = torch.randperm(clients, generator=own)[:uploads].tolist()
    ages = [protocol.staleness(versions, own) for _ in chosen]
    return Invited(tuple(chosen), tuple(ages), own)


def _sum(parts: Sequence[tuple[float, Mapping[str, torch.Tensor]]]) -> Update | None:
    """Return the weighted sum of updates; None if there is none."""
    if not parts:
        return None
    return {
        name: torch.stack([weight * update[name] for weight, update in parts]).sum(dim=0)
        for name in parts[0][1]
    }
