"""Trap weights: rows that only few examples activate."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..base import Adversary, Crafted, Observation, Reconstruction, Round, Threat
from ..spaces import NotApplicable
from .imprint import (
    CraftedLayer,
    direct_pass_,
    dissect,
    isolate,
    outside,
    place_,
    seen_by,
    way_to,
    within,
)

_NATURAL = 1.9  # mean divided by standard deviation of the pixels of a natural image
_EXAMPLES = 500  # number of public examples for the choice of s


@dataclass(frozen=True)
class TrapWeights(Adversary):
    """Make each row of the first linear layer fire for about one example, and read it off.

    A row has random weights: -|a| for half of the inputs, and +s|a| with the same magnitudes for
    the other half. If inputs are in [0, 1] and s < 1, the negative half wins for most examples.
    Each row has different exceptions. Convolutions before the layer copy their inputs. A row that
    only one example activates has dL/dW_k = d x and dL/db_k = d.

    The attack tells mixtures from examples without ground truth. No two rows give the same
    mixture, because the next layer weighs examples differently in every row. A mixture comes from
    a row that known examples activate too, or has values out of range. Or it would not activate
    its own row, or it would activate rows that have no gradient.

    The ReLUs of the convolutions remove negative values. The attack therefore fails on normalised
    inputs, as published [2]. Without convolutions it finds few examples there, because examples
    darker than the mean activate all rows.

    Attributes:
        s: Factor of the positive half. `auto` chooses the factor that exposes most examples, by
            the statistics of public examples or else of natural images. An example then activates
            a row with a probability of about 1/B, so one in e rows has exactly one example.
        sigma: Standard deviation of a. It does not change the sign of any row.

    References:
        [1] Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot. "When the Curious
            Abandon Honesty: Federated Learning Is Not Private." EuroS&P 2023.
            https://arxiv.org/abs/2112.02918
        [2] Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated
            Learning through Activation Recovery." IEEE S&P 2026. (section VI)
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS
    cost: ClassVar[int] = 0

    s: float | Literal["auto"] = "auto"
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if self.s != "auto" and not (isinstance(self.s, float | int) and 0 <= self.s <= 1):
            raise ValueError(f"s must be 'auto' or lie in [0, 1], got {self.s!r}")
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be positive and finite, got {self.sigma}")

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return one model with crafted parameters, for all clients."""
        crafted = copy.deepcopy(model)
        anatomy = dissect(crafted, round.space)
        for convolution in anatomy.convolutions:
            direct_pass_(convolution)
        layer, size = anatomy.layer, math.prod(round.space.shape)
        prefix = way_to(layer, crafted, round.space)
        if self.s != "auto":
            s = self.s
        else:
            even = torch.tensor([_NATURAL * math.sqrt(size)], dtype=torch.float64)
            if round.public is not None:
                public = round.public.inputs[:_EXAMPLES].to(layer.weight)
                seen = seen_by(layer, crafted, public)
                even = evenness(seen[:, :size] if prefix is None else public)
            s = tuned(even, round.clients * round.batch_size, layer.out_features)
        rows = traps(layer.out_features, size, s, self.sigma, rng).to(layer.weight)
        place_(layer, rows, torch.zeros_like(layer.bias), prefix)
        return Crafted([crafted] * round.clients, CraftedLayer.of(layer, anatomy.name, prefix))

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return guesses on which rows agree, then sound ones, up to the batch size."""
        space, size = observation.space, math.prod(observation.space.shape)
        kept = observation.kept
        traps = kept if isinstance(kept, CraftedLayer) else _recognised(observation)
        layer = traps.received(observation)
        weight, bias = (observation.update[name] for name in traps.parameters)
        found = isolate(weight, bias, cumulative=False)
        values = traps.inputs(found, size).inputs
        active = functional.linear(values, traps.on_inputs(layer, size)[0].detach()) > 0
        groups = agreeing(values)
        agreed = groups.rows > 1
        shared = active[groups.first[agreed]][:, found.bins].any(dim=0)
        boxed = outside(values.view(-1, *space.shape), space) == 0
        sound = (within(found, active) & boxed & ~shared)[groups.first]
        trust = groups.rows - 1 + sound / 2
        best = trust.argsort(descending=True, stable=True)[: observation.batch_size]
        best = best[trust[best] > 0] if bool((trust > 0).any()) else best
        inputs = space.clamp(groups.inputs[best].view(-1, *space.shape))
        return Reconstruction(inputs, confidence=agreed[best].to(inputs))


