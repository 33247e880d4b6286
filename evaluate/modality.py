"""What differs between kinds of data: how guesses are matched, scored and shown, and utility.

Everything else is the same code for images, sound and text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import InputSpace, TokenSpace, WaveSpace
from leakfrontier.defenses import Batch, Loss

from . import metrics
from .rendering import image_png, token_texts, wave_file
from .rows import Media


class Utility(NamedTuple):
    """Test performance: correct predictions of all, and the mean loss."""

    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class Modality(ABC):
    """A kind of data.

    Examples are compared on the scale of the data (`values`), stacked along the first axis.

    Attributes:
        space: What is publicly known of the inputs.
        name: What reports call it.
        metrics: What is scored beside identification, and in which unit.
        media: As what an example is shown.
    """

    name: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    media: ClassVar[Media]

    space: InputSpace

    @property
    def loss(self) -> Loss:
        """Return the mean loss that models are trained by."""
        return cross_entropy

    @abstractmethod
    def values(self, inputs: Tensor) -> Tensor:
        """Return model inputs on the scale of the data."""

    @abstractmethod
    def inputs(self, values: Tensor) -> Tensor:
        """Return data as model inputs."""

    @abstractmethod
    def nothing(self, like: Tensor) -> Tensor:
        """Return what stands for a guess that was not made: one example's values."""

    @abstractmethod
    def match(self, guess: Tensor, truth: Tensor) -> Tensor:
        """Return, for each truth, the index of the guess assigned to it, or -1 if none is left."""

    @abstractmethod
    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return every metric of each guess; NaN where it cannot be computed."""

    @abstractmethod
    def identified(self, guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
        """Return whether each guess is nearer to its truth than to all of the truth's pool."""

    @abstractmethod
    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        """Return which of some examples are no near-duplicates of one."""

    @abstractmethod
    def render(self, values: Tensor) -> bytes:
        """Return one example as a file of its media."""

    def look_alikes(
        self, index: int, data: Batch, exclude: Tensor, count: int, rng: Generator
    ) -> Tensor:
        """Return the indices of look-alikes that an example has to be told apart from.

        They are drawn without replacement from the examples of the same label, without those to
        be excluded and without near-duplicates of the example itself, which no guess could tell
        apart.

        Args:
            index: The example.
            data: All examples, on the scale of the data.
            exclude: Indices that must not be drawn, such as those of the other victims.
            count: Number of look-alikes.
            rng: Source of randomness.

        Raises:
            ValueError: If the class has too few examples.
        """
        allowed = data.targets == data.targets[index]
        allowed[exclude] = False
        candidates = allowed.nonzero().flatten()
        candidates = candidates[self.differ(data.inputs[index], data.inputs[candidates])]
        if not 1 <= count <= len(candidates):
            raise ValueError(
                f"count must be in [1, {len(candidates)}], the look-alikes that class "
                f"{data.targets[index].item()} has left, got {count}"
            )
        order = torch.randperm(len(candidates), generator=rng, device=rng.device)[:count]
        return candidates[order.to(candidates.device)]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, test: Batch) -> Utility:
        """Return how good a model is on test data."""
        model.eval()
        outputs: Tensor = torch.cat([model(part) for part in test.inputs.split(500)])
        model.train()
        correct = (outputs.argmax(dim=1) == test.targets).sum()
        return Utility(int(correct), len(test.targets), float(self.loss(outputs, test.targets)))


