"""A results folder as a run would leave it, of made-up scores, written through the real `Store`.

By default the evaluation can be trusted; every argument takes one reason for that away.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from leakfrontier.adversaries.base import Threat
from leakfrontier.evaluate.rows import (
    AttackRow,
    Cell,
    GuaranteeRow,
    Outcome,
    Picture,
    UtilityRow,
)
from leakfrontier.evaluate.store import Results, Store

SCENARIOS = ("fashion-mini/lenet", "fashion-mini/mlp")
ROUNDS = (0, 20, 40)
CANDIDATES = 100
PICTURED = 8
SHAPE = (1, 28, 28)
TEST_SIZE = 1000


@dataclass(frozen=True)
class Arm:
    """A defense, how much of each attack's success it leaves, and the accuracy it ends with."""

    label: str
    family: str
    strength: float | None
    leaves: float
    accuracy: float
    stochastic: bool = False


@dataclass(frozen=True)
class Foe:
    """An adversary and its success undefended."""

    label: str
    success: float
    baseline: bool = False
    simulates: bool = False
    objective: bool = False
    candidates: bool = False


ARMS = (
    Arm("none", "none", None, 1.0, 0.85),
    Arm("DPSGD(noise_multiplier=0.01, max_grad_norm=1.0)", "DPSGD", 0.01, 0.7, 0.83, True),
    Arm("DPSGD(noise_multiplier=0.1, max_grad_norm=1.0)", "DPSGD", 0.1, 0.3, 0.78, True),
    Arm("DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)", "DPSGD", 1.0, 0.0, 0.60, True),
    Arm("TopK(ratio=0.5)", "TopK", 0.5, 0.9, 0.84),
    Arm("TopK(ratio=0.1)", "TopK", 0.9, 0.5, 0.80),
)
FOES = (
    Foe("PriorGuess", 0.0, baseline=True),
    Foe("LinearLeakage", 1.0),
    Foe("InvertingGradients", 0.9, simulates=True, objective=True),
)


def make_results(
    folder: Path,
    *,
    seeds: tuple[int, ...] = (0, 1),
    observations: int = 10,
    batch_size: int = 1,
    checkpoints: tuple[int, ...] = (0,),
    control: bool = True,
    baseline: bool = True,
    attack_success: float = 1.0,
    blind_success: float = 0.0,
    optimiser_failures: float = 0.0,
    monotone: bool = True,
    labels_granted: bool = False,
    adaptive: bool = True,
    failed: int = 0,
    missing: int = 0,
    bound: float | None = None,
    informed: bool = False,
    guaranteed: bool = False,
    measured: float | None = 1.0,
    private: bool = True,
) -> Results:
    """Write `results.sqlite` to a folder and return what it holds.

    Args:
        folder: Where the results go.
        seeds: Seeds of training; each has its own observations.
        observations: Observations per seed.
        batch_size: Victims per observation.
        checkpoints: Rounds whose models are attacked.
        control: Whether there is an undefended arm.
        baseline: Whether there is a blind guess.
        attack_success: Factor on the success of all attacks.
        blind_success: Success of the blind guess, under every defense.
        optimiser_failures: Fraction of defended observations where the guess of an optimising
            attack fits worse than the truth.
        monotone: If not, stronger DPSGD leaks more.
        labels_granted: Whether the adversaries are told the labels.
        adaptive: Whether simulating adversaries are granted the defense.
        failed: Number of cells that end in an error.
        missing: Number of cells that never ran.
        bound: Proven bound on identification, claimed by DPSGD.
        informed: Whether there is an attack that is handed candidates, which never fails.
        guaranteed: Whether what DPSGD claims is recorded.
        measured: What an audit finds of the claimed noise, as a share; None without an audit.
        private: Whether there is DPSGD at all.
    """
    arms = [arm for arm in ARMS if control or arm.family != "none"]
    if not monotone:
        arms = [*arms[:-5], *_reversed(arms[-5:-2]), *arms[-2:]]
    arms = [arm for arm in arms if private or arm.family != "DPSGD"]
    foes = [foe for foe in FOES if baseline or not foe.baseline]
    foes += [Foe("PriorAware", 1.0, simulates=True, candidates=True)] if informed else []
    cells: list[tuple[Cell, Outcome]] = []
    for scenario, arm, seed in product(SCENARIOS, arms, seeds):
        labels = _labels(scenario, arm, seed, batch_size)
        claims = (_claim(arm, measured),) if guaranteed and arm.family == "DPSGD" else ()
        trained = Outcome(utility=_utility(arm, seed), guarantees=claims, busy=20.0)
        cells.append((_cell("train", labels), trained))
        for checkpoint, (foe, knows) in product(checkpoints, _variants(arm, foes, adaptive)):
            success = foe.success * arm.leaves * attack_success * (1.0 if knows else 0.5)
            success = 1.0 if foe.candidates else success
            outcome = _attack(
                foe,
                success=blind_success if foe.baseline else success,
                applicable=foe.label != "LinearLeakage" or scenario != SCENARIOS[0],
                fails=optimiser_failures if arm.family != "none" else 0.0,
                shape=(seeds.index(seed), len(seeds), observations, batch_size),
                labels_granted=foe.candidates or (labels_granted and not foe.baseline),
                bound=bound if arm.family == "DPSGD" else None,
            )
            attack = {
                "checkpoint": checkpoint,
                "adversary": foe.label,
                "threat": Threat.PASSIVE.value,
                "baseline": foe.baseline,
                "simulates": foe.simulates,
                "candidates_granted": foe.candidates,
                "knows_defense": knows,
            }
            cells.append((_cell("attack", labels | attack), outcome))
    return _write(folder, cells, failed, missing)


