"""GRAB: texts from gradients of practical training, where dropout masks are unknown too."""

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

_EXCHANGED = 32  # number of nearest tokens to try at a place
_PATIENCE = 3  # the search ends after this many rounds without a better guess


@dataclass(frozen=True)
class GRAB(TokenMatching):
    """Search alternately for embeddings with dropout masks, and for the order of the tokens.

    The continuous part minimises the distance of updates over the embeddings and over dropout
    masks. There is a mask in [0, 1] for every place where the client's model drops activations.
    These random masks make a replay without them differ from the upload. The discrete part puts the
    nearest tokens into other orders and keeps the order with the nearest update. Unlike LAMP, it
    uses no language model.

    Only the abstract and a competitor's figures were available. This attack is an interpretation of
    them, not a reproduction. The following parts are not from the paper:

    - The distance, the prior on norms and the starts are those of LAMP.
    - Masks are sigmoids. A prior draws their mean to the share that is kept, and each entry to 0
      or 1.
    - Orders come from random changes. A token may also be exchanged for the next nearest ones.
    - Tokens replace their embeddings if their update is nearer.

    Labels and lengths are treated as in LAMP. There are no masks if the client's model drops
    nothing, as in evaluation mode.

    Attributes:
        iterations: Steps of Adam.
        lr: First step size of Adam, in units of the root mean square of the vocabulary's
            embeddings.
        starts: Number of random starts. The best is taken, and then as many random orders of it
            are tried.
        norm_prior: Weight of the squared relative difference between the embeddings' mean norm and
            the vocabulary's.
        reorder_every: Steps between two searches for a better order, after the first tenth.
        orders: Changes that such a search tries for each sentence.
        use_embedding: Whether to use only tokens that the gradient of the embeddings shows.
        blocks: Number of first blocks whose parameters are compared, in addition to parameters
            outside of blocks. None compares all blocks.
        lengths: Numbers of tokens of the sentences, if they are known. Default: estimated.
        beams: Guesses that the discrete part keeps from one round of changes to the next.
        rounds: Largest number of rounds of changes at the end.
        learn_masks: Whether to search for dropout masks. Otherwise their mean is used.
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
        """Return the mean cosine distance over parameters."""
        return partial(layerwise_cosine, slopes=slopes)

    def optimizer(self, texts: Texts) -> Adam:
        """Return Adam with a separate step size for masks."""
        return replace(super().optimizer(texts), rates={"masks": self.mask_lr})

    def unknowns(self, texts: Texts, inputs: Tensor) -> Unknowns:
        """Add masks to the unknowns; they start at the share that is kept."""
        with torch.no_grad(), DropoutMasks() as dropout:
            texts.replay(inputs[0], texts.labels_at(inputs[0]))
        if not (self.learn_masks and dropout.sites):
            return {"inputs": inputs}
        kept = torch.cat([torch.full((site.size,), site.kept) for site in dropout.sites])
        return {"inputs": inputs, "masks": kept.logit().unsqueeze(0).to(inputs)}

    def replay(
        self, texts: Texts, inputs: Tensor, targets: Tensor, others: Unknowns
    ) -> tuple[Update, Tensor]:
        """Replay with masks instead of dropout; the prior favours 0 and 1 in the right shares."""
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
        """Replace embeddings by tokens if some order of the tokens has a nearer update."""
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
        """Return a function for the distances of token guesses that replays none twice."""
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

        Half of the changes reorder tokens. The others exchange a token for one that is near the
        embedding at its place.

        Args:
            texts: The search problem.
            beams: Guesses of tokens, stacked.
            near: Tokens near the embedding at each place, (sentences, length, tokens).
            distances: Maps stacked guesses of tokens to the distances of their updates.
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
        """Return the nearest tokens, changed as long as their update comes nearer."""
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
    """A place where the client's model drops activations: their number, and the kept share."""

    size: int
    kept: float


class DropoutMasks(TorchFunctionMode):
    """A context in which dropout multiplies by given masks, or does nothing.

    Attributes:
        sites: The places where activations were dropped, in the order in which the model runs.
    """

    def __init__(self, masks: Tensor | None = None) -> None:
        """Take the concatenated masks of all sites, or None for their mean."""
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
        """Replace dropout, and run all other functions unchanged."""
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
