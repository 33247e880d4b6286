"""Sums of the per-example gradients of many clients, computed together.

For clients with the same weights, one forward and one backward pass to the outputs of the layers is
enough. Together with the inputs of the layers, these slopes give the norm of every example's
gradient, and each client's sum by small matrix products (Bu et al.). For clients with different
weights, `torch.func` vectorises over clients.

References:
    Bu, Wang, Zha, Karypis. "Differentially Private Optimization on Large Model at Small Cost."
    ICML 2023. https://arxiv.org/abs/2210.00038
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from leakfrontier.defenses import Batch, Loss, Update, trainable

Factors = Callable[[Update], Update]
"""Maps the norms of per-example gradients, by parameter, to factors of these gradients."""

EXAMPLES = 400
"""Examples that pass through the model together."""

ENTRIES = 2**25
"""Entries of per-example gradients, or of stacked weights, that are in memory together."""


class Unsuited(Exception):
    """The clients of a model cannot be computed together."""


def grouped_sums(
    model: nn.Module,
    loss: Loss,
    weights: Mapping[str, Tensor],
    batches: Sequence[Batch],
    factors: Factors | None = None,
    *,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Update]:
    """Return each client's sum of per-example gradients, for clients with the same weights.

    Args:
        model: The architecture of all clients.
        loss: Mean loss of a batch.
        weights: Their trainable weights.
        batches: The examples of each client.
        factors: What each example's gradient is multiplied by. Default: nothing.
        layout: The memory format of images. Convolutions are faster with channels last.

    Raises:
        Unsuited: If not every parameter belongs to a layer that the model calls once.
    """
    owning = _owning(model)
    weights = {name: value.detach() for name, value in weights.items()}
    totals = [{name: torch.zeros_like(value) for name, value in weights.items()} for _ in batches]
    most = EXAMPLES
    if factors is not None:
        entries = sum(_materialised(layer) for layer in owning.values())
        most = min(most, max(1, ENTRIES // max(1, entries)))
    for owners, sizes, joined in _chunks(batches, most):
        layers = _passed(model, loss, weights, joined, layout)
        chosen = None
        if factors is not None:
            chosen = factors({name: n for layer in layers for name, n in layer.norms().items()})
        for layer in layers:
            for name, parts in layer.sums(sizes, chosen).items():
                for owner, part in zip(owners, parts, strict=True):
                    totals[owner][name] += part
    return totals


def stacked_sums(
    model: nn.Module,
    loss: Loss,
    weights: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Batch],
) -> list[Update]:
    """Return each client's sum of per-example gradients, for clients with different weights.

    Args:
        model: The architecture of all clients.
        loss: Mean loss of a batch.
        weights: The trainable weights of each client.
        batches: The examples of each client.
    """
    sizes = torch.tensor([len(batch.inputs) for batch in batches])
    most = int(sizes.max())
    padded = [torch.stack([_padded(part, most) for part in p]) for p in zip(*batches, strict=True)]
    real = (torch.arange(most) < sizes.unsqueeze(1)).to(padded[0].device)
    stacked = {name: torch.stack([one[name].detach() for one in weights]) for name in weights[0]}

    def total(own: Update, inputs: Tensor, targets: Tensor, real: Tensor) -> Tensor:
        outputs = functional_call(model, own, (inputs,))
        losses = vmap(lambda o, t: loss(o[None], t[None]))(outputs, targets)
        return (losses * real).sum()

    entries = sum(value[0].numel() for value in stacked.values())
    each: Callable[..., Update] = vmap(grad(total), chunk_size=max(1, ENTRIES // entries))
    parts = {name: v.unbind() for name, v in each(stacked, *padded, real).items()}
    return [{name: parts[name][place] for name in parts} for place in range(len(batches))]


@dataclass
class _Layer:
    """What passed through a layer.

    Attributes:
        prefix: The beginning of its parameters' names.
        module: The layer.
        parameters: Its trainable parameters, by their own names.
        inputs: Its inputs, one for each example.
        slopes: The slopes of each example's loss at its outputs.
    """

    prefix: str
    module: nn.Module
    parameters: Update
    inputs: Tensor
    slopes: Tensor

    def norms(self) -> Update:
        """Return the norms of the per-example gradients of its parameters."""
        return {
            self.prefix + name: value.flatten(1).norm(dim=1) for name, value in self._each.items()
        }

    def sums(self, sizes: Sequence[int], factors: Update | None) -> dict[str, list[Tensor]]:
        """Return the sum of each client's part of the examples, by parameter.

        Args:
            sizes: Numbers of examples of each client.
            factors: Factors of the examples, by parameter.
        """
        if factors is None:
            parts = zip(self.inputs.split(sizes), self.slopes.split(sizes), strict=True)
            several = [self._gradient(*part) for part in parts]
            return {self.prefix + n: [one[n] for one in several] for n in self.parameters}
        return {
            self.prefix + name: [
                (factor @ part.flatten(1)).view(part.shape[1:])
                for factor, part in zip(
                    factors[self.prefix + name].split(sizes), value.split(sizes), strict=True
                )
            ]
            for name, value in self._each.items()
        }

    @cached_property
    def _each(self) -> Update:
        """Return the gradient of each example."""

        def gradient(inputs: Tensor, slopes: Tensor) -> Update:
            def outputs(own: Update) -> Tensor:
                return cast(Tensor, functional_call(self.module, own, (inputs[None],)))

            return cast(Update, vjp(outputs, self.parameters)[1](slopes[None])[0])

        return vmap(gradient)(self.inputs, self.slopes)

    def _gradient(self, inputs: Tensor, slopes: Tensor) -> Update:
        """Return the gradient of some examples."""

        def outputs(own: Update) -> Tensor:
            return cast(Tensor, functional_call(self.module, own, (inputs,)))

        return cast(Update, vjp(outputs, self.parameters)[1](slopes)[0])


class _Linear(_Layer):
    """A linear layer with one row of inputs for each example: gradients are outer products."""

    def norms(self) -> Update:
        """Return the norms of the outer products."""
        slopes, inputs = self.slopes.norm(dim=1), self.inputs.norm(dim=1)
        found = {"weight": slopes * inputs, "bias": slopes}
        return {self.prefix + name: found[name] for name in self.parameters}

    def sums(self, sizes: Sequence[int], factors: Update | None) -> dict[str, list[Tensor]]:
        """Return each client's sum by a matrix product."""
        found = {}
        for name in self.parameters:
            full, slopes = self.prefix + name, self.slopes
            if factors is not None:
                slopes = slopes * factors[full].unsqueeze(1)
            parts = zip(slopes.split(sizes), self.inputs.split(sizes), strict=True)
            if name == "bias":
                found[full] = [slope.sum(dim=0) for slope, _ in parts]
            else:
                found[full] = [slope.T @ inputs for slope, inputs in parts]
        return found


