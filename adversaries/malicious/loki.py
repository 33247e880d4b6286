"""LOKI: one imprint per client, which survives secure aggregation and local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from ..base import Adversary, Crafted, Observation, Reconstruction, Round, Threat
from ..spaces import ContinuousSpace, InputSpace, NotApplicable
from .imprint import (
    CraftedLayer,
    Isolated,
    Quantiles,
    carry_on_,
    chosen,
    fitted,
    noise_of,
    normal_quantiles,
    outside,
    some_weight,
    window_rows,
)

_CONVOLUTIONS = {2: nn.Conv1d, 3: nn.Conv2d}
"""Convolutions by the number of dimensions of an input."""
_SAME = 2e-2
"""Two rows show the same example if their directions differ by less than this, in spite of noise.
"""


@dataclass(frozen=True)
class LOKI(Adversary):
    """Send every client an imprint module with its own weights, which sums do not mix.

    A convolution of client z copies the input to the client's own channels and sets all other
    channels to zero. In the linear layer behind it, only the columns of these channels then have
    gradients. All rows measure the brightness, each within its own bin. In the sum of the updates,
    each block of columns therefore holds one client's rows, and a row is the example in its bin,
    up to a factor. Bias gradients would reveal the factor, but they are summed over clients.
    Instead, the bin tells the brightness. The attack also learns which client an example
    belongs to.

    With several local steps, the first example in a bin moves its row so far that no later example
    reaches it. Two examples therefore collide only within the same step.

    This module differs from the published one. The published copies have a weight of 500, and the
    next layer adds up bins with weights of 1000. That saturates a model without normalisation.
    This module averages the bins into a pattern (see `carry_on_`). It chooses the weight of the
    copies such that the size of the update's rows does not depend on the batch size and the
    learning rate. It also undoes the normalisation of its inputs; the published module expects
    pixels in [0, 1]. Its outer bins reach to black and white; the published bins miss a share of
    2 / (K + 2) of the examples.

    Attributes:
        bins_per_example: Bins for each example of a client.
        queries: Number of projections that share the bins: the brightness, and brightnesses that
            weigh some rows of a picture more than others. An example is lost if it shares its bin
            with another example in every projection. More than one (the published number) loses
            fewer examples, but the wider bins tell less about the factor.
        signal: Size of a row of the update, relative to its example and to the slope of the loss
            along the pattern. The copies grow with it. Forward passes do not depend on it.
        readout: How the factor is chosen. `brightness` uses the bin. `minmax`, as published, makes
            the darkest value 0 and the brightest 1.

    References:
        Zhao, Sharma, Elkordy, Ezzeldin, Avestimehr, Bagchi. "LOKI: Large-scale Data
        Reconstruction Attack against Federated Learning through Model Manipulation." IEEE S&P
        2024. https://arxiv.org/abs/2303.12233
    """

    threat: ClassVar[Threat] = Threat.ARCHITECTURE
    cost: ClassVar[int] = 0

    bins_per_example: int = 4
    queries: int = 1
    signal: float = 0.25
    readout: Literal["brightness", "minmax"] = "brightness"

    def __post_init__(self) -> None:
        if not self.bins_per_example >= 1:
            raise ValueError(f"bins_per_example must be at least 1, got {self.bins_per_example}")
        if not self.queries >= 1 or self.bins_per_example % self.queries:
            raise ValueError(
                f"queries must be at least 1 and divide bins_per_example, got {self.queries}"
            )
        if not 0 < self.signal < math.inf:
            raise ValueError(f"signal must be positive and finite, got {self.signal}")
        if self.readout not in ("brightness", "minmax"):
            raise ValueError(f"readout must be 'brightness' or 'minmax', got {self.readout!r}")

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return, for each client, the model with the client's module before it."""
        space = _checked(round.space)
        if round.public is None:
            raise NotApplicable("no public data is granted for the quantiles of the brightness")
        public = space.to_unit(round.public.inputs).flatten(1).double()
        bins = self.bins_per_example * round.batch_size
        size, clients, some = math.prod(space.shape), round.clients, some_weight(model)
        measure = skip_init(nn.Linear, clients * size, bins)
        carry = skip_init(nn.Linear, bins, size)
        scale = self._scale(round, bins)
        parts: list[tuple[Tensor, Tensor]] = []
        for query in _queries(space.shape, self.queries):
            quantile = fitted(public @ query.to(public), normal_quantiles)
            edges = _edges(bins // self.queries, quantile)
            parts.append(window_rows(query.repeat(clients) / scale, edges))
        with torch.no_grad():
            measure.weight.copy_(torch.cat([weight for weight, _ in parts]))
            measure.bias.copy_(torch.cat([bias for _, bias in parts]))
        carry_on_(carry, 1.0, rng)
        modules = (
            Separator(space, index, clients, scale, measure, carry).to(some)
            for index in range(clients)
        )
        columns = tuple(slice(index * size, (index + 1) * size) for index in range(clients))
        kept = Blocks(CraftedLayer.of(measure, "0.measure"), columns, scale, self.queries)
        return Crafted([nn.Sequential(module, model) for module in modules], kept)

    def _scale(self, round: Round, bins: int) -> float:
        """Return the weight of the copies: `signal` times K b / lr, for steps of b examples."""
        protocol, examples = round.protocol, round.batch_size
        whole = torch.ones(())  # an update of 1 is a mean gradient of 1 / (lr steps)
        per_step = float(protocol.as_gradient(whole, protocol.clients * examples).abs())
        inverse_lr = per_step * protocol.clients * protocol.local_steps(examples)
        return self.signal * bins * protocol.step_size(examples) * inverse_lr

    @torch.no_grad()
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the contents of the bins of all clients, the victim's first."""
        space = _checked(observation.space)
        kept = observation.kept
        if not isinstance(kept, Blocks):
            raise NotApplicable("the clients were not sent modules of their own by this server")
        parts = [
            self._of(
                ClientBlock(kept.layer.received(observation, model), columns, kept), observation
            )
            for model, columns in zip(observation.models, kept.columns, strict=True)
        ]
        inputs, confidence = (torch.cat(part) for part in zip(*parts, strict=True))
        return Reconstruction(space.clamp(space.to_inputs(inputs)), confidence=confidence)

    def _of(self, block: ClientBlock, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return one client's examples, on the scale of the data, and their confidences."""
        weight, bias = (observation.update[name] for name in block.kept.layer.parameters)
        rows = weight[:, block.columns]
        mean = rows.mean(dim=1)
        examples = observation.batch_size // len(observation.models)
        noise = noise_of(rows, examples) / math.sqrt(rows.shape[1])
        bins = (mean.abs() > max(1e-6 * float(mean.abs().max()), 4 * noise)).nonzero().flatten()
        rows, mean = rows[bins], mean[bins]
        exact = torch.zeros_like(bins, dtype=torch.bool)
        if self.readout == "brightness":
            inputs, exact = block.scaled(rows, bins, bias[bins])
        else:
            inputs = rows.abs() - rows.abs().amin(dim=1, keepdim=True)
            inputs = inputs / inputs.amax(dim=1, keepdim=True).clamp(min=torch.finfo().tiny)
        inputs = inputs.view(-1, *observation.space.shape)
        confidence = 1 - outside(observation.space.to_inputs(inputs), observation.space, 0.02)
        directions = functional.normalize(inputs.flatten(1))  # independent of the factor
        sound = (confidence > 0.999) & block.fit(inputs.flatten(1), bins, exact)
        found = Isolated(directions, bins, mean)
        keep = chosen(found, sound * (1 + exact.long()), examples, tolerance=_SAME)
        return inputs[keep], confidence[keep]


class Separator(nn.Module):
    """Convolution - ReLU - Linear - clamp - Linear, for one of several clients.

    Attributes:
        convolution: Copies the input to the client's channels.
        measure: The layer whose rows sort examples into bins. All clients share it.
        carry: The layer that passes on the sum of the bins. All clients share it.
    """

    black: Tensor
    span: Tensor

    def __init__(
        self,
        space: ContinuousSpace,
        index: int,
        clients: int,
        scale: float,
        measure: nn.Linear,
        carry: nn.Linear,
    ) -> None:
        super().__init__()
        channels = space.shape[0]
        zeros = torch.zeros(1, *space.shape)
        self.register_buffer("black", space.to_inputs(zeros))
        self.register_buffer("span", space.to_inputs(zeros + 1) - space.to_inputs(zeros))
        kind = _CONVOLUTIONS[len(space.shape)]
        self.convolution = skip_init(
            kind, channels, clients * channels, kernel_size=3, padding=1, bias=False
        )
        with torch.no_grad():
            own = self.convolution.weight[index * channels :][:channels]
            self.convolution.weight.zero_()
            nn.init.dirac_(own).mul_(scale)
        self.measure, self.carry = measure, carry

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a picture that depends only on the bin of the input."""
        pixels = (inputs - self.black) / self.span
        copies = functional.relu(self.convolution(pixels)).flatten(1)
        measured = functional.hardtanh(self.measure(copies), 0.0, 1.0)
        carried: Tensor = self.carry(measured).view_as(inputs)
        return carried


@dataclass(frozen=True)
class Blocks:
    """What the server keeps about the modules.

    Attributes:
        layer: The layer whose rows sort examples into bins.
        columns: The columns of each client.
        scale: Weight of the copies.
        queries: Number of groups of rows.
    """

    layer: CraftedLayer
    columns: tuple[slice, ...]
    scale: float
    queries: int


class ClientBlock(NamedTuple):
    """One client's part of the bins.

    Attributes:
        measure: The layer that the client received.
        columns: The client's columns of it.
        kept: What all clients have in common.
    """

    measure: nn.Linear
    columns: slice
    kept: Blocks

    def scaled(self, rows: Tensor, bins: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples of rows, scaled to lie in their bins, and which scales are exact.

        An example x in bin k has z = s <w, x> + b in (0, 1), and its row is a multiple of x. The
        gradient of the bias gives the factor if no other client has an example in the bin.
        Otherwise the computed z is not in (0, 1), and the middle of the bin is assumed.

        Args:
            rows: The client's part of the gradients of `measure`.
            bins: The k of each row.
            deltas: The gradients of the biases, summed over clients.
        """
        weight, bias = self.measure.weight[bins, self.columns], self.measure.bias[bins]
        projections = (weight * rows).sum(dim=1)
        told = projections / deltas + bias
        exact = (told > 0) & (told < 1)
        outputs = torch.where(exact, told, 0.5)
        return rows * ((outputs - bias) / (self.kept.scale * projections))[:, None], exact

    def fit(self, inputs: Tensor, bins: Tensor, exact: Tensor) -> Tensor:
        """Return which inputs lie in a full bin of every query. Mixtures often do not.

        Args:
            inputs: Flattened inputs, on the scale of the data.
            bins: The full bins.
            exact: Whether each input's factor is exact. Otherwise it may be off by half a bin.
        """
        outputs = functional.linear(
            self.kept.scale * inputs, self.measure.weight[:, self.columns], self.measure.bias
        )
        full = torch.zeros_like(self.measure.bias, dtype=torch.bool)
        full[bins] = True
        beside = torch.where(exact, 1e-3, 0.5)[:, None]
        inside = (outputs > -beside) & (outputs < 1 + beside) & full
        fits: Tensor = inside.unflatten(1, (self.kept.queries, -1)).any(dim=2).all(dim=1)
        return fits


def _queries(shape: tuple[int, ...], count: int) -> Tensor:
    """Return weights of means: first even ones, then non-negative waves down the rows."""
    places = (torch.arange(shape[1], dtype=torch.float64) + 0.5) / shape[1]
    waves = 1 + torch.cos(math.pi * torch.arange(count)[:, None] * places)
    weights = waves.view(count, 1, -1, *[1] * (len(shape) - 2)).expand(count, *shape).flatten(1)
    return weights / weights.sum(dim=1, keepdim=True)


def _edges(bins: int, quantile: Quantiles) -> Tensor:
    """Return K + 1 edges: quantiles with equal mass between them, plus black and white."""
    inner = quantile(torch.arange(1, bins, dtype=torch.float64) / bins)
    edges: Tensor = torch.cat([inner, inner.new_tensor([0.0, 1.0])]).sort().values
    return edges


def _checked(space: InputSpace) -> ContinuousSpace:
    if not isinstance(space, ContinuousSpace):
        raise NotApplicable("token inputs have no brightness to sort them by")
    if len(space.shape) not in _CONVOLUTIONS:
        raise NotApplicable(f"inputs of shape {space.shape} have no channels for a convolution")
    return space