@dataclass(frozen=True)
class _Continuous(Modality):
    """Data in [0, 1], compared by the Euclidean distance."""

    def values(self, inputs: Tensor) -> Tensor:
        return self.space.to_unit(inputs)

    def inputs(self, values: Tensor) -> Tensor:
        return self.space.to_inputs(values)

    def match(self, guess: Tensor, truth: Tensor) -> Tensor:
        return metrics.match(guess, truth)

    def identified(self, guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
        return metrics.identified(guess, truth, pool)

    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        error = (others - example).flatten(1).square().mean(1)
        return error > metrics.DUPLICATE_ERROR


@dataclass(frozen=True)
class Images(_Continuous):
    """Images: PSNR for a range of 1, and SSIM."""

    name = "image"
    metrics: ClassVar[Mapping[str, str]] = {"psnr": "dB", "ssim": ""}
    media: ClassVar[Media] = "image/png"

    def nothing(self, like: Tensor) -> Tensor:
        """Return black."""
        return torch.zeros_like(like[:1]) if len(like) else like.new_zeros(1, *like.shape[1:])

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return PSNR and SSIM."""
        return {"psnr": metrics.psnr(guess, truth), "ssim": metrics.ssim(guess, truth)}

    def render(self, values: Tensor) -> bytes:
        """Return a PNG."""
        return image_png(values)


@dataclass(frozen=True)
class Waves(_Continuous):
    """Sound: PSNR for the full range of amplitudes, from -1 to 1, and SNR."""

    name = "audio"
    metrics: ClassVar[Mapping[str, str]] = {"psnr": "dB", "snr": "dB"}
    media: ClassVar[Media] = "audio/wav"

    def nothing(self, like: Tensor) -> Tensor:
        """Return silence."""
        return like.new_full((1, *like.shape[1:]), 0.5)

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return PSNR and SNR."""
        amplitudes = (2 * guess - 1, 2 * truth - 1)
        return {"psnr": metrics.psnr(guess, truth), "snr": metrics.snr(*amplitudes)}

    def render(self, values: Tensor) -> bytes:
        """Return a WAV file."""
        rate = self.space.rate if isinstance(self.space, WaveSpace) else 16_000
        return wave_file(2 * values - 1, rate)


@dataclass(frozen=True)
class Text(Modality):
    """Sequences of tokens, compared place by place.

    Attributes:
        space: What is publicly known of the inputs.
        vocabulary: The text of every token.
    """

    name = "text"
    metrics: ClassVar[Mapping[str, str]] = {"token_accuracy": "", "exact": ""}
    media: ClassVar[Media] = "tokens"

    vocabulary: tuple[str, ...] = field(default=(), repr=False)

    def values(self, inputs: Tensor) -> Tensor:
        """Return the tokens."""
        return inputs

    def inputs(self, values: Tensor) -> Tensor:
        """Return the tokens."""
        return values

    def nothing(self, like: Tensor) -> Tensor:
        """Return a token that there is not."""
        return like.new_full((1, *like.shape[1:]), -1)

    def match(self, guess: Tensor, truth: Tensor) -> Tensor:
        """Assign guesses so that the fewest tokens are wrong."""
        wrong = (guess[:, None] != truth[None]).sum(dim=-1)
        return metrics.assign(wrong.double())

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return the share of right tokens, padding left out, and whether all are right."""
        right, known = guess == truth, self._known(truth)
        share = (right & known).sum(dim=1) / known.sum(dim=1)  # NaN where there is nothing
        return {"token_accuracy": share, "exact": (right | ~known).all(dim=1).double()}

    def identified(self, guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
        """Return whether fewer tokens differ from the truth than from any other."""
        own = (guess != truth).sum(dim=1)
        others = (guess[:, None] != pool).sum(dim=-1)
        return own < others.amin(dim=1)

    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        """Return which are not the same sequence."""
        return (others != example).any(dim=1)

    def render(self, values: Tensor) -> bytes:
        """Return the tokens' texts."""
        kept = values[self._known(values)] if bool(self._known(values).any()) else values[:0]
        return token_texts([self._text(int(token)) for token in kept])

    def _known(self, tokens: Tensor) -> Tensor:
        """Return which places hold a token rather than padding."""
        padding = self.space.padding if isinstance(self.space, TokenSpace) else None
        return torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding

    def _text(self, token: int) -> str:
        return self.vocabulary[token] if 0 <= token < len(self.vocabulary) else "\N{WHITE SQUARE}"


def modality_of(space: InputSpace, vocabulary: tuple[str, ...] = ()) -> Modality:
    """Return the modality of a space."""
    if isinstance(space, TokenSpace):
        return Text(space, vocabulary)
    return Waves(space) if isinstance(space, WaveSpace) else Images(space)
