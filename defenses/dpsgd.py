"""Differentially private SGD, on Opacus."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .base import Batch, Defense, Guarantee, Loss, Plan, Update


@dataclass
class DPSGD(Defense):
    """Clip every example's gradient, add Gaussian noise to their sum, divide by the batch size.

    One Opacus `DPOptimizer` per client computes every gradient, in training as in the observed
    step. The upload is (sum of clipped gradients + N(0, (sigma C)^2)) / B.

    Attributes:
        noise_multiplier: sigma, the noise's standard deviation in units of `max_grad_norm`.
        max_grad_norm: C, the norm to which each example's gradient is clipped; may be infinite
            without noise.
        expected_batch_size: B; by default the size of the batch at hand.

    References:
        Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. "Deep Learning with
        Differential Privacy." CCS 2016. https://arxiv.org/abs/1607.00133
    """

    noise_multiplier: float
    max_grad_norm: float = 1.0
    expected_batch_size: int | None = None
    _client: _OpacusClient | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be in [0, inf), got {self.noise_multiplier}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be in (0, inf], got {self.max_grad_norm}")
        if self.max_grad_norm == math.inf and self.noise_multiplier > 0:
            raise ValueError("max_grad_norm must be finite with noise, got inf")
        if self.expected_batch_size is not None and not self.expected_batch_size >= 1:
            raise ValueError(f"expected_batch_size must be >= 1, got {self.expected_batch_size}")

    @property
    def stochastic(self) -> bool:
        """Return whether noise is added."""
        return self.noise_multiplier > 0

    @property
    def strength(self) -> float:
        """Return the noise multiplier."""
        return self.noise_multiplier

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the clipped, noised mean gradient, as Opacus's optimizer would step on it."""
        if self._client is None:
            self._client = _OpacusClient(model, self.noise_multiplier, self.max_grad_norm)
        size = self.expected_batch_size or len(batch.inputs)
        return self._client.gradient(model, loss, batch, size, rng)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the clipping without the noise."""
        return ClippedGradient(self.max_grad_norm, self.expected_batch_size)

    def log_likelihood(
        self, observed: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return the Gaussian log-density of the noise, if B is fixed; None without noise."""
        if not self.noise_multiplier or self.expected_batch_size is None:
            return None
        std = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        squares = [(observed[name] - expected[name]).square().sum() for name in observed]
        return -torch.stack(squares).sum() / (2 * std**2)

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon of the subsampled Gaussian mechanism, by privacy loss distributions."""
        return Guarantee(self._epsilon(plan), plan.delta, "record", "add/remove", "PLD")

    def _epsilon(self, plan: Plan) -> float:
        if not self.noise_multiplier:
            return math.inf
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld

        step = PoissonSampledDpEvent(plan.sample_rate, GaussianDpEvent(self.noise_multiplier))
        accountant = pld.PLDAccountant().compose(SelfComposedDpEvent(step, plan.steps))
        return float(accountant.get_epsilon(plan.delta))


@dataclass
class ClippedGradient(Defense):
    """The mean of per-example clipped gradients: what can be replayed of DP-SGD.

    Differentiable, unlike Opacus's hooks, and equal to `DPSGD` without noise.
    """

    max_grad_norm: float
    expected_batch_size: int | None = None

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the clipped mean gradient."""
        parameters: Update = dict(model.named_parameters())

        def example_loss(parameters: Update, example: Tensor, target: Tensor) -> Tensor:
            output = functional_call(model, parameters, (example.unsqueeze(0),))
            return loss(output, target.unsqueeze(0))

        gradients = vmap(grad(example_loss), in_dims=(None, 0, 0))(parameters, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factor = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)  # Opacus's own form
        size = self.expected_batch_size or len(batch.inputs)
        return {
            name: torch.einsum("i,i...->...", factor, g) / size for name, g in gradients.items()
        }


class _OpacusClient:
    """A replica of the model under Opacus's hooks, with the optimizer that makes it private."""

    def __init__(self, model: nn.Module, noise_multiplier: float, max_grad_norm: float) -> None:
        from opacus import GradSampleModule  # here, because it takes seconds to import
        from opacus.optimizers import DPOptimizer

        self.module = GradSampleModule(_replica(model))
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.module.parameters(), lr=1.0),
            noise_multiplier=noise_multiplier,
            max_grad_norm=min(max_grad_norm, torch.finfo(torch.float32).max),
            expected_batch_size=1,
        )

    def gradient(
        self, model: nn.Module, loss: Loss, batch: Batch, size: int, rng: Generator
    ) -> Update:
        self.optimizer.zero_grad()
        self.optimizer.expected_batch_size = size
        self.optimizer.generator = rng
        replica = self.module._module
        with torch.no_grad():
            for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        with warnings.catch_warnings():
            # Per-example gradients of parameters need no gradient of the inputs.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss(self.module(batch.inputs), batch.targets).backward()
        self.optimizer.pre_step()
        return {name: p.grad.clone() for name, p in replica.named_parameters()}


def _replica(model: nn.Module) -> nn.Module:
    """Copy a model, making leaves of parameters that an earlier local step computed."""
    with torch.no_grad():
        replica = copy.deepcopy(model)
        for module in replica.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module.register_parameter(name, nn.Parameter(value.detach().clone()))
    return replica.train()
