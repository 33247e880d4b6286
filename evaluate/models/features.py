"""Frozen public features of images, and models that train only a head on them.

References:
    Tramer, Boneh. "Differentially Private Learning Needs Better Features (or Much More Data)."
    ICLR 2021. https://arxiv.org/abs/2011.11660
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from leakfrontier.adversaries import ContinuousSpace, ImageSpace, InputSpace
from leakfrontier.defenses import torchvision_ops  # noqa: F401 (or torchvision may fail)

from .pretrained import find_source, loaded
from .scattering import Scattering

DEFAULT = "DEFAULT"
"""The weights that torchvision downloads."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of the images for which public backbones were trained."""


class FeatureModel(nn.Module):
    """A trainable head on frozen features: `model(x)` is `model.head(model.features(x))`.

    Features have no trainable parameters and stay in evaluation mode. Training is therefore the
    same on `model.features(x)`, computed once. An upload holds only the gradient of the head.
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        """Freeze the features.

        Args:
            features: A map of images to features, example by example.
            head: A map of features to logits.
        """
        super().__init__()
        self.features = features.requires_grad_(False).eval()
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.head(self.features(images)))

    def train(self, mode: bool = True) -> FeatureModel:
        """Set the mode of the head."""
        super().train(mode)
        self.features.eval()
        return self


def build_features(space: ImageSpace, choice: object) -> tuple[nn.Module, InputSpace]:
    """Return features and the space of what they make of an image.

    Args:
        space: Images.
        choice: `scattering`; a mapping with the name and the options of `scattering`; or a mapping
            with the arguments of `backbone`.
    """
    options = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(options, Mapping) or not options.keys() & {"name", "backbone"}:
        raise ValueError(
            "features must be scattering, {name: scattering, ...} or {backbone: NAME, weights: "
            f"FILE}}, got {choice!r}"
        )
    name = options.get("name", "backbone")
    if name not in _FEATURES or ("backbone" in options) != (name == "backbone"):
        raise ValueError(f"features must be scattering or a mapping with backbone, got {choice!r}")
    given = {key: value for key, value in options.items() if key != "name"}
    known = [*inspect.signature(_FEATURES[name]).parameters][1:]
    if not {*given} <= {*known}:
        raise ValueError(f"features: {name} has the options {', '.join(known)}, got {choice!r}")
    with torch.random.fork_rng(devices=[]):  # the head must not depend on weights that are replaced
        try:
            features = _FEATURES[name](space, **given).requires_grad_(False).eval()
        except TypeError as error:
            raise ValueError(f"features cannot be built from {choice!r}: {error}") from error
    with torch.no_grad():
        shape = tuple(features(torch.zeros(1, *space.shape)).shape[1:])
    kind = ImageSpace if len(shape) == 3 else ContinuousSpace
    return features, kind(shape, space.classes)


def scattering(
    space: ImageSpace, scales: int = 2, angles: int = 8, groups: int | None = 27
) -> nn.Module:
    """Return the scattering transform, normalised for each example.

    Args:
        space: Images.
        scales: J. Features have 1/2^J of the resolution.
        angles: L.
        groups: Groups of channels that GroupNorm normalises, or None for no normalisation. The
            default suits the 81 channels of J = 2 and L = 8, as in Tramer and Boneh.
    """
    channels, height, width = space.shape
    made = Scattering((channels, height, width), scales, angles)
    if groups is None:
        return made
    if not (groups >= 1 and made.shape[0] % groups == 0):
        raise ValueError(f"groups must divide the {made.shape[0]} channels, got {groups}")
    return nn.Sequential(made, nn.GroupNorm(groups, made.shape[0], affine=False))


def backbone(
    space: ImageSpace, backbone: str, weights: str | None = None, size: int | None = None
) -> nn.Module:
    """Return the features before the last layer of a public network, averaged over positions.

    Images are put on the scale of ImageNet. A grey channel is repeated.

    Args:
        space: Images.
        backbone: A model of torchvision. Without `weights`: a model of transformers, by its id on
            the Hugging Face hub or its folder.
        weights: File with a torchvision model's weights, as safetensors or as `torch.save` writes a
            state_dict; or `DEFAULT`, which torchvision downloads.
        size: Height and width to which images are resized; by default they are not.
    """
    if space.shape[0] not in (1, 3):
        raise ValueError(f"a backbone needs images of 1 or 3 channels, got {space.shape}")
    if size is not None and not 1 <= size <= MOST_PIXELS:
        raise ValueError(f"size must be in [1, {MOST_PIXELS}], got {size}")
    network = _transformers(backbone) if weights is None else _torchvision(backbone, weights)
    return Backbone(space, _without_batch_norm(network.eval()), size)


MOST_PIXELS = 1024
"""The maximum height to which a backbone's images are resized."""

