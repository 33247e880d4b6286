"""DP-SGD: speed of ghost clipping and hooks, and accuracy on MNIST at epsilon 3.

python benchmarks/dpsgd.py speed
python benchmarks/dpsgd.py mnist FOLDER     # where torchvision keeps or downloads MNIST
"""

import resource
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedSGD, ImageSpace
from leakfrontier.defenses import DPSGD, Batch, Plan
from leakfrontier.defenses.pld import gaussian_epsilon
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.models.models import build_model

BATCH, STEPS, DELTA, EPSILON = 1024, 300, 1e-5, 3.0


def speed(batch_size: int = 64, repeats: int = 5) -> None:
    """Time one gradient of a CNN with more than a million parameters, both ways."""
    space = ImageSpace((1, 28, 28), 10)
    rng = torch.Generator().manual_seed(0)
    model = build_model("cnn", space, rng)
    batch = Batch(torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,)))
    ways = {way: DPSGD(1.0, per_example=way) for way in ("ghost", "hooks")}  # type: ignore[arg-type]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):
        for way, defense in ways.items():
            start = time.perf_counter()
            defense.gradient(model, cross_entropy, batch, rng)
            best[way] = min(best[way], time.perf_counter() - start)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size:,} parameters, batch {batch_size}: "
        + ", ".join(f"{way} {seconds:.3f} s" for way, seconds in best.items())
        + f"; ghost is {best['hooks'] / best['ghost']:.1f} times faster"
    )


def mnist(folder: Path) -> None:
    """Train a small CNN on all of MNIST under DP-SGD, with the least noise for epsilon."""
    data = load_dataset("mnist", folder)
    space, (train, test) = data.space, data.normalised
    plan = Plan(STEPS, BATCH / len(train.targets), DELTA)
    sigma = _calibrate(plan)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _small_cnn()
    client = Client(model, cross_entropy, DPSGD(sigma, 1.0), FedSGD(), space)
    federation = Federation(client, [train], 1, batch_size=BATCH, server="adam", lr=0.005)
    print(f"sigma {sigma:.3f}: epsilon {gaussian_epsilon(sigma, plan):.3f} at delta {DELTA} (PLD)")
    start = time.perf_counter()

    def show(done: int, model: nn.Module) -> None:
        accuracy = data.modality.evaluate(model, test).correct / len(test.targets)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = time.perf_counter() - start
        print(
            f"step {done}: accuracy {accuracy:.4f}, {seconds:.0f} s, {memory:.1f} GiB", flush=True
        )

    rng = torch.Generator().manual_seed(1)
    federation.train(STEPS, rng, at=range(0, STEPS + 1, 50), on_checkpoint=show)


def _small_cnn() -> nn.Module:
    """Return the usual tanh CNN for DP-SGD on MNIST (Papernot et al., AAAI 2021)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def _calibrate(plan: Plan) -> float:
    """Return the least noise multiplier that keeps epsilon, to three digits."""
    low, high = 0.3, 5.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, plan) > EPSILON else (low, middle)
    return high


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["speed"]:
        speed()
    elif sys.argv[1:2] == ["mnist"] and len(sys.argv) == 3:
        mnist(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
