"""Uploading signs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from .base import Defense, Update
from .vector import flatten, restore, straight_through


@dataclass
class SignSGD(Defense):
    """Upload the sign of every entry [1], by default times each tensor's mean magnitude.

    Error feedback adds what was lost to the next update. With the scale and error feedback, SignSGD
    converges like SGD [2]. An exact zero stays zero and is visible in the upload.

    Signs were made to save bandwidth and promise no privacy. There is one sign per parameter, far
    more than there are numbers in a batch, and the signs still reveal the update's direction.

    Attributes:
        scale: Whether to multiply by the mean magnitude of each tensor.
        error_feedback: Whether to carry what was lost to the next round.

    References:
        [1] Bernstein, Wang, Azizzadenesheli, Anandkumar. "signSGD: Compressed Optimisation for
            Non-Convex Problems." ICML 2018. https://arxiv.org/abs/1802.04434
        [2] Karimireddy, Rebjock, Stich, Jaggi. "Error Feedback Fixes SignSGD and other Gradient
            Compression Schemes." ICML 2019. https://arxiv.org/abs/1901.09847
    """

    scale: bool = True
    error_feedback: bool = False
    _dropped: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.error_feedback and not self.scale:
            raise ValueError("scale must be True with error_feedback, which needs magnitudes")

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the signs of the update."""
        update = restore(update, self._dropped)
        sent = {name: _signs(value, self.scale) for name, value in update.items()}
        if self.error_feedback:
            self._dropped = flatten(update) - flatten(sent)
        return sent

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the same signs, with the derivative of the update itself (straight through)."""
        return SignReplay(self.scale)

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the logistic log-likelihood of the observed signs.

        The expected entries are divided by each tensor's mean magnitude. It is the observed
        magnitude if that was uploaded, otherwise the expected one.
        """
        terms = []
        for name, signs in observed.items():
            scale = signs.abs().max() if self.scale else expected[name].detach().abs().mean()
            margin = signs.sign() * expected[name] / torch.where(scale > 0, scale, 1.0)
            terms.append(logsigmoid(margin).sum())
        return torch.stack(terms).sum()


@dataclass
class SignReplay(Defense):
    """The replay of SignSGD: signs with the derivative of the update itself.

    Attributes:
        scale: Whether to multiply by the mean magnitude of each tensor.
    """

    scale: bool

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the signs of the update."""
        return {
            name: straight_through(value, _signs(value, self.scale))
            for name, value in update.items()
        }


def _signs(value: Tensor, scale: bool) -> Tensor:
    return value.sign() * value.abs().mean() if scale else value.sign()
