"""Differentially private SGD, on Opacus."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from .base import Batch, Defense, Guarantee, Loss, Plan, Refused, Update, trainable
from .per_example import ClippedGradient, architecture, check_alone, check_apart
from .pld import gaussian_epsilon

_MOST_SIZES = 32
"""Batch sizes at which a model is tested. Poisson samples have many more."""

_SMALL = 2**20  # up to this many entries, computing all per-example gradients is faster than ghost


@dataclass
class DPSGD(Defense):
    """Clip every example's gradient, add Gaussian noise to their sum, divide by the batch size.

    One Opacus optimizer per client computes every gradient, both in training and in the observed
    step. `torch.func` replaces it where Opacus cannot compute per-example gradients: for custom or
    recurrent layers, and for weights that are tied, used twice or unused. The upload is (sum of
    clipped gradients + N(0, (sigma C)^2)) / B. Local batches are Poisson samples, as the
    accountants assume: each of N examples is in a step with probability B / N. The sum is always
    divided by the configured B, even if the sample or the client's data are larger or smaller.
    Otherwise, the size of the noise would reveal the number of examples.

    The claim uses zero-out adjacency, with public N. The sample rate is B / N, and a client that
    trains for epochs takes ceil(N / B) steps in each; see `ADJACENCIES`. With a fixed number of
    local steps (`FedAvg(steps=...)`), only the sample rate depends on N.

    The defense raises an error if a model or loss mixes the examples of a batch. Clipping one
    example's gradient does not bound its effect on the gradients of others. The defense tests a
    model at its first 32 batch sizes, and at its 1st, 2nd, 4th, 8th ... step. `check_apart`
    tests the model and the loss. `check_alone` tests the sum of the step itself, unless the model
    draws random numbers. A model that mixes only at other steps, or only beside certain examples,
    may remain undetected.

    Attributes:
        noise_multiplier: sigma, the noise's standard deviation in units of `max_grad_norm`.
        max_grad_norm: C, the norm to which each example's gradient is clipped. It may be infinite
            if there is no noise.
        clipping: `flat` clips the gradient of all parameters together. `per_layer` clips the
            gradient of each parameter to C / sqrt(number of parameters), so the whole stays
            within C.
        per_example: How per-example norms are computed. `ghost` does not compute the gradients
            [2]. It supports flat clipping only. For large models it is several times faster and
            smaller. `hooks` computes the gradients. `auto` uses `hooks` for per-layer clipping and
            if all gradients together are small, otherwise `ghost`.
        poisson_sampling: Whether local batches are Poisson samples. If not, batches are shuffled,
            and an example counts in full at each step that contains it. This is once per epoch if
            batches come from epochs, otherwise every step; see `pld.sampled_segment`.

    References:
        [1] Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. "Deep Learning with
            Differential Privacy." CCS 2016. https://arxiv.org/abs/1607.00133
        [2] Li, Tramer, Liang, Hashimoto. "Large Language Models Can Be Strong Differentially
            Private Learners." ICLR 2022. https://arxiv.org/abs/2110.05679
    """

    noise_multiplier: float
    max_grad_norm: float = 1.0
    clipping: Literal["flat", "per_layer"] = "flat"
    per_example: Literal["auto", "ghost", "hooks"] = "auto"
    poisson_sampling: bool = True
    _batch_size: int | None = field(default=None, init=False, repr=False, compare=False)
    _client: _OpacusClient | _FunctionalClient | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be in [0, inf), got {self.noise_multiplier}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be in (0, inf], got {self.max_grad_norm}")
        if self.max_grad_norm == math.inf and self.noise_multiplier > 0:
            raise ValueError("max_grad_norm must be finite with noise, got inf")
        if self.clipping not in ("flat", "per_layer"):
            raise ValueError(f"clipping must be 'flat' or 'per_layer', got {self.clipping!r}")
        if self.per_example not in ("auto", "ghost", "hooks"):
            raise ValueError(
                f"per_example must be 'auto', 'ghost' or 'hooks', got {self.per_example!r}"
            )
        if self.clipping == "per_layer" and self.per_example == "ghost":
            raise ValueError("per_example must be 'hooks' with clipping='per_layer', got 'ghost'")

    def __getstate__(self) -> dict[str, object]:
        """Return what is saved between rounds: Opacus's client is made again."""
        return {**vars(self), "_client": None}

    @property
    def stochastic(self) -> bool:
        """Return whether noise is added."""
        return self.noise_multiplier > 0

    @property
    def strength(self) -> float:
        """Return the noise multiplier."""
        return self.noise_multiplier

    def on_model(self, model: nn.Module) -> nn.Module:
        """Raise if the examples of a batch see each other in an architecture."""
        mixing = _mixing_layer(model)
        if mixing is not None:
            raise ValueError(
                f"{mixing}: no example's gradient can be clipped by itself. Use GroupNorm in every "
                "arm, e.g. by the scenario's replace_batch_norm"
            )
        return model

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Refuse a model that the server changed so that it mixes examples."""
        mixing = _mixing_layer(model)
        if mixing is not None:
            raise Refused(f"{mixing}: its examples cannot be protected one by one")
        return model

    def batches(
        self, examples: int, batch_size: int, epochs: int, rng: Generator
    ) -> Iterator[Tensor]:
        """Yield as many Poisson samples as there would be batches."""
        self.expect(batch_size)
        if not self.poisson_sampling:
            yield from super().batches(examples, batch_size, epochs, rng)
            return
        for _ in range(epochs * -(-examples // batch_size)):
            chosen = torch.rand(examples, generator=rng) < batch_size / examples
            yield chosen.nonzero().flatten()

    def expect(self, batch_size: int) -> None:
        """Divide by this batch size from now on."""
        self._batch_size = batch_size

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the clipped, noised mean gradient, as Opacus's optimizer computes it.

        Raises:
            ValueError: If the model or the loss mixes the examples of a batch.
        """
        size = self._batch_size or len(batch.inputs)
        if not len(batch.inputs):  # some models cannot be called on an empty batch
            return _FunctionalClient(self).gradient(model, loss, batch, size, rng)
        looked_at = _is_due(model, loss, len(batch.inputs))
        if looked_at:
            check_apart(_replica(model), loss, batch)
        if self._client is None:
            suited = _suits_opacus(_replica(model), loss, batch)
            ghost = self._ghost(model, size)
            self._client = _OpacusClient(model, self, ghost) if suited else _FunctionalClient(self)
        gradient = self._client.gradient(model, loss, batch, size, rng)
        if looked_at and isinstance(self._client, _OpacusClient) and not self._client.drew:
            check_alone(_replica(model), loss, batch, self._client.total, self._clipped)
        return gradient

    def from_sum(
        self, total: Update, model: nn.Module, loss: Loss, batch: Batch, rng: Generator
    ) -> Update:
        """Return the gradient for a sum of clipped gradients that was computed elsewhere.

        The model must not draw random numbers.

        Raises:
            ValueError: If the model or the loss mixes the examples of a batch.
        """
        if len(batch.inputs) and _is_due(model, loss, len(batch.inputs)):
            check_apart(_replica(model), loss, batch)
            check_alone(_replica(model), loss, batch, total, self._clipped)
        return _FunctionalClient(self).noised(total, self._batch_size or len(batch.inputs), rng)

    def _ghost(self, model: nn.Module, batch_size: int) -> bool:
        if self.per_example != "auto":
            return self.per_example == "ghost"
        entries = batch_size * sum(value.numel() for value in trainable(model).values())
        return self.clipping == "flat" and entries > _SMALL

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the clipping without the noise."""
        return self._clipped

    @property
    def _clipped(self) -> ClippedGradient:
        return ClippedGradient(self.max_grad_norm, self.clipping)

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return the Gaussian log-density of the noise on a single gradient."""
        if not self.noise_multiplier or batch_size is None:
            return None
        std = self.noise_multiplier * self.max_grad_norm / batch_size
        squares = [(observed[name] - expected[name]).square().sum() for name in observed]
        return -torch.stack(squares).sum() / (2 * std**2)

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon of the subsampled Gaussian mechanism, by privacy loss distributions."""
        epsilon = gaussian_epsilon(
            self.noise_multiplier, plan, poisson_sampling=self.poisson_sampling
        )
        return Guarantee(epsilon, plan.delta, "record", "zero-out", "PLD")


def _mixing_layer(model: nn.Module) -> str | None:
    """Return which layer mixes the examples of a batch; None if no layer does."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return f"layer {name!r} is a BatchNorm, which mixes the examples of a batch"
    return None


