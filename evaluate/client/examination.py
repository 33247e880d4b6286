"""Test whether an informed adversary's replay of a defense can be trusted.

An attack that knows the defense replays the client on its guesses. Some replays would cripple that
attack, so that the defense seems to protect. They draw fresh noise, lose their slope by rounding,
or compute a different function while vectorised. So the harness examines the replay of every
defense on clients with known examples, and repairs it if it fails. It replaces secret draws by
their mean or averages over them. It uses a straight-through gradient for rounding. If a stack of
guesses gives different results, it replays guesses one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import cosine_similarity

from leakfrontier.adversaries import Replay
from leakfrontier.adversaries.base import in_evaluation
from leakfrontier.defenses import Batch, Chain, Defense, Update

from ..foundations.rows import ProbeRow, ReplayRow
from ..foundations.seeds import copied, fork
from ..users.contract import Checked
from .client import Client, ThreatModel, make_replay, release
from .mending import AS_GIVEN, DRAWS, Draws, Mending

EXAMINED_ROUNDS = 3
"""Number of rounds whose uploads are used to examine a replay."""

REPEATED = 4
"""Uploads of the same examples that measure how far a defense's draws move an upload."""

LOST = 0.5
"""A slope is lost if its cosine with the truth is this much below that of straight-through."""

SMALL = 1e-4
"""Norm of the slope in the upload that is used to test the slope in the inputs."""

EXACT = 1e-5
"""Relative distance of updates that differ only by the order of their sums."""

STEP = 0.1
"""Share of the distance to other inputs over which a slope must predict the change."""

ALIKE = 1e-2
"""Updates within this relative distance are the same, because rounding may go either way."""

FAR = 1.5
"""A replay at the truth is too far off if another upload is nearer by this factor."""

LEAST_CONTRAST = 0.2
"""If the truth is nearer to an upload than other examples by less than this, noise drowns it."""

CLEAR = 0.4
"""If an undefended client's replay has this contrast, the defense's replay must discriminate."""

KEPT = 0.5
"""Share of the contrast of an undefended client's replay that the defense's replay must have."""

TOLERATED = 1 / 3
"""By this share of examples, a likelihood may prefer the truth less often than a distance."""

_TINY = 1e-30


def examine(client: Client, cohorts: Sequence[Sequence[Batch]], rng: Generator) -> ReplayRow:
    """Return the properties of the replay of a client's defense, and its repairs.

    The model is in evaluation mode, because its dropout is not part of the defense's draws.

    Args:
        client: The template of all clients.
        cohorts: The examples of the clients of several rounds.
        rng: Source of all randomness.
    """
    with in_evaluation(client.model):
        return _examined(client, cohorts, rng)


def _examined(client: Client, cohorts: Sequence[Sequence[Batch]], rng: Generator) -> ReplayRow:
    rounds = [KnownRound.play(client, shares, rng) for shares in cohorts]
    models = [client.model] * len(cohorts[0])
    public = fork(rng)

    def replay(mending: Mending = AS_GIVEN) -> Replay:
        again = copied(public)  # every replay draws the same random numbers
        return make_replay(client, ThreatModel(), again, models=models, mending=mending)

    def residual(mending: Mending) -> float:
        return median(one.missed_by(replay(mending)) for one in rounds)

    given, truth = replay(), rounds[0].asked
    random = distance(given(*truth), given(*truth)) > EXACT
    own = not random or _has_own_replay(client.defense, rounds[0].upload)
    chosen = min([Mending(draws) for draws in (DRAWS[:1] if own else DRAWS)], key=residual)
    through = replace(chosen, straight_through=True)
    slopes = [_slope(rounds, partial(replay, mending)) for mending in (chosen, through)]
    if not slopes[0] >= LOST * slopes[1]:
        chosen = through
    vectorised = _vectorised(rounds, partial(replay, chosen))
    chosen = replace(chosen, one_by_one=vectorised is False)
    return ReplayRow(
        uploads_differ=_is_stochastic(client, cohorts[0], rng),
        random=random,
        residual=residual(AS_GIVEN),
        repeat=median(one.repeat for one in rounds),
        slope=slopes[0],
        slope_straight_through=slopes[1],
        vectorised=vectorised,
        draws=chosen.draws,
        straight_through=chosen.straight_through,
        one_by_one=chosen.one_by_one,
        mended_residual=residual(chosen),
    )


def mending_of(row: ReplayRow, probe: ProbeRow | None = None) -> Mending:
    """Return the repairs of what adversaries know of a defense."""
    if probe is None:
        return Mending(cast(Draws, row.draws), row.straight_through, row.one_by_one)
    trusted = not misleads(row, probe)
    return Mending(
        cast(Draws, row.draws) if trusted else "given",
        row.straight_through and trusted,
        row.one_by_one and trusted,
        undefended=not trusted,
        guarded=misguides(probe),
        no_likelihood=not trusted or misjudges(probe),
    )


