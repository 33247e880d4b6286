"""Public facts about the inputs: images, sound or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor


class NotApplicable(ValueError):
    """The attack cannot run on this observation. This is not recorded as a failed attack."""


@dataclass(frozen=True)
class InputSpace:
    """Public facts about inputs of any kind.

    Attributes:
        shape: Shape of one example, without the batch axis.
        classes: Number of classes.
        continuous: Whether inputs have values that gradient descent can change.
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
        """Return model inputs with every value clamped to the range of the data."""
        raise NotApplicable("tokens cannot be moved by gradient descent")


@dataclass(frozen=True)
class ContinuousSpace(InputSpace):
    """Real-valued inputs: data in [0, 1], normalised by channel.

    Attributes:
        mean: Per-channel mean that is subtracted from the data.
        std: Per-channel standard deviation that the data is then divided by.
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
        """Return model inputs with every value clamped to the range of the data."""
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
    """Sound of shape (channels, samples). Values 0 and 1 mean the amplitudes -1 and 1.

    Attributes:
        rate: Samples per second.
    """

    rate: int = 16_000


@dataclass(frozen=True)
class TokenSpace(InputSpace):
    """Sequences of token ids, of shape (length,), padded on the right.

    The padding of a sequence is only the run of `padding` at its end. The same id within a
    sequence is an ordinary token. A tokenizer without a padding token can therefore pad with its
    end-of-text token.

    Attributes:
        vocabulary: Number of different tokens.
        padding: The token that fills shorter sequences. None if there is no padding.
        task: What the model learns: the label of a sequence, or each token from the tokens
            before it. For `next-token` the targets are the tokens themselves, including padding,
            and `classes` is the size of the vocabulary.
        first: The token that begins every sequence, such as BERT's [CLS] or Llama's beginning of
            text. None if there is no such token.
        last: The token that ends every sequence before its padding, such as BERT's [SEP]. Texts
            that were cut end with it too. None if there is no such token.
        special: All ids that do not stand for text.
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
        """Return which positions of sequences hold tokens rather than padding."""
        return real_tokens(tokens, self.padding)


def real_tokens(tokens: Tensor, padding: int | None) -> Tensor:
    """Return which positions of sequences come before the final padding."""
    if padding is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    return up_to_last(tokens != padding)


def up_to_last(true: Tensor) -> Tensor:
    """Return which positions along the last axis are not after the last true one."""
    return true.flip(-1).cumsum(-1).flip(-1) > 0
