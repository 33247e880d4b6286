"""Learning to Invert: train a network that maps defended uploads back to examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor
from torch.linalg import cholesky
from torch.nn.functional import one_hot, pad

from ..base import Adversary, Observation, PublicData, Reconstruction, in_groups, only
from ..matching.label_inference import infer_targets
from ..matching.matching import Randomness, vectorised
from ..spaces import NotApplicable

Update = Mapping[str, Tensor]

Release = Callable[[Tensor, Tensor, Generator], Update]
"""Maps examples that the adversary chooses, and a generator, to a client's upload."""

_ENTRIES_AT_ONCE = 2**22  # entries of simulated uploads before they are hashed
_HELD_OUT = 10  # one in this many public examples is held out to choose the ridge
_LARGEST = 10.0  # features are clamped to this many standard deviations around their mean
_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # in units of the mean square of the network's output
_TRIED_ON = 1500  # uploads on which ridges are compared; more would be slower


@dataclass(frozen=True)
class LearningToInvert(Adversary):
    """Train a network on uploads that clients would make of public data, then apply it.

    This is the adaptive attack on any defense that can be called, differentiable or not: the
    network learns what the defense leaves of an example. Large uploads are hashed with random
    signs into `features` numbers. All features are standardised. Labels that the threat model
    grants are also inputs. The attack minimises no objective on the victim's upload, so it reports
    none.

    The paper's network is a perceptron with two hidden layers of 3000 units. It is trained by Adam
    for 200 epochs on 50,000 examples. Here the network is infinitely wide and trained to
    convergence in closed form: ridge regression with the kernel of such a network [2]. This takes
    seconds and far fewer examples. The ridge is the one with the lowest error on held-out public
    examples.

    The examples of a batch are sorted by label, and by brightness within a label, so there is
    one right answer. The paper's loss takes the best of all orders instead.

    Attributes:
        uploads: Number of simulated uploads to learn from. If an upload has one example and the
            defense is deterministic, there are at most as many as public examples.
        features: Numbers that an upload is hashed into.
        max_examples: Largest number of private examples per upload that the attack accepts.

    References:
        [1] Wu, Chen, Guo, Weinberger. "Learning To Invert: Simple Adaptive Attacks for Gradient
            Inversion in Federated Learning." UAI 2023. https://arxiv.org/abs/2210.10880
        [2] Cho, Saul. "Kernel Methods for Deep Learning." NeurIPS 2009. (arc-cosine kernel)
    """

    simulates: ClassVar[bool] = True
    pooled: ClassVar[bool] = True
    cost: ClassVar[int] = 1

    uploads: int = 5000
    features: int = 4096
    max_examples: int = 8

    def __post_init__(self) -> None:
        for name in ("uploads", "features", "max_examples"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Train for this observation only, and apply the network."""
        return only(self.reconstruct_all([observation], [rng]))

    def reconstruct_all(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction | NotApplicable]:
        """Train one network per group of observations that share the client's code; apply it."""

        def alike(index: int) -> tuple[object, ...]:
            observation = observations[index]
            self._check(observation)
            return observation.replay, observation.batch_size, observation.targets is not None

        return in_groups(
            len(observations),
            alike,
            lambda group: self._attack([observations[i] for i in group], [rngs[i] for i in group]),
        )

    def _check(self, observation: Observation) -> None:
        size = observation.batch_size
        if not observation.space.continuous:
            raise NotApplicable("the network outputs pixels, but the inputs are tokens")
        _, public = _granted(observation)
        if size > self.max_examples:
            raise NotApplicable(
                f"the upload has {size} examples, but the attack learns at most "
                f"{self.max_examples} at once (max_examples)"
            )
        if len(public.inputs) < 2 * _HELD_OUT * size:
            raise NotApplicable(
                f"{len(public.inputs)} public examples are too few to learn from: batches of "
                f"{size} need {2 * _HELD_OUT * size}"
            )

    def _attack(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction]:
        """Train a network for the client of the first observation, and apply it to all."""
        first, rng = observations[0], rngs[0]
        simulator = Simulator.of(first, self.features, rng)
        order = torch.randperm(len(simulator.public.inputs), generator=rng)
        is_held_out = torch.arange(len(order)) % _HELD_OUT == 0
        splits = order[~is_held_out], order[is_held_out]
        simulator = replace(simulator, stochastic=simulator.is_stochastic(rng))
        repeat = first.batch_size > 1 or simulator.stochastic
        shares = [self.uploads * len(rows) // len(order) for rows in splits]
        train, held_out = (
            simulator.draw(rows, max(1, share if repeat else min(share, len(rows))), rng)
            for rows, share in zip(splits, shares, strict=True)
        )
        network = Network.fit(train, held_out)
        labels = [_labels(*pair) for pair in zip(observations, rngs, strict=True)]
        updates = {
            name: torch.stack([observation.update[name] for observation in observations])
            for name in first.update
        }
        known = None if first.targets is None else torch.stack([y for y in labels if y is not None])
        pixels = network.predict(simulator.features(updates, known))
        guesses = pixels.view(len(observations), first.batch_size, *first.space.shape)
        return [
            Reconstruction(first.space.to_inputs(guess), targets)
            for guess, targets in zip(guesses, labels, strict=True)
        ]


class Drawn(NamedTuple):
    """Simulated uploads, and the examples behind them.

    Attributes:
        features: Hashed uploads, one row each.
        pixels: The pixels of all examples of an upload, in one row.
    """

    features: Tensor
    pixels: Tensor


@dataclass(frozen=True)
class Simulator:
    """Runs clients on public data and returns their uploads as features.

    Attributes:
        observation: An observed upload of the client to simulate.
        release: The client's code.
        public: The public examples.
        bins: Number of features. If an upload has more entries, a random permutation assigns them
            to bins, and the entries of a bin are summed with random signs.
        order: The permutation.
        signs: The signs.
        stochastic: Whether uploads have private random draws. All other draws of the client are
            public.
    """

    observation: Observation
    release: Release
    public: PublicData
    bins: int
    order: Tensor
    signs: Tensor
    stochastic: bool = False

    @classmethod
    def of(cls, observation: Observation, bins: int, rng: Generator) -> Simulator:
        """Return a simulator of an observed client, with a random hash."""
        entries = sum(value.numel() for value in observation.update.values())
        order = torch.randperm(entries, generator=rng)
        signs = 1.0 - 2 * torch.randint(2, (entries,), generator=rng)
        return cls(observation, *_granted(observation), bins, order, signs)

    def draw(self, rows: Tensor, count: int, rng: Generator) -> Drawn:
        """Simulate uploads for random batches of public examples, each used equally often."""
        size = self.observation.batch_size
        per_pass = len(rows) // size
        passes = [
            torch.randperm(len(rows), generator=rng)[: per_pass * size].view(per_pass, size)
            for _ in range(-(-count // per_pass))
        ]
        batches = rows[torch.cat(passes)[:count]]
        pixels = self.observation.space.to_unit(self.public.inputs)
        darkness = 1 - pixels.flatten(1).mean(dim=1).clamp(0, 1) / 2  # in [1/2, 1]
        by_label = (self.public.targets - darkness)[batches].argsort(dim=1)
        batches = batches.gather(1, by_label)
        features = self._simulate(self.public.inputs[batches], self.public.targets[batches], rng)
        return Drawn(features, pixels[batches].flatten(1))

    def is_stochastic(self, rng: Generator) -> bool:
        """Return whether two uploads for the same examples differ."""
        inputs, targets = (part[: self.observation.batch_size].unsqueeze(0) for part in self.public)
        first, second = (self._simulate(inputs, targets, rng) for _ in range(2))
        return not torch.equal(first, second)

    def features(self, updates: Update, targets: Tensor | None) -> Tensor:
        """Return a stack of uploads as features: hashed, with the labels if they are granted."""
        names = list(self.observation.update)
        vectors = torch.cat([updates[name].flatten(1) for name in names], dim=1)
        if vectors.shape[1] > self.bins:
            vectors = pad(vectors[:, self.order] * self.signs, (0, -vectors.shape[1] % self.bins))
            vectors = vectors.view(len(vectors), -1, self.bins).sum(dim=1)
        if self.observation.targets is None or targets is None:
            return vectors
        labels = one_hot(targets, self.observation.space.classes).flatten(1)
        return torch.cat([vectors, labels.to(vectors)], dim=1)

    def _simulate(self, inputs: Tensor, targets: Tensor, rng: Generator) -> Tensor:
        randomness: Randomness = "different" if self.stochastic else "same"
        run = vectorised(lambda inputs, targets: self.release(inputs, targets, rng), randomness)
        size = max(1, _ENTRIES_AT_ONCE // len(self.order))
        parts = zip(inputs.split(size), targets.split(size), strict=True)
        # A client may need gradients, so this is not under `no_grad`.
        return torch.cat([self.features(run(*part), part[1]).detach() for part in parts])


@dataclass(frozen=True)
class Network:
    """An infinitely wide perceptron with two hidden ReLU layers, trained in closed form.

    The hidden weights keep their random initial values, and ridge regression fits the last layer.
    The fit needs only the inner products of the last hidden layers.

    Attributes:
        center: Mean of each feature.
        scale: Standard deviation of each feature.
        inputs: Standardised features of the training uploads.
        factor: Cholesky factor of their kernel plus the ridge.
        pixels: The pixels of the training uploads, minus their mean.
        mean: Mean of each pixel.
    """

    center: Tensor
    scale: Tensor
    inputs: Tensor
    factor: Tensor
    pixels: Tensor
    mean: Tensor

    @classmethod
    def fit(cls, train: Drawn, held_out: Drawn) -> Network:
        """Train on all uploads, with the ridge that is best on the held-out uploads."""
        features, pixels = (torch.cat(pair) for pair in zip(train, held_out, strict=True))
        center, spread, mean = features.mean(dim=0), features.std(dim=0), pixels.mean(dim=0)
        scale = spread.clamp(min=0.01 * float(spread.square().mean().sqrt()) + 1e-30)
        inputs, pixels = _standardised(features, center, scale), pixels - mean
        kernel = hidden_products(inputs, inputs)
        seen, unseen = slice(min(len(train.features), _TRIED_ON)), slice(len(train.features), None)

        def error(ridge: float) -> float:
            factor = _factor(kernel[seen, seen], ridge)
            guess = _regress(kernel[unseen, seen], factor, pixels[seen])
            return float((guess - pixels[unseen]).square().mean())

        factor = _factor(kernel, min(_RIDGES, key=error))
        return cls(center, scale, inputs, factor, pixels, mean)

    def predict(self, features: Tensor) -> Tensor:
        """Return the pixels of all examples behind each upload, in one row."""
        inputs = _standardised(features, self.center, self.scale)
        products = hidden_products(inputs, self.inputs)
        return (self.mean + _regress(products, self.factor, self.pixels)).clamp(0, 1)


def hidden_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of the second hidden layers, per unit, in double precision.

    Weights have the variance 2 / inputs of the layer. This keeps the mean square constant.
    """
    products = (left @ right.T).double() / left.shape[1]
    lengths = [part.double().square().mean(dim=1).sqrt() for part in (left, right)]
    scale = lengths[0].unsqueeze(1) * lengths[1]
    for _ in range(2):
        cosine = (products / scale.clamp(min=1e-30)).clamp(-1, 1)
        angle = cosine.acos()
        products = scale * (angle.sin() + (math.pi - angle) * cosine) / math.pi
    return products


def _factor(kernel: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of a kernel plus a ridge, relative to its diagonal."""
    penalty = ridge * kernel.diagonal().mean() + 1e-30
    factor: Tensor = cholesky(kernel + penalty * torch.eye(len(kernel)).to(kernel))
    return factor


def _regress(products: Tensor, factor: Tensor, outputs: Tensor) -> Tensor:
    """Return the prediction of ridge regression, from the kernel of new and known inputs."""
    weights = torch.cholesky_solve(products.T, factor).T
    return weights.to(outputs) @ outputs


def _standardised(features: Tensor, center: Tensor, scale: Tensor) -> Tensor:
    return ((features - center) / scale).clamp(-_LARGEST, _LARGEST)


def _labels(observation: Observation, rng: Generator) -> Tensor | None:
    """Return the granted or inferred labels in the order of the guesses; None if unknown."""
    try:
        return infer_targets(observation, rng).sort().values
    except NotApplicable:
        return None


def _granted(observation: Observation) -> tuple[Release, PublicData]:
    """Return the client's code and the public data, or raise if they are not granted."""
    if observation.public is None:
        raise NotApplicable("no public data is granted to train on")
    if observation.release is None:
        raise NotApplicable("no client code is granted to run on public data")
    return observation.release, observation.public
