"""What differs between kinds of data: matching, scoring and showing guesses, and utility.

All other code is the same for images, sound and text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ContinuousSpace, InputSpace, TokenSpace, WaveSpace
from leakfrontier.adversaries.base import in_evaluation
from leakfrontier.adversaries.spaces import real_tokens
from leakfrontier.defenses import Batch, Loss

from ..foundations.examples import Data
from ..foundations.rows import Media
from . import metrics
from .rendering import image_png, joined, token_texts, wave_file
from .rouge import rouge

_LOGITS = 2**24  # number of logits that are computed at once


@dataclass(frozen=True)
class NextTokenLoss:
    """Mean over examples of the mean cross-entropy of an example's tokens after its first.

    Every example has the same weight, however long it is. So the gradient of a batch is the mean of
    its examples' gradients. Padding has no weight.

    Attributes:
        padding: See `TokenSpace`.
    """

    padding: int | None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of logits (n, length, vocabulary) for tokens (n, length)."""
        losses, counted = self.by_token(outputs, targets)
        return (losses.sum(1) / counted.sum(1).clamp(min=1)).mean()

    def by_token(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token after the first, and which of them are not padding."""
        counted = real_tokens(targets, self.padding)[:, 1:]
        losses = cross_entropy(outputs[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none")
        return losses * counted, counted


class Utility(NamedTuple):
    """Test performance: correct predictions, all predictions, and the mean loss."""

    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class Modality(ABC):
    """A kind of data.

    Examples are compared on the scale of the data (`values`), stacked along the first axis.

    Attributes:
        space: The public knowledge about the inputs.
        media: The format in which an example is shown.
    """

    media: ClassVar[Media]

    space: InputSpace

    @property
    def loss(self) -> Loss:
        """Return the mean loss that training minimises."""
        return cross_entropy

    @abstractmethod
    def values(self, inputs: Tensor) -> Tensor:
        """Return model inputs on the scale of the data."""

    @abstractmethod
    def inputs(self, values: Tensor) -> Tensor:
        """Return data as model inputs."""

    @abstractmethod
    def nothing(self, like: Tensor) -> Tensor:
        """Return the values of one example that stands for a missing guess."""

    @abstractmethod
    def match(self, guess: Tensor, truth: Tensor) -> Tensor:
        """Return the index of the guess assigned to each truth, or -1 if none is left."""

    @abstractmethod
    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return every metric of each guess; NaN if it cannot be computed."""

    @abstractmethod
    def identified(self, guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
        """Return whether each guess is nearer to its truth than to all of the truth's pool."""

    @abstractmethod
    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        """Return which of some examples are not near-duplicates of one."""

    @abstractmethod
    def render(self, values: Tensor) -> bytes:
        """Return one example as a file of its media."""

    def groups(self, targets: Tensor) -> Tensor:
        """Return the group of each example, from which its look-alikes come: its label, if any."""
        return targets

    def look_alikes(
        self, index: int, data: Data, exclude: Tensor, count: int, rng: Generator
    ) -> Tensor:
        """Return the indices of look-alikes from which a guess must distinguish an example.

        They are drawn without replacement from the examples of the same label that `alike` selects.
        Excluded examples are never drawn. Neither are near-duplicates of the example itself,
        because no guess could distinguish them.

        Args:
            index: The example.
            data: All examples, on the scale of the data.
            exclude: Indices that must not be drawn, such as those of the other victims.
            count: Number of look-alikes.
            rng: Source of randomness.

        Raises:
            ValueError: If the class has too few examples.
        """
        groups = self.groups(data.targets)
        allowed = groups == groups[index]
        allowed[exclude] = False
        allowed[index] = True
        candidates = allowed.nonzero().flatten()
        differ = self.differ(data.at(slice(index, index + 1)).inputs[0], data.at(candidates).inputs)
        candidates = self.alike(index, data, candidates[differ | (candidates == index)], count)
        candidates = candidates[candidates != index]
        if not 1 <= count <= len(candidates):
            raise ValueError(
                f"count must be in [1, {len(candidates)}], the look-alikes that class "
                f"{groups[index].item()} has left, got {count}"
            )
        order = torch.randperm(len(candidates), generator=rng, device=rng.device)[:count]
        return candidates[order.to(candidates.device)]

    def alike(self, index: int, data: Data, among: Tensor, count: int) -> Tensor:
        """Return those of some examples that are similar to one of them; at least `count` more."""
        return among

    @torch.no_grad()
    def evaluate(self, model: nn.Module, test: Batch) -> Utility:
        """Return the performance of a model on test data."""
        with in_evaluation(model):
            outputs: Tensor = torch.cat([model(part) for part in test.inputs.split(500)])
        correct = (outputs.argmax(dim=1) == test.targets).sum()
        return Utility(int(correct), len(test.targets), float(self.loss(outputs, test.targets)))


@dataclass(frozen=True)
class _Continuous(Modality):
    """Data in [0, 1], compared by the Euclidean distance."""

    space: ContinuousSpace

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

    media: ClassVar[Media] = "image/png"

    def nothing(self, like: Tensor) -> Tensor:
        """Return black."""
        return like.new_zeros(1, *like.shape[1:])

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return PSNR and SSIM."""
        return {"psnr": metrics.psnr(guess, truth), "ssim": metrics.ssim(guess, truth)}

    def render(self, values: Tensor) -> bytes:
        """Return a PNG."""
        return image_png(values)


@dataclass(frozen=True)
class Waves(_Continuous):
    """Sound: PSNR for the full range of amplitudes, from -1 to 1, and SNR."""

    media: ClassVar[Media] = "audio/wav"

    space: WaveSpace

    def nothing(self, like: Tensor) -> Tensor:
        """Return silence."""
        return like.new_full((1, *like.shape[1:]), 0.5)

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return PSNR and SNR."""
        snr = metrics.snr(_amplitudes(guess), _amplitudes(truth))
        return {"psnr": metrics.psnr(guess, truth), "snr": snr}

    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        """Return which differ by more than a thousandth of its loudness, and by a 16-bit step.

        The scale of sound, unlike that of images, says little: whole datasets are quiet.
        """
        loudness = (example - 0.5).square().mean()
        error = (others - example).flatten(1).square().mean(1)
        return error > (1e-6 * loudness).clamp(min=2.0**-32)

    def render(self, values: Tensor) -> bytes:
        """Return a WAV file."""
        return wave_file(_amplitudes(values), self.space.rate)


@dataclass(frozen=True)
class Text(Modality):
    """Sequences of tokens: token accuracy, ROUGE and exact match.

    Sequences are compared by `metrics.token_distance`.

    Attributes:
        space: The public knowledge about the inputs.
        vocabulary: The text of every token.
    """

    media: ClassVar[Media] = "tokens"

    space: TokenSpace
    vocabulary: tuple[str, ...] = field(default=(), repr=False)

    @property
    def loss(self) -> Loss:
        """Return the loss of labels, or of next tokens."""
        if self.space.task == "next-token":
            return NextTokenLoss(self.space.padding)
        return super().loss

    def values(self, inputs: Tensor) -> Tensor:
        """Return the tokens."""
        return inputs

    def inputs(self, values: Tensor) -> Tensor:
        """Return the tokens."""
        return values

    def nothing(self, like: Tensor) -> Tensor:
        """Return a token that does not exist."""
        return like.new_full((1, *like.shape[1:]), -1)

    def match(self, guess: Tensor, truth: Tensor) -> Tensor:
        """Assign guesses to truths at the smallest total distance."""
        return metrics.match_tokens(guess, truth, self.space.padding)

    def scores(self, guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Return the share of the truth's tokens that are right, whether all are, and ROUGE."""
        accuracy = metrics.token_accuracy(guess, truth, self.space.padding)
        texts = [[self.text(tokens) for tokens in part] for part in (guess, truth)]
        return {
            "token_accuracy": accuracy,
            "exact": metrics.exact_match(guess, truth),
            **rouge(texts[0], texts[1]),
        }

    def identified(self, guess: Tensor, truth: Tensor, pool: Tensor) -> Tensor:
        """Return whether each guess is nearer to its truth than to any other."""
        return metrics.identified_tokens(guess, truth, pool, self.space.padding)

    def groups(self, targets: Tensor) -> Tensor:
        """Return the labels; for next tokens, there is one group."""
        return targets if targets.dim() == 1 else targets.new_zeros(len(targets))

    def alike(self, index: int, data: Data, among: Tensor, count: int) -> Tensor:
        """Return the examples of similar length.

        The examples are sorted by length and cut into parts of equal size. There are as many parts
        as leave each at least twice `count`. So an example's part does not distinguish it from the
        others of that part.
        """
        lengths = self.space.real(data.at(among).inputs).sum(1)
        ordered = among[lengths.argsort(stable=True)]
        parts = ordered.tensor_split(max(1, len(ordered) // (2 * (count + 1))))
        return next(part for part in parts if bool((part == index).any()))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, test: Batch) -> Utility:
        """Return accuracy and mean loss. For next tokens, the loss is per token (log perplexity).

        The accuracy of next tokens is the mean over texts of the share of predicted tokens. Texts
        are independent, but tokens of one text are not.
        """
        if self.space.task == "classification":
            return super().evaluate(model, test)
        loss, right, total, tokens = NextTokenLoss(self.space.padding), 0.0, 0.0, 0
        size = max(1, _LOGITS // (self.space.vocabulary * self.space.shape[0]))
        for start in range(0, len(test.inputs), size):
            part = test.at(slice(start, start + size))
            with in_evaluation(model):
                outputs = model(part.inputs)
            losses, counted = loss.by_token(outputs, part.targets)
            hits = (outputs[:, :-1].argmax(-1) == part.targets[:, 1:]) & counted
            right += float((hits.sum(1) / counted.sum(1).clamp(min=1)).sum())
            total, tokens = total + float(losses.sum()), tokens + int(counted.sum())
        return Utility(round(right), len(test.inputs), total / max(1, tokens))

    def differ(self, example: Tensor, others: Tensor) -> Tensor:
        """Return which are different sequences."""
        return (others != example).any(dim=1)

    def render(self, values: Tensor) -> bytes:
        """Return the tokens' texts, in order, without the padding at the end."""
        return token_texts([self._text(int(token)) for token in self._real(values)])

    def text(self, tokens: Tensor) -> str:
        """Return a sequence as text, without special tokens."""
        ids = (int(token) for token in self._real(tokens))
        return joined([self._text(token) for token in ids if token not in self.space.special])

    def _real(self, tokens: Tensor) -> Tensor:
        return tokens[self.space.real(tokens)]

    def _text(self, token: int) -> str:
        return self.vocabulary[token] if 0 <= token < len(self.vocabulary) else "\N{WHITE SQUARE}"


def modality_of(space: InputSpace, vocabulary: tuple[str, ...] = ()) -> Modality:
    """Return the modality of a space."""
    if isinstance(space, TokenSpace):
        return Text(space, vocabulary)
    if isinstance(space, WaveSpace):
        return Waves(space)
    if isinstance(space, ContinuousSpace):
        return Images(space)
    raise ValueError(f"space must be one of images, sound or tokens, got {space}")


def _amplitudes(values: Tensor) -> Tensor:
    """Return sound on the scale from -1 to 1."""
    return 2 * values - 1
