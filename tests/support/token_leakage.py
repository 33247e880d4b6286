"""A user's own attack on texts, as a plugin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from leakfrontier.adversaries import (
    Adversary,
    NotApplicable,
    Observation,
    Reconstruction,
    TokenSpace,
    infer_targets,
)


@dataclass(frozen=True)
class TokenLeakage(Adversary):
    """Read a text off the gradients of a model's embeddings of tokens and of places.

    For one text, the gradient of a place's row is the slope at that place, and that of a token's
    row is the sum of the slopes at the places where it stands: T = AP, where A says which token
    stands where. As wide as the text is long, P has a right inverse, and A is known.
    """

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the token that each place has most of."""
        tokens, places = _embeddings(observation)
        slopes, sums = (observation.update[f"{name}.weight"].double() for name in (places, tokens))
        stands = torch.linalg.pinv(slopes.T) @ sums.T  # places x tokens
        return Reconstruction(stands.argmax(dim=1).unsqueeze(0), infer_targets(observation, rng))


def _embeddings(observation: Observation) -> tuple[str, str]:
    """Return the names of the layers that embed tokens and places."""
    space = observation.space
    if not isinstance(space, TokenSpace):
        raise NotApplicable("the inputs are no tokens")
    if observation.batch_size != 1:
        raise NotApplicable(f"needs the gradient of one text, got {observation.batch_size}")
    found = {
        name: module
        for name, module in observation.model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    sizes = [layer.num_embeddings for layer in found.values()]
    if sizes != [space.vocabulary, *space.shape]:
        raise NotApplicable(f"needs embeddings of tokens and of places, got {sizes}")
    tokens, places = found
    if found[places].embedding_dim < space.shape[0]:
        raise NotApplicable("embeddings are narrower than texts are long")
    return tokens, places
