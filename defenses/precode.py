"""PRECODE: a variational bottleneck in front of the classifier."""

from __future__ import annotations

import copy
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import softplus

from .base import Batch, Defense, Loss, Update, trainable


@dataclass
class PRECODE(Defense):
    """Train an extended model whose gradients depend on noise that the server does not know.

    Before the last linear layer, features are encoded as a normal distribution, and one sample of
    it is decoded. The layers are Linear(d, 2K), then mean + softplus(.) * N(0, I), then
    Linear(K, d). The loss gains beta times the KL divergence, in bits, of the code's distribution
    from N(0, I) [1].

    The bottleneck samples only during local steps. Elsewhere, e.g. for test accuracy, it decodes
    the mean; the authors' code always samples. New layers use torch's initialisation, with a seed
    that depends only on the classifier's weights. The architecture changes, and the server has to
    agree to it. Hence no setting leaves the model as it was.

    The noise mainly reaches the gradients of the bottleneck and the classifier, which dominate the
    update. An adversary who leaves them out of the matching regains much of what was lost [2]. The
    replay does this: it uses the mean, and only the layers before the bottleneck. Moreover, a whole
    row of gradients shares the noise. For a linear layer that sees one example, dL/dW divided by
    dL/db is exactly its input, whatever was sampled. So a model that begins with a linear layer
    leaks as if undefended.

    Attributes:
        bottleneck: K, the size of the code, at least 1.
        beta: Weight of the divergence, in [0, inf).

    References:
        [1] Scheliga, Maeder, Seeland. "PRECODE - A Generic Model Extension to Prevent Deep
            Gradient Leakage." WACV 2022. https://arxiv.org/abs/2108.04725
        [2] Balunovic, Dimitrov, Staab, Vechev. "Bayesian Framework for Gradient Leakage."
            ICLR 2022. https://arxiv.org/abs/2111.04706
    """

    bottleneck: int = 256
    beta: float = 1e-3

    def __post_init__(self) -> None:
        if not self.bottleneck >= 1:
            raise ValueError(f"bottleneck must be at least 1, got {self.bottleneck}")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta must be in [0, inf), got {self.beta}")

    @property
    def stochastic(self) -> bool:
        """Return True: every local step samples."""
        return True

    def on_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model with a bottleneck before its last linear layer."""
        model = copy.deepcopy(model)
        linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ValueError("PRECODE extends a linear layer, but the model has none")
        name, layer = linear[-1]
        extended = nn.Sequential(
            OrderedDict(bottleneck=_initialised(layer, self.bottleneck), classifier=layer)
        )
        if not name:
            return extended
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, extended)
        return model

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient of the loss and the divergence, with one sample per example."""
        return _gradient(model, loss, batch, self.beta, rng)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the extended model at its mean, without the layers that its noise dominates."""
        return BeforeBottleneck(self.beta)


@dataclass
class BeforeBottleneck(Defense):
    """The replay of PRECODE: the mean code's gradient in the layers before the bottleneck.

    All other entries are zero, so they do not count in the matching. A model without layers before
    the bottleneck keeps its whole gradient.

    Attributes:
        beta: Weight of the divergence.
    """

    beta: float

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient of the loss and the divergence at the mean code."""
        return _gradient(model, loss, batch, self.beta, rng=None)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update of the layers before the bottleneck; other entries are zero."""
        (encoder,) = (name for name in update if name.endswith("bottleneck.encoder.weight"))
        extended = encoder.removesuffix("bottleneck.encoder.weight")
        if not extended:
            return update
        return {
            name: torch.zeros_like(value) if name.startswith(extended) else value
            for name, value in update.items()
        }


class VariationalBottleneck(nn.Module):
    """Features encoded as a normal distribution, and decoded from a sample or from its mean."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * width)
        self.decoder = nn.Linear(width, features)
        self._rng: Generator | None = None
        self._bits: list[Tensor] | None = None

    @contextmanager
    def training_step(self, rng: Generator | None) -> Iterator[list[Tensor]]:
        """Sample from `rng` in this context, and yield a list of the divergences of all calls."""
        self._rng, self._bits = rng, []
        try:
            yield self._bits
        finally:
            self._rng, self._bits = None, None

    def forward(self, features: Tensor) -> Tensor:
        """Return features decoded from a sample if there is a generator, else from the mean."""
        mean, raw = self.encoder(features).chunk(2, dim=-1)
        std = softplus(raw)
        if self._bits is not None:
            self._bits.append(divergence_in_bits(mean, std))
        code = mean if self._rng is None else mean + std * _noise_like(std, self._rng)
        return cast(Tensor, self.decoder(code))


def divergence_in_bits(mean: Tensor, std: Tensor) -> Tensor:
    """Return KL(N(mean, std^2) || N(0, 1)), summed over the code and averaged over the batch."""
    nats = (mean.square() + std.square() - 1) / 2 - std.log()
    return nats.flatten(1).sum(dim=1).mean() / math.log(2)


def _noise_like(values: Tensor, rng: Generator) -> Tensor:
    return torch.randn(values.shape, generator=rng, dtype=values.dtype, device=values.device)


def _gradient(
    model: nn.Module, loss: Loss, batch: Batch, beta: float, rng: Generator | None
) -> Update:
    """Return the gradient of the loss and the divergence, at samples or at the mean."""
    bottleneck = _find_bottleneck(model)
    parameters = trainable(model)

    def objective(parameters: Update) -> Tensor:
        with bottleneck.training_step(rng) as bits:
            outputs = functional_call(model, parameters, (batch.inputs,))
        return loss(outputs, batch.targets) + beta * bits[0]

    return cast(Update, grad(objective)(parameters))


def _initialised(layer: nn.Linear, width: int) -> VariationalBottleneck:
    """Return a new bottleneck for a layer's inputs; equal layers give equal bottlenecks."""
    weight = layer.weight.detach()
    seed = zlib.crc32(weight.cpu().contiguous().numpy().tobytes())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return VariationalBottleneck(layer.in_features, width).to(weight)


def _find_bottleneck(model: nn.Module) -> VariationalBottleneck:
    for module in model.modules():
        if isinstance(module, VariationalBottleneck):
            return module
    raise ValueError("the model has no bottleneck: train the model that PRECODE.on_model returns")
