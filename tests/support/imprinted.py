"""Malicious rounds on a few photos."""

from __future__ import annotations

import torch
from federated import rng, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import Adversary, FedSGD, Protocol, PublicData, Reconstruction, Round
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import Dataset
from leakfrontier.evaluate.modality import metrics


def host() -> nn.Module:
    """Return a small model without normalisation, which saturates easily."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 10)
        )
    )


def attacked(
    attack: Adversary,
    data: Dataset,
    model: nn.Module,
    examples: int,
    *,
    clients: int = 1,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    public: bool = True,
    seed: int = 0,
) -> Upload:
    """Return what the server sees, having crafted the models of its clients."""
    (private, test), protocol = data.normalised, protocol or FedSGD()
    rows = torch.randperm(len(private.inputs), generator=rng(seed))[: examples * clients]
    known = PublicData(*test) if public else None
    crafted = attack.craft(
        model, Round(data.space, protocol, clients, examples, known), rng(seed + 1)
    )
    client = Client(model, cross_entropy, defense or Defense(), protocol, data.space)
    shares = [Batch(private.inputs[part], private.targets[part]) for part in rows.split(examples)]
    threat = ThreatModel(public=known)
    (upload,) = observe(
        client, shares, threat, rng(seed + 2), models=crafted.models, kept=crafted.kept
    )
    return upload


def psnrs(guess: Reconstruction, upload: Upload) -> Tensor:
    """Return the PSNR of each private example, 0 where there is no guess, with the best mean."""
    space = upload.observation.space
    truth = space.to_unit(upload.truth.inputs.double()).flatten(1)
    guesses = space.to_unit(guess.inputs.double()).flatten(1)
    errors = torch.cdist(guesses, truth).square() / truth.shape[1]
    levels = torch.cat(
        [
            -10 * errors.clamp(min=1e-16).log10(),
            torch.zeros_like(truth[:1, :1]).expand(1, len(truth)),
        ]
    )
    return levels[metrics.assign(-levels[:-1]), torch.arange(len(truth))]
