"""Gradient matching: the search for inputs whose replayed update is the observed one.

The machinery of the attacks by optimisation. An attack says what it searches for (its unknowns),
how a guess is replayed, and by which distance, priors and optimizer; the guesses for several
victims, each from several starts, are then improved in one loop, vectorised by `torch.func`.
All functions of this module take such a stack of guesses, along the first axis.
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
"""From replayed and observed updates to each guess's distance and its slope in the replayed."""

Simulation = Callable[[Tensor, Unknowns, Tensor, Update], Update]
"""From one guess's inputs, all its unknowns, its targets and the observed update to its own."""

Randomness = Literal["same", "different"]
"""Whether what a function draws is the same for all guesses of a stack."""

T = TypeVar("T")

_TINY = 1e-30  # keeps a cosine with nothing at zero
_FLOATS_AT_ONCE = 2**24  # above it, larger stacks leave the caches and are no faster


@dataclass(frozen=True)
class Matching(Adversary):
    """An attack that searches for guesses by their objective: a distance of updates and priors.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts; the one with the lowest objective is kept.
    """

    simulates: ClassVar[bool] = True
    precision: ClassVar[torch.dtype] = torch.float32  # of the search

    iterations: int = 1000
    restarts: int = 1

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @abstractmethod
    def distance(self, observation: Observation) -> Distance:
        """Return how updates are compared."""

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Return how the objective is minimised."""

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return how unlikely each guess is before the update is seen."""
        return inputs.new_zeros(len(inputs))

    def check(self, observation: Observation) -> None:
        """Raise `NotApplicable` if the attack's assumptions do not hold."""

    def targets(self, observation: Observation, rng: Generator) -> Tensor:
        """Return the labels that guesses are given: granted or inferred ones."""
        return infer_targets(observation, rng)

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Return as many first guesses for an observation as there are restarts."""
        shape = (self.restarts, observation.batch_size, *observation.space.shape)
        return {"inputs": torch.randn(shape, generator=rng)}

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Return unknowns moved to where they may lie: inputs to the range of the data."""
        return {**unknowns, "inputs": observation.space.clamp(unknowns["inputs"])}

    def render(self, observation: Observation, unknowns: Unknowns) -> Tensor:
        """Return the inputs that unknowns stand for."""
        return unknowns["inputs"]

    def simulation(self, observation: Observation) -> Simulation:
        """Return how one guess becomes an update: by replaying the client."""
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
        """Attack observations together where they replay the same client on as many examples."""
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
        """Return the distance and the priors at a guess."""
        with torch.no_grad():
            return self.value(observation, observation.simulate(inputs, targets), inputs)

    def value(self, observation: Observation, update: Update, inputs: Tensor) -> float:
        """Return the objective of one guess, from its update and its inputs."""
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
            reached = self.objective(observation, inputs, labels)  # comparable to the truth's
            results.append(Reconstruction(inputs, labels, reached))
        return results

    def _evaluation(self, observation: Observation, targets: Tensor, observed: Update) -> Evaluate:
        """Return the objective of a stack of guesses, and its slope."""
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
    """Return the objective of a stack of guesses, and its slope.

    The slope in the replayed updates comes from the distance itself, so that autograd need not
    keep products as large as the updates.

    Args:
        replay: From unknowns to their updates and priors.
        distance: How updates are compared.
        observed: What they are compared with.
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
    """Return the sum of squared differences: likely under Gaussian noise."""
    errors = {name: replayed[name] - value for name, value in observed.items()}
    return _norm(errors).square(), {name: error.mul_(2) for name, error in errors.items()}


def absolute_error(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
    """Return the sum of absolute differences: likely under Laplace noise."""
    errors = {name: replayed[name] - value for name, value in observed.items()}
    values = _sum(vector_norm(error.flatten(1), 1, dim=1) for error in errors.values())
    return values, {name: error.sign_() for name, error in errors.items()}


def cosine(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
    """Return one less the cosine of the angle, which no scale changes."""
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
    """Return the mean of the parameters' own cosine distances: each counts the same.

    Parameters whose observed update is nil but for rounding say nothing, and are left out.

    Args:
        replayed: Updates of a stack of guesses.
        observed: What was seen, of a stack as large or of one.
        slopes: Whether the slopes are wanted: they take longer than the rest.
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
"""The distances that need nothing but the updates, by name."""


def likelihood(observation: Observation, otherwise: Distance) -> Distance:
    """Return minus the mean log-likelihood of an entry of the upload, if the defense has one.

    The Bayes-optimal distance for an adversary who knows the defense; `otherwise` stands in
    where it is not known, or has no density.

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
    """Return each guess's distance from the mean of the guesses for the same victim."""
    groups = inputs.view(-1, restarts, *inputs.shape[1:])
    consensus = groups.mean(dim=1, keepdim=True).detach()
    distances: Tensor = vector_norm((groups - consensus).flatten(2), dim=2)
    return distances.flatten()


def batch_norm_statistics(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return how far inputs take a model from its BatchNorm statistics; None if it has none.

    The sum, over BatchNorm layers, of the distances of mean and variance, where the first
    layer counts ten times.

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
    """Return a function of one guess as one of a stack: at once if its code allows it.

    Arguments are tensors, or dictionaries of them, and so are results, or tuples of those. Code
    that branches on values, or takes them out of tensors, is run for one guess after the other, and
    a warning says so.

    Args:
        function: Of one guess.
        randomness: Whether what it draws is the same for all guesses, as anything is that it can
            draw by itself, from a seed of its own; or is `different`, as secrets of clients are.
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
            except RuntimeError as error:  # one that is no fault of vmap comes again below
                possible = False
                reason = str(error).partition("\n")[0]
                warnings.warn(f"one guess at a time, which is slow: {reason}", stacklevel=2)
        rows = [function(*(_row(stack, i) for stack in stacks)) for i in range(length)]
        return cast(T, tree_map(_joined, *rows))

    return call


def stacked(updates: Sequence[Update]) -> Update:
    """Return updates as those of a stack of guesses."""
    return {name: _joined(*(update[name] for update in updates)) for name in updates[0]}


def _row(stack: Tensor | Update, index: int) -> Tensor | Update:
    if isinstance(stack, Tensor):
        return stack[index]
    return {name: value[index] for name, value in stack.items()}


def _joined(*values: Tensor) -> Tensor:
    return values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)  # one: no copy


def _guesses_at_once(observation: Observation) -> int:
    """Return how many guesses are worth one stack, from the sizes of updates and activations."""
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
    """Let models compute in another precision for a while; their weights are the same after it."""
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
    """Shape one value per guess so that it multiplies all entries of that guess."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return one inner product per guess; for a single one without a product as large as it."""
    if len(left) == 1:
        return torch.dot(left.flatten(), right.flatten()).unsqueeze(0)
    return (left * right).flatten(1).sum(dim=1)


def _norm(update: Update) -> Tensor:
    norms = torch.stack([vector_norm(value.flatten(1), dim=1) for value in update.values()])
    total: Tensor = vector_norm(norms, dim=0)
    return total


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(dim=0)
