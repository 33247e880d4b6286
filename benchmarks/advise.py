"""Test whether advice on DP parameters keeps its promise, and compare it with a full search.

python benchmarks/advise.py promise [OUT]          # fashion-mini, each kind of target
python benchmarks/advise.py mnist FOLDER [OUT]     # where torchvision keeps or downloads MNIST
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch import nn

from leakfrontier.adversaries import InputSpace
from leakfrontier.evaluate.advise.advice import Advice
from leakfrontier.evaluate.advise.experiment import SEED_STRIDE, Effort, Experiment
from leakfrontier.evaluate.advise.question import AdviceRow, Question
from leakfrontier.evaluate.advise.recommendation import advise
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

AFRESH = 4
"""Repetitions of a recommended row. Each uses as many new seeds as the advice."""

EXHAUSTIVE = Effort(
    norm_factors=(0.03, 0.1, 0.3, 1.0, 3.0),
    step_sizes=(0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03),
)
"""A finer and wider grid than that of the search."""

TARGETS = {"epsilon": 3.0, "reconstruction_success": 0.1, "min_accuracy": 0.55}


def promise(out: Path) -> None:
    """Ask for each kind of target, and run the recommended setting with new seeds."""
    scenario = Scenario(model=Method(name="lenet"))
    for target, value in TARGETS.items():
        question = Question(2000, 128, 100, **{target: value})  # type: ignore[arg-type]
        start = time.perf_counter()
        advice = advise(question, scenario, out=out, console=Console(stderr=True))
        print(f"{target} {value:g}: advised in {time.perf_counter() - start:.0f} s")
        row = advice.recommended
        if row is None:
            print(f"  not reachable: {' '.join(advice.reasons)}")
            continue
        print(
            f"  sigma {row.noise_multiplier:.3g}, C {row.max_norm:g}, lr {row.lr:g}, epsilon "
            f"{row.epsilon['pld']:.3g}: accuracy {row.accuracy}, {row.strongest} {row.success}",
            flush=True,
        )
        experiment = Experiment(advice.question, scenario, out)
        setting = experiment.setting(row)
        afresh = [experiment.measure([setting], repetition=i)[0] for i in range(1, AFRESH + 1)]
        print(f"  afresh: {kept(advice, afresh)}", flush=True)


def kept(advice: Advice, afresh: Sequence[AdviceRow]) -> str:
    """Return the comparison of the advice with new measurements, in words."""
    row, question = advice.recommended, advice.question
    accuracies = [one.accuracy.value for one in afresh if one.accuracy is not None]
    attacks = [one.success for one in afresh if one.success is not None]
    if row is None or row.accuracy is None or not accuracies or not attacks:
        return "not measured"
    most = question.reconstruction_success or row.upload_bound
    within = sum(row.accuracy.low <= value <= row.accuracy.high for value in accuracies)
    least = question.min_accuracy or 0.0
    uploads = sum(attack.n for attack in attacks)
    success = clopper_pearson(round(sum(attack.value * attack.n for attack in attacks)), uploads)
    return (
        f"accuracies {', '.join(f'{100 * value:.1f}' for value in accuracies)} %, {within} of "
        f"{len(accuracies)} within the interval, {sum(value < least for value in accuracies)} "
        f"below the target; success {success} of {uploads} uploads, "
        f"{'below' if success.value <= most else 'ABOVE'} {100 * most:.3g} %"
    )


def mnist(folder: Path, out: Path) -> None:
    """Compare the recommended row at epsilon 3 with every row of a finer and wider grid."""
    question = Question(60_000, 512, 200, delta=1e-5, epsilon=3.0)
    scenario = Scenario(
        dataset="mnist", data_folder=folder, model=Method(name=f"{Path(__file__)}:tanh_cnn")
    )
    console = Console(stderr=True)
    experiment = Experiment(question, scenario, out, console=console)
    sigma, start = question.least_noise(), time.perf_counter()
    best, rows = experiment.search(sigma)
    print(f"sigma {sigma:.3f}; the search took {time.perf_counter() - start:.0f} s")
    for row in rows:
        print(f"  C {row.max_norm:g}, lr {row.lr:g}: {row.accuracy} ({row.seconds:.0f} s)")
    start = time.perf_counter()
    exhaustive = replace(experiment, effort=EXHAUSTIVE)
    settings = {best, *exhaustive.settings(sigma)}
    grid = exhaustive.train(sorted(settings), range(SEED_STRIDE, SEED_STRIDE + 1))
    print(f"the grid took {time.perf_counter() - start:.0f} s, with another seed")
    for setting, trained in grid.items():
        print(f"  C {setting.max_norm:g}, step {setting.step_size:g}: {trained.accuracy}")
    ours = grid[best].accuracy.value
    most = max(trained.accuracy.value for trained in grid.values())
    print(
        f"recommended: C {best.max_norm:g}, step {best.step_size:g}, accuracy {100 * ours:.2f} %; "
        f"best of the grid {100 * most:.2f} %; {100 * (most - ours):.2f} points below"
    )


def tanh_cnn(space: InputSpace) -> nn.Module:
    """Return the usual CNN for DP-SGD on MNIST (Papernot et al., AAAI 2021)."""
    return nn.Sequential(
        nn.Conv2d(space.shape[0], 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, space.classes),
    )


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[2:]]
    if sys.argv[1:2] == ["promise"] and len(given) <= 1:
        promise(*given or [Path("runs/promise")])
    elif sys.argv[1:2] == ["mnist"] and 1 <= len(given) <= 2:
        mnist(given[0], given[1] if len(given) > 1 else Path("runs/advise-mnist"))
    else:
        sys.exit(__doc__)
