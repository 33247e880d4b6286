"""LAMP: texts from gradients, with a language model as a prior on word order."""

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

    Adam minimises the distance of the replayed update from the observed one, plus a prior on the
    embeddings' norm. Every `reorder_every` steps after the first tenth, the attack tries other
    orders of each sentence's tokens. It keeps the order with the lowest distance + `language` *
    cross-entropy of the nearest tokens. The guess is the nearest tokens, by the cosine, of the best
    embeddings. Without reorderings and priors, this is TAG or, with squared errors, DLG for text.

    This attack differs from the paper as follows:

    - The prior is the attacked model itself instead of another language model with the same
      vocabulary. It uses the model's next-token logits or, for a decoder that classifies, those of
      its tied embeddings. There is no prior if the model is an encoder, or if it finds public texts
      hardly more likely than random tokens. Orders are then chosen by their gradients alone.
    - The authors' attack is given the labels. Here the threat model decides. If labels are not
      granted, the attack infers them from the last layer's bias. If that fails, it takes the labels
      of the public texts with the nearest update, among as many batches as there are starts.
    - If the model learns next tokens, the labels are the text itself: the nearest tokens at every
      step. Tokens come from those that the gradient of the embeddings shows, up to twice the number
      of tokens. Starts are sentences of these tokens that the model itself draws.
    - The authors' attack is given the lengths. Here they are estimated unless `lengths` is set.
    - Starts are scaled to the vocabulary's norm before they are compared, not after.
    - The step size falls by the same total factor for any number of iterations.
    - After a sentence is reordered, the prior sees the new order.
    - Padding is masked, as the client does it.

    Attributes:
        iterations: Steps of Adam. The paper takes 5000 for large models.
        lr: First step size of Adam, in units of the root mean square of the vocabulary's
            embeddings. The paper's 0.01 is 0.2 for BERT.
        starts: Number of random starts. The best is taken, and then as many random orders of it
            are tried.
        norm_prior: Weight of the squared relative difference between the embeddings' mean norm and
            the vocabulary's. For BERT, the paper takes 2 with the cosine, and 49 with L1 and L2.
        reorder_every: Steps between two searches for a better order, after the first tenth.
        orders: Orders that such a search tries for each sentence.
        use_embedding: Whether to use only tokens that the gradient of the embeddings shows. This is
            an option of the authors' code. It leaves little but the order to be found.
        blocks: Number of first blocks whose parameters are compared, in addition to parameters
            outside of blocks. None, as published, compares all blocks.
        lengths: Numbers of tokens of the sentences, if they are known. Default: estimated.
        comparison: `cosine` is the mean over parameters of the cosine distance. `l1l2` is squared
            errors plus `absolute` times absolute errors.
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
        """Return the distance that `comparison` names."""
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
        """Keep the most likely order of each sentence, by its gradient and the language model."""
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
