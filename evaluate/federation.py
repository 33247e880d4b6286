"""Rounds of federated training under a defense: the utility side of the frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import FedSGD, Protocol
from leakfrontier.defenses import Batch, Defense, Loss, Update

from .client import release
from .contract import Checked

SERVER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
"""How the server applies the mean update: plain averaging, or FedAdam (Reddi et al. 2021)."""


@dataclass
class Federation:
    """A server, its clients and their data.

    Each round, `clients_per_round` clients train on their examples under their own copy of the
    defense, and the server steps along the mean of what it sees. Under FedSGD a client's batch
    is `batch_size` of its examples; under FedAvg it trains on all of them.

    Attributes:
        model: The global model, after the defense's `on_model`; trained in place.
        loss: Mean loss of a batch.
        shares: Each client's private examples.
        defense: The defense; every client gets a copy.
        protocol: How a client makes an update.
        clients_per_round: Clients sampled per round.
        batch_size: Examples per FedSGD update.
        server: `sgd` or `adam`.
        lr: The server's learning rate.
        rounds_of: Rounds that each client has taken part in, so far.
    """

    model: nn.Module
    loss: Loss
    shares: Sequence[Batch]
    defense: Defense
    protocol: Protocol
    clients_per_round: int
    batch_size: int = 32
    server: str = "adam"
    lr: float = 0.01
    rounds_of: list[int] = field(init=False, repr=False)
    _defenses: list[Checked] = field(init=False, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.clients_per_round <= len(self.shares):
            raise ValueError(
                f"clients_per_round must be in [1, {len(self.shares)}], "
                f"got {self.clients_per_round}"
            )
        if self.server not in SERVER_OPTIMIZERS:
            raise ValueError(f"server must be one of {[*SERVER_OPTIMIZERS]}, got {self.server!r}")
        self.rounds_of = [0] * len(self.shares)
        self._defenses = [Checked(replace(self.defense)) for _ in self.shares]
        self._optimizer = SERVER_OPTIMIZERS[self.server](self.model.parameters(), lr=self.lr)

    def round(self, rng: Generator) -> None:
        """Train one round: sample clients, collect what they release, step."""
        chosen = torch.randperm(len(self.shares), generator=rng)[: self.clients_per_round].tolist()
        shares = [self._local_examples(index, rng) for index in chosen]
        defenses = [self._defenses[index] for index in chosen]
        updates = release(self.model, self.loss, shares, defenses, self.protocol, rng)
        for index in chosen:
            self.rounds_of[index] += 1
        self._step(updates, clients=len(chosen))

    def train(
        self,
        rounds: int,
        rng: Generator,
        *,
        at: Iterable[int] = (),
        on_checkpoint: Callable[[int, nn.Module], None],
    ) -> None:
        """Train for some rounds; call `on_checkpoint` at those of `at` (0 is the initial model)."""
        wanted = set(at)
        for done in range(rounds + 1):
            if done in wanted:
                on_checkpoint(done, self.model)
            if done < rounds:
                self.round(rng)

    def _local_examples(self, client: int, rng: Generator) -> Batch:
        """Return a client's examples of this round: one draw for FedSGD, all for FedAvg."""
        share = self.shares[client]
        if not isinstance(self.protocol, FedSGD):
            return share
        draws = self._defenses[client].batches(len(share.inputs), self.batch_size, 1, rng)
        rows = next(iter(draws))
        return Batch(share.inputs[rows], share.targets[rows])

    def _step(self, updates: Sequence[Update], clients: int) -> None:
        """Step along the mean update; a FedAvg update points downhill, a gradient uphill."""
        sign = 1.0 if isinstance(self.protocol, FedSGD) else -1.0
        for name, parameter in self.model.named_parameters():
            total = torch.stack([update[name] for update in updates]).sum(dim=0)
            parameter.grad = sign * total / clients
        self._optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, loss: Loss, test: Batch) -> tuple[int, float]:
    """Return the number of correct predictions and the mean loss on test data."""
    model.eval()
    outputs: Tensor = torch.cat([model(part) for part in test.inputs.split(500)])
    model.train()
    correct = (outputs.argmax(dim=1) == test.targets).sum()
    return int(correct), float(loss(outputs, test.targets))
