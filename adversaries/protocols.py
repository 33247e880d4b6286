"""Protocols: how a client computes its upload and how the server uses uploads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Generator, Tensor

Weights = Mapping[str, Tensor]
Part = TypeVar("Part")


@dataclass(frozen=True)
class Protocol(ABC):
    """What clients and server agreed on.

    Attributes:
        clients: Clients behind one observed upload. Above 1, the server sees only their sum.
        uploads_gradient: Whether an upload is a gradient. Otherwise it is a change of weights.
        uses_all_examples: Whether every upload of a client uses all its examples, so that its
            uploads of different rounds are about the same examples.
    """

    uploads_gradient: ClassVar[bool]
    uses_all_examples: ClassVar[bool] = False

    clients: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not self.clients >= 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")

    @property
    @abstractmethod
    def passes(self) -> int:
        """Return how often local training sees each example."""

    @abstractmethod
    def local_steps(self, examples: int) -> int:
        """Return the number of local steps that one client takes on its examples."""

    @abstractmethod
    def step_size(self, examples: int) -> int:
        """Return how many of a client's examples one local step sees."""

    @abstractmethod
    def drawn(self, examples: int, batches: Callable[[], Iterator[Tensor]]) -> Tensor:
        """Return the indices of the client's examples that one upload is computed from.

        Args:
            examples: Number of examples that the client has.
            batches: Draws batches of their indices.
        """

    @abstractmethod
    def train(
        self,
        start: Weights,
        examples: Part,
        batches: Callable[[int, int], Iterator[Part]],
        gradient: Callable[[Weights, Part], Weights],
    ) -> Weights:
        """Train locally and return the upload, before the defense's `on_update`.

        Args:
            start: The weights that the client received.
            examples: All its examples in this round.
            batches: Maps a batch size and a number of epochs to the examples of each local step.
            gradient: Returns the gradient of a local step at given weights.
        """

    @abstractmethod
    def as_gradient(self, value: Tensor, examples: int) -> Tensor:
        """Return one parameter's upload as the mean gradient per client and local step.

        Args:
            value: The upload of one parameter.
            examples: Private examples behind the upload, summed over all its clients.
        """

    def rounding(self, weight: Tensor, examples: int) -> Tensor:
        """Return the standard deviation of `as_gradient` that rounding of weights causes.

        Args:
            weight: The parameter that the client received.
            examples: Private examples behind the upload, summed over all its clients.
        """
        return torch.zeros_like(weight)

    def descent(self, value: Tensor) -> Tensor:
        """Return an upload with the sign of a gradient, for the server's optimizer."""
        return value if self.uploads_gradient else -value

    def uploads(self, clients_per_round: int) -> int:
        """Return the number of uploads per server step."""
        return clients_per_round

    def staleness(self, rounds: int, rng: Generator) -> int:
        """Return the age of the model that a client trains on, in versions.

        Args:
            rounds: Number of versions so far.
            rng: Source of all randomness.
        """
        return 0

    @property
    def max_staleness(self) -> int:
        """Return the largest possible staleness, in versions."""
        return 0

    def weight(self, staleness: int) -> float:
        """Return the weight of an upload that was trained on an old model."""
        return 1.0


@dataclass(frozen=True)
class FedSGD(Protocol):
    """A client uploads one gradient of its batch."""

    uploads_gradient: ClassVar[bool] = True

    @property
    def passes(self) -> int:
        """Return 1."""
        return 1

    def local_steps(self, examples: int) -> int:
        """Return 1."""
        return 1

    def step_size(self, examples: int) -> int:
        """Return the number of examples."""
        return examples

    def drawn(self, examples: int, batches: Callable[[], Iterator[Tensor]]) -> Tensor:
        """Return one batch."""
        return next(batches())

    def train(
        self,
        start: Weights,
        examples: Part,
        batches: Callable[[int, int], Iterator[Part]],
        gradient: Callable[[Weights, Part], Weights],
    ) -> Weights:
        """Return the gradient."""
        return gradient(start, examples)

    def as_gradient(self, value: Tensor, examples: int) -> Tensor:
        """Return the mean over clients."""
        return value / self.clients


