"""A server that attacks uploads: what it is granted, what it makes of them, what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from leakfrontier.adversaries import Adversary, NotApplicable, Observation, Reconstruction, Replay
from leakfrontier.defenses import Defense, Refused

from ..client.client import Client, ThreatModel, make_replay
from ..client.examination import mending_of
from ..client.mending import AS_GIVEN, Mending
from ..foundations.rows import Outcome, ReplayRow
from ..foundations.seeds import generator
from ..privacy.claims import claim_of, proven_bound
from ..world.scenario import World
from ..world.victims import candidates
from .scoring import Attempt, Scoring


@dataclass(frozen=True)
class Server:
    """A server that attacks the uploads of one arm, of a run or captured.

    Attributes:
        world: The scenario and its data.
        defense: The clients' defense.
        adversary: The attack.
        threat: What it is granted of every upload.
        seed: Repetition; with the scenario, it determines look-alikes.
        draws: What the adversary's draws depend on.
        examined: What the examination of the clients' replay found; None if they do nothing.
    """

    world: World
    defense: Defense
    adversary: Adversary
    threat: ThreatModel
    seed: int
    draws: tuple[object, ...]
    examined: Callable[[Client], ReplayRow] | None
    _replays: dict[tuple[nn.Module, ...], Replay] = field(default_factory=dict)

    def granted(self, victims: Tensor, number: int, *, examples: int) -> ThreatModel:
        """Return what the adversary is granted of an upload: candidates, if it chooses among them.

        Args:
            victims: Indices of the private examples that are scored.
            number: The upload's.
            examples: Private examples behind it, of which candidates are made only for a lone one.
        """
        if not (self.adversary.needs_candidates and len(victims) == examples == 1):
            return self.threat
        among = candidates(self.world, victims, seed=self.seed, observation=number)
        return replace(self.threat, candidates=among)

    def replay(self, client: Client, models: tuple[nn.Module, ...], number: int = 0) -> Replay:
        """Return the replay of clients that received some models: one for all their uploads.

        Args:
            client: What the clients are alike in.
            models: What each of them received.
            number: Of the first upload, if each has models of its own.
        """
        if models not in self._replays:
            self._replays[models] = make_replay(
                client,
                self.threat,
                generator("replay", *self.draws, number),
                models=models,
                mending=self._mending(client),
            )
        return self._replays[models]

    def _mending(self, client: Client) -> Mending:
        known = self.threat.knows_defense and self.adversary.simulates
        if not known or self.examined is None:
            return AS_GIVEN
        try:
            return mending_of(self.examined(client))
        except Refused:  # of the clients that are examined: these may accept
            return AS_GIVEN

    def attack(
        self, observations: Mapping[int, Observation]
    ) -> dict[int, Reconstruction | NotApplicable]:
        """Return what the adversary makes of observations, by their numbers."""
        rngs = [generator("adversary", *self.draws, number) for number in observations]
        seen = [*observations.values()]
        found = self.adversary.reconstruct_all(seen, rngs) if seen else []
        name = type(self.adversary).__name__
        if len(found) != len(seen):
            raise ValueError(
                f"{name}.reconstruct_all must return {len(seen)} results, got {len(found)}"
            )
        for result in found:
            if not isinstance(result, Reconstruction | NotApplicable):
                kind = type(result).__name__
                raise ValueError(f"{name} must return a Reconstruction, got {kind}")
        return {n: _examples(result) for n, result in zip(observations, found, strict=True)}

    def outcome(
        self,
        attempts: Sequence[Attempt],
        busy: float,
        *,
        rounds: int | None,
        shown: Container[int],
        each: int = 1,
    ) -> Outcome:
        """Return the rows of attacks.

        Args:
            attempts: The attacks.
            busy: Seconds that they took.
            rounds: Rounds of training before them; None if nothing is proven of the model.
            shown: The uploads of which guesses are kept for the gallery.
            each: How many victims of each of these.
        """
        claim = claim_of(self.defense)
        bound = None
        if claim is not None and rounds is not None:
            bound = proven_bound(claim, self.world, rounds)
        scoring = Scoring(self.world, self.defense, self.adversary, self.seed, attempts, bound)
        scored = list(scoring.rows(seconds=busy / len(attempts)))
        return Outcome(
            attacks=tuple(row for row, _ in scored),
            scores=tuple(score for _, scores in scored for score in scores),
            renderings=tuple(scoring.renderings(shown, each)),
            busy=busy,
        )


def _examples(result: Reconstruction | NotApplicable) -> Reconstruction | NotApplicable:
    """Return a result that can be scored against the private examples."""
    if isinstance(result, Reconstruction) and result.layer is not None:
        return NotApplicable(f"recovered features, the inputs of layer {result.layer!r}")
    return result
