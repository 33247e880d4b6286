"""The two kinds of cell: train under a defense, and attack it. Each leaves rows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import Field, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leakfrontier.adversaries import (
    Adversary,
    Candidates,
    NotApplicable,
    Reconstruction,
)
from leakfrontier.defenses import Batch, Defense

from .client import Replay, Upload, make_replay, observe
from .data import partition
from .federation import Federation, evaluate
from .identity import ATTACK, TRAINING, factories, source
from .methods import Method, build_adversary, build_defense
from .privacy.claims import claim_of, guarantee_row, proven_bound
from .rows import Cell, GuaranteeRow, Outcome, UtilityRow
from .scenario import (
    Scenario,
    World,
    adversary_label,
    family,
    generator,
    label,
    load_world,
    loss,
    options,
)
from .scoring import Scoring, look_alikes

CURVE_POINTS = 5  # evaluations of accuracy along training, besides those at checkpoints


@dataclass(frozen=True)
class TrainTrial:
    """Train under a defense: its utility, and the checkpoints that are attacked.

    Attributes:
        scenario: What is trained.
        defense: The defense.
        seed: Repetition: data split, initial weights, order and noise.
    """

    scenario: Scenario
    defense: Method
    seed: int

    @cached_property
    def cell(self) -> Cell:
        """Return the cell, by which the outcome is stored."""
        config = {
            "scenario": self.scenario.config(),
            "defense": self.defense.config(),
            "seed": self.seed,
        }
        labels = {**_labels(self.scenario, self.defense), "seed": self.seed}
        code = source(TRAINING, build_defense(self.defense), *factories(self.scenario.model))
        return Cell("train", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Train, evaluating along the way and saving the checkpoints."""
        world = load_world(self.scenario)
        defense, training = world.defense(self.defense), self.scenario.training
        rng = generator("training", self.cell.identity)
        shares = partition(
            world.train,
            training.clients,
            training.partition,
            generator("shares", self.scenario.config(), self.seed),
            alpha=training.alpha,
        )
        federation = Federation(
            model=world.model(defense, self.seed),
            loss=loss,
            shares=shares,
            defense=defense,
            protocol=world.protocol,
            clients_per_round=training.clients_per_round,
            batch_size=training.batch_size,
            server=training.server,
            lr=training.lr,
        )
        rows: list[UtilityRow] = []

        def on_checkpoint(done: int, model: nn.Module) -> None:
            if done and done in self.scenario.checkpoints:
                _save(model, self.checkpoint(folder, done))
            correct, value = evaluate(model, loss, world.test)
            rows.append(UtilityRow(done, correct, len(world.test.targets), value))

        start = time.perf_counter()
        every = [round(training.rounds * i / CURVE_POINTS) for i in range(CURVE_POINTS + 1)]
        at = {*every, *self.scenario.checkpoints}
        federation.train(training.rounds, rng, at=at, on_checkpoint=on_checkpoint)
        busy = time.perf_counter() - start
        return Outcome(
            utility=tuple(rows),
            guarantees=self._guarantees(world, defense, max(federation.rounds_of)),
            busy=busy,
        )

    def _guarantees(self, world: World, defense: Defense, rounds: int) -> tuple[GuaranteeRow, ...]:
        """Return what the defense claims of this run, and whether its noise is there."""
        claim = claim_of(defense)
        if claim is None:
            return ()
        rng = generator("audit", self.cell.identity)
        return (guarantee_row(claim, world, world.model(defense, self.seed), rounds, rng),)

    def checkpoint(self, folder: Path, after: int) -> Path:
        """Return where the model after some rounds is kept."""
        return folder / "checkpoints" / f"{self.cell.key}-{after}.safetensors"


