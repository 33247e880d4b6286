"""Attacked rounds: clients with what they remember, the model that they have, their uploads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor, nn

from leakfrontier.defenses import Batch, Defense, Refused, Update

from ..client.clients import Answer, Clients, Invited
from ..foundations.seeds import generator
from ..users.alone import fresh
from ..users.contract import Checked
from ..world.scenario import World
from ..world.victims import cohort, victims
from .upload_log import Logged


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
        earlier: Return what the server saw of the victim before, oldest first, and its model.
    """

    victims: Tensor
    model: nn.Module
    shares: Sequence[Batch]
    honest: Callable[[], Shown]
    answer: Callable[[Sequence[nn.Module]], Shown]
    earlier: Sequence[Callable[[], tuple[nn.Module, Logged]]] = ()


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
        model, shown = self._model, _SHOWN.get(key)
        if shown is None:
            shown = replace(self._answer(index, shares, [model] * len(shares)), models=())
            _keep(key, shown)
        received = Checked(fresh(self.defense)).on_receive(model, model)
        return replace(shown, models=(received,) * len(shares))

    def _answer(self, index: int, shares: Sequence[Batch], models: Sequence[nn.Module]) -> Shown:
        client = self.world.client(self.defense, self._model)
        clients = Clients(client, shares, [len(one.inputs) for one in shares])
        members = range(len(shares))
        rng = generator("client", *self.draws, index)
        invited = Invited(tuple(members), (0,) * len(shares), rng)
        sent = dict(zip(members, models, strict=True))
        return shown_of(clients.answer(invited, sent, self._model), members, self.defense)

    @cached_property
    def _model(self) -> nn.Module:
        return self.world.model(self.defense, self.seed)


def shown_of(answer: Answer, members: Sequence[int], defense: Defense) -> Shown:
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
