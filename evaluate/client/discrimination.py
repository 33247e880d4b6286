"""Test whether what adversaries know of a defense tells the truth from other examples.

A replay that fits the upload at the truth may fit it as well at every other guess, so that attacks
find nothing. The test compares a replay with that of an undefended client, on the upload as it is
and on the decoded one. It tests the `unguarded` client and `log_likelihood` alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Generator, Tensor

from leakfrontier.adversaries.base import in_evaluation
from leakfrontier.defenses import Batch, Update

from ..foundations.rows import ProbeRow, ReplayRow
from ..foundations.seeds import fork
from .client import Client, ThreatModel, make_replay
from .decoders import Decoder
from .examination import REPEATED, KnownRound, distance, known_upload, mending_of
from .inversion import Inversion, decoded
from .mending import Mending


@dataclass(frozen=True)
class Examined:
    """What examinations found of a defense.

    Attributes:
        replay: The quality of its replay.
        probe: What its uploads still hold; None if it was not tested.
        decoder: A decoder of its uploads, if one recovers much of the update.
    """

    replay: ReplayRow
    probe: ProbeRow | None = None
    decoder: Decoder | None = None

    @property
    def mending(self) -> Mending:
        """Return the repairs of what adversaries know of the defense."""
        return mending_of(self.replay, self.probe)

    def write(self, path: Path) -> None:
        """Write the findings without the decoder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(self.replay), None if self.probe is None else asdict(self.probe)]
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(rows))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Examined | None:
        """Return what `write` wrote; None if there is no such file."""
        try:
            replay, probe = json.loads(path.read_text())
            return cls(ReplayRow(**replay), None if probe is None else ProbeRow(**probe))
        except (OSError, ValueError, TypeError):
            return None

    def found_in(self, uploads: Sequence[Mapping[str, Tensor]]) -> Update | None:
        """Return what the decoder finds in the last of some uploads (see `hidden_in`)."""
        return None if self.decoder is None else hidden_in(uploads, self.decoder)


def hidden_in(uploads: Sequence[Mapping[str, Tensor]], decoder: Decoder) -> Update | None:
    """Return the undefended update that is hidden in the last upload; None if none is found.

    An upload that is a multiple of its update hides nothing.

    Args:
        uploads: Uploads of a client, the oldest first. An update that is hidden in the next upload
            is not found.
        decoder: A decoder of such uploads.
    """
    if decoder.lag or len(uploads) < decoder.view.rounds:
        return None
    found = decoded(decoder, uploads)
    return None if angle(found, uploads[-1]) < SAME else found


Distance = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]
Simulation = Callable[[Tensor, Tensor, Update], Mapping[str, Tensor]]

SAME = 1e-3
"""Updates whose directions are no farther apart than this are the same."""

_TINY = 1e-12


def discriminated(
    inversion: Inversion,
    client: Client,
    cohorts: Sequence[Sequence[Batch]],
    mending: Mending,
    rng: Generator,
) -> ProbeRow:
    """Return the row of an inversion, with what the defense's own account of itself is worth.

    Args:
        inversion: How much of the update uploads still hold.
        client: The template of all clients.
        cohorts: The examples of the clients of several rounds.
        mending: The repairs of the defense's replay.
        rng: Source of all randomness.
    """
    with in_evaluation(client.model):
        rounds = [KnownRound.play(client, shares, rng) for shares in cohorts]
        models = [client.model] * len(cohorts[0])
        replay, undefended = (
            make_replay(client, ThreatModel(), fork(rng), models=models, mending=one)
            for one in (mending, Mending(undefended=True))
        )
        shown = [lambda update: update]
        decoder = inversion.decoder
        if decoder is not None and not decoder.needs_history:
            shown.append(lambda update: decoded(decoder, [update]))
        return replace(
            inversion.row,
            contrast=max(_contrast(rounds, replay, one) for one in (distance, angle)),
            ideal_contrast=max(_contrast(rounds, undefended, angle, one) for one in shown),
            unguarded=median(
                _unguarded(client, *pair, rng) for pair in zip(rounds, cohorts, strict=True)
            ),
            repeat=median(one.repeat for one in rounds),
            nearer=_share_nearer(rounds, replay),
            preferred=_share_preferred(rounds, replay, client),
        )


def angle(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the distance between the directions of two updates, from 0 to 1."""
    one, other = (
        torch.cat([each[name].detach().flatten().double() for name in reference])
        for each in (update, reference)
    )
    size = one.norm() * other.norm()
    cosine = 0.0 if size == 0 else float(one @ other / size)
    return math.sqrt(max(0.0, 1 - max(cosine, 0.0) ** 2)) if math.isfinite(cosine) else math.nan


def _others(rounds: Sequence[KnownRound], one: KnownRound) -> list[Batch]:
    """Return other inputs with the labels of the truth, because labels alone identify nobody."""
    return [
        Batch(other.examples.inputs, one.examples.targets) for other in rounds if other is not one
    ]


def _contrast(
    rounds: Sequence[KnownRound],
    simulate: Simulation,
    measure: Distance,
    show: Callable[[Update], Update] = dict,
) -> float:
    """Return how much nearer the truth is to an upload than other examples are: 0 to 1."""

    def contrast(one: KnownRound) -> float:
        seen = show(one.upload)

        def apart(guess: Batch) -> float:
            return measure(simulate(*guess, one.upload), seen)

        truth = min(apart(guess) for guess in (one.examples, one.trained_on))
        others = [*map(apart, _others(rounds, one))]
        if not all(map(math.isfinite, [truth, *others])) or not median(others) > _TINY:
            return 0.0
        return 1 - truth / median(others)

    return median(map(contrast, rounds))


def _unguarded(client: Client, one: KnownRound, shares: Sequence[Batch], rng: Generator) -> float:
    """Return how near uploads of the `unguarded` client come to one of the client.

    The nearest of several counts, because a defense may draw large noise at times.
    """
    unguarded = replace(client, defense=replace(client.defense).unguarded())
    uploads = [known_upload(unguarded, shares, fork(rng))[0] for _ in range(REPEATED)]
    return min(distance(upload, one.upload) for upload in uploads)


def _share_nearer(rounds: Sequence[KnownRound], simulate: Simulation) -> float:
    """Return the share of other examples that are farther from the upload than the truth."""

    def fit(one: KnownRound, guess: Batch) -> float:
        return -distance(simulate(*guess, one.upload), one.upload)

    return _share_preferring_truth(rounds, fit)


def _share_preferred(
    rounds: Sequence[KnownRound], simulate: Simulation, client: Client
) -> float | None:
    """Return the share of other examples that are less likely than the truth."""
    single = client.protocol.uploads_gradient

    def likelihood(one: KnownRound, guess: Batch) -> Tensor | None:
        defense = replace(client.defense)
        size = len(guess.inputs) if single else None
        return defense.log_likelihood(one.upload, dict(simulate(*guess, one.upload)), size)

    if likelihood(rounds[0], rounds[0].examples) is None:
        return None

    def fit(one: KnownRound, guess: Batch) -> float:
        found = likelihood(one, guess)
        return -math.inf if found is None else float(found)

    return _share_preferring_truth(rounds, fit)


def _share_preferring_truth(
    rounds: Sequence[KnownRound], fit: Callable[[KnownRound, Batch], float]
) -> float:
    wins = [
        max(fit(one, truth) for truth in (one.examples, one.trained_on)) > fit(one, other)
        for one in rounds
        for other in _others(rounds, one)
    ]
    return sum(wins) / len(wins)
