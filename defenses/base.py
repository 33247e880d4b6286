"""The base class of defenses: hooks around one client's local training and its upload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad

Update = dict[str, Tensor]
"""A client's upload: one tensor per parameter, by the parameter's name."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a batch of model outputs against its targets."""


class Batch(NamedTuple):
    """Private examples and their labels, stacked along the first axis."""

    inputs: Tensor
    targets: Tensor

    def at(self, rows: Tensor | slice) -> Batch:
        """Return some of the examples."""
        return Batch(self.inputs[rows], self.targets[rows])

    def to(self, device: torch.device) -> Batch:
        """Return the same examples on a device."""
        return Batch(self.inputs.to(device), self.targets.to(device))

    @classmethod
    def joined(cls, batches: Iterable[Batch]) -> Batch:
        """Return the examples of several batches, one after the other."""
        return cls(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


class Refused(Exception):
    """The client refuses to train or to upload. The harness records this as a result."""


@dataclass(frozen=True)
class Plan:
    """How often a defense is applied to one client's records, for privacy accounting.

    Attributes:
        steps: Local steps (gradients) in which the client takes part, over all rounds.
        sample_rate: Probability that a step contains a given record, under secret Poisson sampling.
            It is 1 if the adversary may know which records are in a step, or if batches are not
            Poisson samples.
        delta: The delta at which epsilon is stated.
        passes: Maximum number of steps that contain one record, if batches come from shuffled
            epochs (the default `Defense.batches`). None if only `steps` is known.
    """

    steps: int
    sample_rate: float
    delta: float
    passes: int | None = None

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        if self.passes is not None and not self.passes >= 1:
            raise ValueError(f"passes must be at least 1, or None, got {self.passes}")


ADJACENCIES = {
    "zero-out": "neighbours differ in one unit that contributes nothing; the number of units is "
    "public",
    "add/remove": "neighbours differ in one unit that is added or removed; the number of units is "
    "secret",
    "replace": "neighbours differ in one unit that is replaced by another",
}
"""The adjacencies that a `Guarantee` may name, each with an explanation for readers.

A client can hide the content of a record. It cannot hide its number of records n, because its code
depends on n. The sample rate is B / n, an epoch has ceil(n / B) steps, and a server that weighs
clients by their size is told n. Hence our own record-level claims use `zero-out` (Kairouz et al.,
"Practical and Private (Deep) Learning without Sampling or Shuffling", ICML 2021,
https://arxiv.org/abs/2103.00039, definition 1.1; Chua et al., "How Private are DP-SGD
Implementations?", ICML 2024, https://arxiv.org/abs/2403.17673). The mechanisms and epsilons are
those of addition and removal. The server also sees whether a client takes part. A client-level
claim hides only what the client contributes.
"""


@dataclass(frozen=True)
class Guarantee:
    """A differential-privacy claim, with the assumptions that it depends on.

    Attributes:
        epsilon: Privacy loss; infinite if the mechanism gives no bound.
        delta: Failure probability.
        unit: The unit in which neighbouring datasets differ: `record` or `client`.
        adjacency: One of `ADJACENCIES`.
        accountant: How epsilon was computed.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str


@dataclass
class Defense:
    """The undefended client. Subclasses override the hooks at which they act.

    The harness calls `on_model` once, when the parties agree on the architecture. It calls
    `on_receive` for each model that the server sends. A client draws its `batches`, calls
    `on_batch` and `gradient` at every local step, and `on_update` once per upload. `on_cohort`
    receives the models of all clients of a round. `on_round` returns what the server sees of their
    uploads. Hooks return new values and do not change their arguments. All randomness comes from
    `rng`.

    Fields are hyper-parameters, so `repr(defense)` shows the configuration. State between rounds
    belongs in `field(init=False, repr=False)`. `dataclasses.replace(defense)` returns a fresh copy.
    The harness makes one copy for each client.
    """

    @property
    def stochastic(self) -> bool:
        """Return whether two uploads for the same batch differ."""
        return False

    @property
    def strength(self) -> float | None:
        """Return the strength, on the defense's own scale; None if it has no single knob."""
        return None

    @property
    def cohort(self) -> int:
        """Return the number of clients whose uploads the server sees only together."""
        return 1

    def for_space(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Defense:
        """Return the defense for inputs centred by `mean` and divided by `std`, per channel."""
        return self

    def on_model(self, model: nn.Module) -> nn.Module:
        """Return the model to train, e.g. with a layer added."""
        return model

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Return the model that the client trains on, given the model that it received.

        Args:
            model: The model that the server sent.
            agreed: A model of the agreed architecture, as `on_model` returned it.

        Raises:
            Refused: If the client does not train on the received model. The message says why.
        """
        return model

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Yield which of a client's examples each local step sees, e.g. Poisson samples."""
        for _ in range(epochs):
            yield from torch.randperm(examples, generator=rng).split(batch_size)

    def expect(self, batch_size: int) -> None:
        """Set the nominal batch size, even if a step draws fewer or more examples.

        A private sum is divided by this number, because a divisor must not reveal how many
        examples there were. The harness calls this for local steps that `batches` does not draw,
        as in a replay.
        """

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return the examples to train on, e.g. augmented."""
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient of one local step, e.g. clipped per example, by `trainable` names.

        The result is differentiable in the batch and in the parameters if these require gradients.
        `torch.func.vmap` can vectorise it. Both matter because an adversary replays this code.

        Raises:
            Refused: If the batch shows the client that it must not upload. The message says why.
        """
        return batch_gradient(model, loss, batch)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the upload, e.g. with noise added."""
        return update

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Take note of the model that each client of a round received, for `on_round`."""

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Return what the server sees: one upload per client, or only their sum.

        Raises:
            Refused: If clients find that they must not upload. The message says why.
        """
        return list(updates)

    def unguarded(self) -> Defense:
        """Return a client that refuses no batch. An adversary runs it on its own examples."""
        return self

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the part of the defense that an informed adversary can apply to a guess.

        It has no secret noise and rounds with a straight-through gradient. It includes what the
        observed upload reveals of the defense's choices, such as which entries were kept.
        """
        return self

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return log p(observed upload | replayed upload), up to a constant; None if undefined.

        `batch_size` is the number of examples behind a single gradient. It is None if the upload
        sums several local steps.
        """
        return None

    def guarantee(self, plan: Plan) -> Guarantee | None:
        """Return the formal guarantee under a training plan; None makes no claim."""
        return None


@dataclass
class Chain(Defense):
    """Several defenses. Each is applied to the output of the one before it.

    `on_model`, `on_batch`, `on_update` and `on_round` are composed in the order of the list. At
    most one link may override `gradient`, and at most one may override `batches`.

    Attributes:
        links: The defenses, in the order in which they are applied.
    """

    links: tuple[Defense, ...]

    def __post_init__(self) -> None:
        if not all(isinstance(link, Defense) for link in self.links):
            raise ValueError(f"links must be Defense objects, got {self.links}")
        self.links = tuple(replace(link) for link in self.links)  # state is never shared
        computing = [link for link in self.links if overrides(link, "gradient")]
        if len(computing) > 1:
            names = ", ".join(type(link).__name__ for link in computing)
            raise ValueError(f"at most one link may compute the gradient, got {names}")
        self._computing = computing[0] if computing else Defense()
        drawing = [link for link in self.links if overrides(link, "batches")]
        if len(drawing) > 1:
            names = ", ".join(type(link).__name__ for link in drawing)
            raise ValueError(f"at most one link may draw the batches, got {names}")
        self._drawing = drawing[0] if drawing else Defense()

    @property
    def stochastic(self) -> bool:
        """Return whether any link is stochastic."""
        return any(link.stochastic for link in self.links)

    @property
    def cohort(self) -> int:
        """Return the largest cohort of all links."""
        return max((link.cohort for link in self.links), default=1)

    def for_space(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Defense:
        """Return the chain of the links for that input space."""
        return Chain(tuple(link.for_space(mean, std) for link in self.links))

    def on_model(self, model: nn.Module) -> nn.Module:
        """Apply every link's `on_model`."""
        for link in self.links:
            model = link.on_model(model)
        return model

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Apply every link's `on_receive`."""
        for link in self.links:
            model = link.on_receive(model, agreed)
        return model

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Return the batches of the link that draws them."""
        return self._drawing.batches(examples, batch_size, epochs, rng)

    def expect(self, batch_size: int) -> None:
        """Pass the nominal batch size to every link."""
        for link in self.links:
            link.expect(batch_size)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Apply every link's `on_batch`."""
        for link in self.links:
            batch = link.on_batch(batch, rng)
        return batch

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient of the link that computes it."""
        return self._computing.gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Apply every link's `on_update`."""
        for link in self.links:
            update = link.on_update(update, rng)
        return update

    def on_cohort(self, models: Sequence[nn.Module]) -> None:
        """Pass the models to every link."""
        for link in self.links:
            link.on_cohort(models)

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        """Apply every link's `on_round`."""
        for link in self.links:
            updates = link.on_round(updates, rng)
        return list(updates)

    def unguarded(self) -> Defense:
        """Return the chain of links that refuse no batch."""
        return Chain(tuple(link.unguarded() for link in self.links))

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the chain of the links' replays."""
        return Chain(tuple(link.replay(observed) for link in self.links))

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return the log-likelihood of the only link that has one.

        The replayed upload already contains what is known of later links. With several noisy links
        there is no log-likelihood: no link knows the density of the sum of their noises.
        """
        found = [link.log_likelihood(observed, expected, batch_size) for link in self.links]
        known = [value for value in found if value is not None]
        return known[0] if len(known) == 1 else None

    def guarantee(self, plan: Plan) -> Guarantee | None:
        """Return the guarantee of the link that has one; otherwise None.

        Links after a private one are post-processing. A guarantee for whole uploads holds after any
        earlier link. A guarantee for records fails if another link changes or mixes the examples,
        or changes the model.
        """
        others = [link for link in self.links if link is not self._computing]
        mixed = any(overrides(link, "on_batch") or overrides(link, "on_model") for link in others)
        claims = [link.guarantee(plan) for link in others]
        if not mixed:
            claims.insert(0, self._computing.guarantee(plan))
        made = [claim for claim in claims if claim is not None]
        return next((claim for claim in made if claim.epsilon < math.inf), next(iter(made), None))


def trainable(model: nn.Module) -> Update:
    """Return the parameters that are trained, uploaded and defended; frozen ones are constants.

    Within a local step they are plain tensors that the earlier steps computed.
    """
    return {
        name: value
        for name, value in model.named_parameters()
        if value.requires_grad or not isinstance(value, nn.Parameter)
    }


def batch_gradient(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return the gradient of the mean loss of a batch at the model's trainable parameters."""
    parameters = trainable(model)

    def objective(parameters: Update) -> Tensor:
        return loss(functional_call(model, parameters, (batch.inputs,)), batch.targets)

    return cast(Update, grad(objective)(parameters))


def overrides(defense: Defense, hook: str) -> bool:
    """Return whether a defense, or a link of a chain, has its own version of a hook."""
    if type(defense) is Chain:
        return any(overrides(link, hook) for link in defense.links)
    own = getattr(defense, hook)  # may be an attribute of the object
    return getattr(own, "__func__", own) is not getattr(Defense, hook)
