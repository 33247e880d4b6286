"""Measured effects of other choices: clipping norms, and changes of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from safetensors.torch import load_model
from torch import nn

from ..run.cells import TrainTrial
from .clipping import ClippingPoint, clipped
from .experiment import Experiment, TrainingChoice, between
from .levers import Lever


def over_norms(experiment: Experiment, setting: TrainingChoice) -> list[ClippingPoint]:
    """Return the effect of each clipping norm, with all else as in a setting.

    Accuracies use the seed of the search. Gradients are those of public examples, at the initial
    model and at the model that the setting trains.
    """
    norms = sorted({*experiment.norms, setting.max_norm})
    seeds, rounds = experiment.searched, experiment.question.rounds
    trials = {norm: experiment.trials(setting._replace(max_norm=norm), seeds) for norm in norms}
    (trial,) = trials[setting.max_norm]
    kept = trial.scenario.model_copy(update={"checkpoints": (0, rounds)})
    trials[setting.max_norm] = [replace(trial, scenario=kept)]
    results = experiment.train_all(trials, f"{len(norms)} clipping norms")
    noise = experiment.question.update_noise(setting.noise_multiplier)
    first, last = (
        clipped(experiment.world, model, norms, noise, experiment.clipped_examples)
        for model in _models(experiment, *trials[setting.max_norm])
    )
    return [
        ClippingPoint(norm, before, after, results[norm].accuracy)
        for norm, before, after in zip(norms, first, last, strict=True)
    ]


def _models(experiment: Experiment, trial: TrainTrial) -> list[nn.Module]:
    """Return the initial and the last model of a training run."""
    world, defense = experiment.world, experiment.world.defense(trial.defense)
    first, last = (world.model(defense, trial.seed) for _ in range(2))
    load_model(last, trial.checkpoint(experiment.out, experiment.question.rounds))
    return [first, last]


def pulled(experiment: Experiment, levers: Sequence[Lever], setting: TrainingChoice) -> list[Lever]:
    """Return levers with their measured accuracy at their own noise, if the data suffices.

    Each lever gets a new search for the step size, around that of the setting. The reported
    accuracy uses the seeds of the recommended row. No additional data exists. So a lever with
    twice the examples measures only the lower noise, and twice the clients share the same data.
    """
    examples = len(experiment.world.train.targets)
    possible = {
        lever.name: lever
        for lever in levers
        if lever.question.batch_size <= examples // lever.question.clients
    }
    sizes = [setting.step_size, *between(setting.step_size, experiment.effort.step_sizes)]
    tried = {}
    for name, lever in possible.items():
        changed = replace(experiment, question=lever.question)
        for size in sizes:
            own = TrainingChoice(lever.noise_multiplier, setting.max_norm, size)
            tried[name, size] = changed.trials(own, experiment.searched)
    found = experiment.train_all(tried, f"{len(possible)} changes with {len(sizes)} step sizes")
    fresh = {}
    for name in possible:
        best = max(sizes, key=lambda size: found[name, size].accuracy.value)
        (trial,) = tried[name, best]
        fresh[name] = [replace(trial, seed=seed) for seed in experiment.fresh(experiment.seed)]
    results = experiment.train_all(
        fresh, f"{len(possible)} changes with {experiment.effort.seeds} new seeds"
    )
    return [
        replace(lever, accuracy=results[lever.name].accuracy) if lever.name in results else lever
        for lever in levers
    ]