def _write(folder: Path, cells: list[tuple[Cell, Outcome]], failed: int, missing: int) -> Results:
    store = Store(folder, create=True)
    config = {"scenarios": SCENARIOS, "rounds": ROUNDS[-1], "candidates": CANDIDATES}
    store.begin("panel-1", config, [cell for cell, _ in cells])
    for index, (cell, outcome) in enumerate(cells[: len(cells) - missing]):
        if index < failed:
            outcome = Outcome(status="error", error="ValueError: loss is not finite")
        store.write(cell.key, outcome, outcome.busy + 1.0)
    return store.results()


def _variants(arm: Arm, foes: list[Foe], adaptive: bool) -> Iterator[tuple[Foe, bool]]:
    for foe in foes:
        if arm.family == "none" or not foe.simulates or adaptive:
            yield foe, True
        if arm.family != "none" and foe.simulates:
            yield foe, False


def _reversed(arms: list[Arm]) -> list[Arm]:
    return [
        Arm(arm.label, arm.family, arm.strength, other.leaves, arm.accuracy, arm.stochastic)
        for arm, other in zip(arms, reversed(arms), strict=True)
    ]


def _labels(scenario: str, arm: Arm, seed: int, batch_size: int) -> dict[str, Any]:
    dataset, model = scenario.split("/")
    return {
        "scenario": scenario,
        "dataset": dataset,
        "model": model,
        "protocol": "FedSGD(clients=1)",
        "batch_size": batch_size,
        "seed": seed,
        "defense": arm.label,
        "family": arm.family,
        "strength": arm.strength,
        "stochastic": arm.stochastic,
    }


def _cell(kind: Any, labels: dict[str, Any]) -> Cell:  # noqa: ANN401 - a literal
    return Cell(kind, config=labels, labels=labels)


def _claim(arm: Arm, measured: float | None) -> GuaranteeRow:
    sigma = arm.strength or 0.0
    row = GuaranteeRow(4.0 / sigma, 1e-5, "record", "add/remove", "PLD", sigma, 0.08, 46)
    if measured is None:
        return row.with_audit("not audited: the noise is not Gaussian")
    return row.with_audit(
        f"{measured:.1f} of the claimed noise",
        violated=measured < 0.9,
        measured_noise=measured * sigma,
        audited_epsilon=3.9 / sigma / measured,
    )


def _utility(arm: Arm, seed: int) -> tuple[UtilityRow, ...]:
    progress = np.linspace(0.1, arm.accuracy, len(ROUNDS)) + 0.005 * seed
    return tuple(
        UtilityRow(round=at, correct=int(TEST_SIZE * accuracy), total=TEST_SIZE, loss=2 - accuracy)
        for at, accuracy in zip(ROUNDS, progress.tolist(), strict=True)
    )