def _recognised(observation: Observation) -> CraftedLayer:
    """Return the layer of a model that this server did not send, as in a capture."""
    anatomy = dissect(observation.model, observation.space)
    if anatomy.layer.bias.any():
        raise NotApplicable(f"the clients were not sent a model with traps in {anatomy.name!r}")
    return CraftedLayer.of(anatomy.layer, anatomy.name)


def evenness(inputs: Tensor) -> Tensor:
    """Return each input's sum divided by its norm after the mean is subtracted."""
    rows = inputs.flatten(1).double()
    spread = torch.linalg.vector_norm(rows - rows.mean(dim=1, keepdim=True), dim=1)
    ratio: Tensor = rows.sum(dim=1) / spread.clamp(min=1e-30)
    return ratio


def activation(s: float | Tensor, evenness: Tensor) -> Tensor:
    """Return the probability that an input activates a row.

    <w, x> is about normal. In units of sigma, a weight has the mean m = -(1 - s) / sqrt(2 pi) and
    the variance v = (1 + s^2) / 2 - m^2. The weights of a row are those of its halves in random
    order. Therefore <w, x> has the mean m sum(x), and its variance is v times the squared norm of
    x minus its mean.
    """
    s = torch.as_tensor(s).to(evenness)
    mean = -(1 - s) / math.sqrt(2 * math.pi)
    probability: Tensor = torch.special.ndtr(mean * evenness / ((1 + s**2) / 2 - mean**2).sqrt())
    return probability


def tuned(evenness: Tensor, examples: int, rows: int) -> float:
    """Return the s for which most examples of a batch are each alone in two rows or more.

    If all inputs are equally even, an input then activates a row with probability 1 / examples.
    If a few inputs would activate most rows, s is larger.
    """

    def missed(factors: Tensor) -> Tensor:
        active = activation(factors[:, None], evenness).clamp(max=1 - 1e-9)
        others = ((examples - 1) * (-active).log1p().mean(dim=1, keepdim=True)).exp()
        alone = active * others  # probability to be alone in a given row
        lost = (1 - alone) ** rows + rows * alone * (1 - alone) ** (rows - 1)
        return lost.mean(dim=1)

    coarse = torch.linspace(0, 1, 101, dtype=torch.float64)
    best = coarse[missed(coarse).argmin()]
    fine = (best + torch.linspace(-0.01, 0.01, 41, dtype=torch.float64)).clamp(0, 1)
    return float(fine[missed(fine).argmin()])


def traps(rows: int, size: int, s: float, sigma: float, rng: Generator) -> Tensor:
    """Return random rows whose negative half outweighs the positive; an odd input gets zero."""
    half = size // 2
    magnitudes = sigma * torch.randn(rows, half, generator=rng, device=rng.device).abs()
    weight = torch.zeros(rows, size, device=rng.device)
    for row, values in zip(weight, magnitudes, strict=True):
        order = torch.randperm(size, generator=rng, device=rng.device)
        row[order[:half]] = -values
        row[order[half : 2 * half]] = s * values
    return weight


class Groups(NamedTuple):
    """Groups of rows that give the same input.

    Attributes:
        inputs: The median of each group.
        rows: The number of rows in each group.
        first: The first row of each group.
    """

    inputs: Tensor
    rows: Tensor
    first: Tensor


def agreeing(inputs: Tensor, tolerance: float = 1e-4) -> Groups:
    """Return groups of inputs that are equal up to rounding, relative to their norm."""
    rows = inputs.double()
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    near = torch.cdist(rows, rows) <= tolerance * norms
    near.fill_diagonal_(True)
    first = (~near.tril(diagonal=-1).any(dim=1)).nonzero().flatten()
    medians = [inputs[near[row]].median(dim=0).values for row in first]
    stacked = torch.stack(medians) if medians else inputs
    return Groups(stacked, near[first].sum(dim=1), first)
