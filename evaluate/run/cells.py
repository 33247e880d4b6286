"""The three kinds of cell: train under a defense, examine its replay, attack it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from leakfrontier.adversaries import (
    Adversary,
    Crafted,
    NotApplicable,
    Round,
    Threat,
)
from leakfrontier.adversaries import Protocol as TrainingProtocol
from leakfrontier.defenses import Batch, Defense, Refused

from ..client.client import Client, Released, Upload, observe, send
from ..client.discrimination import Examined, discriminated
from ..client.examination import EXAMINED_ROUNDS, examine, mending_of
from ..client.federation import Federation
from ..client.inversion import PublicTraining, clients_of, invert
from ..client.math_attention import math_attention
from ..data.partition import partition
from ..engines.parcels import Traveller
from ..foundations.devices import Device, on_device
from ..foundations.rows import Cell, GuaranteeRow, Outcome, UtilityRow
from ..foundations.seeds import generator, global_draws, seed_globally
from ..privacy.claims import claim_of, guarantee_row
from ..users.contract import Checked
from ..users.copies import CLIENTS, copied
from ..users.methods import Method, build_adversary, build_defense, build_protocol
from ..users.names import adversary_label, family, label, options
from ..world.scenario import Scenario, World, load_world
from ..world.victims import cohort, other_cohort, other_examples, victims
from .code_digests import ATTACK, REPLAY, TRAINING, factories, source_digest
from .scoring import Attempt
from .server import Server, either

EXAMINED_SEED = 0  # seed of the model and clients that examine replays
CURVE_POINTS = 5  # evaluations of accuracy along training, besides those at checkpoints

_Key = tuple[tuple[str, Path], int, int]
_RELEASED: dict[_Key, Released] = {}
"""The uploads that this process has computed. Many adversaries attack the same uploads."""

_UPLOADS_KEPT = 512
_ENTRIES_KEPT = 2**26  # in all uploads together: 256 MB


@dataclass(frozen=True)
class TrainTrial:
    """Train under a defense. This gives its utility and the checkpoints for attacks.

    Attributes:
        scenario: The scenario.
        defense: The defense.
        seed: Repetition: data split, initial weights, order and noise.
    """

    scenario: Scenario
    defense: Method
    seed: int

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {
            "scenario": self.scenario.config(),
            "defense": self.defense.config(),
            "seed": self.seed,
        }
        labels = {
            **labels_of(self.scenario, self.defense),
            "seed": self.seed,
            "other_cohort": other_cohort(self.scenario, self.defense),
            "other_examples": other_examples(self.scenario),
        }
        code = source_digest(TRAINING, build_defense(self.defense), *own_code_of(self.scenario))
        return Cell("train", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Train, evaluating along the way and saving the checkpoints."""
        world = load_world(self.scenario)
        defense, training = world.defense(self.defense), self.scenario.training
        shares = partition(
            world.train,
            training.clients,
            training.partition,
            generator("shares", *self.draws),
            alpha=training.alpha,
        )
        federation = Federation(
            world.client(defense, world.model(defense, self.seed)),
            shares,
            clients_per_round=training.clients_per_round,
            batch_size=self.scenario.client_batch,
            server=training.server,
            lr=training.lr_under(self.defense),
        )
        every = {round(training.rounds * i / CURVE_POINTS) for i in range(CURVE_POINTS + 1)}
        every |= {*self.scenario.checkpoints}
        kept = attackable(self.scenario.checkpoints, world.protocol)
        rows: list[UtilityRow] = []

        def on_checkpoint(done: int, model: nn.Module) -> None:
            if done in kept:
                _save(model, self.checkpoint(folder, done))
            if done in every:
                utility = world.modality.evaluate(model, world.test)
                rows.append(UtilityRow(done, *utility, federation.refused))

        start = time.perf_counter()
        at = every | kept
        rng = generator("training", *self.draws)
        federation.train(training.rounds, rng, at=at, on_checkpoint=on_checkpoint)
        busy = time.perf_counter() - start
        return Outcome(
            utility=tuple(rows),
            guarantees=self._guarantees(world, defense, max(federation.rounds_of)),
            busy=busy,
        )

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of all draws. It excludes the defense, so accuracies are paired."""
        return (self.scenario.config(), self.seed)

    def _guarantees(self, world: World, defense: Defense, rounds: int) -> tuple[GuaranteeRow, ...]:
        """Return the defense's privacy claim for this run, with the audit of its noise."""
        claim = claim_of(defense)
        if claim is None or not rounds:  # a client that refused every model has sent nothing
            return ()
        rng = generator("audit", self.cell.config_digest)
        return (guarantee_row(claim, world, world.model(defense, self.seed), rounds, rng),)

    def checkpoint(self, folder: Path, after: int) -> Path:
        """Return the file of the model after some rounds."""
        return folder / "checkpoints" / f"{self.cell.key}-{after}.safetensors"


