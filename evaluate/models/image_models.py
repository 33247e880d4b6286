"""Image classifiers of transformers, by hub id or from a folder."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import torchvision_ops  # noqa: F401 (or transformers may fail)

from .pretrained import NO_CODE, find_source, loaded


class ImageClassifier(nn.Module):
    """A model of transformers that maps images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.model(pixel_values=images).logits)


def image_classifier(space: ImageSpace, id: str, pretrained: bool = True) -> nn.Module:
    """Return an image classifier of transformers.

    The head is new unless the model was saved with a head for the same number of classes. With new
    weights, the model is made for the size and the channels of the images. Pretrained weights must
    already fit them.

    Args:
        space: Images.
        id: Its id on the Hugging Face hub, or its folder.
        pretrained: Whether to load its weights instead of new ones.
    """
    from transformers import AutoConfig, AutoModelForImageClassification  # slow to import

    channels, height, width = space.shape
    source = find_source(id)
    if source.gguf is not None:
        raise ValueError(f"hf needs an id or a folder for images, got the GGUF file {id}")

    # Attacks differentiate twice, which fused attention does not support.
    common = {"dtype": torch.float32, "attn_implementation": "eager"}

    def read() -> nn.Module:
        if pretrained:
            found = AutoModelForImageClassification.from_pretrained(
                source.place,
                num_labels=space.classes,
                ignore_mismatched_sizes=True,  # the head may have another size
                **common,
                **source.options,
            )
        else:
            config = AutoConfig.from_pretrained(source.place, num_labels=space.classes, **NO_CODE)
            for name, value in (("image_size", max(height, width)), ("num_channels", channels)):
                if hasattr(config, name):
                    setattr(config, name, value)
            found = AutoModelForImageClassification.from_config(config, **common)
        return cast(nn.Module, found)

    return ImageClassifier(loaded(id, read))
