"""Language models of transformers, as functions of token ids, and the loss of next tokens."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from leakfrontier.adversaries.spaces import TokenSpace, real_tokens, up_to_last

from .pretrained import Task


class LanguageModel(nn.Module):
    """A causal language model or a sequence classifier, as a function of token ids only.

    It maps token ids (n, length) to logits: (n, length, vocabulary) for next tokens, (n, classes)
    for a label. Floating-point inputs (n, length, width) are input embeddings of tokens. Rows of
    zeros at the end of a sequence are its padding.

    Padding has no effect. It is on the right, where causal models do not look. Encoders get a mask,
    and a decoder's label comes from the last token before the padding. Attention is computed
    eagerly, so that gradients can be differentiated and vectorised. The model starts in evaluation
    mode.

    Attributes:
        model: The transformers model.
        padding: See `TokenSpace`.
        task: See `TokenSpace`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        padding: int | None,
        task: Task = "next-token",
    ) -> None:
        super().__init__()
        self.model, self.padding, self.task = model, padding, task
        self.causal = not is_encoder(model)
        if self.causal is False and task == "next-token":
            raise ValueError(
                f"{type(model).__name__} is an encoder, whose tokens see later tokens: it can "
                "only be trained with task: classification"
            )
        model.set_attn_implementation("eager")  # type: ignore[operator]
        body = cast(nn.Module, model.base_model) if task == "classification" else model
        self._takes_positions = "position_ids" in inspect.signature(body.forward).parameters
        self.eval()

    @classmethod
    def for_space(cls, model: nn.Module, space: TokenSpace) -> LanguageModel:
        """Return a language model for the task of a space."""
        return cls(model, padding=space.padding, task=space.task)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of tokens, or of their embeddings."""
        if inputs.is_floating_point():
            embedded, real = inputs, up_to_last((inputs != 0).any(-1))
        else:
            embedding = cast(nn.Module, self.model.get_input_embeddings())  # type: ignore[operator]
            embedded, real = embedding(inputs), real_tokens(inputs, self.padding)
        given: dict[str, Any] = {
            "inputs_embeds": embedded,
            "attention_mask": self._mask(real, embedded),
        }
        if not self.causal:
            return cast(Tensor, self.model(**given).logits)
        given["use_cache"] = False
        if self._takes_positions:
            places = torch.arange(embedded.shape[1], device=embedded.device)
            given["position_ids"] = places.expand(embedded.shape[:2])
        if self.task == "next-token":
            return cast(Tensor, self.model(**given).logits)
        hidden = cast(nn.Module, self.model.base_model)(**given).last_hidden_state
        return self._at_end(cast(nn.Module, self.model.score)(hidden), real)

    def _mask(self, real: Tensor, like: Tensor) -> Tensor:
        """Return the mask that is added to attention scores (n, heads, queries, keys)."""
        count, length = real.shape
        if self.causal:
            seen = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
            seen = seen.expand(count, 1, length, length)
        else:
            seen = real[:, None, None, :].expand(count, 1, length, length)
        return torch.zeros_like(seen, dtype=like.dtype).masked_fill(
            ~seen, torch.finfo(like.dtype).min
        )

    @staticmethod
    def _at_end(scores: Tensor, real: Tensor) -> Tensor:
        """Return the scores at each sequence's last real token; at its first if it has none."""
        place = (real.sum(1) - 1).clamp(min=0)
        chosen = place[:, None] == torch.arange(real.shape[1], device=real.device)
        return (scores * chosen[..., None]).sum(1)


def is_encoder(model: nn.Module) -> bool:
    """Return whether the tokens of a transformers model see later tokens."""
    from transformers.models.auto.modeling_auto import (  # slow to import
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    config = model.config
    kind = getattr(config, "model_type", "")
    return kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
