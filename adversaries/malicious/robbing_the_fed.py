"""Robbing the Fed: an inserted layer whose bins isolate examples."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from ..base import Adversary, Crafted, Observation, Reconstruction, Round, Threat
from ..spaces import InputSpace, NotApplicable
from .imprint import (
    CraftedLayer,
    Isolated,
    Quantiles,
    calibrated,
    carry_on_,
    chosen,
    direct_pass_,
    dissect,
    equal_columns_,
    fitted,
    imprinted_layer,
    isolate,
    laplace_quantiles,
    normal_quantiles,
    occupied,
    outside,
    place_,
    seen_by,
    some_weight,
    thresholds,
    way_to,
    window_rows,
    windows,
    within,
)

Query = Literal["average", "random", "fourier"]


@dataclass(frozen=True)
class RobbingTheFed(Adversary):
    """Put an imprint module before the model, and read the examples off its bins.

    The module is Linear - ReLU - Linear. Every row of the first layer measures the same projection
    of the input, and the biases are its quantiles. The columns of the second layer are equal; see
    `imprint`. Thresholds drift if a client takes several local steps. In that case the ReLU is cut
    off at 1, and each row sees only its own bin.

    The published module adds up the rows, which saturates a model without normalisation. Examples
    that the saturated model happens to classify then have no gradient. This module averages the
    rows instead. The published sparse rows have the widths of their neighbours; here each has its
    own width.

    Attributes:
        bins: K, the number of rows of the imprint layer.
        query: What the rows measure: the `average`, a `random` direction, or a cosine of
            frequency `mode` (`fourier`).
        mode: Half periods of the cosine.
        queries: Number of random directions that share the bins. An example is lost if it is not
            alone in a bin of any direction. More than one (the published number) loses fewer.
        rows: `cumulative` or `sparse`. `protocol` means cumulative for a single local step.
        calibrated: Whether to take quantiles from public data, if there is any. Otherwise, as
            published, the projection is assumed to have mean 0 and deviation 1.
        gain: Factor of the first layer's weights; the second layer has its inverse. A smaller gain
            makes the gradient of the first layer larger. Sparse rows need a small gain: the first
            example in a bin then closes it for later local steps.

    References:
        Fowl, Geiping, Czaja, Goldblum, Goldstein. "Robbing the Fed: Directly Obtaining Private
        Data in Federated Learning with Modified Models." ICLR 2022.
        https://arxiv.org/abs/2110.13057
    """

    threat: ClassVar[Threat] = Threat.ARCHITECTURE
    cost: ClassVar[int] = 0

    bins: int = 1024
    query: Query = "average"
    mode: int = 32
    queries: int = 1
    rows: Literal["protocol", "cumulative", "sparse"] = "protocol"
    calibrated: bool = True
    gain: float = 1e-3

    def __post_init__(self) -> None:
        if self.query not in ("average", "random", "fourier"):
            raise ValueError(f"query must be 'average', 'random' or 'fourier', got {self.query!r}")
        if self.rows not in ("protocol", "cumulative", "sparse"):
            raise ValueError(
                f"rows must be 'protocol', 'cumulative' or 'sparse', got {self.rows!r}"
            )
        if not self.mode >= 0:
            raise ValueError(f"mode must be at least 0, got {self.mode}")
        if not (self.queries == 1 or (self.query == "random" and self.queries > 1)):
            raise ValueError(
                f"queries must be 1, or more with query='random', got {self.queries} with "
                f"query={self.query!r}"
            )
        if not self.bins >= 2 * self.queries:
            raise ValueError(
                f"bins must be at least 2 for each of {self.queries} queries, got {self.bins}"
            )
        if self.bins % self.queries:
            raise ValueError(
                f"bins must be a multiple of the {self.queries} queries, got {self.bins}"
            )
        if not 0 < self.gain < math.inf:
            raise ValueError(f"gain must be positive and finite, got {self.gain}")

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the model with an imprint module before it, the same for all clients."""
        need_values(round.space)
        size, some = math.prod(round.space.shape), some_weight(model)
        sparse = self.rows == "sparse" or (
            self.rows == "protocol" and round.protocol.local_steps(round.batch_size) > 1
        )
        parts = [self._rows(size, sparse, round, rng) for _ in range(self.queries)]
        top = self.gain if sparse else None
        imprint = Imprint(round.space.shape, self.bins, top)
        with torch.no_grad():
            imprint.measure.weight.copy_(self.gain * torch.cat([weight for weight, _ in parts]))
            imprint.measure.bias.copy_(self.gain * torch.cat([bias for _, bias in parts]))
        carry_on_(imprint.carry, 1 / self.gain, rng)
        kept = Bins(CraftedLayer.of(imprint.measure, "0.measure"), self.queries, top)
        return Crafted([nn.Sequential(imprint.to(some), model)] * round.clients, kept)

    def _rows(self, size: int, sparse: bool, round: Round, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of the rows that measure one query."""
        query, bins = self._query(size, rng), self.bins // self.queries
        quantile = self._quantiles(query, round)
        if sparse:
            return window_rows(query, windows(bins, quantile))
        return query.expand(bins, size), -thresholds(bins, quantile)

    def _query(self, size: int, rng: Generator) -> Tensor:
        if self.query == "average":
            return torch.full((size,), 1 / size, dtype=torch.float64)
        if self.query == "random":
            drawn = torch.randn(size, generator=rng, device=rng.device).cpu().double()
            return (drawn - drawn.mean()) / (drawn.std() * math.sqrt(size))
        wave = torch.cos(math.pi / size * (torch.arange(size).double() + 0.5) * self.mode)
        return wave * 4 * max(self.mode, 0.33) / size

    def _quantiles(self, query: Tensor, round: Round) -> Quantiles:
        family = laplace_quantiles if self.query == "fourier" else normal_quantiles
        if not self.calibrated or round.public is None:
            return family(0.0, 1.0)
        return fitted(round.public.inputs.flatten(1).to(query) @ query, family)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the contents of the bins, at most one per private example."""
        need_values(observation.space)
        bins = observation.kept
        if not isinstance(bins, Bins):
            raise NotApplicable("the clients were not sent an imprint module by this server")
        measure = bins.layer.received(observation)
        weight, bias = (observation.update[name] for name in bins.layer.parameters)
        found = isolate(
            weight,
            bias,
            cumulative=bins.top is None,
            examples=observation.batch_size,
            groups=bins.queries,
        )
        return _reconstruction(found, bins.of(measure, found.inputs), observation)


@dataclass(frozen=True)
class Bins:
    """What the server keeps about an imprint module.

    Attributes:
        layer: The layer whose rows sort examples into bins.
        queries: Number of groups of rows.
        top: Value at which sparse rows are cut off; a sparse row sees only its own bin. None for
            cumulative rows.
    """

    layer: CraftedLayer
    queries: int
    top: float | None

    @torch.no_grad()
    def of(self, measure: nn.Linear, rows: Tensor) -> Tensor:
        """Return which bins flattened inputs lie in."""
        outputs = measure(rows)
        if self.top is None:
            return occupied(outputs, groups=self.queries)
        return occupied(outputs, cumulative=False, groups=self.queries, top=self.top)


class Imprint(nn.Module):
    """Linear - ReLU - Linear; sparse rows are cut off at `top`.

    Attributes:
        measure: The layer whose rows sort examples into bins.
        carry: The layer that passes on the sum of the bins.
    """

    def __init__(self, shape: tuple[int, ...], bins: int, top: float | None) -> None:
        super().__init__()
        size = math.prod(shape)
        self.measure = skip_init(nn.Linear, size, bins)
        self.activation = nn.ReLU() if top is None else nn.Hardtanh(0.0, top)
        self.carry = skip_init(nn.Linear, bins, size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a picture that depends only on the bin of the input."""
        measured = self.activation(self.measure(inputs.flatten(1)))
        carried: Tensor = self.carry(measured).view_as(inputs)
        return carried


@dataclass(frozen=True)
class RobbingTheFedDirectPass(Adversary):
    """Imprint the model's own first linear layer, behind convolutions that copy.

    The architecture stays unchanged. The convolutions before the layer pass their inputs on. Their
    ReLUs remain and remove negative values. Of normalised inputs, half of the values are lost and
    guessed as 0, the mean colour. Of inputs in [0, 1], nothing is lost. ARES compares itself with
    Robbing the Fed in this way [2].

    Attributes:
        calibrated: Whether to take quantiles from public data, if there is any. Otherwise, as
            published, the projection is assumed to have mean 0 and deviation 1.

    References:
        [1] Fowl, Geiping, Czaja, Goldblum, Goldstein. "Robbing the Fed: Directly Obtaining
            Private Data in Federated Learning with Modified Models." ICLR 2022.
            https://arxiv.org/abs/2110.13057
        [2] Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated
            Learning through Activation Recovery." IEEE S&P 2026. (section VI)
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS
    cost: ClassVar[int] = 0

    calibrated: bool = True

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return one model with crafted parameters, for all clients."""
        crafted = copy.deepcopy(model)
        anatomy = dissect(crafted, round.space)
        for convolution in anatomy.convolutions:
            direct_pass_(convolution)
        layer, size = anatomy.layer, math.prod(round.space.shape)
        prefix = way_to(layer, crafted, round.space)
        quantile = normal_quantiles()
        if self.calibrated and round.public is not None:
            public = round.public.inputs.to(layer.weight)
            seen = seen_by(layer, crafted, public)
            seen = seen[:, :size] if prefix is None else public.flatten(1)
            quantile = calibrated(seen.mean(dim=1))
        bias = -thresholds(layer.out_features, quantile).to(layer.bias)
        if prefix is None:
            with torch.no_grad():
                layer.weight.fill_(1 / size)
                layer.bias.copy_(bias)
        else:
            query = layer.weight.new_full((layer.out_features, size), 1 / size)
            place_(layer, query, bias, prefix)
        equal_columns_(anatomy.head)
        return Crafted([crafted] * round.clients, CraftedLayer.of(layer, anatomy.name, prefix))

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the contents of the bins, at most one per private example."""
        kept = observation.kept
        bins = kept if isinstance(kept, CraftedLayer) else imprinted_layer(observation)
        layer = bins.received(observation)
        size = math.prod(observation.space.shape)  # the layer's other inputs are zero
        weight, bias = (observation.update[name] for name in bins.parameters)
        width = size if bins.prefix is None else weight.shape[1]
        found = isolate(weight[:, :width], bias, examples=observation.batch_size)
        found = bins.inputs(found, size)
        outputs = functional.linear(found.inputs, *bins.on_inputs(layer, size))
        return _reconstruction(found, occupied(outputs), observation)


def need_values(space: InputSpace) -> None:
    """Refuse tokens.

    Raises:
        NotApplicable: If inputs are tokens.
    """
    if not space.continuous:
        raise NotApplicable("token inputs are embedded before any linear layer")


@torch.no_grad()
def _reconstruction(found: Isolated, bins: Tensor, observation: Observation) -> Reconstruction:
    space = observation.space
    inputs = found.inputs.view(-1, *space.shape)
    confidence = within(found, bins) * (1 - outside(inputs, space))
    keep = chosen(found, confidence > 0.999, observation.batch_size)
    return Reconstruction(space.clamp(inputs[keep]), confidence=confidence[keep])