@dataclass(frozen=True)
class ReplayTrial:
    """Examine how adversaries replay a defense, and what its uploads still hold.

    Attributes:
        scenario: The scenario.
        defense: The defense.
    """

    scenario: Scenario
    defense: Method

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {"scenario": _untrained(self.scenario), "defense": self.defense.config()}
        code = source_digest(REPLAY, build_defense(self.defense), *own_code_of(self.scenario))
        labels = {**labels_of(self.scenario, self.defense), "seed": EXAMINED_SEED}
        return Cell("replay", config, labels, code)

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of all draws. It excludes the defense."""
        return (self.scenario.description, EXAMINED_SEED)

    def run(self, folder: Path) -> Outcome:
        """Examine a defense on clients of the scenario; without result if they refuse."""
        start = time.perf_counter()
        try:
            found = self.examined()
        except Refused:
            return Outcome()
        probes = () if found.probe is None else (found.probe,)
        busy = time.perf_counter() - start
        return Outcome(replays=(found.replay,), probes=probes, busy=busy)

    def examined(self) -> Examined:
        """Return the findings of the examination, computed once per process."""
        if self.cell.key not in _EXAMINED:
            with global_draws(generator("examination", *self.draws)):
                _EXAMINED[self.cell.key] = self._examine()
        return _EXAMINED[self.cell.key]

    def _examine(self) -> Examined:
        world = load_world(self.scenario)
        defense = world.defense(self.defense)
        agreed = world.model(defense, EXAMINED_SEED)
        received = Checked(defense).on_receive(agreed, agreed)
        client = world.client(defense, known_of(agreed, received))
        here = {"clients": defense.cohort, "seed": EXAMINED_SEED}
        rounds = [
            cohort(world, victims(world, EXAMINED_SEED, i), **here, observation=i)
            for i in range(EXAMINED_ROUNDS)
        ]
        replay = examine(client, rounds, generator("examination", *self.draws))
        public = world.client(defense, agreed)
        rng = generator("inversion", *self.draws)
        try:
            inversion = invert(public, _public_shares(world, defense), self._public_training, rng)
        except Refused:
            return Examined(replay)
        mending = mending_of(replay)
        probe = discriminated(inversion, client, rounds, mending, rng)
        return Examined(replay, probe, inversion.decoder)

    @property
    def _public_training(self) -> PublicTraining:
        """Return how public clients train. It does not depend on the training of the scenario."""
        return PublicTraining(self.scenario.batch_size)


def _public_shares(world: World, defense: Defense) -> list[Batch]:
    """Return examples of the test split for each client. They include no victim."""
    clients, available = clients_of(defense), len(world.test.targets)
    size = world.scenario.batch_size
    if world.protocol.uploads_gradient:
        size = max(size, available // clients)
    rows = torch.arange(clients * size).remainder(available)
    return [world.test.at(part) for part in rows.split(size)]


_EXAMINED: dict[str, Examined] = {}


def examination(scenario: Scenario, defense: Method) -> Callable[[Client], Examined] | None:
    """Return a function that examines a defense; None without a defense."""
    if undefended(defense):
        return None
    return lambda _: ReplayTrial(scenario, defense).examined()


@dataclass(frozen=True)
class AttackTrial(Traveller):
    """Attack a defense. This gives scores per victim.

    All comparisons are paired: victims, look-alikes and the clients' draws depend neither on the
    adversary nor on the defense.

    Attributes:
        scenario: The scenario.
        defense: The defense.
        adversary: The attack.
        knows_defense: Whether the attack may replay the defense.
        seed: Repetition.
        checkpoint: Rounds of training before the attacked upload.
        observations: The numbers of the attacked uploads, from 0.
        pictures: How many of the first uploads are kept for the gallery.
    """

    scenario: Scenario
    defense: Method
    adversary: Method
    knows_defense: bool
    seed: int
    checkpoint: int
    observations: tuple[int, ...]
    pictures: int = 6

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {
            "scenario": self.scenario.config() if self.checkpoint else _untrained(self.scenario),
            "defense": self.defense.config(),
            "adversary": self.adversary.config(),
            **{name: getattr(self, name) for name in _ATTACK_FIELDS},
        }
        adversary = build_adversary(self.adversary)
        labels = {
            **labels_of(self.scenario, self.defense),
            **attack_labels(self.adversary, adversary),
            "seed": self.seed,
            "checkpoint": self.checkpoint,
            "knows_defense": self.knows_defense,
        }
        path = {*ATTACK, *(TRAINING if self.checkpoint else ())}
        own = own_code_of(self.scenario)
        code = source_digest(path, build_defense(self.defense), adversary, *own)
        return Cell("attack", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Observe uploads, attack them, and score the results."""
        world = load_world(self.scenario)
        server = Server(
            world,
            world.defense(self.defense),
            build_adversary(self.adversary),
            world.threat(self.knows_defense),
            self.seed,
            self.draws,
            examined=examination(self.scenario, self.defense),
        )
        victims(world, self.seed, max(self.observations))  # raises before any work is done

        start = time.perf_counter()
        rounds = Rounds(self, server, folder)
        observed = [rounds.observe(i) for i in self.observations]
        seen = {a.observation: a.upload.observation for a in observed if a.upload is not None}
        found = server.attack(seen)
        attempts = [replace(a, result=found.get(a.observation, a.result)) for a in observed]
        decoded = server.attack_decoded(attempts)
        busy = time.perf_counter() - start
        shown = range(self.pictures)
        own, other = (
            server.outcome(several, busy, rounds=self.checkpoint, shown=shown)
            for several in (attempts, decoded)
        )
        return either(own, other)

    def needed(self, folder: Path) -> Iterator[Path]:
        """Yield the checkpoints of the attacked models."""
        if not self.checkpoint:
            return
        training = TrainTrial(self.scenario, self.defense, self.seed)
        for version in attackable([self.checkpoint], build_protocol(self.scenario.protocol)):
            path = training.checkpoint(folder, version)
            if path.exists():  # else training failed, and the cell will say so
                yield path

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of the adversary's draws. It excludes the defense, so they are paired."""
        return (self.scenario.description, self.adversary.config(), self.seed)

    @property
    def upload(self) -> tuple[object, ...]:
        """Return the seed of an upload. It excludes adversary and defense, so they are paired."""
        return (self.scenario.description, self.seed, self.checkpoint)