def misleads(row: ReplayRow, probe: ProbeRow) -> bool:
    """Return whether a replay fails to tell the truth from other examples.

    It must do so about as well as the replay of an undefended client. If it misses the upload by
    more than the defense's own noise, it must do so in any case.
    """
    needed = LEAST_CONTRAST if _misses(row) else 0.0
    if probe.ideal_contrast >= CLEAR:
        needed = max(needed, KEPT * probe.ideal_contrast)
    return needed > 0 and not probe.contrast >= needed


def misguides(probe: ProbeRow) -> bool:
    """Return whether the `unguarded` client uploads something else than the client."""
    return not probe.unguarded <= max(ALIKE, FAR * probe.repeat)


def misjudges(probe: ProbeRow) -> bool:
    """Return whether `log_likelihood` prefers other examples where a distance prefers the truth."""
    if probe.preferred is None or math.isnan(probe.preferred):
        return False  # tables have NaN where a row has None
    if not probe.contrast >= LEAST_CONTRAST:
        return False
    return not probe.preferred >= probe.nearer - TOLERATED


def _misses(row: ReplayRow) -> bool:
    return not row.mended_residual <= max(ALIKE, FAR * row.repeat)


class Finding(NamedTuple):
    """A problem of a replay, and the code that repairs it."""

    problem: str
    remedy: str


def failures(row: ReplayRow, probe: ProbeRow) -> list[Finding]:
    """Return how a defense misleads the adversaries that know it."""
    found = []
    if misleads(row, probe):
        problem = (
            "its `replay` does not tell the true examples from others (contrast "
            f"{probe.contrast:.2f}, an undefended client's is {probe.ideal_contrast:.2f})"
        )
        found.append(Finding(problem, _CERTAIN))
    if misguides(probe):
        error = f"{100 * probe.unguarded:.0f} %"
        problem = f"uploads of its `unguarded` client differ from those of the client by {error}"
        found.append(Finding(problem, _SAME_CLIENT))
    if probe.preferred is not None and misjudges(probe):
        problem = (
            f"its `log_likelihood` prefers the truth to {100 * probe.preferred:.0f} % of other "
            f"examples, a distance to {100 * probe.nearer:.0f} %"
        )
        found.append(Finding(problem, _LIKELIHOOD))
    return found


def findings(row: ReplayRow) -> list[Finding]:
    """Return what the author of a defense should repair in its replay."""
    found = []
    if row.draws != "given":
        done = (
            "replaced by their means" if row.draws == "expected" else "averaged over several draws"
        )
        found.append(Finding(f"it draws new secrets, which were {done}", _WITHOUT_NOISE))
    elif row.random:
        problem = "it still draws noise, which handicapped attacks that know the defense"
        found.append(Finding(problem, _WITHOUT_NOISE))
    if row.straight_through:
        found.append(
            Finding("its slope vanishes; a straight-through slope replaced it", _STRAIGHT_THROUGH)
        )
    if row.one_by_one:
        found.append(
            Finding(
                "batched replay differs from single replay, so guesses were replayed one at a "
                "time (slower)",
                _PURE,
            )
        )
    if _misses(row):
        error = f"{100 * row.mended_residual:.0f} %"
        found.append(Finding(f"at the true examples it misses the upload by {error}", _CERTAIN))
    return found


_SAME_CLIENT = """\
def unguarded(self):
    return dataclasses.replace(self, threshold=math.inf)  # the same defense, without its refusals
"""
_LIKELIHOOD = """\
def log_likelihood(self, observed, expected, batch_size=None):  # largest if both are equal
    return -sum((observed[n] - v).square().sum() for n, v in expected.items()) / (2 * self.scale**2)
"""
_WITHOUT_NOISE = """\
def replay(self, observed):
    return dataclasses.replace(self, scale=0.0)  # the same defense, without its noise
"""
_STRAIGHT_THROUGH = """\
def on_update(self, update, rng):  # in the class that `replay` returns: rounded, with a slope
    rounded = super().on_update(update, rng)
    return {name: v + (rounded[name] - v).detach() for name, v in update.items()}
"""
_PURE = """\
def on_update(self, update, rng):  # in the class that `replay` returns: no state between calls
    public = torch.Generator().manual_seed(self.seed)
    return {name: v + torch.randn(v.shape, generator=public) for name, v in update.items()}
"""
_CERTAIN = """\
def replay(self, observed):  # uses what the upload shows of the defense's choices
    kept = {name: value != 0 for name, value in observed.items()}
    return Masked(kept)
"""


