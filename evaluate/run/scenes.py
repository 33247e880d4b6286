"""Attacked rounds: clients with what they remember, the model that they have, their uploads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from leakfrontier.defenses import Batch, Defense, Refused, Update, trainable

from ..client.aggregation import invite
from ..client.clients import Answer, Clients, Invited
from ..client.examination import ALIKE, distance
from ..foundations.seeds import generator
from ..users.alone import fresh
from ..users.contract import Checked
from ..world.enrolment import Enrolment, enrol
from ..world.scenario import World
from ..world.victims import cohort, victims
from .upload_log import Logged, SecretLog, UploadLog


@dataclass(frozen=True)
class Shown:
    """What came of a round: the victim's upload, and what the server does not see of it.

    Attributes:
        update: The upload, of the victim alone or of the victim's group.
        models: The model that each client of the group trained on, the victim's first.
        trained_on: What each of these clients last trained on.
    """

    update: Update
    models: tuple[nn.Module, ...]
    trained_on: tuple[Batch, ...]


@dataclass(frozen=True)
class Scene:
    """An attacked round.

    Attributes:
        victims: Indices of the private examples that are scored.
        model: The model that an honest server sends.
        shares: The private examples of the clients that the server sees together, the victim's
            first.
        honest: Returns what came of the round with an honest server.
        answer: Returns what comes of it if the server sends each of these clients another model.
            Both raise `Refused` if the victim does not upload.
        earlier: What the server saw of the victim before, newest first.
    """

    victims: Tensor
    model: nn.Module
    shares: Sequence[Batch]
    honest: Callable[[], Shown]
    answer: Callable[[Sequence[nn.Module]], Shown]
    earlier: Sequence[Logged] = ()


class Scenes(ABC):
    """The attacked rounds of an arm."""

    @abstractmethod
    def scene(self, index: int) -> Scene:
        """Return an attacked round by its number."""


@dataclass
class NewScenes(Scenes):
    """First rounds of new clients, for an untrained model.

    Attributes:
        world: The scenario and its data.
        defense: The clients' defense.
        seed: Repetition.
        draws: The values that seed the clients.
        arm: Identifies the arm. Many adversaries attack the same uploads of it.
    """

    world: World
    defense: Defense
    seed: int
    draws: tuple[object, ...]
    arm: str

    def scene(self, index: int) -> Scene:
        """Return an attacked round by its number."""
        sought = victims(self.world, self.seed, index)
        here = {"clients": self.defense.cohort, "seed": self.seed}
        shares = cohort(self.world, sought, **here, observation=index)
        answer = partial(self._answer, index, shares)
        honest = partial(self._honest, index, shares)
        return Scene(sought, self._model, shares, honest, answer)

    def _honest(self, index: int, shares: Sequence[Batch]) -> Shown:
        key = (self.arm, index)
        if key not in _SHOWN:
            shown = self._answer(index, shares, [self._model] * len(shares))
            _keep(key, replace(shown, models=()))
        model = self._model
        received = Checked(fresh(self.defense)).on_receive(model, model)
        return replace(_SHOWN[key], models=(received,) * len(shares))

    def _answer(self, index: int, shares: Sequence[Batch], models: Sequence[nn.Module]) -> Shown:
        client = self.world.client(self.defense, self._model)
        clients = Clients(client, shares, [len(one.inputs) for one in shares])
        members = range(len(shares))
        rng = generator("client", *self.draws, index)
        invited = Invited(tuple(members), (0,) * len(shares), rng)
        sent = dict(zip(members, models, strict=True))
        return _shown(clients.answer(invited, sent, self._model), members, self.defense)

    @cached_property
    def _model(self) -> nn.Module:
        return self.world.model(self.defense, self.seed)


@dataclass
class TrainedScenes(Scenes):
    """Attacked rounds of a training.

    Attributes:
        world: The scenario and its data.
        defense: The clients' defense.
        seed: Repetition.
        draws: The values that seeded the training.
        observations: Number of attacked uploads.
        seen: The file of what the server saw.
        secrets: The file of what it did not see.
    """

    world: World
    defense: Defense
    seed: int
    draws: tuple[object, ...]
    observations: int
    seen: Path
    secrets: Path
    _models: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seen.exists() or not self.secrets.exists():
            raise ValueError("there is no log of the attacked uploads: training failed")
        self._log, self._hidden = UploadLog(self.seen), SecretLog(self.secrets)

    def scene(self, index: int) -> Scene:
        """Return an attacked round by its number."""
        if index >= len(self._log):
            return self._refused(index)
        logged, *earlier = self._log[index]
        victim = self._log.victim(index)
        members = (victim, *(one for one in logged.clients if one != victim))
        rows = [self._hidden[logged.round, one].rows for one in members]
        shares = [self.world.train.at(part) for part in rows]
        honest = partial(self._honest, logged, members)
        answer = partial(self._answer, logged, members)
        return Scene(rows[0], self.model(logged), shares, honest, answer, earlier)

    def _refused(self, index: int) -> Scene:
        def refuse(*_: object) -> Shown:
            raise Refused("clients refused to upload in training")

        sought = victims(self.world, self.seed, index)
        model = self.world.model(self.defense, self.seed)
        return Scene(sought, model, [self.world.train.at(sought)], refuse, refuse)

    def _honest(self, logged: Logged, members: Sequence[int]) -> Shown:
        """Return what was logged in training."""
        model = self.model(logged)
        received = Checked(fresh(self.defense)).on_receive(model, model)
        trained_on = tuple(self._hidden[logged.round, index].trained_on for index in members)
        return Shown(logged.update, (received,) * len(members), trained_on)

    def _answer(self, logged: Logged, members: Sequence[int], models: Sequence[nn.Module]) -> Shown:
        """Return what comes of a round if the server sends other models.

        Raises:
            ValueError: If the clients cannot be put back to the time before the round: with the
                honest model, they would not upload what they did upload.
        """
        honest = [self.model(logged)] * len(models)
        missed = distance(self._again(logged, members, honest).update, logged.update)
        if not missed <= ALIKE:
            raise ValueError(
                f"{type(self.defense).__name__} cannot be attacked by a malicious server: from "
                "what a client remembered before a round, its upload of that round could not be "
                f"repeated ({100 * missed:.0f} % off). An upload must depend on nothing but the "
                "fields of the defense, the model, the examples and rng"
            )
        return self._again(logged, members, models)

    def _again(self, logged: Logged, members: Sequence[int], models: Sequence[nn.Module]) -> Shown:
        """Return what comes of a round for clients that remember what they did before it."""
        for index in members:
            memory = self._hidden[logged.round, index].memory
            if isinstance(memory, str):
                raise ValueError(memory)
            self._clients.remember({index: memory})
        sent = dict(zip(members, models, strict=True))
        answer = self._clients.answer(self._invited(logged.round), sent, self.model(logged))
        return _shown(answer, members, self.defense)

    def model(self, logged: Logged) -> nn.Module:
        """Return the model that the clients of an upload received."""
        if id(logged.model) not in self._models:
            model = self.world.model(self.defense, self.seed)
            with torch.no_grad():
                for name, value in trainable(model).items():
                    value.copy_(logged.model[name])
            self._models[id(logged.model)] = model
        return self._models[id(logged.model)]

    @cached_property
    def _enrolment(self) -> Enrolment:
        return enrol(self.world, self.seed, self.observations)

    @cached_property
    def _clients(self) -> Clients:
        model = self.world.model(self.defense, self.seed)
        return clients_of(self.world, self.defense, model, self._enrolment)

    def _invited(self, number: int) -> Invited:
        """Return the clients of a round, and the source of their randomness, as in training."""
        protocol = self.world.protocol
        uploads = protocol.uploads(self.world.scenario.training.clients_per_round)
        rng = generator("training", *self.draws)
        for done in range(number):
            versions = min(done, protocol.max_staleness)
            invited = invite(protocol, len(self._enrolment.rows), uploads, versions, rng)
        return invited


def clients_of(world: World, defense: Defense, model: nn.Module, enrolment: Enrolment) -> Clients:
    """Return the clients of a federation under a defense."""
    shares = [world.train.at(rows) for rows in enrolment.rows]
    return Clients(world.client(defense, model), shares, enrolment.batch_sizes)


def _shown(answer: Answer, members: Sequence[int], defense: Defense) -> Shown:
    """Return the part of an answer that is about the first of some clients."""
    seen = next((one for one in answer.seen if members[0] in one.clients), None)
    if seen is None:
        raise Refused(answer.reason)
    if len(seen.updates) == len(seen.clients) > 1:
        raise ValueError(
            f"{type(defense).__name__} has a cohort of {defense.cohort}, so on_round must return "
            f"one update for the whole cohort, got {len(seen.updates)}"
        )
    secrets = [answer.secrets[index] for index in members if index in seen.clients]
    return Shown(
        seen.updates[0],
        tuple(one.model for one in secrets),
        tuple(one.trained_on for one in secrets),
    )


_SHOWN: dict[tuple[str, int], Shown] = {}
"""The uploads of new clients that this process has computed."""

_UPLOADS_KEPT = 512
_ENTRIES_KEPT = 2**26  # in all uploads together: 256 MB


def _keep(key: tuple[str, int], shown: Shown) -> None:
    """Keep what clients have sent. Drop the oldest entries if that is too much."""
    _SHOWN[key] = shown
    while len(_SHOWN) > _UPLOADS_KEPT or sum(map(_entries, _SHOWN.values())) > _ENTRIES_KEPT:
        del _SHOWN[next(iter(_SHOWN))]


def _entries(shown: Shown) -> int:
    return sum(value.numel() for value in shown.update.values())
