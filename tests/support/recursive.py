"""Smooth images behind small convolutional networks, for attacks that go back layer by layer."""

import torch
from federated import rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import Adversary, FedSGD, ImageSpace, Observation, Protocol
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers.rconv import logistic

SHAPE = (3, 16, 16)


def smooth(count: int, seed: int = 0) -> Tensor:
    """Return images with large structures, in [0, 1]."""
    small = torch.rand(count, SHAPE[0], 4, 4, generator=rng(seed), dtype=torch.float64)
    return nn.functional.interpolate(small, SHAPE[1:], mode="bicubic").clamp(0, 1)


def seen(
    name: str = "lenet_x",
    examples: int = 1,
    *,
    precision: torch.dtype = torch.float64,
    classes: int = 10,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    model: nn.Module | None = None,
    **options: str,
) -> tuple[Observation, Tensor]:
    space = ImageSpace(SHAPE, classes)
    if model is None:
        model = build_model(name, space, rng(1), **options)
    loss = logistic if classes == 1 else cross_entropy
    images = smooth(examples).to(precision)
    labels = torch.arange(examples) % max(classes, 2)
    client = Client(model.to(precision), loss, defense or Defense(), protocol or FedSGD(), space)
    (upload,) = observe(client, [Batch(images, labels)], ThreatModel(), rng(2))
    return upload.observation, images


def attacked(observation: Observation, truth: Tensor, attack: Adversary) -> float:
    """Return the PSNR of the only example."""
    guess = attack.reconstruct(observation, rng(3))
    return float(metrics.psnr(guess.inputs, truth)[0])