@dataclass(frozen=True)
class FedAvg(Protocol):
    """A client takes local SGD steps and uploads the change of its weights, w_T - w_0.

    Attributes:
        epochs: Passes over the client's examples.
        batch_size: Examples in one local step.
        lr: Local learning rate.
        steps: Local steps of every client, independent of its number of examples, so an upload
            does not reveal that number. None takes as many steps as `epochs` contain.
        clients: Clients behind one observed upload. Above 1, the server sees only their sum.
    """

    uploads_gradient: ClassVar[bool] = False
    uses_all_examples: ClassVar[bool] = True

    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if self.steps is not None and not self.steps >= 1:
            raise ValueError(f"steps must be at least 1, or None, got {self.steps}")
        if self.steps is not None and self.epochs > 1:
            raise ValueError("give either epochs or steps: steps may end within an epoch")

    @property
    def passes(self) -> int:
        """Return the number of epochs, or the largest number that fixed steps may reach."""
        return self.steps or self.epochs

    def local_steps(self, examples: int) -> int:
        """Return the number of batches in all epochs, or the fixed number of steps."""
        return self.steps or self.epochs * -(-examples // self.batch_size)

    def step_size(self, examples: int) -> int:
        """Return the size of a batch."""
        return min(self.batch_size, examples)

    def drawn(self, examples: int, batches: Callable[[], Iterator[Tensor]]) -> Tensor:
        """Return the indices of all examples."""
        return torch.arange(examples)

    def train(
        self,
        start: Weights,
        examples: Part,
        batches: Callable[[int, int], Iterator[Part]],
        gradient: Callable[[Weights, Part], Weights],
    ) -> Weights:
        """Take the local steps, and return the change of weights."""
        weights = start
        for part in islice(batches(self.batch_size, self.passes), self.steps):
            slope = gradient(weights, part)
            weights = {name: weights[name] - self.lr * slope[name] for name in start}
        return {name: weights[name] - start[name] for name in start}

    def as_gradient(self, value: Tensor, examples: int) -> Tensor:
        """Return minus the mean step, divided by the learning rate."""
        steps = self.local_steps(examples // self.clients)
        return -value / (self.clients * self.lr * steps)

    def rounding(self, weight: Tensor, examples: int) -> Tensor:
        """Return the standard deviation of the sum of independent rounding errors.

        Each error is at most half the spacing of floats. Every local step rounds the weights
        again; the final difference of weights is exact.
        """
        size = weight.detach().abs()
        spacing = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
        errors = self.clients * self.local_steps(examples // self.clients)
        return spacing / (self.lr * math.sqrt(12 * errors))


@dataclass(frozen=True)
class FedBuff(FedAvg):
    """Asynchronous federated averaging: the server steps whenever its buffer is full.

    Each client trains at its own pace on the version of the model that it received. When its
    upload arrives, the model is tau versions newer, and the upload counts (1 + tau)^-a. The
    simulation has no clocks: it draws tau for each upload. The adversary knows the version that
    the attacked client trained.

    Attributes:
        epochs: Passes over the client's examples.
        batch_size: Examples in one local step.
        lr: Local learning rate.
        steps: Local steps of every client. None takes as many steps as `epochs` contain.
        buffer: Uploads per server step, K.
        oldest: The largest staleness.
        delays: Distribution of tau. `uniform` draws from 0 to `oldest`. `half-normal` is the
            paper's distribution of training times, with `oldest` at two standard deviations and
            larger values cut off.
        exponent: a, which damps old uploads. 0 means no damping.

    References:
        Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. "Federated Learning with Buffered
        Asynchronous Aggregation." AISTATS 2022. https://arxiv.org/abs/2106.06639 (Algorithm 1;
        weights in section 5)
    """

    buffer: int = 10
    oldest: int = 4
    delays: Literal["uniform", "half-normal"] = "uniform"
    exponent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.buffer >= 1:
            raise ValueError(f"buffer must be at least 1, got {self.buffer}")
        if not self.oldest >= 0:
            raise ValueError(f"oldest must be at least 0, got {self.oldest}")
        if self.delays not in ("uniform", "half-normal"):
            raise ValueError(f"delays must be 'uniform' or 'half-normal', got {self.delays!r}")
        if not 0 <= self.exponent < math.inf:
            raise ValueError(f"exponent must be >= 0 and finite, got {self.exponent}")

    @property
    def max_staleness(self) -> int:
        """Return the largest staleness."""
        return self.oldest

    def uploads(self, clients_per_round: int) -> int:
        """Return the size of the buffer."""
        return self.buffer

    def staleness(self, rounds: int, rng: Generator) -> int:
        """Draw tau; it never exceeds the number of versions so far."""
        if self.delays == "uniform":
            drawn = int(torch.randint(self.oldest + 1, (), generator=rng))
        else:
            normal = float(torch.randn((), generator=rng).abs())
            drawn = min(self.oldest, int(normal * (self.oldest + 1) / 2))
        return min(rounds, drawn)

    def weight(self, staleness: int) -> float:
        """Return (1 + tau)^-a."""
        return float((1 + staleness) ** -self.exponent)