_FEATURES: dict[str, Callable[..., nn.Module]] = {"scattering": scattering, "backbone": backbone}


class Backbone(nn.Module):
    """A public network on images of a space: see `backbone`."""

    def __init__(self, space: ImageSpace, network: nn.Module, size: int | None) -> None:
        super().__init__()
        self.space, self.network, self.size = space, network, size

    def forward(self, images: Tensor) -> Tensor:
        """Return one vector per image."""
        units = self.space.to_unit(images).expand(-1, 3, -1, -1)
        if self.size is not None:
            shape = (self.size, self.size)
            units = functional.interpolate(units, shape, mode="bilinear", antialias=True)
        mean, std = (units.new_tensor(values).view(3, 1, 1) for values in IMAGENET)
        found = self.network((units - mean) / std)
        if isinstance(found, Tensor):
            return found
        states = cast(Tensor, found.last_hidden_state)  # of transformers: (n, t, d) or (n, d, h, w)
        return states.mean(1) if states.ndim == 3 else states.mean((2, 3))


def _transformers(name: str) -> nn.Module:
    from transformers import AutoModel  # slow to import

    source = find_source(name)

    def read() -> nn.Module:
        # Attacks differentiate through features, which fused attention supports only once.
        options = {"dtype": torch.float32, "attn_implementation": "eager", **source.options}
        return cast(nn.Module, AutoModel.from_pretrained(source.place, **options))

    return loaded(name, read)


def _torchvision(name: str, weights: str) -> nn.Module:
    from torchvision import models  # slow to import

    if name not in models.list_models(module=models):
        raise ValueError(
            f"backbone must be a classifier of torchvision if weights are given, got {name!r}"
        )
    model = cast(nn.Module, models.get_model(name, weights=weights if weights == DEFAULT else None))
    last = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    if not last:
        raise ValueError(f"{name} has no linear layer of logits to leave out")
    model.set_submodule(last[0], nn.Identity())
    if weights != DEFAULT:
        values = _state(Path(weights).expanduser())
        kept = {key: value for key, value in values.items() if not key.startswith(f"{last[0]}.")}
        try:
            model.load_state_dict(kept)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{weights} does not hold the weights of {name}: {reason}") from error
    return model


def _state(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file. No code in the file is run."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        values = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"cannot read weights from {file}: give a safetensors file, or what "
            f"torch.save(model.state_dict(), FILE) writes ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(one, Tensor) for one in values.values()):
        raise ValueError(f"{file} must hold a state_dict: names and tensors")
    return values


class _Affine(nn.Module):
    """BatchNorm in evaluation mode, with constants."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            raise ValueError("a backbone's BatchNorm has no statistics, so it mixes examples")
        scale = (variance + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.detach()
        shift = -mean * scale if norm.bias is None else norm.bias.detach() - mean * scale
        self.register_buffer("scale", scale.view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(-1, 1, 1), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        return values * self.get_buffer("scale") + self.get_buffer("shift")


def _without_batch_norm(network: nn.Module) -> nn.Module:
    """Replace every BatchNorm by constants, and operations in place by others."""
    for path, module in [*network.named_modules()]:
        if isinstance(module, _BatchNorm):
            network.set_submodule(path, _Affine(module))
        elif hasattr(module, "inplace"):
            module.inplace = False
    return network
