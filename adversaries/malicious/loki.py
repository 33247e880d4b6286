"""LOKI: an imprint per client, which survives secure aggregation and local steps."""

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
"""By the dimensions of an input."""
_SAME = 2e-2
"""Distance of directions up to which two rows are of one example: noise keeps them apart."""


@dataclass(frozen=True)
class LOKI(Adversary):
    """Send every client an imprint module with weights of its own, which sums do not mix.

    A convolution of client z copies the input to its own channels and leaves those of the others
    zero, so that in the linear layer behind it only the columns of those channels have gradients.
    All rows measure the brightness, each within a bin of its own. The sum of the clients' updates
    is then, column block by column block, the clients' own rows: each is the example in its bin,
    up to a factor. Bias gradients, which would tell the factor, are sums over clients; but the
    bin tells the brightness. Which client an example belongs to is told as well.

    Within several local steps, the first example in a bin moves the row so far that none after it
    reaches it: collisions count within a step alone.

    The published copies have a weight of 500, before a layer that adds bins up with weights of
    1000. That drives a model without normalisation into saturation. This one averages them, as a
    pattern (see `carry_on_`), and chooses the weight of the copies so that rows of the update have
    the same size whatever the batch and the learning rate. It also undoes the normalisation of its
    inputs, where the published one takes pixels in [0, 1], and its outer bins reach to black and
    white, where the published ones leave a share of 2 / (K + 2) of the examples in none.

    Attributes:
        bins_per_example: Bins for each example of a client.
        queries: Projections among which the bins are divided: the brightness, and brightnesses
            that weigh some rows of a picture more than others. An example is lost if it shares
            its bin of each with another: with more than the published one, fewer are, but the
            wider bins tell less of the factor.
        signal: Size of a row of the update, relative to its example and to the slope of the loss
            along the pattern. The copies grow with it, which leaves forward passes as they are.
        readout: How the factor is chosen: by `brightness`, or, as published, so that the
            darkest value is 0 and the brightest 1, `minmax`.

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
        """Return the model behind a module of each client's own."""
        space = _checked(round.space)
        if round.public is None:
            raise NotApplicable("no public data to take quantiles of the brightness of")
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
        whole = torch.ones(())  # an update of 1, which is a mean gradient of 1 / (lr steps)
        per_step = float(protocol.as_gradient(whole, protocol.clients * examples).abs())
        inverse_lr = per_step * protocol.clients * protocol.local_steps(examples)
        return self.signal * bins * protocol.step_size(examples) * inverse_lr

    @torch.no_grad()
    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return what the bins of all clients hold, the victim's first."""
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
        """Return the examples of one client, on the scale of the data, and how sound they are."""
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
        directions = functional.normalize(inputs.flatten(1))  # of one example, whatever its factor
        sound = (confidence > 0.999) & block.fit(inputs.flatten(1), bins, exact)
        found = Isolated(directions, bins, mean)
        keep = chosen(found, sound * (1 + exact.long()), examples, tolerance=_SAME)
        return inputs[keep], confidence[keep]


class Separator(nn.Module):
    """Convolution - ReLU - Linear - clamp - Linear, for one of several clients.

    Attributes:
        convolution: Copies the input to the client's channels.
        measure: The layer whose rows sort examples into bins, the same for all clients.
        carry: The layer that hands on what they add up to, the same for all clients.
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
        """Return a picture in which nothing is left of the input but its bin."""
        pixels = (inputs - self.black) / self.span
        copies = functional.relu(self.convolution(pixels)).flatten(1)
        measured = functional.hardtanh(self.measure(copies), 0.0, 1.0)
        carried: Tensor = self.carry(measured).view_as(inputs)
        return carried


@dataclass(frozen=True)
class Blocks:
    """What the server keeps of the modules.

    Attributes:
        layer: The layer whose rows sort examples into bins.
        columns: Each client's columns of it.
        scale: Weight of the copies.
        queries: Groups of rows.
    """

    layer: CraftedLayer
    columns: tuple[slice, ...]
    scale: float
    queries: int


class ClientBlock(NamedTuple):
    """One client's part of the bins.

    Attributes:
        measure: The layer as the client received it.
        columns: The client's columns of it.
        kept: What all clients' parts have in common.
    """

    measure: nn.Linear
    columns: slice
    kept: Blocks

    def scaled(self, rows: Tensor, bins: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows as the examples that lie in their bins, and whether the factor is exact.

        An example x in bin k has z = s <w, x> + b in (0, 1), and its row is a multiple of it. The
        gradient of the bias gives the factor, if no other client has an example in the bin.
        Otherwise z is not in (0, 1), and is taken to be in the middle.

        Args:
            rows: The client's part of the gradients of `measure`.
            bins: Their k.
            deltas: The gradients of its biases, summed over clients.
        """
        weight, bias = self.measure.weight[bins, self.columns], self.measure.bias[bins]
        projections = (weight * rows).sum(dim=1)
        told = projections / deltas + bias
        exact = (told > 0) & (told < 1)
        outputs = torch.where(exact, told, 0.5)
        return rows * ((outputs - bias) / (self.kept.scale * projections))[:, None], exact

    def fit(self, inputs: Tensor, bins: Tensor, exact: Tensor) -> Tensor:
        """Return whether inputs lie in full bins of every query, as mixtures of them need not.

        Args:
            inputs: Flattened, on the scale of the data.
            bins: The full ones.
            exact: Whether each input's factor is; another lies up to half a bin beside its own.
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
    """Return weights of means: even ones, then waves down the rows of a picture, none negative."""
    places = (torch.arange(shape[1], dtype=torch.float64) + 0.5) / shape[1]
    waves = 1 + torch.cos(math.pi * torch.arange(count)[:, None] * places)
    weights = waves.view(count, 1, -1, *[1] * (len(shape) - 2)).expand(count, *shape).flatten(1)
    return weights / weights.sum(dim=1, keepdim=True)


def _edges(bins: int, quantile: Quantiles) -> Tensor:
    """Return K + 1 edges: quantiles, between which the same mass lies, black and white."""
    inner = quantile(torch.arange(1, bins, dtype=torch.float64) / bins)
    edges: Tensor = torch.cat([inner, inner.new_tensor([0.0, 1.0])]).sort().values
    return edges


def _checked(space: InputSpace) -> ContinuousSpace:
    if not isinstance(space, ContinuousSpace):
        raise NotApplicable("token inputs have no brightness to sort them by")
    if len(space.shape) not in _CONVOLUTIONS:
        raise NotApplicable(f"inputs of shape {space.shape} have no channels for a convolution")
    return space