@dataclass(frozen=True)
class Rounds:
    """Rounds of one arm: the server sends models, the clients answer.

    Attributes:
        trial: The attack.
        server: The server.
        folder: The folder of the checkpoints.
    """

    trial: AttackTrial
    server: Server
    folder: Path
    _models: dict[int, nn.Module] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)

    def observe(self, index: int) -> Attempt:
        """Return an observation, or the reason why there is none."""
        sought = victims(self.server.world, self.trial.seed, index)
        try:
            upload = self._upload(index, sought)
        except (NotApplicable, Refused) as reason:
            return Attempt(index, sought, reason)
        return Attempt(index, sought, NotApplicable("not attacked"), upload)

    def _upload(self, index: int, sought: Tensor) -> Upload:
        """Return the upload of one round: the server sends models, and clients train them."""
        trial, server, defense = self.trial, self.server, self.server.defense
        model = self._model(index)
        crafted = self._sent(model, index)
        received = tuple(Checked(defense).on_receive(one, model) for one in crafted.models)
        known = tuple(map(known_of, crafted.models, received))
        honest = all(one is model for one in known)

        client = server.world.client(defense, model)
        here = {"clients": defense.cohort, "seed": trial.seed}
        shares = cohort(server.world, sought, **here, observation=index)
        rng = generator("client", *trial.upload, index)
        released = (
            self._released(client, shares, rng, index)
            if honest
            else send(client, shares, rng, models=received)
        )

        uploads = observe(
            client,
            shares,
            server.granted(sought, index, examples=sum(len(one.inputs) for one in shares)),
            rng,
            models=known,
            replay=server.replay(client, known, 0 if honest else index),
            released=released,
            kept=crafted.kept,
            mending=server.mending(client),
        )
        if len(uploads) != 1:
            raise ValueError(
                f"{type(defense).__name__} has a cohort of {defense.cohort}, so on_round must "
                f"return one update for the whole cohort, got {len(uploads)}"
            )
        return uploads[0]

    def _released(
        self, client: Client, shares: Sequence[Batch], rng: torch.Generator, index: int
    ) -> Released:
        """Return what clients send to an honest server. It is the same for all attacks."""
        key = (self._arm, self.trial.checkpoint, index)
        released = _RELEASED.get(key)
        if released is None:
            released = send(client, shares, rng)
            _keep(key, released)
        copies = [{n: value.clone() for n, value in update.items()} for update in released.updates]
        return replace(released, updates=copies)  # an attack may change its copy

    @cached_property
    def _arm(self) -> tuple[str, Path]:
        trial = self.trial
        return TrainTrial(trial.scenario, trial.defense, trial.seed).cell.key, self.folder

    def _sent(self, model: nn.Module, index: int) -> Crafted:
        """Return the models that the server sends to clients, and what it keeps."""
        server, scenario, adversary = self.server, self.trial.scenario, self.server.adversary
        check_permitted(adversary, Threat(scenario.threat))
        clients, last = server.defense.cohort, self._kept[-1] if self._kept else None
        known = Round(
            server.world.space,
            server.world.protocol,
            clients,
            scenario.batch_size,
            server.threat.public,
            last,
        )
        rng = generator("craft", *self.trial.draws, index)
        crafted, name = adversary.craft(model, known, rng), type(adversary).__name__
        if not isinstance(crafted, Crafted):
            raise ValueError(
                f"{name}.craft must return Crafted(models, kept), got {type(crafted).__name__}"
            )
        if len(crafted.models) != clients:
            raise ValueError(
                f"{name}.craft must return a model for each of {clients} clients, got "
                f"{len(crafted.models)}"
            )
        self._kept[:] = [crafted.kept]
        return crafted

    def _model(self, index: int) -> nn.Module:
        """Return the version of the model that the client of an observation received."""
        trial = self.trial
        rng = generator("staleness", trial.scenario.description, trial.seed, index)
        protocol = self.server.world.protocol
        version = trial.checkpoint - protocol.staleness(trial.checkpoint, rng)
        if version not in self._models:
            self._models[version] = self._load(version)
        return self._models[version]

    def _load(self, version: int) -> nn.Module:
        trial = self.trial
        model = self.server.world.model(self.server.defense, trial.seed)
        if version:
            training = TrainTrial(trial.scenario, trial.defense, trial.seed)
            path = training.checkpoint(self.folder, version)
            if not path.exists():
                raise ValueError(f"there is no checkpoint of round {version}: training failed")
            load_model(model, path)
        return model