@dataclass(frozen=True)
class AttackTrial:
    """Attack a defense: scores per victim.

    Victims, uploads and look-alikes do not depend on the adversary, and victims not on the
    defense either: all comparisons are paired.

    Attributes:
        scenario: What is attacked.
        defense: The defense.
        adversary: The attack.
        knows_defense: Whether it may replay the defense.
        seed: Repetition.
        checkpoint: Rounds of training before the attacked upload.
        observations: Which uploads are attacked, by their numbers from 0.
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
        """Return the cell, by which the outcome is stored."""
        scenario = self.scenario.config()
        if self.checkpoint == 0:
            del scenario["training"]  # an untrained model does not depend on it
        config = {
            "scenario": scenario,
            "defense": self.defense.config(),
            "adversary": self.adversary.config(),
            **{name: getattr(self, name) for name in _ATTACK_FIELDS},
        }
        adversary = build_adversary(self.adversary)
        labels = {
            **_labels(self.scenario, self.defense),
            "seed": self.seed,
            "checkpoint": self.checkpoint,
            "adversary": adversary_label(self.adversary, adversary),
            "adversary_name": type(adversary).__name__,
            "adversary_options": {**vars(adversary)},
            "threat": adversary.threat.value,
            "baseline": adversary.baseline,
            "simulates": adversary.simulates,
            "candidates_granted": adversary.needs_candidates,
            "knows_defense": self.knows_defense,
        }
        path = {*ATTACK, *(TRAINING if self.checkpoint else ())}
        made_by = factories(self.scenario.model)
        code = source(path, build_defense(self.defense), adversary, *made_by)
        return Cell("attack", config, labels, code)

    def run(self, folder: Path) -> Outcome:
        """Observe uploads, attack them, and score what came out."""
        world = load_world(self.scenario)
        defense, adversary = world.defense(self.defense), build_adversary(self.adversary)
        model = self._model(world, defense, folder)
        victims = self._victims(world)

        start = time.perf_counter()
        uploads = self._observe(world, defense, adversary, model, victims)
        rngs = [generator("adversary", *self._identity, i) for i in self.observations]
        found = adversary.reconstruct_all([upload.observation for upload in uploads], rngs)
        results = [_examples(result) for result in found]
        busy = time.perf_counter() - start

        claim = claim_of(defense)
        bound = None if claim is None else proven_bound(claim, world, self.checkpoint)
        scores = Scoring(
            world,
            defense,
            adversary,
            self.seed,
            victims,
            uploads,
            results,
            bound,
            self.observations,
        )
        return Outcome(
            attacks=tuple(scores.rows(seconds=busy / len(uploads))),
            scores=tuple(scores.scores()),
            renderings=tuple(scores.renderings(self.pictures)),
            busy=busy,
        )

    @property
    def _identity(self) -> tuple[object, ...]:
        """Return what the adversary's draws depend on: not the defense, so that they pair."""
        return (self.scenario.description, self.adversary.config(), self.seed)

    def _model(self, world: World, defense: Defense, folder: Path) -> nn.Module:
        model = world.model(defense, self.seed)
        if self.checkpoint:
            path = TrainTrial(self.scenario, self.defense, self.seed).checkpoint(
                folder, self.checkpoint
            )
            if not path.exists():
                raise ValueError(
                    f"there is no checkpoint of round {self.checkpoint}: training failed"
                )
            model.load_state_dict(load_file(path))
        return model

    def _victims(self, world: World) -> list[Tensor]:
        """Return the indices of each observation's private examples: disjoint, at random."""
        count = max(self.observations) + 1
        needed, available = count * self.scenario.batch_size, len(world.train.targets)
        if needed > available:
            raise ValueError(
                f"{count} observations of {self.scenario.batch_size} examples need "
                f"{needed} training examples, {self.scenario.dataset} has {available}"
            )
        rng = generator("victims", self.scenario.dataset, self.scenario.batch_size, self.seed)
        drawn = torch.randperm(available, generator=rng)[:needed].view(count, -1)
        return list(drawn[list(self.observations)])

    def _observe(
        self,
        world: World,
        defense: Defense,
        adversary: Adversary,
        model: nn.Module,
        victims: Sequence[Tensor],
    ) -> list[Upload]:
        """Return one upload per batch of victims; those of one model share its replay."""
        threat, protocol = world.threat(self.knows_defense), world.protocol
        replays: dict[nn.Module, Replay] = {}
        uploads = []
        for index, rows in zip(self.observations, victims, strict=True):
            rng = generator("craft", *self._identity, index)
            sent = adversary.craft(model, world.space, index, rng)
            if sent not in replays:
                rng = generator("replay", *self._identity, index)
                replays[sent] = make_replay(
                    sent, loss, defense, protocol, threat, defense.cohort, rng
                )
            rng = generator("client", self._upload, self.seed, self.checkpoint, index)
            shares = self._cohort(world, rows, defense.cohort, index)
            known = threat
            if adversary.needs_candidates and len(rows) == len(shares) == 1:
                known = replace(threat, candidates=self._candidates(world, rows, index))
            seen = observe(
                sent, loss, shares, defense, protocol, world.space, known, rng, replays[sent]
            )
            if len(seen) != 1:
                raise ValueError(
                    f"{type(defense).__name__} has a cohort of {defense.cohort}, so that on_round "
                    f"must return one update for all of it, got {len(seen)}"
                )
            uploads += seen
        return uploads

    def _cohort(self, world: World, victims: Tensor, clients: int, index: int) -> list[Batch]:
        """Return the victims' share and those of the clients that are only seen with them."""
        others = torch.ones(len(world.train.targets), dtype=torch.bool)
        others[victims] = False
        spare, needed = others.nonzero().flatten(), (clients - 1) * len(victims)
        if needed > len(spare):
            raise ValueError(f"{clients} clients need {needed} more examples, got {len(spare)}")
        rng = generator("bystanders", self.scenario.dataset, self.seed, index)
        bystanders = spare[torch.randperm(len(spare), generator=rng)[:needed]]
        return [
            Batch(world.train.inputs[rows], world.train.targets[rows])
            for rows in (victims, *bystanders.split(len(victims)))
            if len(rows)
        ]

    def _candidates(self, world: World, victim: Tensor, index: int) -> Candidates:
        """Return a victim among its look-alikes, in an order that says nothing."""
        rows = torch.cat([victim, look_alikes(world, victim, self.seed, index)[0]])
        rng = generator("candidates", self.scenario.dataset, self.seed, index)
        rows = rows[torch.randperm(len(rows), generator=rng)].unsqueeze(1)
        return Candidates(world.train.inputs[rows], world.train.targets[rows])

    @property
    def _upload(self) -> tuple[object, ...]:
        """Return what an upload's noise depends on: not the adversary, so that all see the same."""
        return (self.scenario.description, self.defense.config())


