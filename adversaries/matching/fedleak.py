"""FedLeak: partial gradient matching with a regularised gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from ..base import Observation
from ..spaces import NotApplicable
from .matching import Distance, Matching, Update, cosine, total_variation, vectorised
from .optimizers import Adam, Unknowns, cosine_decay

_LATENT = 128  # entries of a generator's input
_PIXELS = 4  # size of the generator's first image, which is doubled until it is large enough


@dataclass(frozen=True)
class FedLeak(Matching):
    """Search for an untrained generator whose images reproduce the large gradient entries.

    Gradient matching has hardly more than one solution, but it is badly conditioned. The attack
    has two cures. It matches only the entries of each parameter's gradient that are largest in the
    guess (mean absolute error and cosine). Each step follows a mixture of the slope at the guess
    and the slope one step ahead, both by their signs.

    As in the authors' release, the attack optimises the weights of an untrained convolutional
    generator with a fixed random input. Two parts of the release are left out: the median filter
    at the end, and the spectral normalisation, because BatchNorm after each convolution undoes any
    scale.

    Attributes:
        iterations: Optimisation steps, with two evaluations each.
        restarts: Random starts. The attack keeps the one with the lowest objective.
        lr: Step size of AdamW, which falls to zero as a cosine.
        matched: Share of the entries of each parameter that is matched.
        look_ahead: Share of the slope one step ahead.
        total_variation: Weight of the total variation.
        weight_decay: Weight decay of AdamW.
        width: Channels of the generator. 0 optimises pixels instead.

    References:
        Fan, Wang, Chen, Zhou. "Boosting Gradient Leakage Attacks: Data Reconstruction in
        Realistic FL Settings." USENIX Security 2025. https://arxiv.org/abs/2506.08435
    """

    cost: ClassVar[int] = 3

    iterations: int = 10_000
    lr: float = 0.01
    matched: float = 0.5
    look_ahead: float = 0.3
    total_variation: float = 1e-5
    weight_decay: float = 0.01
    width: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 < self.matched <= 1:
            raise ValueError(f"matched must be in (0, 1], got {self.matched}")
        if not 0 <= self.look_ahead < 1:
            raise ValueError(f"look_ahead must be in [0, 1), got {self.look_ahead}")
        for name in ("total_variation", "weight_decay", "width"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")

    def check(self, observation: Observation) -> None:
        """Refuse inputs that a generator cannot draw."""
        if self.width and len(observation.space.shape) != 3:
            raise NotApplicable("the generator draws images of shape (channels, height, width)")

    def distance(self, observation: Observation) -> Distance:
        """Return the distance of the entries that are large in the guess, per parameter."""

        def partial(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
            values, slopes = [], {}
            for name, value in replayed.items():
                entries = value[0].numel()
                rank = 1 + int((1 - self.matched) * (entries - 1))
                least = value.abs().flatten(1).kthvalue(rank, dim=1).values
                mask = value.abs() >= least.view(-1, *[1] * (value.dim() - 1))
                guess, truth = value * mask, observed[name] * mask
                angle, slope = cosine({name: guess}, {name: truth})
                error = guess - truth
                values.append(angle + error.abs().flatten(1).mean(dim=1))
                slopes[name] = (slope[name] + error.sign() / entries) * mask
            return torch.stack(values).sum(dim=0), slopes

        return partial

    def prior(self, observation: Observation, inputs: Tensor) -> Tensor:
        """Return the total-variation prior."""
        return self.total_variation * total_variation(observation.space.to_unit(inputs))

    def optimizer(self) -> Adam:
        """Return AdamW on signs, with look-ahead."""
        return Adam(
            self.iterations,
            lr=self.lr,
            schedule=cosine_decay,
            signed=True,
            weight_decay=self.weight_decay,
            look_ahead=self.look_ahead,
            rates={"latent": 0.0},
        )

    def start(self, observation: Observation, rng: Generator) -> Unknowns:
        """Draw generators and their inputs."""
        if not self.width:
            return super().start(observation, rng)
        latent = torch.randn((self.restarts, observation.batch_size, _LATENT), generator=rng)
        drawn = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            for _ in range(self.restarts):
                module = _Generator(observation.space.shape, self.width)
                drawn.append({name: p.detach() for name, p in module.named_parameters()})
        return {"latent": latent} | {n: torch.stack([d[n] for d in drawn]) for n in drawn[0]}

    def project(self, observation: Observation, unknowns: Unknowns) -> Unknowns:
        """Clamp pixels to the range of the data; a generator's pixels are always in range."""
        return unknowns if self.width else super().project(observation, unknowns)

    def render(self, observation: Observation, unknowns: Unknowns) -> Tensor:
        """Return the generators' images."""
        if not self.width:
            return super().render(observation, unknowns)
        module = _generator(observation.space.shape, self.width)
        weights = {name: value for name, value in unknowns.items() if name != "latent"}
        draw = vectorised(lambda weights, latent: functional_call(module, weights, (latent,)))
        return observation.space.to_inputs(draw(weights, unknowns["latent"]))


class _Generator(nn.Module):
    """Draws images from random vectors: blocks of two convolutions, with upsampling in between."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.shape = shape
        layers: list[nn.Module] = [
            nn.Unflatten(1, (_LATENT, 1, 1)),
            nn.ConvTranspose2d(_LATENT, width, _PIXELS, bias=False),
            *_normalised(width),
        ]
        size, channels = _PIXELS, width
        while True:
            wanted = max(1, width // max(1, min(4, size // 32)))
            for _ in range(2):
                layers += [nn.Conv2d(channels, wanted, 3, padding=1, bias=False)]
                layers += _normalised(wanted)
                channels = wanted
            if size >= max(shape[1:]):
                break
            layers.append(nn.Upsample(scale_factor=2))
            size *= 2
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, shape[0], 1), nn.Sigmoid())

    def forward(self, latent: Tensor) -> Tensor:
        """Return pixels, cut to the requested shape."""
        images: Tensor = self.layers(latent)
        return images[..., : self.shape[1], : self.shape[2]]


def _normalised(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels, track_running_stats=False), nn.LeakyReLU(0.1)]


@lru_cache(maxsize=4)
def _generator(shape: tuple[int, ...], width: int) -> nn.Module:
    """Return the architecture; its own weights are never used."""
    return _Generator(shape, width)
