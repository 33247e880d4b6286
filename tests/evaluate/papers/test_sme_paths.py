import torch
from federated import rng
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, ImageSpace
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers.sme_paths import local_steps, plane_shares


def test_plane_shares_are_those_of_the_best_plane() -> None:
    flat = torch.randn(6, 2, generator=rng()) @ torch.randn(2, 50, generator=rng(1))
    torch.testing.assert_close(plane_shares(flat), torch.ones(6).double(), atol=1e-3, rtol=0)
    gradients = torch.randn(6, 50, generator=rng(2))
    plane = torch.linalg.svd(gradients)[2][:2]
    expected = (gradients @ plane.mT).norm(dim=1) / gradients.norm(dim=1)
    torch.testing.assert_close(plane_shares(gradients).float(), expected)


def test_all_examples_are_looked_at_in_every_step() -> None:
    space = ImageSpace((1, 8, 8), 3)
    model = build_model("mlp", space, rng(), width=8)
    batch = Batch(torch.rand(6, 1, 8, 8, generator=rng()), torch.arange(6) % 3)
    client = Client(model, cross_entropy, Defense(), FedAvg(2, 2, 1e-6), space)
    steps = local_steps(client, batch, rng(), points=3)
    assert steps.plane_shares.shape == (6,)
    # With hardly any movement, the gradient of all examples is the same everywhere.
    torch.testing.assert_close(steps.plane_shares, torch.ones(6).double(), atol=1e-3, rtol=0)
    assert torch.allclose(steps.cosines, steps.cosines[:1], atol=1e-3)
