"""The three kinds of cell: train under a defense, examine its replay, attack it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from leakfrontier.adversaries import (
    Adversary,
    Crafted,
    NotApplicable,
    Observation,
    Round,
    Threat,
)
from leakfrontier.defenses import Batch, Defense, Refused, Update

from ..client.client import (
    Client,
    Released,
    ThreatModel,
    Upload,
    observation_of,
    observe,
)
from ..client.decoders import Decoder
from ..client.discrimination import Examined, discriminated
from ..client.examination import EXAMINED_ROUNDS, examine, mending_of
from ..client.inversion import PublicTraining, invert, public_clients
from ..client.math_attention import math_attention
from ..engines.parcels import Traveller
from ..foundations.devices import Device, on_device
from ..foundations.lazy import Lazy
from ..foundations.rows import CHANGED_MODEL, Cell, GuaranteeRow, Outcome, ProbeRow
from ..foundations.seeds import generator, global_draws, seed_globally
from ..privacy.claims import claim_of, guarantee_row
from ..privacy.trained_noise import TrainedClient
from ..users.contract import Checked
from ..users.copies import CLIENTS, copied
from ..users.methods import Method, build_adversary, build_defense, build_protocol
from ..users.names import adversary_label, family, label, options
from ..world.enrolment import attacked, attacked_rounds, enrol
from ..world.scenario import Scenario, World, load_world
from ..world.victims import cohort, other_cohort, other_examples, victims
from .code_digests import ATTACK, REPLAY, TRAINED, TRAINING, factories, source_digest
from .scenes import NewScenes, Scene, Scenes
from .scoring import Attempt
from .server import Server, either
from .trained_audit import audited_clients
from .trained_inversion import TrainedInversion
from .trained_scenes import TrainedScenes, clients_of
from .training_clients import TrainingClients
from .training_server import Order
from .upload_log import Logged

EXAMINED_SEED = 0  # seed of the model and clients that examine replays
CURVE_POINTS = 5  # evaluations of accuracy along training, besides those at checkpoints


@dataclass(frozen=True)
class TrainTrial:
    """Train under a defense. This gives its utility and the checkpoints for attacks.

    Attributes:
        scenario: The scenario.
        defense: The defense.
        seed: Repetition: data split, initial weights, order and noise.
        logged: Number of attacked uploads that are logged for each checkpoint.
    """

    scenario: Scenario
    defense: Method
    seed: int
    logged: int = 0

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {
            "scenario": self.scenario.config(),
            "defense": self.defense.config(),
            "seed": self.seed,
        }
        if self._attacked:
            config["logged"] = self.logged
        labels = {
            **labels_of(self.scenario, self.defense),
            "seed": self.seed,
            "other_cohort": other_cohort(self.scenario, self.defense),
            "other_examples": other_examples(self.scenario),
        }
        code = source_digest(TRAINING, build_defense(self.defense), *own_code_of(self.scenario))
        return Cell("train", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Train, evaluating along the way and logging the uploads that are attacked."""
        world = load_world(self.scenario)
        defense, settings = world.defense(self.defense), self.scenario.training
        enrolment = enrol(world, self.seed, self.logged)
        curve = {round(settings.rounds * i / CURVE_POINTS) for i in range(CURVE_POINTS + 1)}
        rounds = {
            last: attacked_rounds(world, enrolment, self.seed, last, self.logged)
            for last in self._attacked
        }
        model = world.model(defense, self.seed)
        training = TrainingClients(
            clients_of(world, defense, model, enrolment),
            enrolment.rows,
            model,
            Order(
                scenario=self.scenario,
                draws=self.draws,
                weights=enrolment.weights,
                lr=settings.lr_under(self.defense),
                evaluated=frozenset(curve | {*self.scenario.checkpoints}),
                saved={c: self.checkpoint(folder, c) for c in self.scenario.checkpoints if c},
                logged=frozenset(one for several in rounds.values() for one in several),
                invited=enrolment.invited(world, self.logged, attacked=True),
            ),
        )
        start = time.perf_counter()
        training.run(settings.rounds)
        busy = time.perf_counter() - start
        probes: list[ProbeRow] = []
        for last, several in rounds.items():
            found = training.attackable(several)
            chosen = attacked(found, self.scenario.batch_size, self.logged)
            if len(chosen) < self.logged and not training.refused:
                raise ValueError(
                    f"training gives {len(chosen)} uploads to attack, but observations is "
                    f"{self.logged}: raise training.rounds or training.clients_per_round, or "
                    "lower observations"
                )
            training.write(self.seen(folder, last), self.hidden(folder, last), chosen)
            if not undefended(self.defense):
                row = self.inversion(folder, last).row(training.end)
                probes += [] if row is None else [row]
        return Outcome(
            utility=training.utility(),
            guarantees=self._guarantees(world, defense, training, folder),
            probes=tuple(probes),
            busy=busy,
        )

    @property
    def _attacked(self) -> tuple[int, ...]:
        """Return the last rounds of the attacked parts of training."""
        return tuple(c for c in self.scenario.checkpoints if c) if self.logged else ()

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of all draws. It excludes the defense, so accuracies are paired."""
        return (self.scenario.paired_config(), self.seed)

    def _guarantees(
        self, world: World, defense: Defense, training: TrainingClients, folder: Path
    ) -> tuple[GuaranteeRow, ...]:
        """Return the defense's privacy claim for this run, with the audit of its noise."""
        claim, rounds = claim_of(defense), max(training.rounds_of.values(), default=0)
        if claim is None or not rounds:  # a client that refused every model has sent nothing
            return ()
        rng, model = generator("audit", self.cell.config_digest), world.model(defense, self.seed)

        def trained() -> list[TrainedClient]:
            pasts = [p for last in self._attacked for p in self.inversion(folder, last).pasts()]
            return audited_clients(world, defense, claim.unit, model, [*pasts, training.end()])

        return (guarantee_row(claim, world, model, rounds, rng, trained),)

    def scenes(self, folder: Path, last: int) -> TrainedScenes:
        """Return the attacked rounds up to a round."""
        world = load_world(self.scenario)
        defense = world.defense(self.defense)
        files = (self.seen(folder, last), self.hidden(folder, last))
        return TrainedScenes(world, defense, self.seed, self.draws, self.logged, *files)

    def inversion(self, folder: Path, last: int) -> TrainedInversion:
        """Return the tests whether these uploads hold the update, once per process."""
        place = self.findings(folder, last)
        if place not in _INVERTED:
            scenes = self.scenes(folder, last)
            shares = _public_shares(scenes.world, scenes.defense)
            training = PublicTraining(self.scenario.batch_size)
            _INVERTED[place] = TrainedInversion(scenes, shares, training, place)
        return _INVERTED[place]

    def findings(self, folder: Path, last: int) -> Path:
        """Return the file of what these tests found, for attacks in other processes."""
        return folder / "examined" / f"{self.cell.key}-{last}.json"

    def checkpoint(self, folder: Path, after: int) -> Path:
        """Return the file of the model after some rounds."""
        return folder / "checkpoints" / f"{self.cell.key}-{after}.safetensors"

    def seen(self, folder: Path, last: int) -> Path:
        """Return the file of what the server saw of the attacked uploads up to a round."""
        return folder / "uploads" / f"{self.cell.key}-{last}.safetensors"

    def hidden(self, folder: Path, last: int) -> Path:
        """Return the file of what the server did not see of them."""
        return folder / "uploads" / f"{self.cell.key}-{last}-hidden.safetensors"


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
        if found.decoder is None:  # else attacks fit it again
            found.write(self.findings(folder))
        probes = () if found.probe is None else (found.probe,)
        busy = time.perf_counter() - start
        return Outcome(replays=(found.replay,), probes=probes, busy=busy)

    def findings(self, folder: Path) -> Path:
        """Return the file of the findings, for attacks in other processes."""
        return folder / "examined" / f"{self.cell.key}.json"

    def examined(self, folder: Path | None = None) -> Examined:
        """Return the findings of the examination, from the folder or computed once per process."""
        known = None
        if self.cell.key not in _EXAMINED and folder is not None:
            known = Examined.read(self.findings(folder))
        if known is not None:
            _EXAMINED[self.cell.key] = known
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
    clients, available = public_clients(defense), len(world.test.targets)
    size = world.scenario.batch_size
    if world.protocol.uploads_gradient:
        size = max(size, available // clients)
    rows = torch.arange(clients * size).remainder(available)
    return [world.test.at(part) for part in rows.split(size)]


_EXAMINED: dict[str, Examined] = {}
_INVERTED: dict[Path, TrainedInversion] = {}


def examination(
    scenario: Scenario, defense: Method, folder: Path | None = None
) -> Callable[[Client], Examined] | None:
    """Return a function that examines a defense; None without a defense.

    Args:
        scenario: The scenario.
        defense: The defense.
        folder: The folder of the run, which may hold the findings.
    """
    if undefended(defense):
        return None
    return lambda _: ReplayTrial(scenario, defense).examined(folder)


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
        checkpoint: Attacked uploads come from random rounds of training, up to this one. 0 attacks
            the first upload of new clients, for the untrained model.
        observations: The numbers of the attacked uploads, from 0.
        pictures: How many of the first uploads are kept for the gallery.
        logged: How many attacked uploads training has logged. Default: up to the last of these.
    """

    scenario: Scenario
    defense: Method
    adversary: Method
    knows_defense: bool
    seed: int
    checkpoint: int
    observations: tuple[int, ...]
    pictures: int = 6
    logged: int | None = None

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        config = {
            "scenario": self.scenario.config() if self.checkpoint else _untrained(self.scenario),
            "defense": self.defense.config(),
            "adversary": self.adversary.config(),
            **{name: getattr(self, name) for name in _ATTACK_FIELDS},
        }
        if self.checkpoint:
            config["logged"] = self.training.logged
        adversary = build_adversary(self.adversary)
        labels = {
            **labels_of(self.scenario, self.defense),
            **attack_labels(self.adversary, adversary),
            "seed": self.seed,
            "checkpoint": self.checkpoint,
            "knows_defense": self.knows_defense,
        }
        path = {*ATTACK, *(TRAINED if self.checkpoint else ())}
        own = own_code_of(self.scenario)
        code = source_digest(path, build_defense(self.defense), adversary, *own)
        return Cell("attack", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Observe uploads, attack them, and score the results."""
        world = load_world(self.scenario)
        trained = self.checkpoint and not undefended(self.defense)
        server = Server(
            world,
            world.defense(self.defense),
            build_adversary(self.adversary),
            world.threat(self.knows_defense),
            self.seed,
            self.draws,
            examined=examination(self.scenario, self.defense, folder),
            decoder=partial(self._decoder, folder) if trained else None,
        )
        start = time.perf_counter()
        rounds = Rounds(self, server, self._scenes(world, server.defense, folder))
        observed = [rounds.observe(i) for i in self.observations]
        seen = {a.observation: a.upload.observation for a in observed if a.upload is not None}
        found = server.attack(seen)
        attempts = [replace(a, result=found.get(a.observation, a.result)) for a in observed]
        score = partial(server.outcome, rounds=self.checkpoint, shown=range(self.pictures))
        own = score(attempts, time.perf_counter() - start)
        decoded = server.attack_decoded(attempts, own)
        busy = time.perf_counter() - start
        both = either(replace(own, busy=busy), score(decoded, busy))
        return self._explained(both, world, server.defense)

    def _explained(self, outcome: Outcome, world: World, defense: Defense) -> Outcome:
        """Return rows that say whether an attack does not apply to a model that was changed."""
        absent = any(row.outcome == "not applicable" for row in outcome.attacks)
        if not absent or not world.is_changed(defense, self.seed):
            return outcome
        rows = (
            replace(row, reason=f"{row.reason}{CHANGED_MODEL}")
            if row.outcome == "not applicable"
            else row
            for row in outcome.attacks
        )
        return replace(outcome, attacks=tuple(rows))

    def _decoder(self, folder: Path, index: int) -> Decoder | None:
        """Return the decoder of an upload of the training."""
        return self.training.inversion(folder, self.checkpoint).decoder(index)

    def _scenes(self, world: World, defense: Defense, folder: Path) -> Scenes:
        if not self.checkpoint:
            victims(world, self.seed, max(self.observations))  # raises before any work is done
            arm = f"{folder} {self.training.cell.key}"
            return NewScenes(world, defense, self.seed, self.upload, arm)
        return self.training.scenes(folder, self.checkpoint)

    @property
    def training(self) -> TrainTrial:
        """Return the training whose uploads are attacked."""
        logged = max(self.observations, default=-1) + 1 if self.logged is None else self.logged
        return TrainTrial(self.scenario, self.defense, self.seed, logged if self.checkpoint else 0)

    def needed(self, folder: Path) -> Iterator[Path]:
        """Yield the logs of the attacked uploads, and what was found about the defense."""
        paths = [ReplayTrial(self.scenario, self.defense).findings(folder)]
        if self.checkpoint:
            files = (self.training.seen, self.training.hidden, self.training.findings)
            paths += [path(folder, self.checkpoint) for path in files]
        yield from (path for path in paths if path.exists())  # else training failed

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
        scenes: The attacked rounds.
    """

    trial: AttackTrial
    server: Server
    scenes: Scenes
    _kept: list[object] = field(default_factory=list)

    def observe(self, index: int) -> Attempt:
        """Return an observation, or the reason why there is none."""
        scene = self.scenes.scene(index)
        try:
            upload = self._upload(index, scene)
        except (NotApplicable, Refused) as reason:
            return Attempt(index, scene.victims, reason)
        return Attempt(index, scene.victims, NotApplicable("not attacked"), upload)

    def _upload(self, index: int, scene: Scene) -> Upload:
        """Return the upload of one round: the server sends models, and clients train them."""
        server, defense, model = self.server, self.server.defense, scene.model
        crafted = self._sent(model, index, len(scene.shares))
        honest = all(one is model for one in crafted.models)
        shown = scene.honest() if honest else scene.answer(crafted.models)
        known = tuple(map(known_of, crafted.models, shown.models))
        client = server.world.client(defense, model)
        examples = sum(len(one.inputs) for one in scene.shares)
        threat = server.granted(scene.victims, index, examples=examples)
        (upload,) = observe(
            client,
            scene.shares,
            threat,
            generator("client", *self.trial.upload, index),
            models=known,
            replay=server.replay(client, known, 0 if honest else index),
            released=Released([_cloned(shown.update)], shown.trained_on),
            kept=crafted.kept,
            mending=server.mending(client),
        )
        earlier = Lazy(
            [partial(self._before, before, threat, examples) for before in scene.earlier]
        )
        return replace(upload, observation=replace(upload.observation, earlier=earlier))

    def _before(
        self, earlier: Callable[[], tuple[nn.Module, Logged]], threat: ThreatModel, examples: int
    ) -> Observation:
        """Return what the server saw of the victim in an earlier round."""
        model, logged = earlier()
        client = self.server.world.client(self.server.defense, model)
        models = (model,) * len(logged.clients)
        replay = self.server.replay(client, models)
        return observation_of(
            client, models, logged.update, threat, replay, examples=examples, targets=None
        )

    def _sent(self, model: nn.Module, index: int, clients: int) -> Crafted:
        """Return the models that the server sends to clients, and what it keeps."""
        server, scenario, adversary = self.server, self.trial.scenario, self.server.adversary
        check_permitted(adversary, Threat(scenario.threat))
        known = Round(
            server.world.space,
            server.world.protocol,
            clients,
            scenario.batch_size,
            server.threat.public,
            self._kept[-1] if self._kept else None,
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


def _cloned(update: Update) -> Update:
    return {name: value.clone() for name, value in update.items()}  # an attack may change it


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
