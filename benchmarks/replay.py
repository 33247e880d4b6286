"""Test whether defenses without their own replay get a fair score.

The defenses are weak or worthless: noise from a public seed, 8-bit floats, fresh Gaussian noise.
Their default replay would cripple an attack that knows them. The script compares each with the
same defense plus a perfect replay. The rates must agree.

    python benchmarks/replay.py [--victims 40] [--models mlp lenet]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from leakfrontier.defenses import Defense, Update
from leakfrontier.evaluate.run.cells import AttackTrial, run_trial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario


@dataclass
class PublicNoise(Defense):
    """Adds noise from a public seed, which everyone can compute."""

    scale: float = 0.3

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with noise from a fixed seed."""
        public = torch.Generator().manual_seed(7)
        return {
            name: value + self.scale * torch.randn(value.shape, generator=public)
            for name, value in update.items()
        }


@dataclass
class PublicNoiseReplayed(PublicNoise):
    """The same defense with its own replay."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the noise as a constant."""
        zeros = {name: torch.zeros(value.shape) for name, value in observed.items()}
        return Shifted(self.on_update(zeros, torch.Generator()))


@dataclass
class Shifted(Defense):
    """Adds given values."""

    values: Update

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the shifted update."""
        return {name: value + self.values[name] for name, value in update.items()}


@dataclass
class Float8(Defense):
    """Uploads 8-bit floats, through which no gradient passes."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update rounded to 8 bits."""
        return {name: v.to(torch.float8_e4m3fn).float() for name, v in update.items()}


@dataclass
class Float8Replayed(Float8):
    """The same defense with its own replay."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the rounding with a straight-through gradient."""
        return Float8StraightThrough()


@dataclass
class Float8StraightThrough(Float8):
    """Rounding with a straight-through gradient."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update rounded to 8 bits."""
        rounded = super().on_update(update, rng)
        return {name: v + (rounded[name] - v).detach() for name, v in update.items()}


@dataclass
class GaussianNoise(Defense):
    """Adds fresh Gaussian noise."""

    scale: float = 0.01

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with noise."""
        return {
            name: value + self.scale * torch.randn(value.shape, generator=rng)
            for name, value in update.items()
        }


@dataclass
class GaussianNoiseReplayed(GaussianNoise):
    """The same defense with its own replay."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return a replay without noise, because the noise is secret."""
        return Defense()


PAIRS = [
    (PublicNoise, PublicNoiseReplayed),
    (Float8, Float8Replayed),
    (GaussianNoise, GaussianNoiseReplayed),
]


def rate(model: str, defense: type[Defense], adversary: Method, victims: int) -> float:
    """Return the share of victims that an informed attack identifies."""
    trial = AttackTrial(
        scenario=Scenario(model=Method(name=model)),
        defense=Method(name=f"{__file__}:{defense.__name__}"),
        adversary=adversary,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(victims)),
        pictures=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = run_trial((trial, Path(folder))).attacks
    return sum(bool(row.identified) for row in rows) / len(rows)


def main() -> None:
    """Print the rates of each defense without and with its own replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victims", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    adversary = Method(name="InvertingGradients", options={"iterations": 300})
    for model in chosen.models:
        for without, perfect in PAIRS:
            rates = [rate(model, one, adversary, chosen.victims) for one in (without, perfect)]
            texts = " ".join(f"{100 * one:6.1f} %" for one in rates)
            print(f"{model:6} {without.__name__:14} without and with its own replay: {texts}")


if __name__ == "__main__":
    main()
