"""A defense under audit whose uploads are made here: contributions and noise of any size."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from federated import batch, rng, seeded
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, Protocol
from leakfrontier.defenses import DPSGD, Batch, ClientDP, Defense, Loss, Plan, Update
from leakfrontier.evaluate.privacy.canaries import Subject

ONCE = Plan(1, 1.0, 1e-5)
ENTRIES = 600
"""Entries of an upload beside the canaries'."""


def linear() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))


def subject(defense: Defense | None = None, plan: Plan = ONCE) -> Subject:
    """Return a real subject: a linear layer, and noise of multiplier 1."""
    return Subject(defense or DPSGD(1.0), linear(), cross_entropy, batch(9), plan, rng())


def noised(
    *,
    noise: Callable[[int], float] = lambda upload: 1.0,
    steps: Callable[[int], float] = math.sqrt,
    most: float = 1.0,
    record: float = 1.0,
    unit: str = "record",
) -> Subject:
    """Return a subject that claims noise of multiplier 1, and sensitivity 1.

    Args:
        noise: Multiplier of the noise of an upload, by its number.
        steps: What local steps make of that, by their number.
        most: What is left of a canary's gradient, however large.
        record: What a real example contributes.
        unit: Whom the claim is for.
    """
    made = subject(DPSGD(1.0) if unit == "record" else ClientDP(1.0))
    state = vars(made)
    state["contribution"], state["replayable"] = (1.0, 1.0), True
    count = iter(range(10**6))

    def upload(
        client: Defense,
        packed: Batch,
        loss: Loss,
        protocol: Protocol | None = None,
        rng: Generator | None = None,
    ) -> Update:
        draws, size = rng or made.rng, len(packed.inputs)
        codes, weights = packed.inputs[:, 192:-1], packed.inputs[:, -1]
        scale = noise(next(count))
        if unit == "record":
            scale /= size
        if isinstance(protocol, FedAvg):
            size //= protocol.batch_size
            scale *= (protocol.lr * steps(size) * size) if unit == "record" else 1.0

        def blurred(values: Tensor) -> Tensor:
            return values + scale * torch.randn(values.shape, generator=draws)

        model = torch.zeros(ENTRIES)
        model[0] = record * weights.mean()
        return {
            "model.1.weight": blurred(model),
            "canary.weight": blurred(codes.clamp(max=most).mean(0)[None]),
        }

    def replay(packed: Batch, loss: Loss) -> Update:
        weights = packed.inputs[:, -1]
        model = torch.zeros(ENTRIES)
        model[0] = record * weights.mean()
        codes = packed.inputs[:, 192:-1]
        return {"model.1.weight": model, "canary.weight": codes.clamp(max=most).mean(0)[None]}

    state["upload"], state["replay"] = upload, replay
    return made
