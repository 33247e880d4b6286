"""LAMP: texts from gradients, with a language model as the prior of their word order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor

from ..matching.matching import Distance, Update, absolute_error, layerwise_cosine, squared_error
from ..matching.optimizers import Unknowns
from .reordering import reorderings
from .texts import Texts
from .token_matching import TokenMatching


@dataclass(frozen=True)
class LAMP(TokenMatching):
    """Search for embeddings by their gradient, and for orders that a language model finds likely.

    Adam minimises the distance of the replayed update from the observed one plus a prior on the
    embeddings' norm. Every `reorder_every` steps after the first tenth, each sentence's tokens are
    put into other orders, of which the one with the least distance + `language` * cross-entropy
    of the nearest tokens is kept. The nearest tokens, by the cosine, of the best embeddings are
    the guess. Without reorderings and priors, this is TAG or, with squared errors, DLG for text.

    What we read differently:

    - The prior is the model under attack itself, in place of a language model of the same
      vocabulary: its own next-token logits or, if it is a decoder that classifies, those that its
      tied embeddings give. A model that finds public texts hardly likelier than any tokens, or
      an encoder, is none, and orders are chosen by their gradients alone.
    - Labels are granted to the authors' attack. Here they are if the threat model says so, or else
      inferred from the last layer's bias, or taken from the public texts whose update is nearest
      of as many as there are starts. When next tokens are learned, the labels are the text:
      they are the nearest tokens of every step, among those that the gradient of the embeddings
      shows, up to twice as many as there are tokens, and starts are sentences of these that the
      model itself draws.
    - So are lengths: here they are estimated unless given as `lengths`.
    - Starts are scaled to the vocabulary's norm before they are compared, not after; the step
      size falls by the same total factor in any number of iterations; after a sentence was
      reordered, the prior sees its new order; padding is masked, as the client does it.

    Attributes:
        iterations: Steps of Adam; 5000 for large models in the paper.
        lr: Its first step size, in units of the root mean square of the vocabulary's embeddings:
            the paper's 0.01 is 0.2 of BERT's.
        starts: Random starts of which the best is taken, and then random orders of it.
        norm_prior: Weight of the squared relative difference of the embeddings' mean norm from
            the vocabulary's: for BERT, the paper's are 2 with the cosine, 49 with L1 and L2.
        reorder_every: Steps between two searches for a better order, after the first tenth.
        orders: Orders that such a search tries for each sentence.
        use_embedding: Whether only tokens that the gradient of the embeddings shows are taken: an
            option of the authors' code, which leaves little but the order to be found.
        blocks: How many of the first blocks' parameters are compared, beside those outside of
            blocks; None, as published, for all.
        lengths: The sentences' numbers of tokens, where they are known; estimated otherwise.
        comparison: `cosine`, the mean over parameters of the cosine distance, or `l1l2`, squared
            plus `absolute` times absolute errors.
        language: Weight of the cross-entropy: 0.2 with the cosine, 60 with L1 and L2.
        absolute: Weight of absolute errors.

    References:
        Balunovic, Dimitrov, Jovanovic, Vechev. "LAMP: Extracting Text from Gradients with Language
        Model Priors." NeurIPS 2022. https://arxiv.org/abs/2202.08827
        Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran, Ding. "TAG: Gradient Attack on
        Transformer-based Language Models." EMNLP Findings 2021. https://arxiv.org/abs/2103.06819
    """

    comparison: Literal["cosine", "l1l2"] = "cosine"
    language: float = 0.2
    absolute: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comparison not in ("cosine", "l1l2"):
            raise ValueError(f"comparison must be cosine or l1l2, got {self.comparison!r}")
        for name in ("language", "absolute"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")

    def distance(self, *, slopes: bool = True) -> Distance:
        """Compare directions, parameter by parameter, or all entries."""
        if self.comparison == "cosine":
            return partial(layerwise_cosine, slopes=slopes)

        def errors(replayed: Update, observed: Update) -> tuple[Tensor, Update]:
            squares, slopes = squared_error(replayed, observed)
            sizes, signs = absolute_error(replayed, observed)
            for name, slope in slopes.items():
                slope.add_(signs[name], alpha=self.absolute)
            return squares + self.absolute * sizes, slopes

        return errors

    def reorder(self, texts: Texts, unknowns: Unknowns, rng: Generator) -> Unknowns:
        """Keep the likeliest order of each sentence, by its gradient and the language model."""
        prior = texts.language if self.language else None
        inputs = unknowns["inputs"][0].clone()
        tokens = texts.nearest(inputs)
        for sentence, free in enumerate(texts.free):
            places = free.nonzero().flatten()
            orders = places[reorderings(len(places), self.orders, rng)]
            moved, read = (part.repeat(len(orders), *[1] * part.dim()) for part in (inputs, tokens))
            moved[:, sentence, places] = inputs[sentence, orders]
            read[:, sentence, places] = tokens[sentence, orders]
            value = self.distances(texts, moved, texts.labels(read))
            if prior is not None:
                value = value + self.language * _mean_over_sentences(prior, read)
            best = int(value.nan_to_num(nan=math.inf).argmin())
            inputs, tokens = moved[best].clone(), read[best]
        return {**unknowns, "inputs": inputs.unsqueeze(0)}


def _mean_over_sentences(prior: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return torch.stack([prior(part) for part in tokens.unbind(1)]).mean(0)
