"""A defense that claims privacy, beside canaries: what audits look at.

A canary is an example whose gradient is a single huge entry, of a linear layer beside the audited
model that nothing else excites. Canaries are examples of the private batch, so that they enter
before clipping, and uploads come from `release`, the one path.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import ContinuousSpace, FedSGD, NotApplicable
from leakfrontier.defenses import Batch, Chain, Defense, Guarantee, Loss, Plan, Update, trainable

from ..client import Client, release
from ..mending import Expected
from ..statistics import Floats
from .accounting import calibrate, epsilon, gaussian_sigma

TOLERANCE, SLACK = 0.005, 1e-3
"""What a lower bound of epsilon may exceed a claim by, relative and absolute: accountants round."""

HUGE = 1e6
"""Factor by which gradients are inflated, so that clipping has something to do."""


class NoClaim(NotApplicable):
    """A defense claims no differential privacy, or an infinite epsilon."""


class Probe(nn.Module):
    """A model, beside a linear layer that nothing but canaries excites.

    An example is packed as its own values and a code: all zeros, or one huge entry. Its loss is
    its own plus the layer's output, hence its gradient in the layer is the code.
    """

    def __init__(self, model: nn.Module, loss: Loss, example: Tensor, canaries: int) -> None:
        super().__init__()
        self.model, self.inner_loss = copy.deepcopy(model), loss
        self.canary = nn.utils.skip_init(nn.Linear, canaries, 1, bias=False)
        nn.init.zeros_(self.canary.weight)
        self.shape, self.dtype = example.shape, example.dtype
        with torch.no_grad():
            self.outputs = self.model(example.unsqueeze(0)).shape[1:]

    def forward(self, packed: Tensor) -> Tensor:
        """Return the model's outputs, flat, and the layer's."""
        values, codes = packed.tensor_split([self.shape.numel()], dim=1)
        inputs = values.reshape(len(packed), *self.shape).to(self.dtype)
        return torch.cat([self.model(inputs).flatten(1), self.canary(codes)], dim=1)

    def loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return the model's mean loss, plus the layer's mean output."""
        outputs = packed[:, :-1].reshape(len(packed), *self.outputs)
        return self.inner_loss(outputs, targets) + packed[:, -1].mean()

    def inflated_loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return a loss under which clipping leaves little of any gradient."""
        return HUGE * self.loss(packed, targets)


class Subject:
    """A defense that claims privacy, applied to a probe.

    Attributes:
        defense: The one defense that makes the claim.
        claim: The claim under the plan.
        noise_multiplier: The least sigma of a Gaussian mechanism with the epsilon that is
            claimed of one step.
        needs: What that noise is called: `is claimed`, unless all that is claimed is epsilon 0.
        sample_rate: What the claim counts on: the plan's, or 1 without amplification.
        sensitivity: How far one unit can move the sum of contributions, as replayed.
        reach: What a canary contributes to its own entry, as a share of it.
    """

    def __init__(
        self,
        defense: Defense,
        model: nn.Module,
        loss: Loss,
        data: Batch,
        plan: Plan,
        rng: Generator,
        canaries: int = 1,
    ) -> None:
        if not len(data.inputs) >= 1:
            raise ValueError("data must have at least one example, got none")
        self.data, self.plan, self.rng = data, plan, rng
        self.defense = _claiming(defense, plan.delta)
        self.claim = _claim(self.defense, plan)
        once = _claim(self.defense, Plan(1, 1.0, plan.delta)).epsilon
        sampled = _claim(self.defense, replace(plan, steps=1)).epsilon
        self.noise_multiplier = gaussian_sigma(once, plan.delta)
        self.needs = "is claimed" if once else "an epsilon of 0 needs"
        self.sample_rate = plan.sample_rate if sampled < once else 1.0
        self.probe = Probe(model, loss, data.inputs[0], canaries)
        self._draws = False
        self._check_replay()
        canary = self.canaries(torch.zeros(1, dtype=torch.long))
        largest = _norm(self.replay(canary, self.probe.inflated_loss))
        self.sensitivity = largest * (2 if self.claim.adjacency == "replace" else 1)
        entries = self.replay(canary, self.probe.loss)["canary.weight"]
        self.reach = float(entries.detach().max()) / self.sensitivity

    @property
    def per_record(self) -> bool:
        """Return whether the claim is for single records, and not for the client as a whole."""
        return self.claim.unit == "record"

    def records(self, rows: Tensor) -> Batch:
        """Return some of the real examples, packed."""
        codes = self.probe.canary.weight.new_zeros(len(rows), self.probe.canary.in_features)
        return self._packed(rows, codes)

    def canaries(self, which: Tensor) -> Batch:
        """Return canaries, which are the first example in all but their code."""
        codes = nn.functional.one_hot(which, self.probe.canary.in_features)
        return self._packed(torch.zeros_like(which), HUGE * codes.to(self.probe.canary.weight))

    def _packed(self, rows: Tensor, codes: Tensor) -> Batch:
        values = self.data.inputs[rows].flatten(1).to(codes)
        return Batch(torch.cat([values, codes], dim=1), self.data.targets[rows])

    def client(self, batch_size: int) -> Defense:
        """Return a fresh client that has been told its batch size, as in training."""
        client = replace(self.defense)
        next(iter(client.batches(batch_size, batch_size, 1, self.rng)))
        return client

    def upload(self, client: Defense, batch: Batch, loss: Loss) -> Update:
        """Return what a client releases of a batch."""
        space = ContinuousSpace(tuple(batch.inputs.shape[1:]), classes=1)
        return release([Client(self.probe, loss, client, FedSGD(), space)], [batch], self.rng)[0]

    def replay(self, batch: Batch, loss: Loss) -> Update:
        """Return the same without noise, as an informed adversary replays it."""
        observed = {name: value.detach() for name, value in trainable(self.probe).items()}
        known = replace(self.defense).replay(observed)
        return self.upload(Expected(known) if self._draws else known, batch, loss)

    def unit_size(self, batch_size: int) -> float:
        """Return how far one unit can move an upload, the mean over a batch."""
        return self.sensitivity / (batch_size if self.per_record else 1)

    def canary_values(self, update: Update, batch_size: int) -> Floats:
        """Return the canaries' entries of an upload: 1 for one that is in, plus noise."""
        entries = update["canary.weight"].detach().flatten().double().cpu().numpy()
        values: Floats = entries / (self.reach * self.unit_size(batch_size))
        return values

    def epsilon(self, noise_multiplier: float) -> float:
        """Return what epsilon of the plan would be with this noise; infinite without."""
        if noise_multiplier == math.inf:
            return 0.0
        if not noise_multiplier > 0:
            return math.inf
        return epsilon(self.sample_rate, noise_multiplier, self.plan.steps, self.plan.delta)

    def is_exceeded_by(self, bound: float) -> bool:
        """Return whether a lower bound refutes the epsilon that is claimed of the plan."""
        return bound > self._tolerated

    def needed_noise(self) -> float:
        """Return the least noise multiplier that adds up to the claimed epsilon; slow."""
        return calibrate(self._tolerated, self.sample_rate, self.plan.steps, self.plan.delta)

    @property
    def _tolerated(self) -> float:
        return (1 + TOLERANCE) * self.claim.epsilon + SLACK

    def _check_replay(self) -> None:
        """Refuse what the audits cannot judge."""
        record = self.records(torch.arange(1))
        expected, again = (self.replay(record, self.probe.loss) for _ in range(2))
        if not torch.equal(flat(expected), flat(again)):
            if self._draws:
                raise NotApplicable(
                    "the defense's replay must leave out the noise, and does not: let its "
                    "`replay(observed)` return the defense with its noise set to zero, or draw "
                    "the noise by torch from `rng`"
                )
            self._draws = True  # what is drawn from `rng` is put at its mean
            return self._check_replay()
        near, far = (
            self.defense.log_likelihood(
                {name: value + shift for name, value in expected.items()}, expected, batch_size=1
            )
            for shift in (1.0, 2.0)
        )
        if near is not None and far is not None and not torch.isclose(far, 4 * near, rtol=1e-3):
            raise NotApplicable("the noise is not Gaussian")