@dataclass(frozen=True)
class KnownRound:
    """Clients' examples, an upload of them, and its distance to other uploads of the same examples.

    Local steps see the examples in order, as in a replay, because a defense does not set the order.
    """

    examples: Batch
    trained_on: Batch
    upload: Update
    repeat: float

    @classmethod
    def play(cls, client: Client, shares: Sequence[Batch], rng: Generator) -> KnownRound:
        """Return a round of clients with these examples."""
        upload, trained_on = known_upload(client, shares, fork(rng))
        others = [known_upload(client, shares, fork(rng))[0] for _ in range(REPEATED)]
        repeat = max(distance(other, upload) for other in others)  # two draws may coincide
        return cls(Batch.joined(shares), trained_on, upload, repeat)

    @property
    def asked(self) -> tuple[Tensor, Tensor, Update]:
        """Return the inputs of a replay: the truth, and its upload."""
        return (*self.examples, self.upload)

    def missed_by(self, replay: Replay) -> float:
        """Return the distance of a replay from the upload, at the truth or at what was trained on.

        Attacks succeed with either, so a replay may treat a guess as either. The smaller counts.
        """
        return min(
            distance(replay(*guess, self.upload), self.upload)
            for guess in (self.examples, self.trained_on)
        )


def known_upload(client: Client, shares: Sequence[Batch], rng: Generator) -> tuple[Update, Batch]:
    """Return what the server sees, and what was trained on."""
    defenses = [Checked(replace(client.defense), share) for share in shares]
    clients = [replace(client, defense=defense) for defense in defenses]
    update = _detached(release(clients, shares, rng, in_order=True)[0])
    return update, Batch.joined(one.trained_on for one in defenses if one.trained_on is not None)


def _is_stochastic(client: Client, shares: Sequence[Batch], rng: Generator) -> bool:
    """Return whether uploads in a fixed order differ, or whether the drawn examples differ."""
    uploads = [known_upload(client, shares, fork(rng))[0] for _ in range(2)]
    size = len(shares[0].inputs)
    drawn = [
        torch.cat([*client.defense.batches(size, size, 1, fork(rng))]).sort().values
        for _ in range(2)
    ]
    return not _same(*uploads) or not torch.equal(*drawn)


def _has_own_replay(defense: Defense, upload: Update) -> bool:
    """Return whether a defense defines its own replay; for a chain, whether every link does."""
    if isinstance(defense, Chain):
        return all(_has_own_replay(link, upload) for link in defense.links)
    return defense.replay(upload) != defense


def _slope(rounds: Sequence[KnownRound], make: Callable[[], Replay]) -> float:
    """Return the cosine between a distance's slope and the direction to the other upload's inputs.

    The smaller one counts of the slopes at the truth and at the other inputs, where attacks search.
    """
    here, there, *_ = (one.examples.inputs for one in rounds)
    if not here.is_floating_point():
        return 1.0  # tokens have no slope
    _, targets, observed = rounds[0].asked

    def replay(inputs: Tensor) -> Mapping[str, Tensor]:
        return make()(inputs, targets, observed)

    return min(_slope_at(here, there, replay), _slope_at(there, here, replay))


def _slope_at(
    inputs: Tensor, other: Tensor, replay: Callable[[Tensor], Mapping[str, Tensor]]
) -> float:
    """Return the cosine at some inputs, or 0 if there is no slope.

    The slope in the upload is as small as in attacks. A defense that rounds uploads may round
    gradients too, and would pass only large ones.
    """
    step = STEP * (other - inputs)
    start = inputs.detach().requires_grad_()
    try:
        before, after = replay(start), replay(inputs + step)
        change = {name: (after[name] - value).detach() for name, value in before.items()}
        moved = [name for name, value in before.items() if value.requires_grad]
        if not moved or not _norm(change):
            return 0.0
        (slope,) = torch.autograd.grad(
            [before[name] for name in moved],
            start,
            [SMALL / _norm(change) * change[name] for name in moved],
            materialize_grads=True,
        )
    except RuntimeError:  # autograd does not support the code
        return 0.0
    cosine = float(cosine_similarity(slope.flatten(), step.flatten(), dim=0))
    return cosine if math.isfinite(cosine) else 0.0


def _vectorised(rounds: Sequence[KnownRound], make: Callable[[], Replay]) -> bool | None:
    """Return whether batched replay equals single replay; None if guesses cannot be batched."""
    guesses, observed = [one.examples for one in rounds], rounds[0].upload
    stacks = (torch.stack(parts) for parts in zip(*guesses, strict=True))
    replay = make()
    at_once = vmap(lambda x, y: replay(x, y, observed), randomness="same")
    try:
        together = at_once(*stacks)
    except RuntimeError:
        return None
    return all(
        distance({name: value[i] for name, value in together.items()}, make()(*guess, observed))
        <= ALIKE
        for i, guess in enumerate(guesses)
    )


def _detached(update: Mapping[str, Tensor]) -> Update:
    return {name: value.detach() for name, value in update.items()}


def _same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def distance(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the distance of an update from another, relative to the other's norm."""
    error = {name: update[name].detach() - value for name, value in reference.items()}
    return _norm(error) / max(_norm(reference), _TINY)


def _norm(update: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in update.values()))