def _keep(key: _Key, released: Released) -> None:
    """Keep what clients have sent. Drop the oldest entries if that is too much."""
    _RELEASED[key] = released
    while len(_RELEASED) > _UPLOADS_KEPT or sum(map(_entries, _RELEASED.values())) > _ENTRIES_KEPT:
        del _RELEASED[next(iter(_RELEASED))]


def _entries(released: Released) -> int:
    return sum(value.numel() for update in released.updates for value in update.values())


class Trial(Protocol):
    """A dataclass that knows its cell and does its work."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the values that seed its randomness."""

    def run(self, folder: Path) -> Outcome:
        """Do the work in the folder of the run."""


_ATTACK_FIELDS = ("knows_defense", "seed", "checkpoint", "observations", "pictures")


def run_trial(task: tuple[Trial, Path]) -> Outcome:
    """Do the work of one cell in the folder of its run."""
    trial, folder = task
    if replace(trial).cell.key != trial.cell.key:
        raise ValueError("a source file has changed since the run began: start the run again")
    # Our own draws use separate generators. This seed is for dropout in users' models.
    seed_globally(generator("global", *trial.draws))
    device: Device = getattr(getattr(trial, "scenario", trial), "device", "cpu")
    with warnings.catch_warnings(record=True) as caught, on_device(device), math_attention():
        outcome = trial.run(folder)
    notes = dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught)
    return replace(outcome, note="; ".join(notes))