def _claiming(defense: Defense, delta: float) -> Defense:
    """Return the link of a chain whose claim the chain makes; what follows is post-processing."""
    if not isinstance(defense, Chain):
        return defense
    once = Plan(1, 1.0, delta)
    claim = defense.guarantee(once)
    links = [link for link in defense.links if link.guarantee(once) == claim]
    return _claiming(links[0], delta) if claim is not None and links else defense


@dataclass(frozen=True)
class _Configured:
    """A defense that equals another with the same configuration, as a key."""

    kind: type[Defense]
    configuration: str
    defense: Defense = field(compare=False)


def _claim(defense: Defense, plan: Plan) -> Guarantee:
    claim, name = claim_under(defense, plan), type(defense).__name__
    if claim is None:
        raise NoClaim(f"{name} claims no differential privacy")
    if not claim.epsilon < math.inf:
        raise NoClaim(f"{name} claims an infinite epsilon, which nothing can violate")
    return claim


def claim_under(defense: Defense, plan: Plan) -> Guarantee | None:
    """Return what a defense claims; its accountant is slow, and audits ask again and again."""
    return _cached_claim(_Configured(type(defense), repr(defense), defense), plan)


@lru_cache(maxsize=128)
def _cached_claim(configured: _Configured, plan: Plan) -> Guarantee | None:
    return configured.defense.guarantee(plan)


def flat(update: Mapping[str, Tensor]) -> Tensor:
    """Return all entries of an update, in double precision."""
    return torch.cat([value.detach().flatten().double() for value in update.values()])


def _norm(update: Mapping[str, Tensor]) -> float:
    return float(flat(update).norm())
