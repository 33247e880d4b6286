"""The disaggregation signal-to-noise ratio: refuse to upload what singles out an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from .base import Batch, Defense, Loss, Refused, Update, batch_gradient, trainable

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENTRIES_AT_ONCE = 2**26  # of the gradients of several examples


@dataclass
class DisaggregationSNR(Defense):
    """Refuse to upload where one example of the batch dominates the gradient of a layer.

    Our reading of [1]: for the weights of a linear or convolutional layer,

        D-SNR = max_i |g_i| / sum over the others |g_j|,

    where g_i is the gradient of example i; the largest over the layers must not exceed
    `threshold`. It is about 1 / (B - 1) where all B examples count alike, and infinite where a
    layer was made to react to one of them. A batch of one example dominates itself: it passes,
    unprotected, as does an empty one.

    The threshold is for batches of eight or more. Of those of honest models, 4 of 1,056 exceed it
    (`benchmarks/inspection.py calibrate`): none of 816 of untrained models; of models in training
    3 of 80 batches of 8, 1 of 80 of 16 and none of 80 of 32. It is not for smaller ones, where one
    example often counts most: in training, 8 of 40 batches of 4 and 16 of 40 of 2 exceed it.

    What breaks it: SEER [1] itself, which was made to, and whatever singles examples out of a
    gradient without making one of them the largest: rows that isolate one example each leave the
    norms of whole layers alike. A model that has learned its examples gives large values for
    honest reasons: a single one that it gets wrong is all that the gradient shows.

    Attributes:
        threshold: The largest D-SNR at which the client uploads; infinite refuses nothing.

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
        """Refuse a model whose examples have no gradients of their own."""
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
        """Return the undefended client: what is uploaded is untouched."""
        return Defense()


def disaggregation_snr(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, float]:
    """Return the D-SNR of each linear or convolutional layer; none for fewer than two examples."""
    if len(batch.inputs) < 2:
        return {}
    layers = [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    weights = {name: f"{name}.weight" if name else "weight" for name in layers}
    norms = _gradient_norms(model, loss, batch)  # not of frozen ones
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
