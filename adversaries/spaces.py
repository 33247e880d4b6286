"""What is publicly known of the inputs: images, sound or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor


class NotApplicable(ValueError):
    """The attack cannot run on this observation; recorded as such, never as a failed attack."""


@dataclass(frozen=True)
class InputSpace:
    """What is publicly known of the inputs, whatever they are.

    Attributes:
        shape: Shape of one example, without the batch axis.
        classes: Number of classes.
        continuous: Whether inputs have values that can be moved a little.
    """

    continuous: ClassVar[bool] = False

    shape: tuple[int, ...]
    classes: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of a model's inputs."""
        return torch.float32 if self.continuous else torch.int64

    def to_unit(self, inputs: Tensor) -> Tensor:
        """Return model inputs on the scale of the data, where values lie in [0, 1]."""
        raise NotApplicable("the inputs are tokens, which have no scale")

    def to_inputs(self, values: Tensor) -> Tensor:
        """Return data in [0, 1] as the model's inputs."""
        raise NotApplicable("the inputs are tokens, which have no scale")

    def clamp(self, inputs: Tensor) -> Tensor:
        """Return model inputs with every value moved into the range of the data."""
        raise NotApplicable("tokens cannot be moved by gradient descent")


@dataclass(frozen=True)
class ContinuousSpace(InputSpace):
    """Real-valued inputs: data in [0, 1], normalised by channel.

    Attributes:
        mean: Per-channel mean that the model's inputs were centred by.
        std: Per-channel standard deviation that they were divided by.
    """

    continuous: ClassVar[bool] = True

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def to_unit(self, inputs: Tensor) -> Tensor:
        """Return model inputs on the scale of the data, where values lie in [0, 1]."""
        return inputs * self._per_channel(self.std, inputs) + self._per_channel(self.mean, inputs)

    def to_inputs(self, values: Tensor) -> Tensor:
        """Return data in [0, 1] as the model's inputs."""
        return (values - self._per_channel(self.mean, values)) / self._per_channel(self.std, values)

    def clamp(self, inputs: Tensor) -> Tensor:
        """Return model inputs with every value moved into the range of the data."""
        low = self.to_inputs(torch.zeros((1, *self.shape)).to(inputs))
        high = self.to_inputs(torch.ones((1, *self.shape)).to(inputs))
        return torch.minimum(torch.maximum(inputs, low), high)

    def _per_channel(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values).to(like).view(-1, *[1] * (len(self.shape) - 1))


@dataclass(frozen=True)
class ImageSpace(ContinuousSpace):
    """Images of shape (channels, height, width)."""


@dataclass(frozen=True)
class WaveSpace(ContinuousSpace):
    """Sound of shape (channels, samples); 0 and 1 stand for the amplitudes -1 and 1.

    Attributes:
        rate: Samples per second.
    """

    rate: int = 16_000


@dataclass(frozen=True)
class TokenSpace(InputSpace):
    """Sequences of token ids, of shape (length,), filled up on the right.

    The padding of a sequence is the run of `padding` at its end, and nothing else: the same id
    within a sequence is a token like any other, so that a tokenizer without a padding token can
    pad with its end of text.

    Attributes:
        vocabulary: Number of different tokens.
        padding: The token that fills what is shorter; None if nothing is.
        task: What is learned of a sequence: its label, or each token from those before it. For
            `next-token` the targets are the tokens themselves, padding included, and `classes`
            is the size of the vocabulary.
        first: The token that every sequence begins with, such as BERT's [CLS] or Llama's
            beginning of text, if there is one.
        last: The token that every sequence ends with, before its padding, such as BERT's [SEP],
            if there is one; where a text was cut, too.
        special: All ids that stand for no text.
    """

    vocabulary: int = 0
    padding: int | None = None
    task: Literal["classification", "next-token"] = "classification"
    first: int | None = None
    last: int | None = None
    special: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.vocabulary >= 1:
            raise ValueError(f"vocabulary must be at least 1, got {self.vocabulary}")

    def real(self, tokens: Tensor) -> Tensor:
        """Return which places of sequences hold tokens and not padding."""
        return real_tokens(tokens, self.padding)


def real_tokens(tokens: Tensor, padding: int | None) -> Tensor:
    """Return which places of sequences come before the padding at their ends."""
    if padding is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    return up_to_last(tokens != padding)


def up_to_last(true: Tensor) -> Tensor:
    """Return which places of the last axis are not after its last true one."""
    return true.flip(-1).cumsum(-1).flip(-1) > 0
