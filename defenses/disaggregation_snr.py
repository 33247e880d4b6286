"""The disaggregation signal-to-noise ratio: refuse uploads that single out one example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from .base import Batch, Defense, Loss, Refused, Update, batch_gradient, trainable

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENTRIES_AT_ONCE = 2**26  # entries of per-example gradients that are held at once


@dataclass
class DisaggregationSNR(Defense):
    """Refuse to upload if one example of the batch dominates the gradient of a layer.

    This is our reading of [1]. For the weights of a linear or convolutional layer,

        D-SNR = max_i |g_i| / sum over the others |g_j|,

    where g_i is the gradient of example i. The largest ratio over the layers must not exceed
    `threshold`. The ratio is about 1 / (B - 1) if all B examples count equally. It is infinite if
    a layer was made to react to one example only. A batch of one example always dominates itself.
    The client uploads it without protection, and also an empty batch.

    The threshold is meant for batches of eight or more. `benchmarks/inspection.py calibrate`
    counts how many batches of honest models exceed it. In total, 4 of 1,056 do:

        untrained models               0 of 816
        in training, batches of 8      3 of 80
        in training, batches of 16     1 of 80
        in training, batches of 32     0 of 80

    In smaller batches one example often counts most. In training, 8 of 40 batches of 4 and 16 of
    40 batches of 2 exceed the threshold.

    SEER [1] was built to break it. Any attack also breaks it that singles out examples without
    making one gradient the largest. For example, if each row isolates one example, the norms of
    whole layers stay similar. A trained model gives large values for honest reasons: one example
    that it gets wrong dominates the gradient.

    Attributes:
        threshold: The largest D-SNR at which the client uploads. Infinity refuses nothing.

    References:
        [1] Garov, Dimitrov, Jovanović, Vechev. "Hiding in Plain Sight: Disguising Data Stealing
            Attacks in Federated Learning." ICLR 2024. https://arxiv.org/abs/2306.03013
    """

    threshold: float = 10.0

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"threshold must be positive, got {self.threshold}")

    @property
    def strength(self) -> float:
        """Return the inverse of the threshold."""
        return 1 / self.threshold

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Refuse a model that mixes examples: they have no gradients of their own."""
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                raise Refused(f"layer {name!r} is a BatchNorm, which mixes the examples of a batch")
        return model

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient, unless an example dominates it."""
        if self.threshold < float("inf"):
            for name, ratio in disaggregation_snr(model, loss, batch).items():
                if ratio > self.threshold:
                    raise Refused(f"one example dominates layer {name!r}: D-SNR {ratio:.3g}")
        return batch_gradient(model, loss, batch)

    def unguarded(self) -> Defense:
        """Return the undefended client."""
        return Defense()

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the undefended client, because the defense does not change uploads."""
        return Defense()


def disaggregation_snr(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, float]:
    """Return the D-SNR of each linear or convolutional layer; empty for fewer than two examples."""
    if len(batch.inputs) < 2:
        return {}
    layers = [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    weights = {name: f"{name}.weight" if name else "weight" for name in layers}
    norms = _gradient_norms(model, loss, batch)  # frozen weights are absent
    return {name: _ratio(norms[weight]) for name, weight in weights.items() if weight in norms}


def _gradient_norms(model: nn.Module, loss: Loss, batch: Batch) -> Update:
    """Return the norm of each example's gradient by each parameter."""
    parameters: Update = {name: value.detach() for name, value in trainable(model).items()}

    def example_loss(parameters: Update, example: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, parameters, (example.unsqueeze(0),))
        return loss(output, target.unsqueeze(0))

    def norms(example: Tensor, target: Tensor) -> Update:
        gradient = grad(example_loss)(parameters, example, target)
        return {name: value.norm() for name, value in gradient.items()}

    entries = sum(value.numel() for value in parameters.values())
    at_once = max(1, _ENTRIES_AT_ONCE // entries)
    found: Update = vmap(norms, chunk_size=at_once)(*batch)
    return found


def _ratio(norms: Tensor) -> float:
    largest = float(norms.double().max())
    others = float(norms.double().sum()) - largest
    if largest == 0:
        return 0.0
    return largest / others if others > 0 else float("inf")