class _Conv2d(_Layer):
    """A convolution: each example's gradient is a matrix product with the patches of its inputs."""

    @cached_property
    def _each(self) -> Update:
        layer = cast(nn.Conv2d, self.module)
        padding = cast(tuple[int, int], layer.padding)
        patches = F.unfold(self.inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
        slopes = self.slopes.flatten(2)
        found = {"bias": slopes.sum(dim=2)}
        if "weight" in self.parameters:
            products = torch.bmm(slopes, patches.transpose(1, 2))
            found["weight"] = products.view(len(products), *layer.weight.shape)
        return {name: found[name] for name in self.parameters}

    def _gradient(self, inputs: Tensor, slopes: Tensor) -> Update:
        layer = cast(nn.Conv2d, self.module)
        shape, place = layer.weight.shape, (layer.stride, layer.padding, layer.dilation)
        found = {}
        if "weight" in self.parameters:
            found["weight"] = conv2d_weight(inputs, shape, slopes, *place)
        if "bias" in self.parameters:
            found["bias"] = slopes.sum(dim=(0, 2, 3))
        return found


def _kind(module: nn.Module, inputs: Tensor) -> type[_Layer]:
    if type(module) is nn.Linear and inputs.dim() == 2:
        return _Linear
    if (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ):
        return _Conv2d
    return _Layer


def _own(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters of a module itself."""
    return [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]


def _owning(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own trainable parameters, by the beginning of their names."""
    found = {f"{name}." if name else "": one for name, one in model.named_modules() if _own(one)}
    names = {prefix + name for prefix, module in found.items() for name in _own(module)}
    if names != {*trainable(model)} or any(
        one != other and other.startswith(one) for one in found for other in found
    ):
        raise Unsuited("layers share parameters, or hold other layers with parameters")
    return found


def _materialised(module: nn.Module) -> int:
    """Return how many entries of gradients of one example a layer needs at once."""
    if type(module) is nn.Linear:
        return 0
    return sum(module.get_parameter(name).numel() for name in _own(module))


def _chunks(batches: Sequence[Batch], most: int) -> Iterator[tuple[list[int], list[int], Batch]]:
    """Yield parts of all examples: whose they are, how many each has there, and the examples.

    A part begins with a client, or at a multiple of `most` within a large one.
    """
    owners: list[int] = []
    parts: list[Batch] = []
    for owner, batch in enumerate(batches):
        for rows in torch.arange(len(batch.inputs)).split(most):
            if parts and sum(len(part.inputs) for part in parts) + len(rows) > most:
                yield owners, [len(part.inputs) for part in parts], Batch.joined(parts)
                owners, parts = [], []
            if len(rows):
                owners.append(owner)
                parts.append(batch if len(rows) == len(batch.inputs) else batch.at(rows))
    if parts:
        yield owners, [len(part.inputs) for part in parts], Batch.joined(parts)


def _passed(
    model: nn.Module, loss: Loss, weights: Update, batch: Batch, layout: torch.memory_format
) -> list[_Layer]:
    """Return what passes through the layers of a model for a batch."""
    owning = _owning(model)
    met: dict[str, tuple[Tensor, Tensor]] = {}
    copies = any(getattr(module, "inplace", False) for module in model.modules())

    def meet(prefix: str, inputs: tuple[object, ...], output: object) -> Tensor:
        if prefix in met or len(inputs) != 1:
            raise Unsuited(f"layer {prefix} is called twice, or with several inputs")
        (given,) = inputs
        if not isinstance(given, Tensor) or not isinstance(output, Tensor):
            raise Unsuited(f"layer {prefix} does not map a tensor to a tensor")
        if len(given) != len(batch.inputs) or len(output) != len(batch.inputs):
            raise Unsuited(f"layer {prefix} does not have its examples along the first axis")
        if not output.requires_grad:
            output.requires_grad_()
        met[prefix] = given.detach(), output
        return output.clone() if copies else output

    def hook(prefix: str) -> Callable[..., Tensor]:
        return lambda _, inputs, output: meet(prefix, inputs, output)

    placed = {name: _laid(value, layout) for name, value in weights.items()}
    hooks = [module.register_forward_hook(hook(prefix)) for prefix, module in owning.items()]
    try:
        with torch.enable_grad():
            outputs = functional_call(model, placed, (_laid(batch.inputs, layout),))
            value = loss(outputs, batch.targets) * len(batch.inputs)
            if met.keys() != owning.keys():
                raise Unsuited("a layer is not used")
            slopes = torch.autograd.grad(value, [output for _, output in met.values()])
    finally:
        for one in hooks:
            one.remove()
    layers = []
    for (prefix, (inputs, _)), slope in zip(met.items(), slopes, strict=True):
        module = owning[prefix]
        own = {name: weights[prefix + name] for name in _own(module)}
        layers.append(_kind(module, inputs)(prefix, module, own, inputs, slope))
    return layers


def _laid(value: Tensor, layout: torch.memory_format) -> Tensor:
    return value.to(memory_format=layout) if value.dim() == 4 else value


def _padded(value: Tensor, length: int) -> Tensor:
    missing = length - len(value)
    return torch.cat([value, value.new_zeros((missing, *value.shape[1:]))]) if missing else value
