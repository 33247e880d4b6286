"""Choose parameters for differential privacy, and test whether a defense keeps its claim."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from ..advise.advice import Advice
from ..advise.question import Question
from ..advise.recommendation import advise as answer
from ..engines.engine import LOCAL, Engine
from ..foundations.devices import Device, resolved
from ..foundations.errors import UserError, given_by_user, writable
from ..foundations.terminal import terminal
from ..privacy.accounting import Unreachable
from ..world.scenario import load_world
from .auditing import measured_scenario

BATCH, ROUNDS = 128, 100
"""What is asked about where only a dataset is given."""


def advise(
    *,
    epsilon: float | None = None,
    reconstruction_success: float | None = None,
    min_accuracy: float | None = None,
    examples: int | None = None,
    examples_per_client: int | None = None,
    batch_size: int | None = None,
    rounds: int | None = None,
    epochs: float | None = None,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    clients: int = 1,
    clients_per_round: int | None = None,
    max_participations: int | None = None,
    unit: Literal["record", "client"] = "record",
    delta: float | None = None,
    candidates: int = 100,
    poisson_sampling: bool = True,
    dropout: float = 0.1,
    colluders: float = 0.1,
    dataset: str | Path | None = None,
    model: object = None,
    data_folder: Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    workers: int | None = None,
    engine: Engine = LOCAL,
    device: Device = "cpu",
    quiet: bool = False,
) -> Advice:
    """Choose DP parameters: from sizes and one target to noise, clipping norm and their price.

    Sizes alone answer from accountants and proofs, in seconds. With a dataset or a model, settings
    are trained and attacked as well, in minutes; an interrupted call is continued.

    Args:
        epsilon: Target: the largest epsilon.
        reconstruction_success: Target: the largest success of any reconstruction attack.
        min_accuracy: Target: the least test accuracy; needs data.
        examples: Training examples of all clients together; by default the dataset's.
        examples_per_client: Instead of `examples`: training examples of one client.
        batch_size: Examples of a client in one batch.
        rounds: Rounds; one step each, unless `local_epochs` or `local_steps` say otherwise.
        epochs: Instead of `rounds`: all passes over a client's examples.
        local_epochs: Passes over a client's examples in one round, as in Flower.
        local_steps: Instead of `local_epochs`: steps in one round.
        clients: Clients in all.
        clients_per_round: Clients that take part in a round; by default all.
        max_participations: Enforced limit of the rounds that a client takes part in.
        unit: What is protected.
        delta: By default the smaller of 1e-5 and n^-1.1.
        candidates: Among how many an attacker must find the right one.
        poisson_sampling: Whether batches are Poisson samples; otherwise they are shuffled.
        dropout: Share of clients that may be lost, for distributed noise.
        colluders: Share of clients that may tell the server their noise, for the same.
        dataset: Measure on a dataset, by name or path.
        model: Measure with a model, given as for `evaluate`.
        data_folder: Where downloaded data is kept.
        out: Folder of the measurements; by default `runs/advise` if there are any.
        seed: Repetition: other seeds.
        workers: Processes; by default one per core.
        engine: Where cells run: this machine, or a Ray cluster.
        device: Where tensors live.
        quiet: Show no progress.
    """
    with given_by_user():
        measured = dataset is not None or model is not None
        scenario = measured_scenario(dataset, model, data_folder) if measured else None
        if scenario is not None:
            if engine is LOCAL:  # other machines may have what this one lacks
                resolved(device)
            scenario = scenario.model_copy(update={"device": device})
        if examples_per_client is not None:
            if examples is not None:
                raise UserError("give examples or examples_per_client, not both")
            examples = clients * examples_per_client
        if examples is None and scenario is not None:
            examples = len(load_world(scenario).train.targets)
        if epochs is not None:
            if local_epochs is not None or local_steps not in (None, 1):
                raise UserError("give rounds with local_epochs or local_steps, not epochs")
            local_steps = 1  # as many rounds as there are steps
        examples, batch_size, rounds = _sizes(
            examples=examples,
            batch=batch_size,
            rounds=rounds,
            epochs=epochs,
            clients=clients,
            measured=measured,
        )
        question = Question(
            examples=examples,
            batch_size=batch_size,
            rounds=rounds,
            clients=clients,
            local_epochs=local_epochs,
            local_steps=local_steps,
            clients_per_round=clients_per_round,
            max_participations=max_participations,
            unit=unit,
            delta=delta,
            candidates=candidates,
            poisson_sampling=poisson_sampling,
            dropout=dropout,
            colluders=colluders,
            epsilon=epsilon,
            reconstruction_success=reconstruction_success,
            min_accuracy=min_accuracy,
        )
    folder = None if out is None else Path(out)
    if folder is None and scenario is not None:
        folder = Path("runs") / "advise"
    if folder is not None:
        writable(folder)
    console = terminal(stderr=True, quiet=quiet)
    try:
        return answer(
            question,
            scenario,
            out=folder,
            seed=seed,
            workers=workers,
            engine=engine,
            console=console,
        )
    except Unreachable as error:
        return Advice(question, setting=None, rows=(), recommended=None, reasons=(str(error),))


def _sizes(
    *,
    examples: int | None,
    batch: int | None,
    rounds: int | None,
    epochs: float | None,
    clients: int,
    measured: bool,
) -> tuple[int, int, int]:
    """Return examples, batch size and rounds; defaults only where there is data."""
    if rounds is not None and epochs is not None:
        raise UserError("give rounds or epochs, not both")
    steps = rounds if epochs is None else epochs
    if not measured and None in (examples, batch, steps):
        raise UserError(
            "give examples (or examples_per_client), batch_size and rounds (or epochs), or a "
            "dataset to measure on"
        )
    total = 0 if examples is None else examples
    if not 1 <= clients <= total:
        raise UserError(f"clients must be between 1 and the {total} examples, got {clients}")
    size = min(BATCH, total // clients) if batch is None else batch
    if epochs is not None:
        if not (0 < epochs < math.inf and size >= 1):
            raise UserError(f"epochs and batch must be positive, got {epochs} and {size}")
        rounds = math.ceil(epochs * (total // clients) / size)
    return total, size, ROUNDS if rounds is None else rounds
