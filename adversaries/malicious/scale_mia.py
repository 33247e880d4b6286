"""Scale-MIA: an encoder in the convolutions, bins behind it, and a decoder kept by the server."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Observation, PublicData, Reconstruction, Round, Threat
from ..spaces import ImageSpace, InputSpace, NotApplicable
from .imprint import (
    Anatomy,
    calibrated,
    chosen,
    dissect,
    equal_columns_,
    isolate,
    occupied,
    thresholds,
    within,
)

T = TypeVar("T")

_AT_ONCE = 100  # images that are encoded without gradients
_KEPT: dict[str, object] = {}  # what was last trained in this process, by all that it depends on
_MOST_KEPT = 4


@dataclass(frozen=True)
class ScaleMIA(Adversary):
    """Train an autoencoder on public data, and read the codes of private examples off bins.

    The encoder becomes the convolutions of the model. The first linear layer is an imprint layer
    (see `imprint`) of the codes' brightness: rows of 1/N, biases at quantiles of what public
    examples have, and equal columns behind it. Each bin with one example gives its code, and
    the decoder its image. What it looks like is limited by the autoencoder, not by the bins; the
    sum of many clients is one large batch.

    The published code reads from the private batch which bins are full, and matches images by
    them. Here a bin counts if what it holds lies in it and, where codes are positive, is
    positive. The decoder mirrors the convolutions. For the received encoder it is fitted anew,
    so that nothing but the model has to be remembered from one step of the attack to the next.

    Attributes:
        epochs: Passes over the public data, for the autoencoder and again for the decoder;
            published are 350, for the autoencoder.
        examples: Public examples to train on, at most.
        batch_size: Of training.
        lr: Step size of Adam; 0.001 and batches of 50 are published, for many more steps.

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

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Sequence[nn.Module]:
        """Return the model with the encoder and the bins, the same for all clients."""
        crafted = copy.deepcopy(model)
        anatomy = dissect(crafted, round.space)
        decoder = mirrored(crafted, anatomy, round.space)
        public = self._granted(round.public)

        def trained() -> list[Tensor]:
            self._train(
                lambda inputs: encode(crafted, anatomy.layer, inputs),
                decoder,
                [*_encoder(anatomy), *decoder.parameters()],
                public,
                round.space.to_unit(public),
            )
            return [parameter.detach().clone() for parameter in _encoder(anatomy)]

        weights = _once(("encoder", self, round.space, *_encoder(anatomy), public), trained)
        with torch.no_grad():
            for parameter, value in zip(_encoder(anatomy), weights, strict=True):
                parameter.copy_(value)
            layer, codes = anatomy.layer, encode_all(crafted, anatomy.layer, public)
            layer.weight.fill_(1 / layer.in_features)
            quantile = calibrated(codes.double().mean(dim=1))
            layer.bias.copy_(-thresholds(layer.out_features, quantile))
        equal_columns_(anatomy.head)
        return [crafted] * round.clients

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the images of the codes that bins hold."""
        model, space = observation.model, observation.space
        anatomy = dissect(model, space)
        layer, name = anatomy.layer, anatomy.name
        if not bool((layer.weight == layer.weight[0]).all()):
            raise NotApplicable(f"the clients were not sent a model with an imprint in {name!r}")
        decoder, public = mirrored(model, anatomy, space), self._granted(observation.public)
        codes = encode_all(model, layer, public)

        def trained() -> nn.Module:
            pixels = space.to_unit(public)
            self._train(lambda codes: codes, decoder, decoder.parameters(), codes, pixels)
            return decoder

        decode = _once(("decoder", self, space, *_encoder(anatomy), public), trained)
        found = isolate(
            observation.update[f"{name}.weight"],
            observation.update[f"{name}.bias"],
            examples=observation.batch_size,
        )
        with torch.no_grad():
            sound = within(found, occupied(layer(found.inputs)))
            if bool((codes >= 0).all()):
                sound &= found.inputs.amin(dim=1) >= -1e-3 * found.inputs.amax(dim=1)
            keep = chosen(found, sound, observation.batch_size)
            keep = keep[sound[keep]] if bool(sound.any()) else keep
            images = decode(found.inputs[keep])
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
        """Minimise the squared error of what is decoded, the same way every time."""
        rng = torch.Generator().manual_seed(0)
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(inputs), generator=rng).split(self.batch_size):
                error = decoder(encode(inputs[rows])) - pixels[rows]
                error.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def encode(model: nn.Module, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a layer of a model is given, without running what lies behind it."""

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
    """Return a decoder, untrained: a convolution for each of the model's, from last to first.

    Raises:
        NotApplicable: If the model has no convolutions of images, or its codes are not on a grid.
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
    """Return height and width of the codes: those of an image that strides and pools shrink."""
    sizes = shape[-2:]
    for factor in range(1, min(sizes) + 1):
        for height, width in ([n // factor for n in sizes], [-(-n // factor) for n in sizes]):
            if channels * height * width == features:
                return height, width
    raise NotApplicable(
        f"the {features} features behind the convolutions are no grid of {channels} channels"
    )


def _encoder(anatomy: Anatomy) -> list[nn.Parameter]:
    """Return the parameters that hold the encoder."""
    return [value for convolution in anatomy.convolutions for value in convolution.parameters()]


def _once(inputs: Sequence[object], make: Callable[[], T]) -> T:
    """Return what is made of some inputs, from the last few times if it was made before."""
    digest = hashlib.sha256()
    for part in inputs:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().numpy().tobytes())
        digest.update((str(part.device) if isinstance(part, Tensor) else repr(part)).encode())
    key = digest.hexdigest()
    if key not in _KEPT:
        made = make()
        for oldest in [*_KEPT][: len(_KEPT) - _MOST_KEPT + 1]:
            del _KEPT[oldest]
        _KEPT[key] = made
    return cast(T, _KEPT[key])
