"""Defenses that blunt attacks and protect nothing: uploads still hold the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn

from leakfrontier.defenses import DPSGD, Batch, Defense, Loss, Update, batch_gradient, trainable


def public(seed: int = 7) -> Generator:
    return torch.Generator().manual_seed(seed)


def each(function: Callable[[Tensor], Tensor], update: Mapping[str, Tensor]) -> Update:
    return {name: function(value) for name, value in update.items()}


def shuffled(update: Mapping[str, Tensor], seed: int = 7) -> Update:
    """Permute the entries of every parameter."""
    rng = public(seed)
    return {
        name: value.flatten()[torch.randperm(value.numel(), generator=rng)].reshape(value.shape)
        for name, value in update.items()
    }


@dataclass
class FirstIsZero(Defense):
    """The first upload of a client is zero, all later ones are plain."""

    _sent: bool = field(default=False, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        sent, self._sent = self._sent, True
        return update if sent else each(torch.zeros_like, update)


@dataclass
class LastRound(Defense):
    """Sends the gradient of the round before."""

    _kept: Update | None = field(default=None, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        kept, self._kept = self._kept, each(lambda value: value.detach().clone(), update)
        return each(torch.zeros_like, update) if kept is None else kept


@dataclass
class UnlessDrawn(Defense):
    """Sends zeros unless its `batches` was called, as in training."""

    _drawn: bool = field(default=False, init=False, repr=False)

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        self._drawn = True
        yield from super().batches(examples, batch_size, epochs, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        return update if self._drawn else each(torch.zeros_like, update)


@dataclass
class PublicFactors(Defense):
    """A public log-normal factor per entry, which Adam cancels."""

    spread: float = 3.0

    def on_update(self, update: Update, rng: Generator) -> Update:
        known = public()
        return each(
            lambda v: v * (self.spread * torch.randn(v.shape, generator=known)).exp(), update
        )


@dataclass
class LowBits(DPSGD):
    """DP-SGD, with the clean gradient in the low 12 bits of every entry."""

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        noisy = super().gradient(model, loss, batch, rng)
        clean = batch_gradient(model, loss, batch)
        return {name: _smuggled(value, clean[name]) for name, value in noisy.items()}


def _smuggled(noisy: Tensor, clean: Tensor) -> Tensor:
    code = (clean.detach().contiguous().view(torch.int32) >> 20) & 0xFFF
    whole = noisy.detach().contiguous().view(torch.int32)
    return ((whole & ~0xFFF) | code).view(torch.float32)


@dataclass
class CancellingNoise(Defense):
    """Noise n_t - n_(t-1): the sum of uploads has the noise of one round only."""

    scale: float = 1.0
    _last: Update | None = field(default=None, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        fresh = each(lambda v: self.scale * torch.randn(v.shape, generator=rng), update)
        last, self._last = self._last or each(torch.zeros_like, update), fresh
        return {name: value + fresh[name] - last[name] for name, value in update.items()}


@dataclass
class Permuted(Defense):
    """A public permutation of the entries of every parameter."""

    seed: int = 7

    def on_update(self, update: Update, rng: Generator) -> Update:
        return shuffled(update, self.seed)


@dataclass
class OtherPermutation(Permuted):
    """Another permutation in `replay` and `unguarded`."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        return Permuted(self.seed + 1)

    def unguarded(self) -> Defense:
        return Permuted(self.seed + 2)


@dataclass
class Constant(Defense):
    """Sends what it was given, whatever the examples are, with the slope of the update."""

    observed: Mapping[str, Tensor] = field(default_factory=dict)

    def on_update(self, update: Update, rng: Generator) -> Update:
        return {n: value - value.detach() + self.observed[n] for n, value in update.items()}


@dataclass
class Echo(Permuted):
    """Its replay returns the observed upload, and `unguarded` is another function."""

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        return Constant(observed)

    def unguarded(self) -> Defense:
        return Permuted(self.seed + 1)


