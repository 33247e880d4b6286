"""Defenses that break a differential-privacy claim, each in one way, and others that keep it.

Docstrings of defenses are their names in the tables of `audit.py`.
"""

# ruff: noqa: D102 - the docstring of a class describes its one method

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    ClientDP,
    Defense,
    Guarantee,
    Loss,
    Noise,
    Plan,
    Quantization,
    TopK,
    Update,
    batch_gradient,
)
from leakfrontier.defenses.per_example import ClippedGradient
from leakfrontier.defenses.pld import gaussian_epsilon
from leakfrontier.evaluate.privacy.accounting import epsilon

SIGMA = 1.0
PLAN = Plan(steps=100, sample_rate=0.05, delta=1e-5, passes=5)


@dataclass
class Mechanism(Defense):
    """DP-SGD by hand, which keeps its claim; each of the others changes one thing about it."""

    sigma: float = SIGMA
    norm: float = 1.0
    _expected: int | None = field(default=None, init=False, repr=False, compare=False)
    _step: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def stochastic(self) -> bool:
        """Return True."""
        return True

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Yield Poisson samples."""
        self.expect(batch_size)
        for _ in range(epochs * -(-examples // batch_size)):
            yield (torch.rand(examples, generator=rng) < batch_size / examples).nonzero().flatten()

    def expect(self, batch_size: int) -> None:
        """Use this batch size as divisor."""
        self._expected = batch_size

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return (clipped sum + noise) / expected batch size."""
        self._step += 1
        if len(batch.inputs):
            total = self.clipped(model, loss, batch)
        else:
            total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        sizes = {name: value.numel() for name, value in total.items()}
        noise = self.noise(sizes, rng)
        size, std = self._expected or len(batch.inputs), self.sigma * self.norm
        return {k: (v + std * noise[k].view_as(v)) / size for k, v in total.items()}

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        """Return the sum of clipped gradients."""
        return clipped_sum(model, loss, batch, self.norm)

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        """Return noise of standard deviation 1."""
        return drawn(sizes, rng)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the clipping alone."""
        return ClippedGradient(self.norm)

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon of the subsampled Gaussian mechanism."""
        return Guarantee(
            gaussian_epsilon(self.sigma, plan), plan.delta, "record", "zero-out", "PLD"
        )


def clipped_sum(model: nn.Module, loss: Loss, batch: Batch, norm: float) -> Update:
    """Return the sum of gradients, each clipped to a norm."""
    gradients = example_gradients(model, loss, batch)
    return gradients.weighted((norm / gradients.norms().clamp(min=1e-12)).clamp(max=1.0))


@dataclass(frozen=True)
class Gradients:
    """The gradients of all examples, kept as factors.

    Attributes:
        slopes: Gradient of each example's loss at a layer's outputs, by parameter.
        inputs: Each example's input of the layer, by parameter. 1 for a bias.
    """

    slopes: Update
    inputs: Update

    def norms(self, *names: str) -> Tensor:
        """Return the norms of the examples' gradients, over some or all parameters."""
        squares = [
            self.slopes[name].square().sum(dim=1) * self.inputs[name].square().sum(dim=1)
            for name in names or self.slopes
        ]
        return torch.stack(squares).sum(dim=0).sqrt()

    def weighted(self, factors: Tensor) -> Update:
        """Return the weighted sum of the examples' gradients."""
        sums = {k: (factors[:, None] * v).T @ self.inputs[k] for k, v in self.slopes.items()}
        return {k: v.squeeze(1) if k.endswith("bias") else v for k, v in sums.items()}


