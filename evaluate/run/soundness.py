"""Checks of a scenario's data and model before the first cell.

They raise an error if results would be meaningless, and warn if results may be surprising. They
judge a model by its behaviour, not by the names of its layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from leakfrontier.adversaries import InputSpace, TokenSpace
from leakfrontier.defenses import Batch, Defense, Loss, batch_gradient, trainable

from ..client.math_attention import math_attention
from ..data.data import load_dataset
from ..models.models import Mode, dropping, some_inputs, training_differs
from ..users.methods import own_code
from ..users.names import label
from ..world.scenario import World

EXAMPLES = 2
"""Number of private examples on which a model is tested."""

MORE_EXAMPLES = (16, 256)
"""Numbers of examples if estimates of the time are above the limit. Larger batches are faster."""

LONG = 8.0
"""Seconds above which an estimate is not repeated with more examples."""


@dataclass(frozen=True)
class Work:
    """The work of one attack cell.

    Attributes:
        uploads: Attacked uploads.
        search: Name of the adversary that replays the client most often; "" without a search.
        replays: How often it replays the client for each upload.
        time_limit: Seconds after which a cell is stopped.
    """

    uploads: int
    search: str
    replays: int
    time_limit: float


def notes(world: World, work: Work | None = None) -> Iterator[str]:
    """Yield the warnings about a scenario.

    Args:
        world: The scenario with its data.
        work: The work of a cell; None if there is no run.

    Raises:
        ValueError: If all results would be meaningless. The message says what to do.
    """
    check_classes(world)
    scenario = world.scenario
    yield from load_dataset(scenario.dataset, scenario.data_folder, scenario.reading).notes
    model = world.model(Defense(), seed=0)
    yield from _unused(model, world)
    yield from _same_weights(world)
    yield from _probabilities(model, world)
    loss = world.modality.loss
    batch = world.train.at(slice(EXAMPLES))
    if world.space.continuous or own_code(scenario.model):  # our language models are
        check_twice_differentiable(label(scenario.model), model, loss, batch)
    if work is not None and world.space.continuous:
        yield from _too_slow(model, world, work)
    # This comes last because it may change buffers.
    yield from mode_notes(label(scenario.model), model, world.space, scenario.mode)


def check_classes(world: World) -> None:
    """Raise if all examples have the same label."""
    if isinstance(world.space, TokenSpace) and world.space.task == "next-token":
        return
    found = torch.cat([world.train.targets, world.test.targets]).unique()
    if len(found) < 2:
        raise ValueError(
            f"{world.scenario.data_name} has examples of one class only. A model has nothing to "
            "learn, its accuracy is always 100 %, and its gradients vanish. Provide examples of "
            "at least two classes, e.g. one folder for each"
        )


def check_twice_differentiable(name: str, model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Raise if a client's gradient cannot be differentiated. The message names the module."""
    try:
        _differentiate_twice(model, loss, batch)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be differentiated twice, but attacks need this: "
            f"{_culprit(model, batch.inputs)}{reason}. Replace it by PyTorch operations that have "
            "a second derivative"
        ) from error


def _differentiate_twice(model: nn.Module, loss: Loss, batch: Batch) -> None:
    inputs = batch.inputs.detach().clone()
    if inputs.is_floating_point():
        inputs.requires_grad_()
    with math_attention():
        gradient = batch_gradient(model, loss, Batch(inputs, batch.targets))
        unknown = [inputs] if inputs.requires_grad else [*trainable(model).values()]
        _slopes([*gradient.values()], unknown)


def _slopes(values: Sequence[Tensor], unknown: Sequence[Tensor]) -> None:
    moved = [value.square().sum() for value in values if value.requires_grad]
    if moved:
        torch.autograd.grad(torch.stack(moved).sum(), unknown, allow_unused=True)