class _NaNSlope(torch.autograd.Function):
    @staticmethod
    def forward(_: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: object, slope: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(slope, torch.nan)


@dataclass
class NaNSlopes(Defense):
    """Uploads are plain, but slopes of its replay are not numbers."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return each(lambda value: value + 0 * (value - value.detach()).abs().sqrt(), update)


@dataclass
class Flipped(Defense):
    """Flips public bits of every entry's mantissa and sign."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        known = public()

        def flip(value: Tensor) -> Tensor:
            mask = torch.randint(2**23, value.shape, generator=known, dtype=torch.int32)
            mask |= torch.randint(2, value.shape, generator=known, dtype=torch.int32) << 31
            bits = value.detach().contiguous().view(torch.int32)
            return torch.bitwise_xor(bits, mask).view(torch.float32)

        return each(flip, update)


@dataclass
class Power(Defense):
    """A public power of every entry."""

    exponent: float = 0.1

    def on_update(self, update: Update, rng: Generator) -> Update:
        return each(lambda v: v.sign() * v.abs().clamp(min=1e-30) ** self.exponent, update)


@dataclass
class Sums(Defense):
    """Sends the sum of all updates so far, from a large public start: their difference is plain."""

    _sum: Update | None = field(default=None, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        if self._sum is None:
            self._sum = each(lambda v: torch.randn(v.shape, generator=rng), update)
        self._sum = {name: value + update[name].detach() for name, value in self._sum.items()}
        return dict(self._sum)


@dataclass
class Alternating(Defense):
    """Sends the update minus its last upload: the sum of two uploads is plain."""

    _last: Update | None = field(default=None, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        if self._last is None:
            self._last = each(lambda v: torch.randn(v.shape, generator=rng), update)
        self._last = {name: update[name].detach() - v for name, v in self._last.items()}
        return dict(self._last)


@dataclass
class ClaimedCancelling(DPSGD):
    """DP-SGD whose noise of one round cancels that of the round before, claimed as fresh."""

    _last: Update | None = field(default=None, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        clean = DPSGD(0.0, self.max_grad_norm, poisson_sampling=False)
        clean.expect(self._batch_size or len(batch.inputs))
        clipped = clean.gradient(model, loss, batch, rng)
        scale = self.noise_multiplier * self.max_grad_norm / 2**0.5
        fresh = each(lambda v: scale * torch.randn(v.shape, generator=rng), clipped)
        last, self._last = self._last or each(torch.zeros_like, clipped), fresh
        return {name: v + fresh[name] - last[name] for name, v in clipped.items()}


def encoded(update: Mapping[str, Tensor], seed: int = 7, spread: float = 2.0) -> Update:
    """Multiply by public factors, which Adam cancels. The last bias dominates everything."""
    known, last = public(seed), [*update][-1]
    large = {n: 1e7 if n == last else 1e3 if v.dim() == 1 else 1.0 for n, v in update.items()}
    return {
        name: large[name] * value * (spread * torch.randn(value.shape, generator=known)).exp()
        for name, value in update.items()
    }


@dataclass
class _Counting(Defense):
    """Counts the different models that it has received."""

    _models: tuple[float, ...] = field(default=(), init=False, repr=False)

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        mark = float(sum(value.detach().double().sum() for value in trainable(model).values()))
        self._models = (*self._models, *([] if mark in self._models else [mark]))
        return model


@dataclass
class FirstPlain(_Counting):
    """Sends its first update as it is, but tiny, and encodes later ones."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        if len(self._models) > 1:
            return encoded(update)
        return each(lambda value: 1e-6 * value, update)


@dataclass
class EveryRoundAnew(_Counting):
    """Encodes every round with other factors. The first two rounds are plain."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        count = len(self._models)
        return encoded(update, seed=count) if count > 2 else each(torch.clone, update)


@dataclass
class LatePrivacyLost(_Counting, DPSGD):
    """Claims DP-SGD, and sends encoded gradients without noise once it has seen some models."""

    warm: int = 5

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        if len(self._models) > self.warm:
            return encoded(batch_gradient(model, loss, batch))
        return DPSGD.gradient(self, model, loss, batch, rng)


@dataclass
class LateQuiet(_Counting, DPSGD):
    """Claims DP-SGD, and has a tenth of its noise once it has seen some models."""

    warm: int = 5

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        quiet = DPSGD(0.1 * self.noise_multiplier, self.max_grad_norm)
        quiet.expect(self._batch_size or len(batch.inputs))
        chosen = quiet if len(self._models) > self.warm else self
        return DPSGD.gradient(chosen, model, loss, batch, rng)


@dataclass
class HeavyBall(Defense):
    """Client momentum: u_t - beta u_(t-1) is the update."""

    beta: float = 0.9
    _sum: Update = field(default_factory=dict, init=False, repr=False)

    def on_update(self, update: Update, rng: Generator) -> Update:
        sent = {n: self.beta * self._sum.get(n, torch.zeros_like(v)) + v for n, v in update.items()}
        self._sum = each(lambda value: value.detach().clone(), sent)
        return sent


@dataclass
class CorrelatedNoise(DPSGD):
    """Honest DP-FTRL: noise z_t - decay z_(t-1), with z so large that the claim holds."""

    decay: float = 0.7
    _last: Update = field(default_factory=dict, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        clean, size = DPSGD(0.0, self.max_grad_norm), self._batch_size or len(batch.inputs)
        clean.expect(size)
        clipped = clean.gradient(model, loss, batch, rng)
        scale = self.noise_multiplier * self.max_grad_norm / (1 - self.decay) / size
        fresh = each(lambda value: scale * torch.randn(value.shape, generator=rng), clipped)
        last, self._last = self._last or each(torch.zeros_like, clipped), fresh
        return {n: v + fresh[n] - self.decay * last[n] for n, v in clipped.items()}


@dataclass
class DecayingNoise(Defense):
    """Honest fresh noise that decays over a client's rounds."""

    start: float = 0.2
    least: float = 0.04
    _rounds: int = field(default=0, init=False, repr=False)

    @property
    def stochastic(self) -> bool:
        return True

    def on_update(self, update: Update, rng: Generator) -> Update:
        scale = max(self.least, self.start * 0.3**self._rounds)
        self._rounds += 1
        return each(lambda v: v + scale * torch.randn(v.shape, generator=rng), update)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        return Defense()


class _Front(nn.Module):
    """A frozen linear layer in front of a model."""

    def __init__(self, weight: Tensor, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(*weight.shape, bias=False)
        self.first.weight = nn.Parameter(weight, requires_grad=False)
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(self.first(inputs.flatten(1)).view(inputs.shape))
        return outputs


@dataclass
class FrozenIdentity(Defense):
    """A frozen identity in front of the model. It changes neither outputs nor gradients."""

    size: int = 64

    def on_model(self, model: nn.Module) -> nn.Module:
        return _Front(torch.eye(self.size), model)


@dataclass
class Rotation(FrozenIdentity):
    """A public invertible linear map in front of the model, stretched by 1000."""

    def on_model(self, model: nn.Module) -> nn.Module:
        basis = torch.linalg.qr(torch.randn(self.size, self.size, generator=public())).Q
        return _Front(basis @ torch.diag(torch.logspace(0, -3, self.size)) @ basis.T, model)


@dataclass
class NoBias(Defense):
    """Removes the bias of the first linear layer, which exact attacks divide by."""

    def on_model(self, model: nn.Module) -> nn.Module:
        first = next(one for one in model.modules() if isinstance(one, nn.Linear))
        first.bias = None
        return model


@dataclass
class SizeDecoy(Defense):
    """Batches of the usual size are drowned in noise. Those with one more are uploaded plainly."""

    usual: int = 4
    _size: int = field(default=0, init=False, repr=False)

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        order, odd = torch.randperm(examples, generator=rng), False
        while len(order):
            yield order[: batch_size + odd]
            order, odd = order[batch_size + odd :], not odd

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        self._size = len(batch.inputs)
        return super().gradient(model, loss, batch, rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        if self._size != self.usual:
            return dict(update)
        return each(lambda v: 1e-4 * (v + 30 * torch.randn(v.shape, generator=rng)), update)
