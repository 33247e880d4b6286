"""A malicious server that looks for candidates in the bins of an imprint module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Candidates, Crafted, Observation, Reconstruction, Round, Threat
from ..malicious.imprint import noise_of
from ..malicious.robbing_the_fed import Bins, Query, RobbingTheFed, need_values
from ..spaces import NotApplicable
from .joint_choice import Products, check_size, choose, gaussian
from .prior_aware import Update, of_replays


@dataclass(frozen=True)
class MatchedFilter(Adversary):
    """Send an imprint module, and choose the candidates that best match the rows of their bins.

    Under noise, the rows of an imprint module are too noisy to show an example. They still tell
    candidates apart: each candidate has one bin, and an example adds a known vector to the row of
    its bin and nothing to other rows. So candidates of different bins are orthogonal. The server
    replays each candidate alone, and compares the row of its bin with the replayed row. Other
    private examples may be in the same bin, so candidates are chosen for all examples at once
    (`joint_choice`). The empty rows show the size of the noise.

    Attributes:
        bins: See `RobbingTheFed`. The rows are sparse, as each must see one bin only.
        query: See `RobbingTheFed`.
        mode: See `RobbingTheFed`.
        gain: See `RobbingTheFed`.

    References:
        [1] Fowl, Geiping, Czaja, Goldblum, Goldstein. "Robbing the Fed: Directly Obtaining
            Private Data in Federated Learning with Modified Models." ICLR 2022.
            https://arxiv.org/abs/2110.13057 (the module)
        [2] Hayes, Mahloujifar, Balle. "Bounding Training Data Reconstruction in DP-SGD." NeurIPS
            2023. https://arxiv.org/abs/2302.07225 (the choice among candidates)
    """

    threat: ClassVar[Threat] = Threat.ARCHITECTURE
    simulates: ClassVar[bool] = True
    needs_candidates: ClassVar[bool] = True
    cost: ClassVar[int] = 0

    bins: int = 256
    query: Query = "random"
    mode: int = 32
    gain: float = 1e-3

    def __post_init__(self) -> None:
        self._module()  # checks the options

    def _module(self) -> RobbingTheFed:
        return RobbingTheFed(
            bins=self.bins, query=self.query, mode=self.mode, rows="sparse", gain=self.gain
        )

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the model with an imprint module before it, the same for all clients."""
        return self._module().craft(model, round, rng)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the best candidate of every example."""
        need_values(observation.space)
        bins, candidates = observation.kept, observation.candidates
        if not isinstance(bins, Bins):
            raise NotApplicable("the clients were not sent an imprint module by this server")
        if candidates is None:
            raise NotApplicable(
                f"no candidates are granted for the {observation.batch_size} private examples"
            )
        choice = choose([_products(observation, bins, candidates)], rng)
        guesses = candidates.inputs[choice, torch.arange(len(choice))]
        return Reconstruction(guesses, observation.targets)


@torch.no_grad()
def _products(observation: Observation, bins: Bins, candidates: Candidates) -> Products:
    """Return the inner products of the rows of bins with the replayed candidates."""
    examples, size = candidates.inputs.shape[1], len(candidates.inputs)
    check_size((examples, size))
    inputs, targets = (part.transpose(0, 1).flatten(0, 1) for part in candidates)
    occupied = bins.of(bins.layer.received(observation), inputs.flatten(1))
    inside, row = occupied.any(dim=1), occupied.int().argmax(dim=1)

    def contribution(update: Update) -> Tensor:
        weight, bias = (update[name] for name in bins.layer.parameters)
        return torch.cat([weight.sum(dim=0), bias.sum().view(1)])  # one row is not zero

    alone = of_replays(observation, inputs.unsqueeze(1), targets.unsqueeze(1), contribution)
    expected = observation.protocol.as_gradient(alone, 1) / observation.batch_size
    expected = expected * inside.unsqueeze(1)
    weight, bias = (observation.as_gradient(name) for name in bins.layer.parameters)
    rows = torch.cat([weight, bias.unsqueeze(1)], dim=1)
    noise = noise_of(rows, observation.batch_size)
    observed = (rows[row].double() * expected.double()).sum(dim=1).view(examples, size)
    same = row.unsqueeze(1) == row.unsqueeze(0)
    gram = (expected @ expected.T).double() * same
    weighted = gaussian(1 / (2 * noise**2) if noise else 1.0)
    return Products(observed, torch.zeros_like(observed), gram, (0.0, 0.0), weighted)
