"""Attacked rounds of a training: from its log, and again with other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from leakfrontier.defenses import Defense, Refused, trainable

from ..client.averaging import invite
from ..client.clients import Clients, Invited, Memory, Shares
from ..client.examination import ALIKE, distance
from ..foundations.seeds import generator
from ..users.alone import fresh
from ..users.contract import Checked
from ..world.enrolment import Enrolment, attacked_rounds, enrol
from ..world.scenario import World
from ..world.victims import victims
from .scenes import Scene, Scenes, Shown, shown_of
from .upload_log import Logged, SecretLog, UploadLog


@dataclass(frozen=True)
class Restored:
    """A round of training, as it was before its clients uploaded.

    Attributes:
        number: Its number, from 1.
        model: The model that an attacked client received.
        memories: What clients of the round remembered, the attacked one first.
        rows: The training examples that the attacked client used.
    """

    number: int
    model: nn.Module
    memories: tuple[Memory, ...]
    rows: Tensor


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
        logged = self._log.upload(index)
        victim = self._log.victim(index)
        members = (victim, *(one for one in logged.clients if one != victim))
        rows = [self._hidden[logged.round, one].rows for one in members]
        shares = [self.world.train.at(part) for part in rows]
        honest = partial(self._honest, logged, members)
        answer = partial(self._answer, logged, members)
        ages = reversed(range(1, self._log.uploads(index)))
        before = [partial(self._before, index, age) for age in ages]
        return Scene(rows[0], self.model(logged), shares, honest, answer, before)

    def number(self, index: int) -> int:
        """Return the round of an attacked upload."""
        return self._log.upload(index).round if index < len(self._log) else 0

    def numbers(self) -> list[int]:
        """Return the rounds that attacked uploads are of."""
        return sorted({self.number(index) for index in range(len(self._log))})

    def restored(self, number: int) -> Restored:
        """Return a round of attacked uploads.

        Raises:
            ValueError: As for an active server: if a client cannot be put back to that time.
        """
        index = next(i for i in range(len(self._log)) if self.number(i) == number)
        logged, victim = self._log.upload(index), self._log.victim(index)
        members = (victim, *(one for one in logged.clients if one != victim))
        self._check_repeatable(logged, members)
        others = [one for one in self._hidden.clients(number) if one != victim]
        hidden = [self._hidden[number, one] for one in (victim, *others)]
        memories = tuple(one.memory for one in hidden if not isinstance(one.memory, str))
        return Restored(number, self.model(logged), memories, hidden[0].rows)

    def _before(self, index: int, age: int) -> tuple[nn.Module, Logged]:
        logged = self._log.upload(index, age)
        update = {name: value.to(self.world.device) for name, value in logged.update.items()}
        return self.model(logged), replace(logged, update=update)

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
        device = self.world.device
        trained_on = (self._hidden[logged.round, index].trained_on for index in members)
        return Shown(
            {name: value.to(device) for name, value in logged.update.items()},
            (received,) * len(members),
            tuple(one.to(device) for one in trained_on),
        )

    def _answer(self, logged: Logged, members: Sequence[int], models: Sequence[nn.Module]) -> Shown:
        """Return what comes of a round if the server sends other models.

        Raises:
            ValueError: If the clients cannot be put back to the time before the round: with the
                honest model, they would not upload what they did upload.
        """
        self._check_repeatable(logged, members)
        return self._again(logged, members, models)

    def _check_repeatable(self, logged: Logged, members: Sequence[int]) -> None:
        """Raise if clients that remember the time before a round do not repeat their upload."""
        honest = [self.model(logged)] * len(members)
        again = self._again(logged, members, honest).update
        missed = distance({n: value.cpu() for n, value in again.items()}, logged.update)
        if not missed <= ALIKE:
            raise ValueError(
                f"{type(self.defense).__name__} cannot be attacked as it was in training: from "
                "what a client remembered before a round, its upload of that round could not be "
                f"repeated ({100 * missed:.0f} % off). An upload must depend on nothing but the "
                "fields of the defense, the model, the examples and rng"
            )

    def _again(self, logged: Logged, members: Sequence[int], models: Sequence[nn.Module]) -> Shown:
        """Return what comes of a round for clients that remember what they did before it."""
        for index in members:
            memory = self._hidden[logged.round, index].memory
            if isinstance(memory, str):
                raise ValueError(memory)
            self._clients.remember({index: memory})
        sent = dict(zip(members, models, strict=True))
        answer = self._clients.answer(self._invited(logged.round), sent, self.model(logged))
        return shown_of(answer, members, self.defense)

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
        protocol, enrolment = self.world.protocol, self._enrolment
        rng = generator("training", *self.draws)
        for done in range(number):
            attacked = done + 1 in self._attacked
            uploads = enrolment.invited(self.world, self.observations, attacked=attacked)
            versions = min(done, protocol.max_staleness)
            invited = invite(protocol, len(enrolment.rows), uploads, versions, rng)
        return invited

    @cached_property
    def _attacked(self) -> set[int]:
        """Return the rounds whose uploads may be attacked."""
        return {
            number
            for last in self.world.scenario.checkpoints
            if last
            for number in attacked_rounds(
                self.world, self._enrolment, self.seed, last, self.observations
            )
        }


def clients_of(world: World, defense: Defense, model: nn.Module, enrolment: Enrolment) -> Clients:
    """Return the clients of a federation under a defense."""
    shares = Shares(world.train, enrolment.rows)
    client = world.client(defense, model)
    return Clients(client, shares, enrolment.batch_sizes, enrolment.weights)
