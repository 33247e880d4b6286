"""What an adversary sees, what it may do, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple
from typing import Protocol as TypingProtocol

from torch import Generator, Tensor, nn

from .protocols import Protocol
from .spaces import InputSpace, NotApplicable

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a batch of model outputs against its targets."""


class Threat(StrEnum):
    """How far the server departs from the protocol."""

    PASSIVE = "passive"  # reads what honest training reveals
    PARAMETERS = "parameters"  # sends crafted parameters
    ARCHITECTURE = "architecture"  # sends a crafted architecture


THREATS = tuple(threat.value for threat in Threat)
"""Threats by name, from the weakest server to the strongest: each can do what those before can."""


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
class Round:
    """What a malicious server knows when it sends models.

    Attributes:
        space: What is known of the inputs.
        protocol: What is agreed on.
        clients: Clients that take part; the first is the one whose examples are sought.
        batch_size: Private examples of each of them.
        public: Auxiliary data, if the threat model grants it.
        kept: What `craft` kept when the server last sent models, which may save work; what is
            sent must not depend on it.
    """

    space: InputSpace
    protocol: Protocol
    clients: int
    batch_size: int
    public: PublicData | None = None
    kept: object = None


@dataclass(frozen=True)
class Crafted:
    """What a server sends, and what it keeps.

    Attributes:
        models: A model for each client. Their parameters have the same names and shapes, so that
            updates can be summed.
        kept: What `reconstruct` will find in `Observation.kept`; None if nothing is needed.
    """

    models: Sequence[nn.Module]
    kept: object = None


class Replay(TypingProtocol):
    """The clients' own code, for a guess."""

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        observed: Mapping[str, Tensor],
        /,
        *,
        by_epoch: bool = False,
    ) -> Mapping[str, Tensor]:
        """Return the upload that clients would make of a guess.

        Args:
            inputs: The guess.
            targets: Its labels.
            observed: The upload that was seen.
            by_epoch: Whether the guess holds the examples of every epoch, one after the other,
                instead of those that all epochs see.
        """


@dataclass(frozen=True)
class Observation:
    """Everything that the adversary is granted, and nothing else.

    Attributes:
        models: The models as the clients behind the update received them, the victim's first.
        loss: Mean loss of a batch of outputs, by which clients train.
        update: What the server saw, by parameter name, after the defense.
        protocol: How the update came about.
        space: What is known of the inputs.
        batch_size: Number of private examples behind the update.
        replay: The update that clients would upload for guessed inputs and targets, given the
            observed one; differentiable, through one local step or many, and with the defense
            only if the threat model lets the adversary know it. Observations of the same models
            share one `replay`, so that an attack can vectorise over them.
        release: The upload of another client, for examples of the adversary's own: unlike a
            replay, with noise and choices of its own, drawn from the given generator; with the
            defense only if the adversary knows it. None for a client that cannot be run.
        targets: The private labels, if the threat model grants them.
        log_likelihood: log p(observed update | replayed update), if the defense is known and
            has one.
        public: Auxiliary data, if the threat model grants it.
        candidates: Batches among which the private one is, if the threat model grants them.
        kept: What `craft` kept for all clients of the round. None if it kept nothing, or if the
            models were not crafted by this server, as in a capture. The defense may have altered
            models since: `models` holds what the clients train on.
    """

    models: tuple[nn.Module, ...]
    loss: Loss
    update: Mapping[str, Tensor]
    protocol: Protocol
    space: InputSpace
    batch_size: int
    replay: Replay
    targets: Tensor | None = None
    log_likelihood: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor | None] | None = (
        None
    )
    public: PublicData | None = None
    candidates: Candidates | None = None
    release: Callable[[Tensor, Tensor, Generator], Mapping[str, Tensor]] | None = None
    kept: object = None

    @property
    def model(self) -> nn.Module:
        """Return the model that the victim received."""
        return self.models[0]

    def as_gradient(self, name: str) -> Tensor:
        """Return what was seen of a parameter as the mean gradient per client and local step."""
        return self.protocol.as_gradient(self.update[name], self.batch_size)

    @property
    def local_steps(self) -> int:
        """Return how many local steps are behind one client's update."""
        return self.protocol.local_steps(self.batch_size // self.protocol.clients)

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
        residuals: Of an attack that goes back layer by layer, the part of each layer's equations
            that is left unexplained: where it jumps, the recursion broke.
    """

    inputs: Tensor
    targets: Tensor | None = None
    objective: float | None = None
    confidence: Tensor | None = None
    layer: str | None = None
    residuals: Mapping[str, float] | None = None


def only(results: Sequence[Reconstruction | NotApplicable]) -> Reconstruction:
    """Return the result of an attack on a single observation, or raise why there is none."""
    (result,) = results
    if isinstance(result, NotApplicable):
        raise result
    return result


def in_groups(
    count: int,
    alike: Callable[[int], Hashable],
    attack: Callable[[Sequence[int]], Sequence[Reconstruction]],
) -> list[Reconstruction | NotApplicable]:
    """Return the results of attacking observations together that have something in common.

    Args:
        count: Number of observations.
        alike: From an observation's index to what a group shares; it may raise `NotApplicable`.
        attack: From the indices of a group to its results.
    """
    results: dict[int, Reconstruction | NotApplicable] = {}
    groups: dict[Hashable, list[int]] = {}
    for index in range(count):
        try:
            groups.setdefault(alike(index), []).append(index)
        except NotApplicable as reason:
            results[index] = reason
    for group in groups.values():
        results |= zip(group, attack(group), strict=True)
    return [results[index] for index in range(count)]


@dataclass(frozen=True)
class Adversary(ABC):
    """An attack; its fields are its hyper-parameters, defaulting to the published ones.

    Attributes:
        threat: How far the server departs from the protocol.
        simulates: Whether the attack replays the client, so that knowing the defense matters.
        pooled: Whether what it makes of an observation depends on which others it is given.
        baseline: Whether it ignores the update: what it reaches is not leakage.
        needs_candidates: Whether the attack chooses among candidates, which the harness then
            grants: each victim's look-alikes, and the victim among them.
        cost: Its stage in a cascade: 0 if it takes no search, 1 for a quick one, 2 for one, 3
            for a long one. A stage runs only where those before left something to find.
    """

    threat: ClassVar[Threat] = Threat.PASSIVE
    simulates: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    needs_candidates: ClassVar[bool] = False
    cost: ClassVar[int] = 2

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the model that the server sends to each client, and what it keeps.

        An honest server sends the given model to all, and keeps nothing. The given model is left
        as it is.

        Args:
            model: The model that was agreed on and trained so far.
            round: What the server knows of those that it sends models to.
            rng: Source of all randomness.

        Raises:
            NotApplicable: If the model cannot be crafted as the attack needs it.
        """
        return Crafted([model] * round.clients)

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


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout, and leave it as it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
