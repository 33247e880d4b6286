"""Gradient matching: search for inputs whose replayed update is the observed one.

This module holds the common parts of the attacks by optimisation. An attack defines its unknowns,
how a guess is replayed, and which distance, priors and optimizer it uses. One loop then improves
the guesses for several victims, each from several starts, vectorised by `torch.func`. All
functions of this module take such a stack of guesses along the first axis.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, TypeVar, cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ..base import Adversary, Observation, Reconstruction, in_groups, only
from ..spaces import NotApplicable
from .label_inference import infer_targets
from .optimizers import Evaluate, Optimizer, Progress, Unknowns
from .unfused_norms import unfused_norms

Update = Mapping[str, Tensor]
"""Updates of a stack of guesses, by parameter name."""

Distance = Callable[[Update, Update], tuple[Tensor, Update]]
"""Maps replayed and observed updates to each guess's distance and its gradient (replayed)."""

Simulation = Callable[[Tensor, Unknowns, Tensor, Update], Update]
"""Maps a guess's inputs, all its unknowns, its targets and the observed update to its update."""

Randomness = Literal["same", "different"]
"""Whether random draws of a function are the same for all guesses of a stack."""

T = TypeVar("T")

_TINY = 1e-30  # makes the cosine with a zero vector zero
_FLOATS_AT_ONCE = 2**24  # larger stacks exceed the caches and are no faster


