"""Attacks on captured updates, as cells of a run.

With the private examples and a dataset of their kind, a capture is scored like an upload of a run.
The code and the draws are the same, so the rows are the same. If one of them is missing, the page
claims no success. It then shows the guesses with the attack's own confidence, and with the distance
of their upload from the captured one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import (
    ContinuousSpace,
    InputSpace,
    NotApplicable,
    Observation,
    PublicData,
    Reconstruction,
    TokenSpace,
)
from leakfrontier.defenses import Batch

from ..client.client import Client, ThreatModel, Upload, observation_of, send
from ..client.discrimination import Examined
from ..client.examination import EXAMINED_ROUNDS, examine
from ..data.data import data_digest, data_files, load_dataset
from ..engines.parcels import Bundle, Files, Traveller
from ..foundations.devices import Device, current_device
from ..foundations.examples import Examples
from ..foundations.rows import AttackRow, Cell, Outcome, Rendering, Score
from ..foundations.seeds import generator
from ..modality.modality import modality_of
from ..models.pretrained import model_files
from ..run.cells import attack_labels, examination, labels_of, undefended
from ..run.code_digests import ATTACK, factories, source_digest
from ..run.scoring import Attempt
from ..run.server import Server
from ..users.methods import Method, build_adversary
from ..users.names import label
from ..world.scenario import Scenario, World
from .capture import CaptureError, Description
from .captured import Capture, load_capture

NOT_STATED = "not stated"
"""The name of the defense if a capture does not state it."""

NO_DATA = "no data"
SHOWN = 8
"""The number of guesses per upload that are kept for the gallery."""


@dataclass(frozen=True)
class CaptureTrial(Traveller):
    """Attack captured updates that share one description.

    Attributes:
        captures: The folders of the captures.
        contents: A hash of each capture.
        names: The names of the captures in reports.
        observations: The number of each capture, unique among the uploads of its arm.
        about: The description that they share.
        adversary: The attack.
        knows_defense: Whether the attack may replay the defense.
        control: Whether to attack an undefended client's upload of the same examples instead.
        scored: Whether there are private examples, and data to draw look-alikes from.
        candidates: Number of look-alikes, including the victim.
        data_folder: The folder of downloaded data.
        device: The device of tensors.
        seed: Repetition. It seeds the draws of the adversary and of look-alikes.
        pictures: How many uploads are kept for the gallery.
    """

    download: ClassVar[tuple[str, str]] = ("data_folder", "dataset_name")

    captures: tuple[Path, ...]
    contents: tuple[str, ...]
    names: tuple[str, ...]
    observations: tuple[int, ...]
    about: Description
    adversary: Method
    knows_defense: bool
    control: bool
    scored: bool
    candidates: int = 100
    data_folder: Path | None = None
    device: Device = "cpu"
    seed: int = 0
    pictures: int = 6

    def files(self) -> Files:
        """Yield the files on this machine: captures, their data and the pretrained model."""
        yield from data_files(self.dataset_name, self.data_folder)
        yield from model_files(self.about.model.name, self.about.model.options)
        for folder, content in zip(self.captures, self.contents, strict=True):
            found = {
                str(one.relative_to(folder)): one for one in folder.rglob("*") if one.is_file()
            }
            yield str(folder), (Bundle(f"capture-{content[:64]}", found), "")

    @property
    def dataset_name(self) -> str:
        """Return the name of the dataset, or `NO_DATA`."""
        return self.about.dataset or NO_DATA

    @property
    def scenario(self) -> Scenario:
        """Return the scenario of the captures, as in a run."""
        return scenario_of(
            self.about,
            data_folder=self.data_folder,
            candidates=self.candidates,
            device=self.device,
        )

    @property
    def defense(self) -> Method:
        """Return the defense of the attacked uploads, as far as it is known."""
        return Method(name="none") if self.control or not self.about.defense else self.about.defense

    @property
    def arm(self) -> str:
        """Return the name of the defense in reports."""
        stated = self.control or self.about.defense is not None
        return label(self.defense) if stated else NOT_STATED

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        about, adversary = self.about, build_adversary(self.adversary)
        config = {
            "captures": self.contents,
            "observations": self.observations,
            "model": about.model.config(),
            "defense": self.defense.config(),
            "dataset": about.dataset and self.scenario.data_name,
            "content": about.dataset and data_digest(about.dataset),
            "adversary": self.adversary.config(),
            **{name: getattr(self, name) for name in _FIELDS},
        }
        labels = {
            **labels_of(self.scenario, self.defense),
            **({} if self.arm != NOT_STATED else {"defense": NOT_STATED, "family": NOT_STATED}),
            **attack_labels(self.adversary, adversary),
            "seed": self.seed,
            "checkpoint": about.round,
            "knows_defense": self.knows_defense,
            "captures": self.names,
            "numbers": self.observations,
        }
        path = {*ATTACK, "evaluate/outside/capture_cells.py"}
        own = factories(about.model) + ([about.training] if ":" in about.protocol.name else [])
        code = source_digest(path, about.known_defense, adversary, *own)
        return Cell("attack", config, labels, code)

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the seed of the adversary's draws, as in a run."""
        return (self.scenario.description, self.adversary.config(), self.seed)

    def run(self, folder: Path) -> Outcome:
        """Attack the captures, and score or show the results."""
        captures = self._load()
        world, victims = world_of(self.scenario, self.about, captures)
        public = PublicData(*world.test) if self.about.dataset is not None else None
        server = Server(
            world,
            world.defense(self.defense),
            build_adversary(self.adversary),
            ThreatModel(self.about.labels is not None, self.knows_defense, public),
            self.seed,
            self.draws,
            examined=self._examination(),
        )
        start, seen = time.perf_counter(), _Captured(self, server)
        uploads = {
            number: seen.observe(number, one, rows)
            for number, one, rows in zip(self.observations, captures, victims, strict=True)
        }
        results = server.attack(uploads)
        busy = time.perf_counter() - start
        if not self.scored:
            return _unscored(self, world, captures, uploads, results, busy / len(captures))
        attempts = [
            Attempt(number, rows, results[number], Upload(uploads[number], truth, truth))
            for number, one, rows in zip(self.observations, captures, victims, strict=True)
            if (truth := one.truth) is not None
        ]
        rounds = 0 if self.about.round == 0 else None  # a trained model may know the victim
        each = self.shown_each
        return server.outcome(attempts, busy, rounds=rounds, shown=self.shown, each=each)

    def _examination(self) -> Callable[[Client], Examined] | None:
        """Return a function that examines the replay of the defense; without data, on noise."""
        if undefended(self.defense) or self.about.dataset is not None:
            return examination(self.scenario, self.defense)

        def on_noise(client: Client) -> Examined:
            rng, size = generator("examination", *self.draws), self.about.batch_size
            clients = client.defense.cohort
            rounds = [
                [_noise(client.space, size, rng) for _ in range(clients)]
                for _ in range(EXAMINED_ROUNDS)
            ]
            return Examined(examine(client, rounds, rng))

        return on_noise

    @property
    def shown(self) -> tuple[int, ...]:
        """Return the uploads whose guesses are kept for the gallery."""
        return self.observations[: self.pictures]

    @property
    def shown_each(self) -> int:
        """Return how many victims are kept of each upload; with few uploads there are more."""
        return math.ceil(self.pictures / len(self.observations))

    def _load(self) -> list[Capture]:
        captures = [load_capture(path, known=self.about) for path in self.captures]
        if tuple(one.content for one in captures) != self.contents:
            raise ValueError("a capture has changed since the attack began: start it again")
        return [one.to(current_device()) for one in captures]