def _attack(
    foe: Foe,
    *,
    success: float,
    applicable: bool,
    fails: float,
    shape: tuple[int, int, int, int],
    labels_granted: bool,
    bound: float | None,
) -> Outcome:
    """Return scores with an exact share of successes, over all seeds; each attack's own."""
    part, parts, observations, batch_size = shape
    if not applicable:
        reason = "the first layer is a convolution"
        rows = [AttackRow(i, v, reason) for i in range(observations) for v in range(batch_size)]
        return Outcome(attacks=tuple(rows))
    rng = np.random.default_rng([len(foe.label), part])
    victims = observations * batch_size
    rank = np.random.default_rng(len(foe.label)).permutation(parts * victims)
    rank = rank[part * victims : (part + 1) * victims].reshape(observations, batch_size)
    rows, pictures = [], []
    for observation, victim in product(range(observations), range(batch_size)):
        identified = bool(rank[observation, victim] < round(success * parts * victims))
        failed = bool(rank[observation, 0] < round(fails * parts * victims))
        rows.append(
            AttackRow(
                observation=observation,
                victim=victim,
                psnr=float(rng.normal(24 if identified else 9, 1)),
                ssim=float(np.clip(rng.normal(0.8 if identified else 0.1, 0.03), -1, 1)),
                identified=identified,
                counterfactual=False,
                candidates=CANDIDATES,
                label_correct=None if foe.baseline else True,
                labels_granted=labels_granted,
                objective=_objective(identified, failed) if foe.objective else None,
                objective_at_truth=0.2 if foe.objective else None,
                bound=bound,
                seconds=1.5,
            )
        )
        if part == 0 and observation * batch_size + victim < PICTURED:
            pictures.append(_picture(observation, victim, identified))
    return Outcome(attacks=tuple(rows), pictures=tuple(pictures), busy=1.5 * observations)


def _objective(identified: bool, failed: bool) -> float:
    """Return what is above the truth's 0.2 if the optimiser failed, and lowest on success."""
    return 0.4 if failed else 0.1 if identified else 0.15


def _picture(observation: int, victim: int, identified: bool) -> Picture:
    rng = np.random.default_rng([observation, victim])
    across, down = np.meshgrid(np.linspace(0, 255, SHAPE[1]), np.linspace(0, 255, SHAPE[2]))
    truth = np.where(rng.integers(2), across, (across + down) / 2).astype(np.uint8)
    noise = rng.integers(0, 256, truth.shape, dtype=np.uint8)
    guess = truth if identified else noise
    return Picture(observation, victim, SHAPE, truth.tobytes(), guess.tobytes())


TinyArm = tuple[str, str, float | None, int, list[bool]]


def write_tiny(folder: Path, arms: list[TinyArm], *, pictures: tuple[Picture, ...] = ()) -> Results:
    """Write arms of (label, family, strength, correct of 1000, identified) and one attack."""
    cells = []
    for label, family, strength, correct, identified in arms:
        labels: dict[str, Any] = {
            "scenario": "tiny/model",
            "dataset": "tiny",
            "model": "model",
            "protocol": "FedSGD",
            "batch_size": 1,
            "seed": 0,
            "checkpoint": None,
            "defense": label,
            "family": family,
            "strength": strength,
            "stochastic": False,
            "adversary": None,
            "threat": None,
            "baseline": None,
            "simulates": None,
            "knows_defense": None,
        }
        attack = labels | {
            "checkpoint": 0,
            "adversary": "Attack()",
            "threat": "passive",
            "baseline": False,
            "simulates": False,
            "knows_defense": True,
        }
        rows = tuple(
            AttackRow(
                i, 0, psnr=10.0, ssim=0.1, identified=flag, counterfactual=False, candidates=100
            )
            for i, flag in enumerate(identified)
        )
        trained = Outcome(utility=(UtilityRow(5, correct, 1000, 1.0),))
        cells.append((Cell("train", labels, labels), trained))
        cells.append((Cell("attack", attack, attack), Outcome(attacks=rows, pictures=pictures)))
    store = Store(folder, create=True)
    store.begin("panel-1", {"name": "tiny"}, [cell for cell, _ in cells])
    for cell, outcome in cells:
        store.write(cell.key, outcome, 1.0)
    return store.results()
