"""Rounds of federated training under a defense, with server and clients in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Generator, nn

from leakfrontier.defenses import Batch

from .averaging import Averaging
from .client import Client
from .clients import Clients


@dataclass
class Federation:
    """A server, its clients and their data.

    In each round, clients train on their examples under their own copy of the defense. The server
    steps along the mean of what it sees. The protocol decides on a client's examples of a round,
    the version of its model, the number of uploads per step, and their weights. A client may refuse
    the model at once or after it sees its batch. It is then left out of the round. If clients
    refuse together, they are left out together.

    Attributes:
        client: The template of all clients. Its model is the global one, after the defense's
            `on_model`, and is trained in place. Each client gets a copy of its defense.
        shares: The private examples of each client.
        clients_per_round: Clients sampled per round.
        batch_size: Examples that a client draws for a FedSGD update.
        server: `sgd` or `adam`.
        lr: The server's learning rate.
        rounds_of: Number of rounds in which each client has taken part so far.
        refused: How often clients have refused so far.
    """

    client: Client
    shares: Sequence[Batch]
    clients_per_round: int
    batch_size: int = 32
    server: str = "adam"
    lr: float = 0.01
    rounds_of: list[int] = field(init=False, repr=False)
    refused: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        total = len(self.shares)
        self.rounds_of = [0] * total
        self._clients = Clients(self.client, self.shares, [self.batch_size] * total)
        self._server = Averaging(
            self.client.model,
            self.client.protocol,
            total,
            self.clients_per_round,
            self.server,
            self.lr,
        )

    @property
    def model(self) -> nn.Module:
        """Return the global model."""
        return self.client.model

    def round(self, rng: Generator) -> None:
        """Train one round: invite clients, collect what they release, step."""
        invited = self._server.invite(rng)
        answer = self._clients.answer(invited, self._server.sent(invited), self.model)
        self.refused += answer.refused
        for index in (index for one in answer.seen for index in one.clients):
            self.rounds_of[index] += 1
        self._server.step(invited, answer.seen)

    def train(
        self,
        rounds: int,
        rng: Generator,
        *,
        at: Iterable[int] = (),
        on_checkpoint: Callable[[int, nn.Module], None],
    ) -> None:
        """Train for some rounds; call `on_checkpoint` at those in `at` (0 is the initial model)."""
        wanted = set(at)
        for done in range(rounds + 1):
            if done in wanted:
                on_checkpoint(done, self.model)
            if done < rounds:
                self.round(rng)