class _Looks:
    """How many steps a model was trained for, and the circumstances in which it was tested."""

    def __init__(self) -> None:
        self.steps, self.circumstances = 0, set[tuple[str, int, bool]]()


_LOOKS: dict[tuple[object, ...], _Looks] = {}


def _is_due(model: nn.Module, loss: Loss, size: int) -> bool:
    """Return whether to test a model: at the first batch sizes, or at a step that is a power of 2.

    Clients and rounds that train the same architecture share the counts. No result depends on
    them. A server may make a known architecture mix through its weights. Only the tests at powers
    of 2 can detect that.
    """
    looks = _LOOKS.setdefault(architecture(model), _Looks())
    looks.steps += 1
    name = getattr(loss, "__qualname__", type(loss).__qualname__)  # the loss may hold the model
    new = (name, size, model.training) not in looks.circumstances
    if new := new and len(looks.circumstances) < _MOST_SIZES:
        looks.circumstances.add((name, size, model.training))
    return new or looks.steps & (looks.steps - 1) == 0


def _draws(batch: Batch) -> Tensor:
    """Return the state of torch's generators, which changes if a model draws from them."""
    state = torch.get_rng_state()
    if batch.inputs.is_cuda:
        state = torch.cat([state, torch.cuda.get_rng_state(batch.inputs.device)])
    return state