def _culprit(model: nn.Module, inputs: Tensor) -> str:
    """Return the name of the first innermost module that cannot be differentiated twice."""
    calls: dict[str, Callable[[], None]] = {}
    hooks = [
        module.register_forward_hook(_remember(calls, name or "the model itself"), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    with torch.no_grad(), math_attention():
        model(inputs)
    for hook in hooks:
        hook.remove()
    for name, again in calls.items():  # inner modules return before outer ones
        try:
            again()
        except (RuntimeError, NotImplementedError):
            return f"{name}: "
    return ""


def _remember(calls: dict[str, Callable[[], None]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, _: object) -> None:  # noqa: ANN401
        calls.setdefault(
            f"{name} ({type(module).__name__})", lambda: _try_alone(module, args, kwargs)
        )

    return hook


def _try_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Differentiate the output of a module twice."""
    places = [i for i, one in enumerate(args) if _is_real(one)]
    given = {str(i): args[i].detach().clone().requires_grad_() for i in places}

    def objective(given: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
        placed = tuple(given.get(str(i), one) for i, one in enumerate(args))
        output = functional_call(module, weights, placed, kwargs)
        parts = output if isinstance(output, tuple | list) else [output]
        return torch.stack([one.square().sum() for one in parts if _is_real(one)]).sum()

    with math_attention():
        found = grad(objective, argnums=(0, 1))(given, trainable(module))
        _slopes([value for part in found for value in part.values()], [*given.values()])


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _unused(model: nn.Module, world: World) -> Iterator[str]:
    """Yield a warning if the loss does not depend on all of a model's parameters."""
    batch, parameters = world.train.at(slice(EXAMPLES)), trainable(model)
    loss = world.modality.loss(model(batch.inputs), batch.targets)
    slopes = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    names = [name for name, slope in zip(parameters, slopes, strict=True) if slope is None]
    if names:
        yield (
            f"{label(world.scenario.model)}: the loss does not depend on {', '.join(names)}. "
            "Clients upload zeros for them. Freeze them with requires_grad_(False)"
        )


def _same_weights(world: World) -> Iterator[str]:
    """Yield a warning if a user's factory returns the same weights for every seed."""
    if not own_code(world.scenario.model):
        return
    name, first, other = label(world.scenario.model), world.built(seed=0), world.built(seed=1)
    if other is first:
        raise ValueError(
            f"{name} returns the same object at every call, so all cells would train the same "
            "model. Create a new model in the function"
        )
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    if all(torch.equal(*pair) for pair in pairs):
        yield (
            f"{name} returns the same weights for every seed, so seeds differ only in data and "
            "noise. That is right for pretrained weights. Otherwise remove torch.manual_seed from "
            "the factory, because the harness seeds it"
        )


@torch.no_grad()
def _probabilities(model: nn.Module, world: World) -> Iterator[str]:
    """Yield a warning if a model returns probabilities or their logarithms instead of logits."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inputs = 3 * some_inputs(world.space, EXAMPLES).to(world.device)
    outputs = model(inputs if world.space.continuous else inputs // 3)
    name = label(world.scenario.model)
    one = torch.ones_like(outputs[..., 0])
    if bool((outputs >= 0).all()) and torch.allclose(outputs.sum(-1), one, atol=1e-4):
        yield (
            f"{name} returns probabilities (a softmax), and the loss applies a second softmax. "
            "Training is slow, and the model leaks less than usual. Return logits: remove the "
            "last softmax"
        )
    elif bool((outputs <= 0).all()) and torch.allclose(outputs.exp().sum(-1), one, atol=1e-4):
        yield (
            f"{name} returns logarithms of probabilities (a log-softmax), but the loss computes "
            "them itself. Gradients do not change. You can remove the last log-softmax"
        )


def mode_notes(name: str, model: nn.Module, space: InputSpace, mode: Mode) -> Iterator[str]:
    """Yield a note that says whether dropout and similar randomness is active in training.

    Args:
        name: The name of the model in messages.
        model: The model. It is left in evaluation mode, and its buffers may change.
        space: Its inputs.
        mode: The mode in which clients train.
    """
    if not training_differs(model, space):
        return
    kinds = dropping(model)
    what = f"dropout ({', '.join(kinds)})" if kinds else "behaviour that only training mode has"
    if mode == "train":
        yield (
            f"{name}: clients train in training mode, with {what}. The adversary's replay draws "
            "its own masks"
        )
    else:
        yield (
            f"{name}: {what} is switched off, because clients train in evaluation mode. Set mode: "
            "train to switch it on"
        )


def _too_slow(model: nn.Module, world: World, work: Work) -> Iterator[str]:
    """Yield a warning if a cell will probably time out, estimated from a few gradients."""
    scenario, loss = world.scenario, world.modality.loss
    training, limit = scenario.training, work.time_limit
    sizes = world.drawn_sizes
    each = sum(_seen(world, size) for size in sizes) / len(sizes)
    per_round = round(training.participants * each)
    kinds: list[tuple[str, int, Callable[[nn.Module, Loss, Batch], object]]] = [
        ("training", training.rounds * per_round, batch_gradient),
        (
            f"{work.search} on {work.uploads} uploads",
            work.uploads * work.replays * _seen(world, scenario.batch_size),
            _differentiate_twice,
        ),
    ]
    for what, count, step in kinds:
        each = _seconds(partial(step, model, loss), world, EXAMPLES)
        for examples in MORE_EXAMPLES:
            if count * each > limit and examples * each < LONG:
                each = _seconds(partial(step, model, loss), world, examples)
        if count * each > limit:
            shape = " x ".join(map(str, world.space.shape))
            yield (
                f"{scenario.name}: {what} will take about {_duration(count * each)}, but a cell is "
                f"stopped after {_duration(limit)}. Resize the inputs ({shape}), take a smaller "
                "model, fewer observations or fewer rounds, or raise time_limit"
            )


def _seen(world: World, examples: int) -> int:
    """Return how many examples all local steps of a client see in total."""
    protocol = world.protocol
    return protocol.local_steps(examples) * min(examples, protocol.step_size(examples))


def _seconds(step: Callable[[Batch], object], world: World, examples: int) -> float:
    """Return the seconds that a step takes per example."""
    batch = world.train.at(torch.arange(examples).remainder(len(world.train.targets)))
    start = time.perf_counter()
    step(batch)
    return (time.perf_counter() - start) / examples


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