@dataclass(frozen=True)
class Matching(Adversary):
    """An attack that searches for the guess with the lowest objective: distance plus priors.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts. The attack keeps the one with the lowest objective.
    """

    simulates: ClassVar[bool] = True
    precision: ClassVar[torch.dtype] = torch.float32  # floating-point type of the search

    iterations: int = 1000
    restarts: int = 1

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @abstractmethod
    def distance(self, observation: Observation) -> Distance:
        """Return the distance between updates."""

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Return the optimizer that minimises the objective."""

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return how unlikely each guess is, independent of the update."""
        return inputs.new_zeros(len(inputs))

    def check(self, observation: Observation) -> None:
        """Raise `NotApplicable` if the attack's assumptions do not hold."""

    def targets(self, observation: Observation, rng: Generator) -> Tensor:
        """Return the labels of the guesses, either granted or inferred."""
        return infer_targets(observation, rng)

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Return the first guesses for an observation, one per restart."""
        shape = (self.restarts, observation.batch_size, *observation.space.shape)
        return {"inputs": torch.randn(shape, generator=rng)}

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Return the unknowns projected to their valid range: inputs to the range of the data."""
        return {**unknowns, "inputs": observation.space.clamp(unknowns["inputs"])}

    def render(self, observation: Observation, unknowns: Unknowns) -> Tensor:
        """Return the inputs that the unknowns represent."""
        return unknowns["inputs"]

    def simulation(self, observation: Observation) -> Simulation:
        """Return the function from one guess to its update; by default it replays the client."""
        return lambda inputs, _, targets, observed: observation.replay(inputs, targets, observed)

    def finish(
        self, observation: Observation, unknowns: Unknowns, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of one chosen guess."""
        return self.render(observation, unknowns)[0], targets

    def alike(self, observation: Observation) -> tuple[object, ...]:
        """Return what observations must share to be attacked in one stack."""
        return (observation.replay, observation.batch_size)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the best guess of all iterations and restarts, by the attack's objective."""
        return only(self.reconstruct_all([observation], [rng]))

    def reconstruct_all(
        self,
        observations: Sequence[Observation],
        rngs: Sequence[Generator],
        progress: Progress | None = None,
    ) -> list[Reconstruction | NotApplicable]:
        """Attack observations together if they share the replay and the batch size."""
        targets: dict[int, Tensor] = {}

        def prepare(index: int) -> tuple[object, ...]:
            observation = observations[index]
            if not observation.space.continuous:
                raise NotApplicable("tokens cannot be optimised by gradient descent")
            self.check(observation)
            targets[index] = self.targets(observation, rngs[index])
            return self.alike(observation)

        def attack(group: Sequence[int]) -> list[Reconstruction]:
            size = max(1, _guesses_at_once(observations[group[0]]) // self.restarts)
            return [
                guess
                for part in (group[i : i + size] for i in range(0, len(group), size))
                for guess in self._search(
                    [observations[i] for i in part],
                    torch.stack([targets[i] for i in part]),
                    [rngs[i] for i in part],
                    progress,
                )
            ]

        return in_groups(len(observations), prepare, attack)

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return the distance plus the priors at a guess."""
        with torch.no_grad():
            return self.value(observation, observation.simulate(inputs, targets), inputs)

    def value(self, observation: Observation, update: Update, inputs: Tensor) -> float:
        """Return the objective of one guess, given its update and its inputs."""
        distance = self.distance(observation)
        value, _ = distance(stacked([update]), stacked([observation.update]))
        return float(value + self.prior(observation, inputs.unsqueeze(0)))

    def _search(
        self,
        observations: Sequence[Observation],
        targets: Tensor,
        rngs: Sequence[Generator],
        progress: Progress | None,
    ) -> list[Reconstruction]:
        """Improve the guesses for all observations in one loop."""
        first = observations[0]
        starts = [self.start(*pair) for pair in zip(observations, rngs, strict=True)]
        unknowns = {
            name: torch.cat([start[name] for start in starts]).to(self.precision)
            for name in starts[0]
        }
        updates = stacked([o.update for o in observations for _ in range(self.restarts)])
        observed = {name: value.to(self.precision) for name, value in updates.items()}
        with _precise(first.models, self.precision):
            best, lowest = self.optimizer().minimise(
                self._evaluation(first, targets.repeat_interleave(self.restarts, 0), observed),
                unknowns,
                lambda unknowns: self.project(first, unknowns),
                lambda like: torch.cat(
                    [
                        torch.randn(part.shape, generator=rng)
                        for part, rng in zip(like.chunk(len(rngs)), rngs, strict=True)
                    ]
                ),
                progress,
            )
        results = []
        for index, (observation, values) in enumerate(
            zip(observations, lowest.split(self.restarts), strict=True)
        ):
            chosen = index * self.restarts + int(values.argmin())
            guess = {name: value[chosen : chosen + 1].float() for name, value in best.items()}
            with torch.no_grad():
                inputs, labels = self.finish(observation, guess, targets[index])
            reached = self.objective(observation, inputs, labels)  # comparable to the truth's value
            results.append(Reconstruction(inputs, labels, reached))
        return results

    def _evaluation(self, observation: Observation, targets: Tensor, observed: Update) -> Evaluate:
        """Return a function that evaluates a stack of guesses and the slope of their objective."""
        simulate = vectorised(self.simulation(observation))

        def replay(unknowns: Unknowns) -> tuple[Update, Tensor]:
            inputs = self.render(observation, unknowns)
            with unfused_norms(observation.model):
                replayed = simulate(inputs, unknowns, targets, observed)
            return replayed, self.prior(observation, inputs)

        return evaluation(replay, self.distance(observation), observed)


def evaluation(
    replay: Callable[[Unknowns], tuple[Update, Tensor]], distance: Distance, observed: Update
) -> Evaluate:
    """Return a function that evaluates a stack of guesses and the slope of their objective.

    The distance itself returns its slope in the replayed updates. Autograd therefore need not
    keep products as large as the updates.

    Args:
        replay: Maps unknowns to their updates and priors.
        distance: Compares updates.
        observed: The updates to compare with.
    """

    def evaluate(unknowns: Unknowns) -> tuple[Tensor, Unknowns]:
        leaves = {name: value.detach().requires_grad_() for name, value in unknowns.items()}
        replayed, prior = replay(leaves)
        with torch.no_grad():
            values, pull = distance(replayed, observed)
        outputs = [(prior, torch.ones_like(prior))]
        outputs += [(value, pull[name]) for name, value in replayed.items()]
        moved = [pair for pair in outputs if pair[0].requires_grad]
        if not moved:
            return values, {name: torch.zeros_like(value) for name, value in unknowns.items()}
        slopes = torch.autograd.grad(
            [value for value, _ in moved],
            list(leaves.values()),
            [weight for _, weight in moved],
            materialize_grads=True,
        )
        return values + prior.detach(), dict(zip(leaves, slopes, strict=True))

    return evaluate


def squared_error(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
    """Return the sum of squared differences, which suits Gaussian noise."""
    errors = {name: replayed[name] - value for name, value in observed.items()}
    return _norm(errors).square(), {name: error.mul_(2) for name, error in errors.items()}


def absolute_error(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
    """Return the sum of absolute differences, which suits Laplace noise."""
    errors = {name: replayed[name] - value for name, value in observed.items()}
    values = _sum(vector_norm(error.flatten(1), 1, dim=1) for error in errors.values())
    return values, {name: error.sign_() for name, error in errors.items()}


def cosine(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
    """Return one minus the cosine of the angle. It does not depend on the scale."""
    product = _sum(_dot(replayed[name], value) for name, value in observed.items())
    length = _norm(replayed)
    norms = (length * _norm(observed)).clamp(min=_TINY)
    along, pull = product / length.square().clamp(min=_TINY) / norms, -1 / norms
    slope = {
        name: (value * _each(along, value)).addcmul_(observed[name], _each(pull, value))
        for name, value in replayed.items()
    }
    return 1 - product / norms, slope


def layerwise_cosine(
    replayed: Update, observed: Update, *, slopes: bool = True
) -> tuple[Tensor, Update]:
    """Return the mean of the cosine distances of all parameters. Each parameter counts equally.

    Parameters whose observed update is zero up to rounding carry no information. They are left
    out.

    Args:
        replayed: Updates of a stack of guesses.
        observed: Observed updates: a stack of the same size, or of one.
        slopes: Whether to compute the slopes, which take longer than the rest.
    """
    sizes = {name: vector_norm(observed[name].flatten(1), dim=1) for name in replayed}
    rounding = 1e-6 * torch.stack(list(sizes.values())).amax(dim=0)
    kept = {name: (size > rounding).to(size) for name, size in sizes.items()}
    count = _sum(kept.values()).clamp(min=1)
    values, pulls = torch.zeros_like(count), {}
    for name, value in replayed.items():
        weight = kept[name] / count
        if slopes:
            one, pull = cosine({name: value}, {name: observed[name]})
            pulls[name] = pull[name].mul_(_each(weight, value))
        else:
            length = vector_norm(value.flatten(1), dim=1)
            product = torch.einsum("ij,ij->i", value.flatten(1), observed[name].flatten(1))
            one = 1 - product / (length * sizes[name]).clamp(min=_TINY)
        values = values + weight * one
    return values, pulls


DISTANCES: Mapping[str, Distance] = MappingProxyType(
    {"cosine": cosine, "squared": squared_error, "absolute": absolute_error}
)
"""Distances that need only the updates, by name."""


def likelihood(observation: Observation, otherwise: Distance) -> Distance:
    """Return minus the mean log-likelihood per entry of the upload, if the defense has one.

    It is the Bayes-optimal distance for an adversary who knows the defense. If the adversary does
    not know the defense, or the defense has no density, `otherwise` is returned.

    References:
        Balunovic, Dimitrov, Staab, Vechev. "Bayesian Framework for Gradient Leakage." ICLR
        2022. https://arxiv.org/abs/2111.04706
    """
    density = observation.log_likelihood
    if density is None or density(observation.update, observation.update) is None:
        return otherwise
    entries = sum(value.numel() for value in observation.update.values())
    density = cast("Callable[[Update, Update], Tensor]", density)
    surprise = vectorised(lambda observed, replayed: -density(observed, replayed) / entries)

    def distance(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
        leaves = {name: value.detach().requires_grad_() for name, value in replayed.items()}
        with torch.enable_grad():
            values = surprise(observed, leaves)
            slopes = torch.autograd.grad(
                values.sum(), list(leaves.values()), materialize_grads=True
            )
        return values.detach(), dict(zip(leaves, slopes, strict=True))

    return distance


def total_variation(inputs: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring values, summed over spatial axes."""
    differences = [inputs.diff(dim=axis).abs() for axis in range(3, inputs.dim())]
    if not differences:
        return inputs.new_zeros(len(inputs))
    return _sum(difference.flatten(1).mean(dim=1) for difference in differences)


def mean_square(inputs: Tensor) -> Tensor:
    """Return the mean squared value."""
    return inputs.square().flatten(1).mean(dim=1)


def group_consistency(inputs: Tensor, restarts: int) -> Tensor:
    """Return each guess's distance from the mean of all guesses for the same victim."""
    groups = inputs.view(-1, restarts, *inputs.shape[1:])
    consensus = groups.mean(dim=1, keepdim=True).detach()
    distances: Tensor = vector_norm((groups - consensus).flatten(2), dim=2)
    return distances.flatten()


def batch_norm_statistics(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a distance between the statistics of inputs and those of the BatchNorm layers.

    The distance sums the deviations of mean and variance over all BatchNorm layers. The first
    layer counts ten times. The result is None if the model has no BatchNorm layer in evaluation
    mode.

    References:
        Yin et al. "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion." CVPR
        2020. https://arxiv.org/abs/1912.08795
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and not layer.training
    ]
    if not layers:
        return None

    def one_guess(inputs: Tensor) -> Tensor:
        distances: list[Tensor] = []

        def compare(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            (values,) = arguments
            axes = [axis for axis in range(values.dim()) if axis != 1]
            mean, variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
            distances.append(
                vector_norm(values.mean(axes) - mean)
                + vector_norm(values.var(axes, correction=0) - variance)
            )

        hooks = [layer.register_forward_pre_hook(compare) for layer in layers]
        try:
            model(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return 9 * distances[0] + _sum(distances)

    return vectorised(one_guess)


def vectorised(function: Callable[..., T], randomness: Randomness = "same") -> Callable[..., T]:
    """Return a function of a stack of guesses, from a function of one guess.

    Arguments are tensors or dictionaries of tensors. Results are the same, or tuples of them.
    Some code cannot be vectorised because it branches on values or takes them out of tensors.
    Such code runs for one guess after the other, and a warning says so.

    Args:
        function: A function of one guess.
        randomness: `same` if all guesses share the function's random draws, for example because
            it seeds its own generator. `different` if each guess has its own, such as the secrets
            of clients.
    """
    at_once = vmap(function, randomness=randomness)
    possible = True

    def call(*stacks: Tensor | Update) -> T:
        nonlocal possible
        first = stacks[0]
        length = len(first if isinstance(first, Tensor) else next(iter(first.values())))
        if possible and length > 1:
            try:
                return at_once(*stacks)
            except RuntimeError as error:  # an error that vmap did not cause is raised again below
                possible = False
                reason = str(error).partition("\n")[0]
                warnings.warn(f"guesses run one at a time (slow): {reason}", stacklevel=2)
        rows = [function(*(_row(stack, i) for stack in stacks)) for i in range(length)]
        return cast(T, tree_map(_joined, *rows))

    return call


def stacked(updates: Sequence[Update]) -> Update:
    """Return the updates of several guesses as one stack."""
    return {name: _joined(*(update[name] for update in updates)) for name in updates[0]}


def _row(stack: Tensor | Update, index: int) -> Tensor | Update:
    if isinstance(stack, Tensor):
        return stack[index]
    return {name: value[index] for name, value in stack.items()}


def _joined(*values: Tensor) -> Tensor:
    return values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)  # avoids a copy


def _guesses_at_once(observation: Observation) -> int:
    """Return the best stack size, given the sizes of updates and activations."""
    activations = 0

    def count(module: nn.Module, arguments: object, output: object) -> None:
        nonlocal activations
        if isinstance(output, Tensor) and not any(module.children()):
            activations += output.numel()

    hooks = [module.register_forward_hook(count) for module in observation.model.modules()]
    try:
        with torch.no_grad():
            buffers = {name: b.clone() for name, b in observation.model.named_buffers()}
            examples = torch.zeros(2, *observation.space.shape)
            functional_call(observation.model, buffers, (examples,))
    finally:
        for hook in hooks:
            hook.remove()
    seen = observation.protocol.passes * observation.batch_size * activations / 2
    entries = sum(value.numel() for value in observation.update.values())
    return int(_FLOATS_AT_ONCE // (4 * entries + seen))


@contextmanager
def _precise(models: Sequence[nn.Module], precision: torch.dtype) -> Iterator[None]:
    """Let models compute in another precision, and restore the original one afterwards."""
    usual = {model: _floating(model).dtype for model in models}
    for model in usual:
        model.to(precision)
    try:
        yield
    finally:
        for model, dtype in usual.items():
            model.to(dtype)


def _floating(model: nn.Module) -> Tensor:
    return next(value for value in model.parameters() if value.is_floating_point())


def _each(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per guess so that it broadcasts over the entries of that guess."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return one inner product per guess. A single guess needs no temporary of its size."""
    if len(left) == 1:
        return torch.dot(left.flatten(), right.flatten()).unsqueeze(0)
    return (left * right).flatten(1).sum(dim=1)


def _norm(update: Update) -> Tensor:
    norms = torch.stack([vector_norm(value.flatten(1), dim=1) for value in update.values()])
    total: Tensor = vector_norm(norms, dim=0)
    return total


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(dim=0)
