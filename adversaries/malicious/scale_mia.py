"""Scale-MIA: an encoder in the convolutions, bins behind it, and a decoder at the server."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Crafted, Observation, PublicData, Reconstruction, Round, Threat
from ..spaces import ImageSpace, InputSpace, NotApplicable
from .imprint import (
    Anatomy,
    CraftedLayer,
    calibrated,
    chosen,
    dissect,
    equal_columns_,
    imprinted_layer,
    isolate,
    occupied,
    thresholds,
    within,
)

_AT_ONCE = 100  # number of images that are encoded together, without gradients


@dataclass(frozen=True)
class ScaleMIA(Adversary):
    """Train an autoencoder on public data, and read the codes of private examples from bins.

    The encoder becomes the convolutions of the model. The first linear layer is an imprint layer
    (see `imprint`) for the brightness of the codes: rows of 1/N, biases at quantiles of public
    examples, and equal columns behind it. Each bin with one example gives the code of that
    example, and the decoder gives its image. The autoencoder limits the quality of the images,
    not the bins. The sum of many clients is one large batch.

    The published code looks at the private batch to learn which bins are full, and matches images
    by them. Here a bin counts if its content lies in it and, if codes are positive, is positive.
    The decoder mirrors the convolutions. It is fitted again after the encoder is trained.

    Attributes:
        epochs: Passes over the public data, for the autoencoder and again for the decoder. The
            paper takes 350 for the autoencoder.
        examples: Largest number of public examples to train on.
        batch_size: Batch size of the training.
        lr: Step size of Adam. The paper takes 0.001 and batches of 50, for many more steps.

    References:
        Shi, Kotevska, Reshniak, Amini, Chakraborty, Lou, Hou. "Scale-MIA: A Scalable Model
        Inversion Attack against Secure Federated Learning via Latent Space Reconstruction." NDSS
        2025. https://arxiv.org/abs/2311.05808
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS
    cost: ClassVar[int] = 1

    epochs: int = 10
    examples: int = 2000
    batch_size: int = 20
    lr: float = 0.003

    def __post_init__(self) -> None:
        for name in ("epochs", "examples", "batch_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return one model with the encoder and the bins, for all clients."""
        crafted = copy.deepcopy(model)
        anatomy = dissect(crafted, round.space)
        decoder = mirrored(crafted, anatomy, round.space)
        public = self._granted(round.public)
        start, kept = _values(_encoder(anatomy)), round.kept
        if not (isinstance(kept, Autoencoder) and kept.is_of(self, round.space, start, public)):
            self._train(
                lambda inputs: encode(crafted, anatomy.layer, inputs),
                decoder,
                [*_encoder(anatomy), *decoder.parameters()],
                public,
                round.space.to_unit(public),
            )
            decoding = self._decoding(crafted, anatomy, round.space, public)
            encoder = _values(_encoder(anatomy))
            kept = Autoencoder(self, round.space, start, public, encoder, decoding)
        with torch.no_grad():
            for parameter, value in zip(_encoder(anatomy), kept.encoder, strict=True):
                parameter.copy_(value)
            layer, codes = anatomy.layer, encode_all(crafted, anatomy.layer, public)
            layer.weight.fill_(1 / layer.in_features)
            quantile = calibrated(codes.double().mean(dim=1))
            layer.bias.copy_(-thresholds(layer.out_features, quantile))
        equal_columns_(anatomy.head)
        return Crafted([crafted] * round.clients, kept)

    def _decoding(
        self, model: nn.Module, anatomy: Anatomy, space: InputSpace, public: Tensor
    ) -> Decoding:
        """Fit a decoder to the codes of public examples."""
        decoder, codes = mirrored(model, anatomy, space), encode_all(model, anatomy.layer, public)
        pixels = space.to_unit(public)
        self._train(lambda codes: codes, decoder, decoder.parameters(), codes, pixels)
        positive = bool((codes >= 0).all())
        return Decoding(CraftedLayer.of(anatomy.layer, anatomy.name), decoder, positive)

    def _recognised(self, observation: Observation) -> Decoding:
        """Return how to read a model that this server did not send, as in a capture."""
        imprinted_layer(observation)
        model, space = observation.model, observation.space
        public = self._granted(observation.public)
        return self._decoding(model, dissect(model, space), space, public)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the images of the codes in the bins."""
        space, kept = observation.space, observation.kept
        decoding = kept.decoding if isinstance(kept, Autoencoder) else self._recognised(observation)
        layer = decoding.layer.received(observation)
        weight, bias = (observation.update[name] for name in decoding.layer.parameters)
        found = isolate(weight, bias, examples=observation.batch_size)
        with torch.no_grad():
            sound = within(found, occupied(layer(found.inputs)))
            if decoding.positive:
                sound &= found.inputs.amin(dim=1) >= -1e-3 * found.inputs.amax(dim=1)
            keep = chosen(found, sound, observation.batch_size)
            keep = keep[sound[keep]] if bool(sound.any()) else keep
            images = decoding.decoder(found.inputs[keep])
        return Reconstruction(space.to_inputs(images), confidence=sound[keep].to(images))

    def _granted(self, public: PublicData | None) -> Tensor:
        if public is None:
            raise NotApplicable("no public data is granted to train an autoencoder on")
        return public.inputs[: self.examples]

    def _train(
        self,
        encode: Callable[[Tensor], Tensor],
        decoder: nn.Module,
        parameters: Iterable[Tensor],
        inputs: Tensor,
        pixels: Tensor,
    ) -> None:
        """Minimise the squared error of decoded images, with a fixed seed."""
        rng = torch.Generator().manual_seed(0)
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(inputs), generator=rng).split(self.batch_size):
                error = decoder(encode(inputs[rows])) - pixels[rows]
                error.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@dataclass(frozen=True, eq=False)
class Decoding:
    """How a server reads codes.

    Attributes:
        layer: The layer whose bins hold the codes.
        decoder: Maps codes to images.
        positive: Whether no public example has a negative code.
    """

    layer: CraftedLayer
    decoder: nn.Module
    positive: bool


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """What the server keeps: the trained autoencoder, and everything that it depends on.

    Attributes:
        attack: The attack, whose fields configure the training.
        space: Public facts about the inputs.
        start: The encoder's parameters before training.
        public: The training examples.
        encoder: The encoder's parameters after training.
        decoding: Reads the codes.
    """

    attack: ScaleMIA
    space: InputSpace
    start: Sequence[Tensor]
    public: Tensor
    encoder: Sequence[Tensor]
    decoding: Decoding

    def is_of(
        self, attack: ScaleMIA, space: InputSpace, start: Sequence[Tensor], public: Tensor
    ) -> bool:
        """Return whether training again would give the same result."""
        return (self.attack, self.space) == (attack, space) and all(
            a.device == b.device and torch.equal(a, b)
            for a, b in zip((*self.start, self.public), (*start, public), strict=True)
        )


def encode(model: nn.Module, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer of a model, without running the layers behind it."""

    def stop(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        raise _ReachedError(arguments[0])

    handle = layer.register_forward_pre_hook(stop)
    try:
        model(inputs)
    except _ReachedError as reached:
        return reached.codes
    finally:
        handle.remove()
    raise ValueError("the layer is not part of the model")


class _ReachedError(Exception):
    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        self.codes = codes


@torch.no_grad()
def encode_all(model: nn.Module, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return the codes of many inputs."""
    return torch.cat([encode(model, layer, part) for part in inputs.split(_AT_ONCE)])


def mirrored(model: nn.Module, anatomy: Anatomy, space: InputSpace) -> nn.Module:
    """Return an untrained decoder: one convolution for each of the model's, last to first.

    Raises:
        NotApplicable: If the model has no chain of convolutions that begins with the images, or
            its codes are not on a grid.
    """
    shapes: list[torch.Size] = []
    handles = [
        convolution.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
        for convolution in anatomy.convolutions
    ]
    try:
        encode(model, anatomy.layer, torch.zeros(1, *space.shape))
    finally:
        for handle in handles:
            handle.remove()
    if not (isinstance(space, ImageSpace) and anatomy.convolutions):
        raise NotApplicable("the model has no convolutions of images to hold an encoder")
    if shapes[0][1:] != space.shape:
        raise NotApplicable("the convolutions see features, not the pixels of an input")
    for convolution, (_, after, *_) in zip(anatomy.convolutions, shapes[1:], strict=False):
        if convolution.out_channels != after:
            raise NotApplicable("the convolutions are not a chain: branches are joined")
    channels = anatomy.convolutions[-1].out_channels
    grid = _grid(anatomy.layer.in_features, channels, shapes[-1])
    parts: list[nn.Module] = [nn.Unflatten(1, (channels, *grid))]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for (_, before, *size), convolution in zip(
            reversed(shapes), reversed(anatomy.convolutions), strict=True
        ):
            parts += [
                nn.Upsample(tuple(size)),
                nn.Conv2d(convolution.out_channels, before, 3, 1, 1),
            ]
            parts += [nn.ReLU()]
    return nn.Sequential(*parts[:-1], nn.Sigmoid())


def _grid(features: int, channels: int, shape: torch.Size) -> tuple[int, int]:
    """Return height and width of the codes, given the image size before strides and pooling."""
    sizes = shape[-2:]
    for factor in range(1, min(sizes) + 1):
        for height, width in ([n // factor for n in sizes], [-(-n // factor) for n in sizes]):
            if channels * height * width == features:
                return height, width
    raise NotApplicable(
        f"the {features} features behind the convolutions form no grid of {channels} channels"
    )


def _encoder(anatomy: Anatomy) -> list[nn.Parameter]:
    """Return the parameters that hold the encoder."""
    return [value for convolution in anatomy.convolutions for value in convolution.parameters()]


def _values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of parameters."""
    return [parameter.detach().clone() for parameter in parameters]