class Trial(Protocol):
    """A dataclass that knows its cell and does its work."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def cell(self) -> Cell:
        """Return the cell, by which the outcome is stored."""

    def run(self, folder: Path) -> Outcome:
        """Do the work, in the folder of the run."""


_ATTACK_FIELDS = ("knows_defense", "seed", "checkpoint", "observations", "pictures")


def run_trial(task: tuple[Trial, Path]) -> Outcome:
    """Do the work of one cell, in the folder of its run."""
    trial, folder = task
    if replace(trial).cell.key != trial.cell.key:
        raise ValueError("a source file has changed since the run began: start the run again")
    # All draws of ours come from generators of their own; this is for dropout in users' models.
    torch.manual_seed(generator("global", trial.cell.identity).initial_seed())
    return trial.run(folder)


def _labels(scenario: Scenario, defense: Method) -> dict[str, object]:
    built = build_defense(defense)
    return {
        "scenario": scenario.name,
        "dataset": scenario.dataset,
        "model": label(scenario.model),
        "protocol": label(scenario.protocol),
        "batch_size": scenario.batch_size,
        "defense": label(defense),
        "family": family(defense),
        "defense_options": options(defense),
        "strength": None if built.strength is None else float(built.strength),
        "stochastic": bool(built.stochastic),
    }


def _examples(result: Reconstruction | NotApplicable) -> Reconstruction | NotApplicable:
    """Return a result that can be scored against the private examples."""
    if isinstance(result, Reconstruction) and result.layer is not None:
        return NotApplicable(f"recovered features, the inputs of layer {result.layer!r}")
    return result


def _save(model: nn.Module, path: Path) -> None:
    """Write a checkpoint so that it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, unfinished)
    unfinished.replace(path)
