"""Choose DP parameters: answer a question with a table and its recommended row."""

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
"""Noise multipliers in a table without measurements, relative to the recommended one."""

MEASURED_LADDER = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Noise multipliers in a table with measurements, relative to the recommended one."""

BUDGET = 10.0
"""CPU seconds after which other noise multipliers and other runs are left out."""

EPSILONS = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
"""Epsilons that are tried if the target is an accuracy, the least noise first."""

TUNED_AT = 4.0
"""The one of `EPSILONS` at which clipping norm and learning rate are tuned."""


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
        scenario: Data, model and server's optimizer of the measurements. The question sets the
            other training parameters. None answers from proofs alone.
        out: Folder of the measurements, from which a later call continues. By default they are
            not kept.
        effort: How much is tried.
        seed: Number of the repetition. Each repetition uses other seeds.
        workers: Number of processes. By default as many as the engine can run.
        engine: Where cells run.
        console: Where progress is shown. By default nowhere.

    Raises:
        Unreachable: If no noise keeps an epsilon or a bound. The message names the closest value.
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
    """Raise if a scenario does not fit the clients, batches or steps of a question."""
    if question.steps_per_round > 1:
        raise UserError(
            "measurements need one local step per round, and the question has "
            f"{question.steps_per_round}: leave out --dataset and --model to get the noise, and "
            "measure it with `leakfrontier run` and the protocol FedAvg"
        )
    found = len(load_world(scenario).train.targets)
    if not question.batch_size <= found // question.clients:
        raise UserError(
            f"the dataset has {found} training examples, {found // question.clients} for each of "
            f"{question.clients} clients, but a batch needs {question.batch_size}: give fewer "
            "clients, a smaller batch or a larger dataset"
        )


def _proofs(question: Question, console: Console) -> Advice:
    """Answer from accountants and bounds, and show the progress.

    The order is: the noise nearest to the answer, other runs, other noise. When the time budget
    is used up, the rest is left out.
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
        reasons.append("Slow noise multipliers and changes of the run are left out.")
    return Advice(
        question,
        setting=None,
        rows=tuple(sorted(rows, key=lambda row: row.noise_multiplier)),
        recommended=recommended,
        reasons=tuple(reasons),
        levers=tuple(one for one in found if isinstance(one, Lever)),
    )


def _scaled(question: Question, sigma: float, factor: float) -> AdviceRow:
    """Return the proven row of a multiple of a noise multiplier."""
    return proven(question, rounded_up(factor * sigma, DIGITS))


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[], None]]:
    """Show a progress bar of the accounting."""
    steps = 1 + len(PROVEN_LADDER) + MOST_LEVERS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("accounting", total=steps)
        yield lambda: progress.advance(task)


def levers_of(question: Question, row: AdviceRow) -> list[Callable[[], Lever]]:
    """Return functions that compute the effect of each change of a run.

    If the question's target is an accuracy, they use the epsilon of the row as target.
    """
    asked = question
    if question.min_accuracy is not None:
        asked = replace(question, min_accuracy=None, epsilon=row.epsilon["pld"])
    return [partial(pull, name, changed, asked, row) for name, changed in changes(asked)]


def _measurements(experiment: Experiment) -> Advice:
    """Answer from proofs, training and attacks."""
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
    experiment.measure(settings)  # from the store: `report` shows what was run last
    return advice


def most_private(rows: Sequence[AdviceRow], least: float) -> AdviceRow | None:
    """Return the row with the most noise whose accuracy suffices.

    Accuracy suffices if its lower confidence limit does. The rows are tested in a fixed order,
    least noise first, until the first failure. So the choice does not lower the confidence.
    """
    chosen = None
    for row in rows:
        if row.accuracy is None or not row.accuracy.low >= least:
            break
        chosen = row
    return chosen


def closest(rows: Sequence[AdviceRow]) -> AdviceRow:
    """Return the row with noise whose accuracy has the highest lower limit."""
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
        "best of those tried, with one seed. The norm was tuned at noise multiplier "
        f"{best.noise_multiplier:.4g}, the rate at the recommended one. With "
        f"{experiment.effort.seeds} other seeds, the accuracy is {recommended.accuracy}. Without "
        f"clipping and noise, it is {control.accuracy}."
    )
    yield (
        f"{_strongest(recommended)} identified {recommended.success} of "
        f"{recommended.success.n if recommended.success else 0} uploads of one example. No attack "
        f"can exceed {bounded(recommended.upload_bound)}. All attacks together identified "
        f"{recommended.any_attack}. Without a defense: {_strongest(control)} identified "
        f"{control.success}."
    )


def _strongest(row: AdviceRow) -> str:
    """Return the sentence's subject: the strongest attack of a row, if any succeeded."""
    if row.strongest is None:
        return "No attack succeeded; each"
    return f"The strongest attack, {row.strongest},"


def _closest(question: Question, rows: Sequence[AdviceRow]) -> Iterator[str]:
    """Yield why no row keeps the accuracy, and which row comes closest."""
    control, row = rows[0], closest(rows)
    yield (
        f"No tested epsilon up to {EPSILONS[0]:g} is shown to keep an accuracy of "
        f"{100 * question.value:g} %. The closest accuracy is {row.accuracy}, at noise multiplier "
        f"{row.noise_multiplier:.4g} (epsilon {number(row.epsilon['pld'])}). Without clipping "
        f"and noise, it is {control.accuracy}."
    )
    if row.accuracy is not None and row.accuracy.value >= question.value:
        yield (
            "The estimate suffices, but its lower limit does not. More test examples would narrow "
            "the interval."
        )
    else:
        yield 'Another model or another run may help: see "What else could be changed".'