class _OpacusClient:
    """A replica of the model under Opacus's hooks, with the optimizer that makes it private.

    Attributes:
        drew: Whether the last step drew random numbers other than its noise.
    """

    drew = False

    def __init__(self, model: nn.Module, defense: DPSGD, ghost: bool) -> None:
        replica, self.ghost = _replica(model), ghost
        norm = min(defense.max_grad_norm, torch.finfo(torch.float32).max)
        self.module = _wrapped(replica, norm, ghost)
        self.optimizer = _optimizer(replica, norm, defense, ghost)

    def gradient(
        self, model: nn.Module, loss: Loss, batch: Batch, size: int, rng: Generator
    ) -> Update:
        """Return the gradient that the optimizer would step along, at the model's parameters."""
        replica = self.module._module
        with torch.no_grad():
            for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        self.optimizer.zero_grad()
        self.optimizer.expected_batch_size = size
        self.optimizer.generator = rng
        state = _draws(batch)
        self._backward(loss, batch)
        self.drew = not torch.equal(state, _draws(batch))
        self.optimizer.pre_step()
        parameters: dict[str, Any] = trainable(replica)
        return {name: value.grad.clone() for name, value in parameters.items()}

    @property
    def total(self) -> Update:
        """Return the last sum of clipped gradients, without noise."""
        parameters: dict[str, Any] = trainable(self.module._module)
        return {name: value.summed_grad.view_as(value) for name, value in parameters.items()}

    def _backward(self, loss: Loss, batch: Batch) -> None:
        with warnings.catch_warnings():
            # Per-example gradients of parameters need no gradient of the inputs.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            outputs = self.module(batch.inputs)
            if not self.ghost:
                loss(outputs, batch.targets).backward()
                return
            from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

            losses = vmap(lambda o, y: loss(o.unsqueeze(0), y.unsqueeze(0)))(outputs, batch.targets)
            DPTensorFastGradientClipping(self.module, self.optimizer, losses).backward()