def example_gradients(model: nn.Module, loss: Loss, batch: Batch) -> Gradients:
    """Return every example's gradient, for a model that has only linear layers."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, inputs: Tensor, outputs: Tensor) -> None:
        if not outputs.requires_grad:
            outputs.requires_grad_()
        seen[name] = inputs.detach(), outputs

    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda _, inputs, outputs, n=name: keep(n, *inputs, outputs))
        for name, layer in layers.items()
    ]
    with torch.enable_grad():
        total = len(batch.inputs) * loss(model(batch.inputs), batch.targets)
    for hook in hooks:
        hook.remove()
    slopes = torch.autograd.grad(total, [outputs for _, outputs in seen.values()])
    ones = torch.ones(len(batch.inputs), 1)
    found = {
        f"{name}.{kind}": (slope, inputs if kind == "weight" else ones)
        for (name, (inputs, _)), slope in zip(seen.items(), slopes, strict=True)
        for kind in ("weight", "bias")
    }
    parts = {name: found[name] for name, _ in model.named_parameters()}
    return Gradients(*({name: pair[side] for name, pair in parts.items()} for side in (0, 1)))


def drawn(sizes: Mapping[str, int], rng: Generator) -> Update:
    """Return standard normal noise."""
    return {name: torch.randn(size, generator=rng) for name, size in sizes.items()}


def seeded(sizes: Mapping[str, int], seed: int) -> Update:
    """Return standard normal noise that is always the same."""
    return drawn(sizes, Generator().manual_seed(seed))


# Broken: the noise


class Quiet(Mechanism):
    """0.8 of the claimed noise."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return {name: 0.8 * value for name, value in drawn(sizes, rng).items()}


class Silent(Mechanism):
    """No noise."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return {name: torch.zeros(size) for name, size in sizes.items()}


class Bare(Mechanism):
    """No noise on the last bias."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        found = drawn(sizes, rng)
        last = [name for name in sizes if name.endswith("bias")][-1]
        return {**found, last: 0 * found[last]}


class Uneven(Mechanism):
    """Too little noise at even entries, too much at odd ones."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        found = drawn(sizes, rng)
        for value in found.values():
            value[::2] *= math.sqrt(0.5)
            value[1::2] *= math.sqrt(1.5)
        return found


class Uniform(Mechanism):
    """Uniform noise of the same variance."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return {
            name: math.sqrt(12) * (torch.rand(size, generator=rng) - 0.5)
            for name, size in sizes.items()
        }


class Truncated(Mechanism):
    """Gaussian noise truncated at 2 sigma, scaled up to the same variance."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        inside = 0.9544997  # share of the normal distribution; its variance there is 0.7737
        normal = torch.distributions.Normal(0.0, 1.0)
        return {
            name: normal.icdf(0.5 + inside * (torch.rand(size, generator=rng) - 0.5))
            / math.sqrt(0.7737)
            for name, size in sizes.items()
        }


class Laplacian(Mechanism):
    """Laplace noise of the same variance."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        def draw(size: int) -> Tensor:
            first, second = (torch.empty(size).exponential_(generator=rng) for _ in range(2))
            return (first - second) / math.sqrt(2)

        return {name: draw(size) for name, size in sizes.items()}


class Paired(Mechanism):
    """One draw for two neighbouring entries."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return {
            name: torch.randn(-(-size // 2), generator=rng).repeat_interleave(2)[:size]
            for name, size in sizes.items()
        }


class Scattered(Mechanism):
    """One draw for two entries that are far apart."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        found = drawn(sizes, rng)
        for value in found.values():
            half = len(value) // 2
            if half:
                value[-half:] = value[:half].flip(0)
        return found


