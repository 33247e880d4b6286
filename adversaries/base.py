"""The interface of adversaries: what they observe, what they may send and what they return."""

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
"""Names of the threats, from the weakest server to the strongest. Each includes those before."""


class PublicData(NamedTuple):
    """Auxiliary examples from the distribution of the private data; they include no victim."""

    inputs: Tensor
    targets: Tensor


class Candidates(NamedTuple):
    """N equally likely alternatives for each private example, in random order; one is the example.

    Column k holds the alternatives for the k-th example of the batch, independent of the other
    columns. If the alternatives of a column are all equal, the adversary knows this example. A
    guess that ignores the update is right with probability 1 / N in every other column.

    An attack on a batch returns one guess per column, in the order of the columns. Each guess
    counts only for the example of its own column.

    Attributes:
        inputs: Tensor of shape N x batch size x shape of one example.
        targets: Labels, of shape N x batch size.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Round:
    """What a malicious server knows when it sends models.

    Attributes:
        space: Public facts about the inputs.
        protocol: The agreed protocol.
        clients: Number of clients in the round. The first one is the victim.
        batch_size: Private examples of each client.
        public: Auxiliary data, if the threat model grants it.
        kept: What `craft` kept when the server last sent models. It may save work. The models
            that the server sends must not depend on it.
    """

    space: InputSpace
    protocol: Protocol
    clients: int
    batch_size: int
    public: PublicData | None = None
    kept: object = None


@dataclass(frozen=True)
class Crafted:
    """What a server sends to the clients, and what it keeps for itself.

    Attributes:
        models: One model per client. Their parameters have the same names and shapes, because
            their updates are summed.
        kept: Passed to `reconstruct` as `Observation.kept`. None if the attack needs nothing.
    """

    models: Sequence[nn.Module]
    kept: object = None


class Replay(TypingProtocol):
    """The clients' own code, applied to a guess."""

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        observed: Mapping[str, Tensor],
        /,
        *,
        by_epoch: bool = False,
    ) -> Mapping[str, Tensor]:
        """Return the upload that clients would send for a guess.

        Args:
            inputs: The guess.
            targets: Its labels.
            observed: The upload that the server received.
            by_epoch: If True, the guess lists the examples of every epoch, one epoch after the
                other. If False, all epochs see the same examples.
        """


@dataclass(frozen=True)
class Observation:
    """Everything that the adversary is allowed to see.

    Attributes:
        models: The models that the clients behind the update received, the victim's first.
        loss: Mean loss of a batch of outputs; clients train on it.
        update: What the server received after the defense, by parameter name.
        protocol: How clients compute the update.
        space: Public facts about the inputs.
        batch_size: Number of private examples behind the update.
        replay: Returns the update that clients would upload for guessed inputs and targets,
            given the observed update. It is differentiable through all local steps. It includes
            the defense only if the threat model lets the adversary know it. Observations of the
            same models share one `replay`, which lets an attack vectorise over them.
        release: Returns the upload of another client for examples that the adversary chooses.
            Unlike `replay`, it draws fresh noise and choices from the given generator. It
            includes the defense only if the adversary knows it. None if the client cannot be run.
        targets: The private labels, if the threat model grants them.
        log_likelihood: log p(observed update | replayed update), if the adversary knows the
            defense and the defense has a density.
        public: Auxiliary data, if the threat model grants it.
        candidates: Alternatives for each private example, if the threat model grants them.
        kept: What `craft` kept for all clients of the round. None if it kept nothing, or if this
            server did not craft the models, as in a capture. A defense may change a model after
            it is sent: `models` holds the models that the clients train.
        earlier: The same client's earlier uploads, oldest first. They are about the same private
            examples if `protocol.uses_all_examples`, and otherwise about unknown ones.
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
    earlier: Sequence[Observation] = ()

    @property
    def model(self) -> nn.Module:
        """Return the model that the victim received."""
        return self.models[0]

    def as_gradient(self, name: str) -> Tensor:
        """Return one parameter's update as the mean gradient per client and local step."""
        return self.protocol.as_gradient(self.update[name], self.batch_size)

    @property
    def local_steps(self) -> int:
        """Return the number of local steps behind one client's update."""
        return self.protocol.local_steps(self.batch_size // self.protocol.clients)

    def simulate(self, inputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return what the client would have uploaded if this guess were its batch."""
        return self.replay(inputs, targets, self.update)


@dataclass(frozen=True)
class Reconstruction:
    """Guessed examples in any order. Metrics match them to the private ones.

    Attributes:
        inputs: Guessed model inputs, stacked. There may be fewer than private examples.
        targets: Guessed labels, if the attack has any.
        objective: The value that the attack minimised, at this guess. It ranks guesses without
            ground truth.
        confidence: How well each guess explains the update, from 0 to 1 (certain). None if the
            attack cannot tell.
        layer: Name of the layer whose inputs were recovered; None means the model's own inputs.
        residuals: For attacks that go back layer by layer: the unexplained part of each layer's
            equations. The recursion broke where it jumps.
    """

    inputs: Tensor
    targets: Tensor | None = None
    objective: float | None = None
    confidence: Tensor | None = None
    layer: str | None = None
    residuals: Mapping[str, float] | None = None


def only(results: Sequence[Reconstruction | NotApplicable]) -> Reconstruction:
    """Return the result for a single observation, or raise its `NotApplicable`."""
    (result,) = results
    if isinstance(result, NotApplicable):
        raise result
    return result


def in_groups(
    count: int,
    alike: Callable[[int], Hashable],
    attack: Callable[[Sequence[int]], Sequence[Reconstruction]],
) -> list[Reconstruction | NotApplicable]:
    """Attack observations in groups that share something; return the results in input order.

    Args:
        count: Number of observations.
        alike: Maps an observation's index to what its group shares. May raise `NotApplicable`.
        attack: Maps the indices of a group to its results.
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
    """An attack. Its fields are its hyper-parameters; the defaults are the published values.

    Attributes:
        threat: How far the server departs from the protocol.
        simulates: Whether the attack replays the client. If so, knowing the defense matters.
        pooled: Whether a result depends on the other observations in the same call.
        baseline: Whether the attack ignores the update. Its success is then not leakage.
        needs_candidates: Whether the attack chooses among candidates. The harness then grants
            them: each victim, hidden among its look-alikes.
        informed: Whether an attack with candidates also knows the rest of the batch. The harness
            then runs it once per victim, and reveals all other private examples.
        cost: Stage in a cascade: 0 needs no search, 1 is a quick search, 2 a normal one and 3 a
            long one. A stage attacks only what earlier stages did not recover.
    """

    threat: ClassVar[Threat] = Threat.PASSIVE
    simulates: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    needs_candidates: ClassVar[bool] = False
    informed: ClassVar[bool] = False
    cost: ClassVar[int] = 2

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the model that the server sends to each client, and what it keeps.

        By default, an honest server sends the given model to every client and keeps nothing.
        An attack must not modify the given model.

        Args:
            model: The agreed model, trained so far.
            round: What the server knows about the clients.
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
        """Attack several observations. Override this if the attack can vectorise over them."""
        results: list[Reconstruction | NotApplicable] = []
        for observation, rng in zip(observations, rngs, strict=True):
            try:
                results.append(self.reconstruct(observation, rng))
            except NotApplicable as reason:
                results.append(reason)
        return results

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float | None:
        """Return the attack's objective at any guess, or None if the attack does not optimise.

        The harness compares its values at the guess and at the truth. This shows whether the
        optimiser failed or whether the information is missing.
        """
        return None


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode (no dropout) and restore its mode afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
