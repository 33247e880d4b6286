"""Choose DP parameters: from a question to a table and a recommended row of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress

from ..conclude.labels import number
from ..engines.engine import LOCAL, Engine
from ..foundations.errors import OWN_FOLDER, UserError, given_by_user
from ..foundations.statistics import rounded_up
from ..foundations.terminal import terminal
from ..world.scenario import Scenario, load_world
from .advice import Advice, proven_reasons
from .experiment import Effort, Experiment, TrainingChoice, fitting
from .levers import MOST_LEVERS, Lever, changes, pull
from .question import DIGITS, AdviceRow, Question, proven
from .tables import bounded
from .what_if import over_norms, pulled

PROVEN_LADDER = tuple(2 ** (step / 2) for step in range(-2, 5))
"""Noise multipliers in a table of proofs alone, relative to the one asked for."""

MEASURED_LADDER = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The same where each is trained and attacked."""

BUDGET = 10.0
"""CPU seconds after which proofs leave out other noise multipliers and other runs."""

EPSILONS = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
"""Epsilons whose noise is tried where an accuracy is asked for, the least noise first."""

TUNED_AT = 4.0
"""The one of them at which the clipping norm and the learning rate are then chosen."""


def advise(
    question: Question,
    scenario: Scenario | None = None,
    *,
    out: Path | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    workers: int | None = None,
    engine: Engine = LOCAL,
    console: Console | None = None,
) -> Advice:
    """Answer a question about DP parameters.

    Args:
        question: The training run and its target.
        scenario: Data, model and server's optimizer to measure accuracy and attacks with; its
            other training parameters are the question's. None answers from proofs alone.
        out: Folder of the measurements, which an interrupted call continues; by default they are
            not kept.
        effort: How much is tried.
        seed: Repetition: other seeds throughout.
        workers: Processes; by default as many as the engine has room for.
        engine: Where cells run.
        console: Where progress is shown; by default nowhere.

    Raises:
        Unreachable: If no noise keeps an epsilon or a bound; it says the closest.
    """
    if scenario is None:
        return _proofs(question, console or terminal(quiet=True))
    if out is None:
        with TemporaryDirectory(prefix=OWN_FOLDER, ignore_cleanup_errors=True) as folder:
            return advise(
                question,
                scenario,
                out=Path(folder),
                effort=effort,
                seed=seed,
                workers=workers,
                engine=engine,
                console=console,
            )
    check_sizes(question, scenario)
    with given_by_user():
        fitted = fitting(question, scenario)
    experiment = Experiment(
        question=fitted,
        scenario=scenario,
        out=out,
        effort=effort or Effort(),
        seed=seed,
        workers=workers,
        engine=engine,
        console=console or terminal(quiet=True),
    )
    advice = _measurements(experiment)
    return replace(advice, asked_candidates=question.candidates)


def check_sizes(question: Question, scenario: Scenario) -> None:
    """Raise if a scenario cannot be trained as a question says: its clients, batches and steps."""
    if question.steps_per_round > 1:
        raise UserError(
            f"what is measured takes one local step in a round, not {question.steps_per_round}: "
            "leave out --dataset and --model for the noise of several, and measure it by `run` "
            "with the protocol FedAvg"
        )
    found = len(load_world(scenario).train.targets)
    if not question.batch_size <= found // question.clients:
        raise UserError(
            f"the dataset has {found} training examples, {found // question.clients} for each of "
            f"{question.clients} clients, where a batch takes {question.batch_size}: give fewer "
            "clients, a smaller batch or a larger dataset"
        )


def _proofs(question: Question, console: Console) -> Advice:
    """Answer from accountants and bounds, showing how far it is.

    The noise nearest to the answer comes first, then other runs, then other noise: what takes too
    long is left out.
    """
    start = time.process_time()
    with _progress(console) as advance:
        sigma = question.least_noise()
        advance()
        recommended = proven(question, sigma)
        near, *far = sorted({*PROVEN_LADDER} - {1.0}, key=lambda one: abs(one - 1))
        more: list[Callable[[], AdviceRow | Lever]] = [
            *(partial(_scaled, question, sigma, factor) for factor in (0.0, near)),
            *levers_of(question, recommended),
            *(partial(_scaled, question, sigma, factor) for factor in far),
        ]
        found = [more[0]()]
        for one in more[1:]:
            advance()
            if time.process_time() - start > BUDGET:
                break
            found.append(one())
    rows = [recommended, *(one for one in found if isinstance(one, AdviceRow))]
    reasons = [*proven_reasons(question, recommended)]
    if len(found) < len(more):
        reasons.append("Some noise multipliers and changes of the run take long, and are left out.")
    return Advice(
        question,
        setting=None,
        rows=tuple(sorted(rows, key=lambda row: row.noise_multiplier)),
        recommended=recommended,
        reasons=tuple(reasons),
        levers=tuple(one for one in found if isinstance(one, Lever)),
    )


