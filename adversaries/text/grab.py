"""GRAB: texts from gradients of practical training, where dropout masks are unknown, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..base import Reconstruction
from ..matching.matching import Distance, Update, layerwise_cosine
from ..matching.optimizers import Adam, Unknowns
from .reordering import reorderings
from .texts import Texts
from .token_matching import TokenMatching

_EXCHANGED = 32  # nearest tokens that a place is tried with
_PATIENCE = 3  # rounds of changes without a better one, after which the search ends


@dataclass(frozen=True)
class GRAB(TokenMatching):
    """Search in turn for embeddings and dropout masks, and for the order of the tokens.

    The continuous part minimises the distance of updates over the embeddings and over a mask in
    [0, 1] for every place where the client's model drops activations: the same random masks that
    make a replay without them differ from the upload. The discrete part puts the nearest tokens
    into other orders and keeps what has the nearest update: unlike LAMP, without a language model.

    Only the abstract and a competitor's figures were at hand: this is a reading of them, not a
    reproduction. Ours are the distance, the prior on norms and the starts (those of LAMP); masks
    as sigmoids, with a prior that draws their mean to the share that is kept and each entry to 0
    or 1; orders by random changes; that a token is also exchanged for the next nearest ones; and
    that tokens take the place of their embeddings where their update is nearer. Labels and lengths
    are dealt with as in LAMP. Masks fall away where the client's model drops nothing, as in
    evaluation mode.

    Attributes:
        iterations: Steps of Adam.
        lr: Its first step size, in units of the root mean square of the vocabulary's embeddings.
        starts: Random starts of which the best is taken, and then random orders of it.
        norm_prior: Weight of the squared relative difference of the embeddings' mean norm from
            the vocabulary's.
        reorder_every: Steps between two searches for a better order, after the first tenth.
        orders: Changes that such a search tries for each sentence.
        use_embedding: Whether only tokens that the gradient of the embeddings shows are taken.
        blocks: How many of the first blocks' parameters are compared, beside those outside of
            blocks; None for all.
        lengths: The sentences' numbers of tokens, where they are known; estimated otherwise.
        beams: Guesses that the discrete part keeps from one round of changes to the next.
        rounds: Rounds of changes at the end, at most.
        learn_masks: Whether dropout masks are searched for; or else they are taken at their mean.
        mask_lr: First step size for the masks' logits.
        mask_prior: Weight of the prior on masks.

    References:
        Feng, Ma, Wang, Chegne, Ma, Abuadbba, Bai. "Uncovering Gradient Inversion Risks in
        Practical Language Model Training." CCS 2024. https://arxiv.org/abs/2507.21198
    """

    beams: int = 8
    rounds: int = 30
    learn_masks: bool = True
    mask_lr: float = 0.2
    mask_prior: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beams", "rounds"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.mask_lr < math.inf:
            raise ValueError(f"mask_lr must be positive and finite, got {self.mask_lr}")
        if not 0 <= self.mask_prior < math.inf:
            raise ValueError(f"mask_prior must be >= 0 and finite, got {self.mask_prior}")

    def distance(self, *, slopes: bool = True) -> Distance:
        """Compare directions, parameter by parameter."""
        return partial(layerwise_cosine, slopes=slopes)

    def optimizer(self, texts: Texts) -> Adam:
        """Descend in steps of their own for masks."""
        return replace(super().optimizer(texts), rates={"masks": self.mask_lr})

    def unknowns(self, texts: Texts, inputs: Tensor) -> Unknowns:
        """Search for masks, too, beginning with the share that is kept everywhere."""
        with torch.no_grad(), DropoutMasks() as dropout:
            texts.replay(inputs[0], texts.labels_at(inputs[0]))
        if not (self.learn_masks and dropout.sites):
            return {"inputs": inputs}
        kept = torch.cat([torch.full((site.size,), site.kept) for site in dropout.sites])
        return {"inputs": inputs, "masks": kept.logit().unsqueeze(0).to(inputs)}

    def replay(
        self, texts: Texts, inputs: Tensor, targets: Tensor, others: Unknowns
    ) -> tuple[Update, Tensor]:
        """Replay with masks in place of dropout; zeros and ones, as many as drawn, are likely."""
        masks = others["masks"].sigmoid() if "masks" in others else None
        with DropoutMasks(masks) as dropout:
            update = texts.replay(inputs, targets)
        if masks is None:
            return update, inputs.new_zeros(())
        parts = zip(masks.split([site.size for site in dropout.sites]), dropout.sites, strict=True)
        doubts = [
            (mask * (1 - mask)).mean() + (mask.mean() - site.kept).square() for mask, site in parts
        ]
        return update, self.mask_prior * torch.stack(doubts).mean()

    def reorder(self, texts: Texts, unknowns: Unknowns, rng: Generator) -> Unknowns:
        """Put tokens in the place of their embeddings if some order of them has a nearer update."""
        others = {name: value[0] for name, value in unknowns.items() if name != "inputs"}
        inputs = unknowns["inputs"][0]
        near = texts.candidates(inputs, _EXCHANGED)
        distances = self._remembering(texts, others)
        beams, values = self._improved(texts, texts.nearest(inputs)[None], near, distances, rng)
        reached = self.distances(texts, unknowns["inputs"], texts.labels_at(inputs)[None], others)
        if not values[0] < reached:
            return unknowns
        return {**unknowns, "inputs": texts.embedded(beams[:1])}

    def _remembering(self, texts: Texts, others: Unknowns) -> Callable[[Tensor], Tensor]:
        """Return the distances of guesses of tokens as a function that replays none twice."""
        known: dict[tuple[int, ...], float] = {}

        def distances(guesses: Tensor) -> Tensor:
            keys = [tuple(tokens) for tokens in guesses.flatten(1).tolist()]
            new = {key: row for row, key in enumerate(keys) if key not in known}
            if new:
                tried = guesses[[*new.values()]]
                found = self.distances(texts, texts.embedded(tried), texts.labels(tried), others)
                known.update(zip(new, found.tolist(), strict=True))
            return texts.table.new_tensor([known[key] for key in keys])

        return distances

    def _improved(
        self,
        texts: Texts,
        beams: Tensor,
        near: Tensor,
        distances: Callable[[Tensor], Tensor],
        rng: Generator,
    ) -> tuple[Tensor, Tensor]:
        """Return the best guesses after a change of each sentence, and their distances.

        Half of the changes are of the order; the others exchange a token for another one that is
        near to the embedding at its place.

        Args:
            texts: What is searched for.
            beams: Guesses of tokens, stacked.
            near: Tokens near to the embedding at each place, (sentences, length, tokens).
            distances: From stacked guesses of tokens to their updates' distances.
            rng: Source of all randomness.
        """
        half = (self.orders + 1) // 2
        rows = torch.arange(half, self.orders)
        values = near.new_zeros(len(beams), dtype=torch.float32)
        for sentence, free in enumerate(texts.free):
            places = free.nonzero().flatten()
            moved = beams[torch.arange(self.orders) % len(beams)]
            orders = places[reorderings(len(places), half, rng)]
            moved[:half, sentence, places] = moved[:half, sentence].gather(1, orders)
            where = places[torch.randint(len(places), (len(rows),), generator=rng)]
            which = torch.randint(near.shape[-1], (len(rows),), generator=rng)
            moved[rows, sentence, where] = near[sentence, where, which]
            tried = torch.cat([beams, moved]).unique(dim=0)
            found = distances(tried)
            best = found.nan_to_num(nan=math.inf).topk(min(self.beams, len(tried)), largest=False)
            beams, values = tried[best.indices], best.values
        return beams, values

    def finish(self, texts: Texts, best: Unknowns, rng: Generator) -> Reconstruction:
        """Return the nearest tokens, changed as long as that brings their update nearer."""
        others = {name: value[0] for name, value in best.items() if name != "inputs"}
        near = texts.candidates(best["inputs"][0], _EXCHANGED)
        distances = self._remembering(texts, others)
        beams, lowest, failures = texts.nearest(best["inputs"][0])[None], math.inf, 0
        for _ in range(self.rounds):
            beams, values = self._improved(texts, beams, near, distances, rng)
            failures = 0 if float(values[0]) < lowest else failures + 1
            lowest = min(lowest, float(values[0]))
            if failures == _PATIENCE:
                break
        return self.guess(texts, beams[0])


class _Site(NamedTuple):
    """A place where the client's model drops activations: how many, and the share it keeps."""

    size: int
    kept: float


class DropoutMasks(TorchFunctionMode):
    """While it is entered, dropout is multiplication by given masks, or does nothing.

    Attributes:
        sites: Where activations were dropped, in the order of the model's own code.
    """

    def __init__(self, masks: Tensor | None = None) -> None:
        """Take the masks of all sites, one after the other, or None for their mean."""
        super().__init__()
        self.masks = masks
        self.sites: list[_Site] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Look out for dropout."""
        kwargs = kwargs or {}
        if func is not functional.dropout:
            return func(*args, **kwargs)
        return self._dropped(*args, **kwargs)

    def _dropped(
        self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not (training and p > 0):
            return values
        before = sum(site.size for site in self.sites)
        self.sites.append(_Site(values.numel(), 1 - p))
        if self.masks is None:
            return values
        mask = self.masks[before : before + values.numel()]
        return values * mask.view(values.shape) / (1 - p)