_FIELDS = ("knows_defense", "control", "scored", "candidates", "seed", "pictures")


def scenario_of(about: Description, **options: Any) -> Scenario:  # noqa: ANN401 - fields
    """Return the scenario of captures, as in a run."""
    scenario = Scenario(
        model=about.model,
        protocol=about.protocol,
        batch_size=about.batch_size,
        knows_targets=about.labels is not None,
        public_data=about.dataset is not None,
        mode=about.mode,
        **options,
    )
    return scenario.model_copy(update={"dataset": about.dataset or NO_DATA})


def world_of(
    scenario: Scenario, about: Description, captures: Sequence[Capture]
) -> tuple[World, list[Tensor]]:
    """Return the world of captures, and the rows of each capture's private examples in it.

    Private examples that are not among the training examples are added to them.
    """
    space = about.inputs
    if about.dataset is None:
        nothing = Batch(torch.empty(0, *space.shape, dtype=space.dtype), torch.empty(0).long())
        world = World(scenario, modality_of(space), Examples(*nothing), nothing)
        return world, [torch.empty(0).long() for _ in captures]
    data = load_dataset(about.dataset, scenario.data_folder)
    if (data.space.shape, data.space.classes) != (space.shape, space.classes):
        raise CaptureError(
            f"examples of {data.name} have shape {data.space.shape} and {data.space.classes} "
            f"classes, but those of the capture shape {space.shape} and {space.classes} classes"
        )
    modality = modality_of(space, data.vocabulary)
    train, test = (
        Batch(modality.inputs(part.inputs), part.targets).to(current_device())
        for part in (data.train, data.test)
    )
    victims = []
    for one in captures:
        truth = one.truth or train.at(slice(0))
        rows, train = _among(train, truth)
        victims.append(rows)
    return World(scenario, modality, Examples(*train), test), victims


def _among(data: Batch, sought: Batch) -> tuple[Tensor, Batch]:
    """Return the rows of some examples in the data, and the data with missing ones added."""
    rows: list[int] = []
    more: list[int] = []
    for number, example in enumerate(sought.inputs):
        same = (data.inputs == example).flatten(1).all(dim=1).nonzero().flatten()
        found = [int(row) for row in same if torch.equal(data.targets[row], sought.targets[number])]
        rows.append(found[0] if found else len(data.inputs) + len(more))
        more += [] if found else [number]
    others = sought.at(torch.tensor(more, dtype=torch.long))
    return torch.tensor(rows, dtype=torch.long), Batch.joined([data, others])