class Repeated(Mechanism):
    """The same noise in every upload."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return seeded(sizes, 1)


class Mirrored(Mechanism):
    """z in one upload, -z in the next."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        sign = -1 if self._step % 2 else 1
        return {name: sign * v for name, v in seeded(sizes, 7 + self._step // 2).items()}


class Fading(Mechanism):
    """Half of the variance is that of the upload before."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        new, old = (seeded(sizes, 7 + self._step - back) for back in (0, 1))
        return {name: (new[name] + old[name]) / math.sqrt(2) for name in sizes}


class Bank(Mechanism):
    """A bank of 32 noise vectors, used in turn."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return seeded(sizes, self._step % 32)


class Forgetful(Mechanism):
    """No noise at every 50th step."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        share = 0.0 if self._step % 50 == 49 else 1.0
        return {name: share * value for name, value in drawn(sizes, rng).items()}


@dataclass
class FirstStep(Mechanism):
    """Noise only at the first local step of an upload."""

    _noised: bool = field(default=False, init=False, repr=False, compare=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Start the next upload."""
        self._noised = False
        return update

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        share, self._noised = 0.0 if self._noised else 1.0, True
        return {name: share * value for name, value in drawn(sizes, rng).items()}


class Proportional(Mechanism):
    """Noise in proportion to the sum's norm."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self._step += 1
        if not len(batch.inputs):
            return {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        total = self.clipped(model, loss, batch)
        size = self._expected or len(batch.inputs)
        length = torch.cat([value.flatten() for value in total.values()]).norm()
        std = self.sigma * min(self.norm, float(length))
        noise = drawn({name: value.numel() for name, value in total.items()}, rng)
        return {k: (v + std * noise[k].view_as(v)) / size for k, v in total.items()}


# Broken: what the noise is added to


class Unclipped(Mechanism):
    """No clipping."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        found = batch_gradient(model, loss, batch)
        return {name: len(batch.inputs) * value for name, value in found.items()}


class BatchClipped(Mechanism):
    """The mean is clipped, not each example's gradient."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        size = len(batch.inputs)
        clip = Noise(0.0, max_norm=self.norm)
        found = clip.on_update(batch_gradient(model, loss, batch), Generator())
        return {name: size * value for name, value in found.items()}


class Loose(Mechanism):
    """Clips to 1.5 times the norm."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        return clipped_sum(model, loss, batch, 1.5 * self.norm)


class Gap(Mechanism):
    """Leaves norms between C and 1.4 C as they are."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        gradients = example_gradients(model, loss, batch)
        norms = gradients.norms()
        factors = (self.norm / norms.clamp(min=1e-12)).clamp(max=1.0)
        factors[norms < 1.4 * self.norm] = 1.0
        return gradients.weighted(factors)


class FirstLayer(Mechanism):
    """Clips by the norm of the first layer alone."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        gradients = example_gradients(model, loss, batch)
        norms = gradients.norms(next(iter(gradients.slopes)))
        return gradients.weighted((self.norm / norms.clamp(min=1e-12)).clamp(max=1.0))


class ActualMean(Mechanism):
    """Divides by the actual batch size, with noise for the expected one."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        expected, actual = self._expected or len(batch.inputs), max(1, len(batch.inputs))
        found = super().gradient(model, loss, batch, rng)
        if not len(batch.inputs):
            return found
        clean = self.clipped(model, loss, batch)
        return {k: v + clean[k] / actual - clean[k] / expected for k, v in found.items()}


@dataclass
class Unchecked(DPSGD):
    """DP-SGD without the check whether the model mixes examples."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        size = self._batch_size or len(batch.inputs)
        total = {name: torch.zeros_like(v) for name, v in model.named_parameters()}
        if len(batch.inputs):
            each = torch.func.jacrev(self._losses(model, loss, batch))(
                dict(model.named_parameters())
            )
            norms = torch.cat([g.flatten(1) for g in each.values()], dim=1).norm(dim=1)
            factors = (self.max_grad_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
            total = {k: torch.einsum("i,i...->...", factors, g) for k, g in each.items()}
        noise = drawn({name: value.numel() for name, value in total.items()}, rng)
        std = self.noise_multiplier * self.max_grad_norm
        return {k: (v + std * noise[k].view_as(v)) / size for k, v in total.items()}

    def _losses(self, model: nn.Module, loss: Loss, batch: Batch):  # noqa: ANN202 - a function
        def losses(parameters: Update) -> Tensor:
            outputs = torch.func.functional_call(model, parameters, (batch.inputs,))
            pairs = zip(outputs, batch.targets, strict=True)
            return torch.stack([loss(o[None], y[None]) for o, y in pairs])

        return losses


class Centred(nn.Module):
    """A model that mixes examples: it subtracts the mean over the batch."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of centred features."""
        features = self.model[:2](inputs)
        outputs: Tensor = self.model[2:](features - features.mean(dim=0))
        return outputs


# Broken: which examples are drawn


class TooOften(Mechanism):
    """Draws at three times the rate."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        rate = 3 * batch_size / examples
        for _ in range(epochs * -(-examples // batch_size)):
            yield (torch.rand(examples, generator=rng) < rate).nonzero().flatten()


class Shuffled(Mechanism):
    """Shuffles, and claims Poisson samples."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        yield from Defense.batches(self, examples, batch_size, epochs, rng)


class Ordered(Mechanism):
    """Takes examples in their order, and claims Poisson samples."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        for _ in range(epochs):
            yield from torch.arange(examples).split(batch_size)


class FixedSize(Mechanism):
    """Draws as many as expected, without replacement, afresh at every step."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        for _ in range(epochs * -(-examples // batch_size)):
            yield torch.randperm(examples, generator=rng)[:batch_size]


class Sticky(Mechanism):
    """Uses each Poisson sample for five steps."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        for step, rows in enumerate(super().batches(examples, batch_size, epochs, rng)):
            if step % 5 == 0:
                kept = rows
            yield kept


class Replacement(Mechanism):
    """Draws with replacement."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        for _ in range(epochs * -(-examples // batch_size)):
            yield torch.randint(examples, (batch_size,), generator=rng)


class Reshuffled(DPSGD):
    """Claims one appearance per epoch, and draws afresh at every step."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        for _ in range(epochs * -(-examples // batch_size)):
            yield torch.randperm(examples, generator=rng)[:batch_size]


# Broken: the accounting, and claims for the client


class OneStep(Mechanism):
    """Claims of all steps what holds for one."""

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon of one step."""
        return super().guarantee(replace(plan, steps=1, passes=None))


class QuietClient(ClientDP):
    """0.8 of the noise that it claims for the client."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the clipped update with too little noise."""
        noise = replace(self.mechanism, scale=0.8 * self.mechanism.scale)
        return noise.on_update(update, rng)


class UnclippedClient(ClientDP):
    """The client's update is not clipped."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with noise."""
        return Noise(self.mechanism.scale).on_update(update, rng)


BROKEN: dict[str, Defense] = {
    (kind.__doc__ or "").strip().rstrip("."): kind()
    for kind in (
        *(Quiet, Silent, Bare, Uneven, Uniform, Truncated, Laplacian, Paired, Scattered, Repeated),
        *(Mirrored, Fading, Bank, Forgetful, FirstStep, Proportional, Unclipped, BatchClipped),
        *(Loose, Gap, FirstLayer, ActualMean, TooOften, Shuffled, Ordered, FixedSize, Sticky),
        *(Replacement, OneStep),
    )
} | {
    "DP-SGD on a model that mixes examples": Unchecked(SIGMA),
    "Claims shuffled epochs, and draws afresh at every step": Reshuffled(
        SIGMA, poisson_sampling=False
    ),
    "0.8 of the noise that it claims for the client": QuietClient(SIGMA),
    "The client's update is not clipped": UnclippedClient(SIGMA),
}
"""Defenses by their fault."""


# Correct ones that look unusual


class Automatic(Mechanism):
    """Automatic clipping: every gradient over its norm plus 0.01 (Bu et al., NeurIPS 2023)."""

    def clipped(self, model: nn.Module, loss: Loss, batch: Batch) -> Update:
        return automatic(model, loss, batch, self.norm)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the same without noise."""
        return NormalisedGradient(self.norm)


def automatic(model: nn.Module, loss: Loss, batch: Batch, norm: float) -> Update:
    """Return the sum of gradients over their norms plus 0.01."""
    gradients = example_gradients(model, loss, batch)
    return gradients.weighted(norm / (gradients.norms() + 0.01))


@dataclass
class NormalisedGradient(Defense):
    """The replay of automatic clipping."""

    norm: float

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the mean of normalised gradients."""
        found = automatic(model, loss, batch, self.norm)
        return {name: value / len(batch.inputs) for name, value in found.items()}


class Louder(Mechanism):
    """1.5 times the claimed noise."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return {name: 1.5 * value for name, value in drawn(sizes, rng).items()}


class HeavyTails(Mechanism):
    """The claimed noise, and Cauchy noise on top."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        found = drawn(sizes, rng)
        return {k: v + 0.3 * torch.empty(len(v)).cauchy_(generator=rng) for k, v in found.items()}


class RandomScale(Mechanism):
    """Gaussian noise of a random scale, at least the claimed one."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        scale = 1 + float(torch.rand((), generator=rng))
        return {name: scale * value for name, value in drawn(sizes, rng).items()}


class CommonUploads(Mechanism):
    """The claimed noise, and extra noise that is the same in every upload."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        extra = seeded(sizes, 5)
        return {name: value + extra[name] for name, value in drawn(sizes, rng).items()}


class CommonEntries(Mechanism):
    """The claimed noise, and extra noise that is the same at every entry."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        extra = 2 * torch.randn((), generator=rng)
        return {name: value + extra for name, value in drawn(sizes, rng).items()}


class TwoPoints(Mechanism):
    """The claimed noise, and a coin's toss of +1 or -1 on top: less kurtosis than a Gaussian."""

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        found = drawn(sizes, rng)
        return {k: v + 2 * (torch.rand(len(v), generator=rng) < 0.5) - 1 for k, v in found.items()}


class LessOften(Mechanism):
    """Draws at half of the claimed rate."""

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self.expect(batch_size)
        for _ in range(epochs * -(-examples // batch_size)):
            chosen = torch.rand(examples, generator=rng) < batch_size / examples / 2
            yield chosen.nonzero().flatten()


class OwnDelta(Mechanism):
    """States its claim at a delta of its own."""

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon at delta 1e-3."""
        return super().guarantee(replace(plan, delta=1e-3))


class WholePlan(Mechanism):
    """Claims what holds for the plan, and of single steps an even share of it, which does not."""

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return a share of the epsilon of 100 steps."""
        whole = epsilon(PLAN.sample_rate, self.sigma, PLAN.steps, plan.delta)
        return Guarantee(
            whole * plan.steps / PLAN.steps, plan.delta, "record", "zero-out", "by the step"
        )


class Renyi(Mechanism):
    """Claims what a loose accountant says."""

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon by RDP."""
        found = epsilon(plan.sample_rate, self.sigma, plan.steps, plan.delta, "rdp")
        return Guarantee(found, plan.delta, "record", "zero-out", "RDP")


class Replacing(Mechanism):
    """Claims replacement, with twice the noise."""

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon at half of the noise."""
        found = gaussian_epsilon(self.sigma / 2, replace(plan, sample_rate=1.0))
        return Guarantee(found, plan.delta, "record", "replace", "PLD")


class NoisyReplay(Mechanism):
    """Keeps its claim, and has a replay that draws noise from a generator of its own."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the defense itself."""
        return self

    def noise(self, sizes: Mapping[str, int], rng: Generator) -> Update:
        return seeded(sizes, int(torch.randint(2**31, (), generator=rng)))


CORRECT: dict[str, Defense] = {
    (kind.__doc__ or "").strip().partition(" (")[0].rstrip("."): kind()
    for kind in (
        *(Mechanism, Automatic, Louder, HeavyTails, RandomScale, CommonUploads, CommonEntries),
        *(TwoPoints, LessOften, OwnDelta, WholePlan, Renyi, NoisyReplay),
    )
} | {
    "Claims replacement, with twice the noise": Replacing(2 * SIGMA),
    "`DPSGD`": DPSGD(SIGMA),
    "`DPSGD`, clipped per layer": DPSGD(SIGMA, 0.5, clipping="per_layer"),
    "`DPSGD`, shuffled": DPSGD(SIGMA, poisson_sampling=False),
    "`DPSGD`, then rounded": Chain((DPSGD(SIGMA), Quantization(8))),
    "`ClientDP`": ClientDP(SIGMA, 0.5),
    "`ClientDP`, then made sparse": Chain((ClientDP(SIGMA, 0.5), TopK(0.1))),
}
"""Defenses that keep their claim, by their unusual property."""
