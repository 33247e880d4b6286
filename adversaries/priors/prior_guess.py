"""The blind baseline: a guess that ignores the update."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from ..spaces import InputSpace, NotApplicable, TokenSpace


@dataclass(frozen=True)
class PriorGuess(Adversary):
    """Guess the typical public example, of the victim's class if the label is known.

    For images and sound, the typical example is the mean. For texts, it is the most frequent token
    at each position. Without public data, the guess is constant, or only padding.

    This is not an attack, and its success is not leakage. The rate of an attack is meaningful only
    if it is above the rate of this baseline.
    """

    baseline: ClassVar[bool] = True
    cost: ClassVar[int] = 0

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return one typical example per private example."""
        if observation.targets is None:
            inputs = self._typical(observation, None).repeat_interleave(observation.batch_size, 0)
        else:
            inputs = torch.cat([self._typical(observation, y) for y in observation.targets])
        return Reconstruction(inputs, observation.targets)

    @staticmethod
    def _typical(observation: Observation, target: Tensor | None) -> Tensor:
        """Return the typical public example of a class or of all; without data, an empty one."""
        public, space = observation.public, observation.space
        if public is None:
            return _nothing(space)
        inputs = public.inputs
        if target is not None and (public.targets == target).any():
            inputs = inputs[public.targets == target]
        if space.continuous:
            return inputs.mean(dim=0, keepdim=True)
        return inputs.mode(dim=0, keepdim=True).values


def _nothing(space: InputSpace) -> Tensor:
    """Return an example without content."""
    if space.continuous:
        return torch.zeros(1, *space.shape)  # the mean of the data after centring
    if not isinstance(space, TokenSpace) or space.padding is None:
        raise NotApplicable("there are no public texts to guess from, and there is no padding")
    return torch.full((1, *space.shape), space.padding)
