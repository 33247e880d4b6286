"""The subject of an audit: a defense that claims privacy, and a model with canaries.

A canary is an example whose gradient has a single entry. The entry belongs to an extra linear layer
that only canaries excite. Canaries are examples of the private batch, so they enter before
clipping. Uploads come from `release`, like all uploads of the harness. An example whose
contribution is zeroed out has no gradient. An upload of such examples is pure noise, so no replay
of the defense is needed to isolate the noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import ContinuousSpace, FedSGD, NotApplicable, Protocol
from leakfrontier.defenses import Batch, Defense, Loss, Plan, Update, trainable

from ..client.client import Client, release
from ..client.mending import Expected
from ..foundations.statistics import Floats
from .promise import claiming, promised

HUGE = 1e6
"""Factor that inflates gradients, to make sure that clipping acts."""

CAUTION = 4.5
"""Standard errors that are subtracted from an estimated sensitivity, to be cautious."""


class CanaryModel(nn.Module):
    """A model with an extra linear layer that only canaries excite.

    A packed example consists of its values, a code and a weight. The code is all zeros or has one
    nonzero entry. The loss is the example's loss plus the layer's output. So the gradient of the
    layer is the code. With weight 0, the model's outputs and its gradient vanish.
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
        """Return the flat outputs of the model and the output of the layer."""
        size = self.shape.numel()
        values, codes, weights = packed.tensor_split([size, packed.shape[1] - 1], dim=1)
        inputs = values.reshape(len(packed), *self.shape).to(self.dtype)
        return torch.cat([weights * self.model(inputs).flatten(1), self.canary(codes)], dim=1)

    def loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the model plus the mean output of the layer."""
        outputs = packed[:, :-1].reshape(len(packed), *self.outputs)
        return self.inner_loss(outputs, targets) + packed[:, -1].mean()

    def inflated_loss(self, packed: Tensor, targets: Tensor) -> Tensor:
        """Return a loss whose gradients are so large that clipping cuts all of them."""
        return HUGE * self.loss(packed, targets)


class Subject:
    """A defense that claims privacy, applied to a model with canaries.

    Attributes:
        defense: The defense that makes the claim.
        data: Examples like those of the client.
        plan: Steps, sample rate and delta of the claim.
        promise: The promise of the defense for the plan.
        rng: Source of all randomness.
        probe: The model with canaries.
    """

    def __init__(
        self,
        defense: Defense,
        model: nn.Module,
        loss: Loss,
        data: Batch,
        plan: Plan,
        rng: Generator,
    ) -> None:
        if not len(data.inputs) >= 1:
            raise ValueError("data must have at least one example, got none")
        self.data, self.plan, self.rng = data, plan, rng
        self.defense = claiming(defense, plan.delta)
        self.promise = promised(self.defense, plan)
        self.probe = CanaryModel(model, loss, data.inputs[0], canaries=1)
        self._draws = False

    def beside(self, canaries: int) -> Subject:
        """Return the subject with another number of canaries and a copy of the model."""
        _ = self.contribution  # computed here, because it is the same for all copies
        other = copy.copy(self)
        other.probe = CanaryModel(
            self.probe.model, self.probe.inner_loss, self.data.inputs[0], canaries
        )
        return other

    def under(self, plan: Plan) -> Subject:
        """Return the subject under another plan."""
        other = copy.copy(self)
        other.plan, other.promise = plan, promised(self.defense, plan)
        return other

    @cached_property
    def replayable(self) -> bool:
        """Return whether a replay has no noise.

        If it has noise, attacks that know the defense are handicapped, and audits use differences
        of uploads.

        Raises:
            NotApplicable: If the noise is not Gaussian.
        """
        return self._can_replay()

    @cached_property
    def contribution(self) -> tuple[float, float]:
        """Return the norm of a huge canary's contribution, and its own entry.

        The values come from the replay or, if the replay has noise, from a cautious measurement.
        """
        return self._replayed() if self.replayable else self._measured()

    @property
    def sensitivity(self) -> float:
        """Return the largest change of the sum of contributions by one unit."""
        return self.distance * self.contribution[0]

    @property
    def entry(self) -> float:
        """Return the contribution of a huge canary to its own entry."""
        return self.contribution[1]

    @property
    def distance(self) -> int:
        """Return the distance of neighbours, in contributions of one unit."""
        return 2 if self.promise.claim.adjacency == "replace" else 1

    @property
    def per_record(self) -> bool:
        """Return whether the claim protects single records, and not the whole client."""
        return self.promise.claim.unit == "record"

    @property
    def needs(self) -> str:
        """Return the words that say why the noise is needed."""
        epsilon = self.promise.claim.epsilon
        return "the claim needs" if epsilon else "an epsilon of 0 needs"

    @property
    def reach(self) -> float:
        """Return a canary's contribution to its own entry, divided by the sensitivity."""
        return self.entry / self.sensitivity

    def records(self, rows: Tensor) -> Batch:
        """Return some of the real examples, packed."""
        return self._packed(rows, self._codes(torch.zeros_like(rows), 0.0), weight=1.0)

    def canaries(self, which: Tensor, size: float | Tensor = HUGE, weight: float = 1.0) -> Batch:
        """Return canaries: copies of the first example with a code and a weight."""
        return self._packed(torch.zeros_like(which), self._codes(which, size), weight)

    def nobody(self, count: int) -> Batch:
        """Return examples whose inputs and contributions are zeroed out."""
        batch = self.canaries(torch.zeros(count, dtype=torch.long), 0.0, weight=0.0)
        return Batch(torch.zeros_like(batch.inputs), batch.targets)

    def _codes(self, which: Tensor, size: float | Tensor) -> Tensor:
        codes = nn.functional.one_hot(which, self.probe.canary.in_features)
        return torch.as_tensor(size).reshape(-1, 1) * codes.to(self.probe.canary.weight)

    def _packed(self, rows: Tensor, codes: Tensor, weight: float) -> Batch:
        values = self.data.inputs[rows].flatten(1).to(codes)
        weights = torch.full_like(codes[:, :1], weight)
        return Batch(torch.cat([values, codes, weights], dim=1), self.data.targets[rows])

    def client(self, batch_size: int) -> Defense:
        """Return a fresh client that knows its batch size, as in training."""
        client = replace(self.defense)
        next(iter(client.batches(batch_size, batch_size, 1, self.rng)))
        client.expect(batch_size)
        return client

    def upload(
        self,
        client: Defense,
        batch: Batch,
        loss: Loss,
        protocol: Protocol | None = None,
        rng: Generator | None = None,
    ) -> Update:
        """Return the upload of a client for a batch. By default a single gradient."""
        space = ContinuousSpace(tuple(batch.inputs.shape[1:]), classes=1)
        one = Client(self.probe, loss, client, protocol or FedSGD(), space)
        return release([one], [batch], rng or self.rng)[0]

    def replay(self, batch: Batch, loss: Loss) -> Update:
        """Return the upload without noise, as an informed adversary replays it."""
        observed = {name: value.detach() for name, value in trainable(self.probe).items()}
        known = replace(self.defense).replay(observed)
        return self.upload(Expected(known) if self._draws else known, batch, loss)

    def unit_size(self, batch_size: int) -> float:
        """Return the largest change of an upload (the mean over a batch) by one unit."""
        return self.sensitivity / (batch_size if self.per_record else 1)

    def canary_entries(self, update: Update) -> Floats:
        """Return the canaries' entries of an upload."""
        entries: Floats = update["canary.weight"].detach().flatten().double().cpu().numpy()
        return entries

    def canary_values(self, update: Update, batch_size: int) -> Floats:
        """Return the scaled entries of the canaries: 1 plus noise if in, else noise."""
        values: Floats = self.canary_entries(update) / (self.reach * self.unit_size(batch_size))
        return values

    def _replayed(self) -> tuple[float, float]:
        """Return the norm and the entry of a huge canary's replayed contribution."""
        canary = self.canaries(torch.zeros(1, dtype=torch.long))
        entry = self.replay(canary, self.probe.loss)["canary.weight"].detach().max()
        return _norm(self.replay(canary, self.probe.inflated_loss)), float(entry)

    def _measured(self) -> tuple[float, float]:
        """Return the same from uploads with and without huge canaries, as a cautious lower limit.

        If the unit is a record, many copies of one canary reduce the noise.
        """
        count, uploads = (64, 16) if self.per_record else (1, 256)
        which = torch.zeros(count, dtype=torch.long)
        batches = [self.canaries(which, weight=0.0), self.nobody(count)]
        client = self.client(count)
        values = np.array(
            [
                [self.canary_entries(self.upload(client, b, self.probe.loss))[0] for b in batches]
                for _ in range(uploads)
            ]
        )
        gain = values[:, 0] - values[:, 1]
        least = float(gain.mean() - CAUTION * gain.std(ddof=1) / math.sqrt(uploads))
        if not least > 0:
            raise NotApplicable(
                "the replay of the defense adds noise, and its uploads do not show what one "
                "example can contribute: let its `replay(observed)` return the defense with its "
                "noise set to zero, or draw the noise by torch from `rng`"
            )
        return least, least

    def _can_replay(self) -> bool:
        """Return whether two replays are equal. Draws from `rng` are replaced by their mean.

        Raises:
            NotApplicable: If the density of the defense is not Gaussian.
        """
        record = self.records(torch.arange(1))
        expected, again = (self.replay(record, self.probe.loss) for _ in range(2))
        if not torch.equal(flat(expected), flat(again)):
            if self._draws:
                return False
            self._draws = True
            return self._can_replay()
        near, far = (
            self.defense.log_likelihood(
                {name: value + shift for name, value in expected.items()}, expected, batch_size=1
            )
            for shift in (1.0, 2.0)
        )
        if near is not None and far is not None and not torch.isclose(far, 4 * near, rtol=1e-3):
            raise NotApplicable("the noise is not Gaussian")
        return True


def flat(update: Mapping[str, Tensor]) -> Tensor:
    """Return all entries of an update, in double precision."""
    return torch.cat([value.detach().flatten().double() for value in update.values()])


def _norm(update: Mapping[str, Tensor]) -> float:
    return float(flat(update).norm())
