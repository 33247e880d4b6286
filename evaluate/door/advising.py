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
"""Defaults if only a dataset is given."""


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
    """Choose DP parameters: noise, clipping norm and their price, from sizes and one target.

    Without data, the answer comes from accountants and proofs, in seconds. With a dataset or a
    model, the call also trains and attacks settings, in minutes. The same call continues an
    interrupted one.

    Args:
        epsilon: Target: epsilon at most this.
        reconstruction_success: Target: success of every reconstruction attack at most this.
        min_accuracy: Target: test accuracy at least this. Needs data.
        examples: Training examples of all clients together. By default the dataset's.
        examples_per_client: Training examples of one client. Replaces `examples`.
        batch_size: Examples in one batch of a client.
        rounds: Rounds. A round is one step unless `local_epochs` or `local_steps` is given.
        epochs: Passes over a client's examples in the whole run. Replaces `rounds`.
        local_epochs: Passes over a client's examples in one round, as in Flower.
        local_steps: Steps of a client in one round. Replaces `local_epochs`.
        clients: Number of clients.
        clients_per_round: Clients that take part in a round. By default all.
        max_participations: Limit on the rounds of one client. You must enforce it.
        unit: What the guarantee protects.
        delta: By default the smaller of 1e-5 and n^-1.1, for n units.
        candidates: Number of candidates among which an attacker must find the right one.
        poisson_sampling: Whether batches are Poisson samples. Otherwise they are shuffled.
        dropout: Share of clients that may drop out (for distributed noise).
        colluders: Share of clients that may tell the server their noise (same use).
        dataset: Dataset to measure on: a name or a path.
        model: Model to measure with, given as for `evaluate`.
        data_folder: Folder for downloads.
        out: Folder for the measurements. By default `runs/advise` if there are any.
        seed: Seed of the measurements.
        workers: Number of processes. By default one per core.
        engine: Where cells run: this machine or a Ray cluster.
        device: Device of the tensors.
        quiet: Whether to hide progress.
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
            local_steps = 1  # one round per step
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
    """Return examples, batch size and rounds. Defaults apply only to measurements."""
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
