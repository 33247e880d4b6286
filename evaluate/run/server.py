"""A server that attacks uploads, and the scores of its attacks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import (
    Adversary,
    Candidates,
    NotApplicable,
    Observation,
    Reconstruction,
    Replay,
    Threat,
)
from leakfrontier.defenses import Defense, Refused

from ..client.client import Client, ThreatModel, make_replay, observation_of
from ..client.decoders import Decoder
from ..client.discrimination import Examined, hidden_in
from ..client.mending import AS_GIVEN, Mending
from ..foundations.rows import AttackRow, Outcome, Rendering, Score
from ..foundations.seeds import generator
from ..privacy.claims import claim_of, proven_bound
from ..world.scenario import World
from ..world.victims import all_but_one_known, candidates, disjoint_count
from .scoring import Attempt, Scoring

Row = TypeVar("Row", bound=AttackRow | Score | Rendering)


@dataclass(frozen=True)
class Server:
    """A server that attacks the uploads of one arm, from a run or a capture.

    Attributes:
        world: The scenario and its data.
        defense: The clients' defense.
        adversary: The attack.
        threat: The knowledge that the attack has of every upload.
        seed: Repetition. Together with the scenario, it determines look-alikes.
        draws: The values that seed the adversary's generators.
        examined: Examines the clients' defense; None if clients have none.
        decoder: Returns a decoder of an upload, by its number, if one was found for its round of
            training. None if uploads are those of new clients.
    """

    world: World
    defense: Defense
    adversary: Adversary
    threat: ThreatModel
    seed: int
    draws: tuple[object, ...]
    examined: Callable[[Client], Examined] | None
    decoder: Callable[[int], Decoder | None] | None = None
    _replays: dict[tuple[nn.Module, ...], Replay] = field(default_factory=dict)
    _known: dict[int, list[Candidates]] = field(default_factory=dict)
    _undefended: dict[tuple[nn.Module, ...], Replay] = field(default_factory=dict)

    def granted(self, victims: Tensor, number: int, *, examples: int) -> ThreatModel:
        """Return the adversary's knowledge of an upload, with candidates if it needs them.

        Args:
            victims: Indices of the private examples that are scored.
            number: The number of the upload.
            examples: Private examples in the upload. There are candidates only if all are scored.
        """
        informed = self.adversary.informed
        if not (self.adversary.needs_candidates and 1 <= len(victims) == examples):
            return self.threat
        if not informed and disjoint_count(self.world, victims) < 2:
            return self.threat
        among = candidates(
            self.world, victims, seed=self.seed, observation=number, disjoint=not informed
        )
        if informed and examples > 1:
            self._known[number] = all_but_one_known(among, self.world.train.at(victims))
        return replace(self.threat, candidates=among)

    def replay(self, client: Client, models: tuple[nn.Module, ...], number: int = 0) -> Replay:
        """Return the replay of clients that received some models, one for all their uploads.

        Args:
            client: The properties that all clients share.
            models: The model that each client received.
            number: The number of the first upload, if every upload has other models.
        """
        if models not in self._replays:
            self._replays[models] = make_replay(
                client,
                self.threat,
                generator("replay", *self.draws, number),
                models=models,
                mending=self.mending(client),
            )
        return self._replays[models]

    def mending(self, client: Client) -> Mending:
        """Return the repairs of what the adversary knows of the clients' defense."""
        examined = self._examined(client) if self.adversary.simulates else None
        return AS_GIVEN if examined is None else examined.mending

    def _examined(self, client: Client) -> Examined | None:
        """Return what is known of the defense, if the adversary knows it."""
        if not self.threat.knows_defense or self.examined is None:
            return None
        try:
            return self.examined(client)
        except Refused:  # only the examined clients refused; these may accept
            return None

    def attack_decoded(
        self, attempts: Sequence[Attempt], outcome: Outcome | None = None
    ) -> list[Attempt]:
        """Return passive attacks on the undefended updates that are hidden in uploads, if any.

        Args:
            attempts: The attacks on uploads as they are.
            outcome: Their scores. Uploads whose victims are all identified are not attacked again.
        """
        if self.adversary.threat is not Threat.PASSIVE or self.adversary.baseline:
            return []
        if outcome is not None and not self.adversary.pooled:
            left = {row.observation for row in outcome.attacks if not row.identified}
            attempts = [one for one in attempts if one.observation in left]
        decoded = [
            replace(one, upload=replace(one.upload, observation=found))
            for one in attempts
            if one.upload is not None
            and (found := self._decoded(one.upload.observation, one.observation)) is not None
        ]
        hidden = {a.observation: a.upload.observation for a in decoded if a.upload is not None}
        results = self.attack(hidden)
        return [replace(one, result=results[one.observation]) for one in decoded]

    def _decoder(self, client: Client, number: int) -> Decoder | None:
        """Return the decoder of an upload, if there is one and the adversary knows the defense."""
        if not self.threat.knows_defense or self.examined is None:
            return None
        if self.decoder is not None:
            return self.decoder(number)
        examined = self._examined(client)
        return None if examined is None else examined.decoder

    def _decoded(self, seen: Observation, number: int) -> Observation | None:
        """Return an observation of the undefended update that is hidden in an upload, if any."""
        client = self.world.client(self.defense, seen.model)
        decoder = self._decoder(client, number)
        if decoder is None:
            return None
        update = hidden_in([*(one.update for one in seen.earlier), seen.update], decoder)
        if update is None:
            return None
        threat = replace(self.threat, knows_defense=False, candidates=seen.candidates)
        if seen.models not in self._undefended:
            rng = generator("decoded", *self.draws)
            self._undefended[seen.models] = make_replay(client, threat, rng, models=seen.models)
        return observation_of(
            client,
            seen.models,
            update,
            threat,
            self._undefended[seen.models],
            examples=seen.batch_size,
            targets=seen.targets,
            kept=seen.kept,
        )

    def attack(
        self, observations: Mapping[int, Observation]
    ) -> dict[int, Reconstruction | NotApplicable]:
        """Return the adversary's result for each observation, by its number."""
        views = {n: self._known[n] for n in observations if n in self._known}
        found = self._attacked({n: one for n, one in observations.items() if n not in views})
        found |= {n: self._informed(n, observations[n], told) for n, told in views.items()}
        return {number: found[number] for number in observations}

    def _informed(
        self, number: int, observation: Observation, told: Sequence[Candidates]
    ) -> Reconstruction | NotApplicable:
        """Return the guesses of an adversary that knows all private examples except one.

        It attacks one example at a time, and only its guess of that example counts.
        """
        guesses = []
        for victim, known in enumerate(told):
            view = replace(observation, candidates=known)
            (result,) = self._attacked({victim: view}, number).values()
            if isinstance(result, NotApplicable):
                return result
            if len(result.inputs) != len(told):
                raise ValueError(
                    f"{type(self.adversary).__name__} must return one guess for each of the "
                    f"{len(told)} private examples, got {len(result.inputs)}"
                )
            guesses.append(result.inputs[victim])
        return Reconstruction(torch.stack(guesses), observation.targets)

    def _attacked(
        self, observations: Mapping[int, Observation], *upload: int
    ) -> dict[int, Reconstruction | NotApplicable]:
        """Return the checked results of one call of the adversary."""
        rngs = [generator("adversary", *self.draws, *upload, number) for number in observations]
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
            busy: Seconds that the attacks took.
            rounds: Rounds of training before them; None if no bound is proven for the model.
            shown: The uploads whose guesses are kept for the gallery.
            each: How many victims are kept of each of these uploads.
        """
        claim = claim_of(self.defense)
        bound = None
        if claim is not None and rounds is not None:
            bound = proven_bound(claim, self.world, rounds)
        scoring = Scoring(self.world, self.defense, self.adversary, self.seed, attempts, bound)
        scored = list(scoring.rows(seconds=busy / max(1, len(attempts))))
        return Outcome(
            attacks=tuple(row for row, _ in scored),
            scores=tuple(score for _, scores in scored for score in scores),
            renderings=tuple(scoring.renderings(shown, each)),
            busy=busy,
        )


def either(outcome: Outcome, decoded: Outcome) -> Outcome:
    """Return the rows of attacks. Victims count that only the decoded update reveals."""
    found = {_place(row) for row in outcome.attacks if row.identified}
    added = {_place(row) for row in decoded.attacks if row.identified} - found

    def merged(own: Sequence[Row], others: Sequence[Row]) -> tuple[Row, ...]:
        kept = [row for row in own if _place(row) not in added]
        return (*kept, *(row for row in others if _place(row) in added))

    return replace(
        outcome,
        attacks=merged(outcome.attacks, decoded.attacks),
        scores=merged(outcome.scores, decoded.scores),
        renderings=merged(outcome.renderings, decoded.renderings),
    )


def _place(row: AttackRow | Score | Rendering) -> tuple[int, int]:
    return row.observation, row.victim


def _examples(result: Reconstruction | NotApplicable) -> Reconstruction | NotApplicable:
    """Return a result that can be scored against the private examples."""
    if isinstance(result, Reconstruction) and result.layer is not None:
        return NotApplicable(f"recovered features, the inputs of layer {result.layer!r}")
    return result
