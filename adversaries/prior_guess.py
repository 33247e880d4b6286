"""The blind baseline: a guess that ignores the update."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from .base import Adversary, NotApplicable, Observation, Reconstruction


@dataclass(frozen=True)
class PriorGuess(Adversary):
    """Guess the mean example: per class if labels are known, without public data a flat one.

    No attack: what it reaches is not leakage. A rate means something only above this one.
    """

    baseline: ClassVar[bool] = True
    cost: ClassVar[int] = 0

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return one mean example per private example."""
        if observation.space.vocabulary is not None:
            raise NotApplicable("there is no mean of token inputs")
        if observation.targets is None:
            inputs = self._mean(observation, None).repeat_interleave(observation.batch_size, 0)
        else:
            inputs = torch.cat([self._mean(observation, y) for y in observation.targets])
        return Reconstruction(inputs, observation.targets)

    @staticmethod
    def _mean(observation: Observation, target: Tensor | None) -> Tensor:
        """Return the mean of the public examples of a class, or of all; else the centre."""
        public = observation.public
        if public is None:
            return torch.zeros(1, *observation.space.shape)  # the data's mean, after centring
        inputs = public.inputs
        if target is not None and (public.targets == target).any():
            inputs = inputs[public.targets == target]
        return inputs.mean(dim=0, keepdim=True)