def _scaled(question: Question, sigma: float, factor: float) -> AdviceRow:
    """Return what is proven of a multiple of a noise multiplier."""
    return proven(question, rounded_up(factor * sigma, DIGITS))


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[], None]]:
    """Show how many of the steps of a proof are done."""
    steps = 1 + len(PROVEN_LADDER) + MOST_LEVERS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("accounting", total=steps)
        yield lambda: progress.advance(task)


def levers_of(question: Question, row: AdviceRow) -> list[Callable[[], Lever]]:
    """Return what finds what each change of a run would buy, by accountants and bounds.

    Where an accuracy is asked for, the target is the epsilon of the row.
    """
    asked = question
    if question.min_accuracy is not None:
        asked = replace(question, min_accuracy=None, epsilon=row.epsilon["pld"])
    return [partial(pull, name, changed, asked, row) for name, changed in changes(asked)]


def _measurements(experiment: Experiment) -> Advice:
    """Answer from training and attacks as well."""
    question = experiment.question
    if question.min_accuracy is None:
        tuned_at = question.least_noise()
        ladder = [rounded_up(factor * tuned_at, DIGITS) for factor in MEASURED_LADDER]
    else:
        tuned_at = question.noise_for(TUNED_AT)
        ladder = [question.noise_for(epsilon) for epsilon in EPSILONS]
    best, searched = experiment.search(tuned_at)
    settings, retuned = experiment.retune(best, (0.0, *ladder))
    rows = experiment.measure(settings)
    if question.min_accuracy is None:
        recommended: AdviceRow | None = next(
            row for row in rows if row.noise_multiplier == tuned_at
        )
    else:
        recommended = most_private(rows[1:], question.min_accuracy)
    data = len(load_world(experiment.scenario).train.targets)
    advice = Advice(
        question,
        setting=experiment.scenario.name,
        rows=(*rows, *searched, *retuned),
        recommended=recommended,
        reasons=tuple(_reasons(experiment, best, rows, recommended)),
        panel=experiment.config([best]).panel,
        proxy=data if data != question.examples else None,
    )
    if not experiment.effort.what_if:
        return advice
    row = recommended or closest(rows)
    setting = experiment.setting(row)
    levers = [lever() for lever in levers_of(question, row)]
    advice = replace(
        advice,
        levers=tuple(pulled(experiment, levers, setting)),
        clipping=tuple(over_norms(experiment, setting)),
    )
    experiment.measure(settings)  # nothing runs again, but `report` shows what was run last
    return advice


def most_private(rows: Sequence[AdviceRow], least: float) -> AdviceRow | None:
    """Return the last of rows, from the least noise on, before accuracy is not shown to suffice.

    It suffices where the lower confidence limit does. Rows are looked at in a fixed order until
    the first failure, so that the choice does not spoil the confidence in what is chosen.
    """
    chosen = None
    for row in rows:
        if row.accuracy is None or not row.accuracy.low >= least:
            break
        chosen = row
    return chosen


def closest(rows: Sequence[AdviceRow]) -> AdviceRow:
    """Return the row with noise whose accuracy is the highest for sure."""
    return max(rows[1:], key=lambda row: row.accuracy.low if row.accuracy else 0.0)


def _reasons(
    experiment: Experiment,
    best: TrainingChoice,
    rows: Sequence[AdviceRow],
    recommended: AdviceRow | None,
) -> Iterator[str]:
    question, control = experiment.question, rows[0]
    if recommended is None:
        yield from _closest(question, rows)
        return
    yield from proven_reasons(question, recommended)
    yield (
        f"Clipping norm {recommended.max_norm:g} and learning rate {recommended.lr:g} were the "
        "best of those tried, with one seed: the norm at noise multiplier "
        f"{best.noise_multiplier:.4g}, the rate at this one. With {experiment.effort.seeds} other "
        f"seeds the accuracy is {recommended.accuracy}; without clipping and noise it is "
        f"{control.accuracy}."
    )
    yield (
        f"{_strongest(recommended)} identified {recommended.success} of "
        f"{recommended.success.n if recommended.success else 0} uploads of one example, where no "
        f"attack can exceed {bounded(recommended.upload_bound)}; all attacks together "
        f"{recommended.any_attack}. Undefended: {_strongest(control)} identified "
        f"{control.success}."
    )


def _strongest(row: AdviceRow) -> str:
    """Return which attack a row's success is of; without any success, none is the strongest."""
    if row.strongest is None:
        return "No attack succeeded; each"
    return f"The strongest attack, {row.strongest},"


def _closest(question: Question, rows: Sequence[AdviceRow]) -> Iterator[str]:
    """Yield why no row keeps an accuracy, and what comes closest."""
    control, row = rows[0], closest(rows)
    yield (
        f"An accuracy of {100 * question.value:g} % is not shown to be kept at any epsilon up to "
        f"{EPSILONS[0]:g}. The closest is {row.accuracy}, at noise multiplier "
        f"{row.noise_multiplier:.4g} (epsilon {number(row.epsilon['pld'])}); without clipping "
        f"and noise it is {control.accuracy}."
    )
    if row.accuracy is not None and row.accuracy.value >= question.value:
        yield (
            "The estimate suffices, its lower limit does not: more test examples would narrow it."
        )
    else:
        yield "Another model may help, or another run: see what else could be changed."