@dataclass(frozen=True)
class _Captured:
    """Captured uploads from the view of a server."""

    trial: CaptureTrial
    server: Server
    _models: dict[str, nn.Module] = field(default_factory=dict)

    def observe(self, number: int, one: Capture, victims: Tensor) -> Observation:
        """Return an observation. The server crafted nothing, so it kept nothing."""
        trial, about, server = self.trial, self.trial.about, self.server
        model = self._models.setdefault(one.weights, one.model)  # one object: attacks vectorise
        models = (model,) * about.training.clients
        client = server.world.client(server.defense, model)
        client = replace(client, protocol=replace(client.protocol, clients=1))
        scored = victims if trial.scored else victims[:0]
        return observation_of(
            client,
            models,
            self._control(client, one, number) if trial.control else one.update,
            server.granted(scored, number, examples=len(victims)),
            server.replay(client, models),
            examples=about.batch_size,
            targets=None if one.about.labels is None else torch.tensor(one.about.labels),
            mending=server.mending(client),
        )

    def _control(self, client: Client, one: Capture, number: int) -> dict[str, Tensor]:
        """Return the upload of an undefended client for the same examples."""
        if one.truth is None:
            raise ValueError("an undefended upload needs private examples, but there are none")
        upload = (self.trial.scenario.description, self.trial.seed, self.trial.about.round)
        return send(client, [one.truth], generator("client", *upload, number)).updates[0]


def _noise(space: InputSpace, size: int, rng: Generator) -> Batch:
    """Return random examples to examine a replay without data."""
    targets = torch.randint(space.classes, (size,), generator=rng)
    if isinstance(space, ContinuousSpace):
        values = torch.rand((size, *space.shape), generator=rng)
        return Batch(space.to_inputs(values), targets)
    vocabulary = space.vocabulary if isinstance(space, TokenSpace) else 1
    return Batch(torch.randint(vocabulary, (size, *space.shape), generator=rng), targets)


class _Guess(NamedTuple):
    """A guess on the scale of the data, its measurements, and the matched private example."""

    values: Tensor
    measured: Mapping[str, float]
    truth: Tensor | None = None


def _unscored(
    trial: CaptureTrial,
    world: World,
    captures: Sequence[Capture],
    uploads: Mapping[int, Observation],
    results: Mapping[int, Reconstruction | NotApplicable],
    seconds: float,
) -> Outcome:
    """Return guesses with their measurements, without any claim of success."""
    rows: list[AttackRow] = []
    scores: list[Score] = []
    pictures: list[Rendering] = []
    render = world.modality.render
    for one, (number, result) in zip(captures, results.items(), strict=True):
        if isinstance(result, NotApplicable):
            rows.append(AttackRow(number, 0, "not applicable", str(result)))
            continue
        objective = None if result.objective is None else float(result.objective)
        guesses = _guesses(world, one.truth, uploads[number], result)
        for place, guess in enumerate(guesses):
            rows.append(AttackRow(number, place, "unscored", objective=objective, seconds=seconds))
            scores += [Score(number, place, *one) for one in guess.measured.items()]
            if number in trial.shown and place < SHOWN:
                truth = b"" if guess.truth is None else render(guess.truth)
                shown = render(guess.values)
                pictures.append(Rendering(number, place, world.modality.media, truth, shown))
    busy = seconds * len(captures)
    return Outcome(tuple(rows), tuple(scores), renderings=tuple(pictures), busy=busy)


def _guesses(
    world: World, truth: Batch | None, observation: Observation, result: Reconstruction
) -> list[_Guess]:
    """Return every guess; with known private examples, only the guesses matched to them."""
    modality = world.modality
    values, residual = modality.values(result.inputs.detach()), _residual(observation, result)
    guesses = []
    for index, value in enumerate(values):
        measured = {} if residual is None else {"residual": residual}
        if result.confidence is not None:
            measured["confidence"] = float(result.confidence[index])
        guesses.append(_Guess(value, measured))
    if truth is None:
        return guesses
    private = modality.values(truth.inputs)
    pairs = [
        (guesses[i], private[k]) for k, i in enumerate(modality.match(values, private)) if i >= 0
    ]
    found = modality.scores(
        *(torch.stack(part) for part in ([g.values for g, _ in pairs], [t for _, t in pairs]))
    )
    return [
        _Guess(
            guess.values,
            {**guess.measured, **{n: float(v[k]) for n, v in found.items() if not v[k].isnan()}},
            example,
        )
        for k, (guess, example) in enumerate(pairs)
    ]


def _residual(observation: Observation, result: Reconstruction) -> float | None:
    """Return the relative distance between the upload of a whole guess and the observed one."""
    targets = result.targets if result.targets is not None else observation.targets
    if targets is None or len(result.inputs) != observation.batch_size:
        return None
    with torch.no_grad():
        replayed = observation.simulate(result.inputs.detach(), targets)
    seen = observation.update
    error = sum(float((replayed[name] - seen[name]).square().sum()) for name in seen)
    size = sum(float(value.square().sum()) for value in seen.values())
    return math.sqrt(error / size) if size else None