class _FunctionalClient:
    """The same with `torch.func`, for models whose per-example gradients Opacus cannot compute."""

    def __init__(self, defense: DPSGD) -> None:
        self.clipped = defense._clipped
        self.std = defense.noise_multiplier * defense.max_grad_norm if defense.stochastic else 0.0

    def gradient(
        self, model: nn.Module, loss: Loss, batch: Batch, size: int, rng: Generator
    ) -> Update:
        """Return the noised sum of clipped gradients, divided by the expected batch size."""
        total = {name: torch.zeros_like(value) for name, value in trainable(model).items()}
        if len(batch.inputs):
            self.clipped.expect(1)
            total = self.clipped.gradient(model, loss, batch, rng)
        return self.noised(total, size, rng)

    def noised(self, total: Update, size: int, rng: Generator) -> Update:
        """Return a noised sum, divided by the expected batch size."""
        return {name: (value + self._noise(value, rng)) / size for name, value in total.items()}

    def _noise(self, like: Tensor, rng: Generator) -> Tensor:
        if not self.std:
            return torch.zeros_like(like)
        return torch.normal(0.0, self.std, like.shape, generator=rng, device=rng.device).to(like)


def _suits_opacus(replica: nn.Module, loss: Loss, batch: Batch) -> bool:
    """Return whether Opacus can compute the gradient of every example.

    Opacus must know every layer that has parameters. The model must call each of them once, with
    the examples along the first axis. The loss must depend on each of them.
    """
    from opacus import GradSampleModule  # imported here because it takes seconds

    parameters = []
    calls: dict[nn.Module, list[int]] = {}
    for layer in replica.modules():
        own = [value for value in layer.parameters(recurse=False) if value.requires_grad]
        if own:
            parameters += own
            calls[layer] = []
            layer.register_forward_hook(
                lambda layer, inputs, _: calls[layer].append(len(inputs[0]) if inputs else 0)
            )
            layer.register_full_backward_hook(lambda *_: None)  # as Opacus does
    known = all(type(layer) in GradSampleModule.GRAD_SAMPLERS for layer in calls)
    buffers = any(True for layer in calls for _ in layer.buffers(recurse=False))
    if not known or buffers or len(parameters) > len(trainable(replica)):  # the last: tied weights
        return False
    inputs, targets = (value.new_zeros((2, *value.shape[1:])) for value in batch)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        try:
            outputs = replica(inputs)
        except RuntimeError as error:
            if "BackwardHookFunction" not in str(error):
                raise
            return False  # the model changes a layer's output in place, as ResNets do
        slopes = torch.autograd.grad(loss(outputs, targets), parameters, allow_unused=True)
    return all(sizes == [2] for sizes in calls.values()) and all(s is not None for s in slopes)


def _wrapped(replica: nn.Module, norm: float, ghost: bool) -> Any:  # noqa: ANN401 - untyped
    from opacus import GradSampleModule  # imported here because it takes seconds
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    if ghost:
        return GradSampleModuleFastGradientClipping(replica, max_grad_norm=norm)
    return GradSampleModule(replica)


def _optimizer(replica: nn.Module, norm: float, defense: DPSGD, ghost: bool) -> Any:  # noqa: ANN401 - untyped
    from opacus.optimizers import (
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DPPerLayerOptimizer,
    )

    parameters = list(trainable(replica).values())
    bounds: Any = norm
    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    if defense.clipping == "per_layer":
        kind, bounds = DPPerLayerOptimizer, [norm / math.sqrt(len(parameters))] * len(parameters)
    return kind(
        torch.optim.SGD(parameters, lr=1.0),
        noise_multiplier=defense.noise_multiplier,
        max_grad_norm=bounds,
        expected_batch_size=1,
    )


def _replica(model: nn.Module) -> nn.Module:
    """Copy a model. Parameters that an earlier local step computed become leaves."""
    leaves = {
        id(value): nn.Parameter(
            value.detach().clone(), value.requires_grad or not isinstance(value, nn.Parameter)
        )
        for value in model.parameters()
    }
    replica = copy.deepcopy(model, leaves)
    for module in replica.modules():
        if module._parameters:
            module.training = True  # Opacus's hooks require it; dropout keeps its mode
    return replica
