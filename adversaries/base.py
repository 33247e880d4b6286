"""What an adversary sees, what it may do, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn


class NotApplicable(ValueError):
    """The attack cannot run on this observation; recorded as such, never as a failed attack."""


class Threat(Enum):
    """How far the server departs from the protocol."""

    PASSIVE = "passive"  # reads what honest training reveals
    PARAMETERS = "parameters"  # sends crafted parameters
    ARCHITECTURE = "architecture"  # sends a crafted architecture


class PublicData(NamedTuple):
    """Auxiliary examples of the private data's distribution, disjoint from the victims."""

    inputs: Tensor
    targets: Tensor


class Candidates(NamedTuple):
    """The N batches that a prior holds equally likely, in random order; one is the private one.

    Examples that all candidates have in common are thereby known to the adversary. A guess that
    ignores the update is right with probability 1 / N.

    Attributes:
        inputs: N x examples in a batch x the shape of one.
        targets: Their labels, N x examples in a batch.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class InputSpace:
    """What is publicly known of the inputs.

    Attributes:
        shape: Shape of one example, without the batch axis.
        classes: Number of classes.
        mean: Per-channel mean that the model's inputs were centred by.
        std: Per-channel standard deviation that they were divided by.
        vocabulary: Number of tokens if the inputs are token ids; None for real-valued inputs.
    """

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    vocabulary: int | None = None

    def to_pixels(self, inputs: Tensor) -> Tensor:
        """Return model inputs on the scale of the data, where values lie in [0, 1]."""
        return inputs * self._per_channel(self.std, inputs) + self._per_channel(self.mean, inputs)

    def to_inputs(self, pixels: Tensor) -> Tensor:
        """Return data in [0, 1] as the model's inputs."""
        return (pixels - self._per_channel(self.mean, pixels)) / self._per_channel(self.std, pixels)

    def clamp(self, inputs: Tensor) -> Tensor:
        """Return model inputs with every value moved into the range of the data."""
        low = self.to_inputs(torch.zeros((1, *self.shape)).to(inputs))
        high = self.to_inputs(torch.ones((1, *self.shape)).to(inputs))
        return torch.minimum(torch.maximum(inputs, low), high)

    def _per_channel(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values).to(like).view(-1, *[1] * (len(self.shape) - 1))


@dataclass(frozen=True)
class FedSGD:
    """A client uploads one gradient of its batch.

    Attributes:
        clients: Clients behind one observed upload: above 1, the server sees only their sum.
    """

    clients: int = 1

    def __post_init__(self) -> None:
        if not self.clients >= 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")


@dataclass(frozen=True)
class FedAvg:
    """A client takes local SGD steps and uploads the change of its weights, w_T - w_0.

    Attributes:
        epochs: Passes over the client's examples.
        batch_size: Examples in one local step.
        lr: Local learning rate.
        clients: Clients behind one observed upload: above 1, the server sees only their sum.
    """

    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    clients: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "clients"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be positive and finite, got {self.lr}")


Protocol = FedSGD | FedAvg


@dataclass(frozen=True)
class Observation:
    """Everything that the adversary is granted, and nothing else.

    Attributes:
        model: The model as the client received it.
        update: What the server saw, by parameter name, after the defense.
        protocol: How the update came about.
        space: What is known of the inputs.
        batch_size: Number of private examples behind the update.
        replay: The update that a client would upload for guessed inputs and targets, given the
            observed one; differentiable, through one local step or many, and with the defense
            only if the threat model lets the adversary know it. Observations of one model
            share one `replay`, so that an attack can vectorise over them.
        release: The upload of another client, for examples of the adversary's own: unlike a
            replay, with noise and choices of its own, drawn from the given generator; with the
            defense only if the adversary knows it. None for a client that cannot be run.
        targets: The private labels, if the threat model grants them.
        log_likelihood: log p(observed update | replayed update), if the defense is known and
            has one.
        public: Auxiliary data, if the threat model grants it.
        candidates: Batches among which the private one is, if the threat model grants them.
    """

    model: nn.Module
    update: Mapping[str, Tensor]
    protocol: Protocol
    space: InputSpace
    batch_size: int
    replay: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
    targets: Tensor | None = None
    log_likelihood: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor | None] | None = (
        None
    )
    public: PublicData | None = None
    candidates: Candidates | None = None
    release: Callable[[Tensor, Tensor, Generator], Mapping[str, Tensor]] | None = None

    def simulate(self, inputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return what the client would have uploaded, had its batch been this guess."""
        return self.replay(inputs, targets, self.update)


@dataclass(frozen=True)
class Reconstruction:
    """Guessed examples, in no particular order: metrics match them to the truth.

    Attributes:
        inputs: Guessed model inputs, stacked; there may be fewer than private examples.
        targets: Guessed labels, if the attack has any.
        objective: What the attack minimised, at this guess; it chooses between guesses without
            ground truth.
        confidence: How well each guess explains the update, in [0, 1], where the attack can
            tell; 1 is certain.
        layer: Name of the layer whose inputs were recovered, if these are not the model's.
    """

    inputs: Tensor
    targets: Tensor | None = None
    objective: float | None = None
    confidence: Tensor | None = None
    layer: str | None = None


@dataclass(frozen=True)
class Adversary(ABC):
    """An attack; its fields are its hyper-parameters, defaulting to the published ones.

    Attributes:
        threat: How far the server departs from the protocol.
        simulates: Whether the attack replays the client, so that knowing the defense matters.
        baseline: Whether it ignores the update: what it reaches is not leakage.
        needs_candidates: Whether the attack chooses among candidates, which the harness then
            grants: each victim's look-alikes, and the victim among them.
        cost: 0 if it is exact or cheap, 1 for one search, 2 for several or long ones: costly
            attacks run only where cheaper ones left something to find.
    """

    threat: ClassVar[Threat] = Threat.PASSIVE
    simulates: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    needs_candidates: ClassVar[bool] = False
    cost: ClassVar[int] = 1

    def craft(self, model: nn.Module, space: InputSpace, client: int, rng: Generator) -> nn.Module:
        """Return the model that a malicious server sends to a client; an honest one is passive."""
        return model

    @abstractmethod
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the adversary's best guess of the private batch.

        Raises:
            NotApplicable: If the attack's assumptions do not hold for this observation.
        """

    def reconstruct_all(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction | NotApplicable]:
        """Attack several observations; an attack that can vectorise over them overrides this."""
        results: list[Reconstruction | NotApplicable] = []
        for observation, rng in zip(observations, rngs, strict=True):
            try:
                results.append(self.reconstruct(observation, rng))
            except NotApplicable as reason:
                results.append(reason)
        return results

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float | None:
        """Return what the attack minimises, at any guess; None if it optimises nothing.

        The harness compares it at the guess and at the truth, to tell an optimiser that failed
        from information that is missing.
        """
        return None