def check_permitted(adversary: Adversary, most: Threat) -> None:
    """Check that the threat model permits an attack.

    Raises:
        NotApplicable: If it does not.
    """
    threats = list(Threat)
    if threats.index(adversary.threat) > threats.index(most):
        changed = "the architecture" if adversary.threat is Threat.ARCHITECTURE else "parameters"
        raise NotApplicable(f"the threat model ({most.value}) forbids to change {changed}")


def attackable(checkpoints: Iterable[int], protocol: TrainingProtocol) -> set[int]:
    """Return the rounds whose models clients may hold when some rounds are attacked."""
    oldest = protocol.max_staleness
    return {c - age for c in checkpoints for age in range(oldest + 1) if c > age}


def known_of(sent: nn.Module, received: nn.Module) -> nn.Module:
    """Return the server's view of the model that a client trains on; the server cannot alter it."""
    return sent if CLIENTS.is_copy(received, sent) else copied(received)


def _untrained(scenario: Scenario) -> dict[str, object]:
    """Return the part of a scenario's configuration that an untrained model depends on."""
    return {name: value for name, value in scenario.config().items() if name != "training"}


def own_code_of(scenario: Scenario) -> list[object]:
    """Return the model's factory and the protocol of a scenario, if the user wrote them."""
    protocol = scenario.protocol
    return factories(scenario.model) + ([build_protocol(protocol)] if ":" in protocol.name else [])


def undefended(defense: Method) -> bool:
    """Return whether a defense is the undefended control."""
    return defense.name == "none"


def attack_labels(method: Method, adversary: Adversary) -> dict[str, object]:
    """Return the labels by which reports name and group an adversary."""
    return {
        "adversary": adversary_label(method, adversary),
        "adversary_name": type(adversary).__name__,
        "adversary_options": {**vars(adversary)},
        "threat": adversary.threat.value,
        "baseline": adversary.baseline,
        "simulates": adversary.simulates,
        "candidates_granted": adversary.needs_candidates,
    }


def labels_of(scenario: Scenario, defense: Method) -> dict[str, object]:
    """Return the labels by which reports name and group a scenario and a defense."""
    built = build_defense(defense)
    return {
        "scenario": scenario.name,
        "dataset": scenario.data_name,
        "model": scenario.model_label,
        "protocol": label(scenario.protocol),
        "batch_size": scenario.batch_size,
        "task": scenario.task,
        "defense": label(defense),
        "family": family(defense),
        "defense_options": options(defense),
        "strength": None if built.strength is None else float(built.strength),
        "stochastic": bool(built.stochastic),
    }


def _save(model: nn.Module, path: Path) -> None:
    """Write a checkpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    save_model(model, str(unfinished))  # it handles tied weights
    unfinished.replace(path)
