"""Gradient matching for texts: search for embeddings whose replayed update is the observed one.

This module holds the common parts of LAMP and GRAB. Gradient descent cannot move tokens, but it can
move their input embeddings. A replay takes embeddings as a guess, and the nearest tokens are read
off at the end. Between the steps, the attack tries other orders of the tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad

from ..base import Adversary, Observation, Reconstruction, in_groups, only
from ..matching.matching import Distance, Update, evaluation, stacked, vectorised
from ..matching.optimizers import Adam, Unknowns
from ..matching.unfused_norms import unfused_norms
from ..spaces import NotApplicable
from .language_prior import draw_sentences, next_token_logits
from .texts import Texts

_FLOATS_AT_ONCE = 2**24  # floats in the updates of a stack of guesses


def stepwise_decay(iteration: int, iterations: int) -> float:
    """Return 0.89 to the power of the number of completed fortieths of the search."""
    return float(0.89 ** (40 * iteration // iterations))


@dataclass(frozen=True)
class TokenMatching(Adversary):
    """An attack that searches for texts by their embeddings and by the order of their tokens.

    Attributes:
        iterations: Steps of Adam.
        lr: First step size of Adam, in units of the root mean square of the vocabulary's
            embeddings.
        starts: Number of random starts. The best is taken, and then as many random orders of it
            are tried.
        norm_prior: Weight of the squared relative difference between the embeddings' mean norm and
            the vocabulary's.
        reorder_every: Steps between two searches for a better order, after the first tenth.
        orders: Orders that such a search tries for each sentence.
        use_embedding: Whether to use only tokens that the gradient of the embeddings shows.
        blocks: Number of first blocks whose parameters are compared, in addition to parameters
            outside of blocks. None compares all blocks.
        lengths: Numbers of tokens of the sentences, if they are known. Default: estimated.
    """

    simulates: ClassVar[bool] = True
    cost: ClassVar[int] = 3

    iterations: int = 2000
    lr: float = 0.2
    starts: int = 500
    norm_prior: float = 2.0
    reorder_every: int = 75
    orders: int = 200
    use_embedding: bool = False
    blocks: int | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("iterations", "starts", "reorder_every", "orders"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.norm_prior < math.inf:
            raise ValueError(f"norm_prior must be >= 0 and finite, got {self.norm_prior}")
        if self.blocks is not None and not self.blocks >= 1:
            raise ValueError(f"blocks must be at least 1, or None for all, got {self.blocks}")
        if self.lengths is not None and not all(length >= 1 for length in self.lengths):
            raise ValueError(f"lengths must be at least 1, got {self.lengths}")

    @abstractmethod
    def distance(self, *, slopes: bool = True) -> Distance:
        """Return the distance between updates, with or without slopes."""

    @abstractmethod
    def reorder(self, texts: Texts, unknowns: Unknowns, rng: Generator) -> Unknowns:
        """Return unknowns with the tokens of each sentence in a better order, if one is found."""

    def unknowns(self, texts: Texts, inputs: Tensor) -> Unknowns:
        """Return the unknowns of the search, starting at the given embeddings."""
        return {"inputs": inputs}

    def optimizer(self, texts: Texts) -> Adam:
        """Return Adam with a decaying step size."""
        return Adam(self.iterations, lr=self.lr * texts.scale, schedule=stepwise_decay)

    def replay(
        self, texts: Texts, inputs: Tensor, targets: Tensor, others: Unknowns
    ) -> tuple[Update, Tensor]:
        """Return the update of one guess, and how unlikely its other unknowns are.

        Args:
            texts: The search problem.
            inputs: Embeddings of shape (sentences, length, width).
            targets: Their labels or, for next tokens, their tokens.
            others: The other unknowns.
        """
        return texts.replay(inputs, targets), inputs.new_zeros(())

    def prior(self, texts: Texts, inputs: Tensor) -> Tensor:
        """Return how unlikely the embeddings of one guess are."""
        size = inputs[texts.free].norm(dim=-1).mean()
        unusual: Tensor = (size / texts.size - 1).square()
        return self.norm_prior * unusual

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the nearest tokens of the best embeddings."""
        return only(self.reconstruct_all([observation], [rng]))

    def reconstruct_all(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction | NotApplicable]:
        """Search at once behind all observations that replay the same client."""
        searches: dict[int, _Search] = {}

        def prepare(index: int) -> tuple[object, ...]:
            observation, rng = observations[index], rngs[index]
            texts = Texts.of(
                observation, rng, self.lengths, use_embedding=self.use_embedding, blocks=self.blocks
            )
            texts, inputs = self._start(texts, rng)
            start = self.unknowns(texts, inputs.unsqueeze(0))
            searches[index] = _Search(texts, rng, start)
            others = (value.shape for name, value in start.items() if name != "inputs")
            return (observation.replay, observation.batch_size, texts.names, *others)

        def attack(group: Sequence[int]) -> list[Reconstruction]:
            size = _at_once(observations[group[0]])
            parts = (group[i : i + size] for i in range(0, len(group), size))
            return [
                guess for part in parts for guess in self._searched([searches[i] for i in part])
            ]

        return in_groups(len(observations), prepare, attack)

    def _searched(self, searches: Sequence[_Search]) -> list[Reconstruction]:
        """Improve the guesses for all observations in one loop."""
        first = searches[0].texts
        observed = stacked([search.texts.observation.update for search in searches])
        compared = {name: observed[name] for name in first.names}
        best, _ = self.optimizer(first).minimise(
            evaluation(self._replays(searches, observed), self.distance(), compared),
            _side_by_side([search.start for search in searches]),
            self._projection(searches),
            torch.randn_like,
        )
        return [
            self.finish(search.texts, row, search.rng)
            for search, row in zip(searches, _apart(best, searches), strict=True)
        ]

    def finish(self, texts: Texts, best: Unknowns, rng: Generator) -> Reconstruction:
        """Return the nearest tokens."""
        return self.guess(texts, texts.nearest(best["inputs"][0]))

    def guess(self, texts: Texts, tokens: Tensor) -> Reconstruction:
        """Return tokens as the attack's guess."""
        guess = texts.padded(tokens)
        targets = guess if texts.targets is None else texts.targets
        return Reconstruction(guess, targets, self.objective(texts.observation, guess, targets))

    @torch.no_grad()
    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return the distance plus the prior at a guess of tokens."""
        texts = Texts.at(observation, inputs, targets, self.blocks)
        embedded = texts.embedded(inputs)
        replayed, _ = self.replay(texts, embedded, targets, {})
        stack = {name: value.unsqueeze(0) for name, value in replayed.items()}
        value, _ = self.distance(slopes=False)(stack, texts.observed)
        return float(value + self.prior(texts, embedded))

    @torch.no_grad()
    def distances(
        self, texts: Texts, inputs: Tensor, targets: Tensor, others: Unknowns | None = None
    ) -> Tensor:
        """Return the distances between the updates of a stack of guesses and the observed one."""
        replay = vectorised(lambda x, y: self.replay(texts, x, y, others or {})[0])
        distance = self.distance(slopes=False)
        size = 2 * _at_once(texts.observation)  # no autograd graph takes memory
        parts = zip(inputs.split(size), targets.split(size), strict=True)
        return torch.cat([distance(replay(*part), texts.observed)[0] for part in parts])

    def _replays(
        self, searches: Sequence[_Search], observed: Update
    ) -> Callable[[Unknowns], tuple[Update, Tensor]]:
        """Return a function from guesses, one per observation, to updates and priors."""
        every, first = [search.texts for search in searches], searches[0].texts
        simulate = vectorised(
            lambda x, y, others, update: self.replay(first.behind(update), x, y, others)
        )

        def replay(unknowns: Unknowns) -> tuple[Update, Tensor]:
            rows = [row["inputs"][0] for row in _apart(unknowns, searches)]
            pairs = list(zip(every, rows, strict=True))
            inputs = unknowns["inputs"]
            targets = [texts.labels_at(row.detach()) for texts, row in pairs]
            if first.next_token:
                targets = [first.padded(tokens, inputs.shape[2]) for tokens in targets]
            others = {name: value for name, value in unknowns.items() if name != "inputs"}
            with unfused_norms(first.observation.model):
                replayed, unlikely = simulate(inputs, torch.stack(targets), others, observed)
            prior = torch.stack([self.prior(texts, row) for texts, row in pairs])
            return replayed, prior + unlikely

        return replay

    def _projection(self, searches: Sequence[_Search]) -> Callable[[Unknowns], Unknowns]:
        """Return the projection after every step: restore known tokens, or reorder all."""
        iteration = -2  # the start is projected, too

        @torch.no_grad()
        def project(unknowns: Unknowns) -> Unknowns:
            nonlocal iteration
            iteration += 1
            due = 10 * iteration >= self.iterations and iteration % self.reorder_every == 1
            rows = []
            for (texts, rng, _), row in zip(searches, _apart(unknowns, searches), strict=True):
                settled = {**row, "inputs": texts.settled(row["inputs"])}
                rows.append(self.reorder(texts, settled, rng) if due else settled)
            return _side_by_side(rows)

        return project

    def _start(self, texts: Texts, rng: Generator) -> tuple[Texts, Tensor]:
        """Return the texts with labels, and the best start."""
        if texts.next_token:
            return texts, self._likely_sentences(texts, rng)
        if texts.targets is None:
            texts = self._labelled(texts, rng)
        shape = (self.starts, *texts.known.shape, texts.table.shape[1])
        noise = normalize(torch.randn(shape, generator=rng), dim=-1).to(texts.table)
        inputs = self._best(texts, texts.settled(texts.size * noise))
        return texts, self._best(texts, self._shuffled(texts, inputs, rng))

    def _likely_sentences(self, texts: Texts, rng: Generator) -> Tensor:
        """Return the best of several sentences that the model itself draws.

        Embeddings and labels must fit together; otherwise no update is similar.
        """
        logits = next_token_logits(texts.observation)
        known = texts.known.repeat(self.starts, 1)
        tokens = draw_sentences(logits, known, texts.allowed, rng)
        return self._best(texts, texts.embedded(tokens.view(self.starts, *texts.known.shape)))

    def _shuffled(self, texts: Texts, inputs: Tensor, rng: Generator) -> Tensor:
        """Return embeddings in their current order, and in random orders."""
        moved = inputs.repeat(self.starts + 1, 1, 1, 1)
        for guess in moved[1:]:
            for sentence, free in zip(guess, texts.free, strict=True):
                places = free.nonzero().flatten()
                order = torch.randperm(len(places), generator=rng)
                sentence[places] = sentence[places[order]]
        return moved

    def _labelled(self, texts: Texts, rng: Generator) -> Texts:
        """Return texts with the labels of the batch of public texts with the nearest update."""
        public, count = texts.observation.public, len(texts.known)
        if public is None:
            raise NotApplicable("labels are not granted and cannot be inferred")
        rows = torch.randint(len(public.inputs), (self.starts, count), generator=rng)
        values = self.distances(texts, public.inputs[rows], public.targets[rows])
        return replace(texts, targets=public.targets[rows[_lowest(values)]])

    def _best(self, texts: Texts, inputs: Tensor) -> Tensor:
        """Return the guess of a stack with the nearest update."""
        targets = torch.stack([texts.labels_at(guess) for guess in inputs])
        return inputs[_lowest(self.distances(texts, inputs, targets))]


class _Search(NamedTuple):
    """The search behind one observation, and its start: a stack of one guess."""

    texts: Texts
    rng: Generator
    start: Unknowns


def _side_by_side(rows: Sequence[Unknowns]) -> Unknowns:
    """Join stacks of one guess, with embeddings padded to a common length."""
    width = max(row["inputs"].shape[2] for row in rows)
    wide = [
        {**row, "inputs": pad(row["inputs"], (0, 0, 0, width - row["inputs"].shape[2]))}
        for row in rows
    ]
    return {name: torch.cat([row[name] for row in wide]) for name in rows[0]}


def _apart(unknowns: Unknowns, searches: Sequence[_Search]) -> list[Unknowns]:
    """Split a stack into stacks of one guess, each as long as its texts."""
    rows = [
        {name: value[i : i + 1] for name, value in unknowns.items()} for i in range(len(searches))
    ]
    return [
        {**row, "inputs": row["inputs"][:, :, : search.texts.known.shape[1]]}
        for row, search in zip(rows, searches, strict=True)
    ]


def _at_once(observation: Observation) -> int:
    """Return how many guesses to put into one stack."""
    entries = sum(value.numel() for value in observation.update.values())
    return max(1, _FLOATS_AT_ONCE // (4 * entries))


def _lowest(values: Tensor) -> int:
    return int(values.nan_to_num(nan=math.inf).argmin())
