"""A results folder as a run would leave it, of made-up scores, written through the real `Store`.

By default the evaluation can be trusted; every argument takes one reason for that away.
"""

import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import (
    AttackRow,
    Cell,
    GuaranteeRow,
    Media,
    Outcome,
    ProbeRow,
    Rendering,
    ReplayRow,
    Score,
    UtilityRow,
)
from leakfrontier.evaluate.modality.rendering import png
from leakfrontier.evaluate.run.store import Store

SCENARIOS = ("fashion-mini/lenet", "fashion-mini/mlp")
ROUNDS = (0, 20, 40)
CANDIDATES = 100
RENDERED = 8
SHAPE = (1, 28, 28)
TEST_SIZE = 1000
_ERROR = 'ValueError: loss is not finite\n  File "mine.py", line 1\n    raise ValueError'
SOUND = ReplayRow(
    uploads_differ=False,
    random=False,
    residual=0.0,
    repeat=0.0,
    slope=0.3,
    slope_straight_through=0.3,
    vectorised=True,
    draws="given",
    straight_through=False,
    one_by_one=False,
    mended_residual=0.0,
)


HONEST = ProbeRow(
    decoded=0.4,
    plain=0.4,
    decoder="a factor per parameter of the upload",
    needs_history=False,
    remaining_noise=1.0,
    contrast=0.9,
    ideal_contrast=0.9,
)


@dataclass(frozen=True)
class Arm:
    """A defense, how much of each attack's success it leaves, and the accuracy it ends with."""

    family: str
    strength: float | None
    leaves: float
    accuracy: float
    stochastic: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.family}({options})" if options else self.family


@dataclass(frozen=True)
class Foe:
    """An adversary and its success undefended."""

    label: str
    success: float
    baseline: bool = False
    simulates: bool = False
    objective: bool = False
    candidates: bool = False
    threat: str = "passive"


def _dpsgd(noise: float, leaves: float, accuracy: float) -> Arm:
    options = {"noise_multiplier": noise, "max_grad_norm": 1.0}
    return Arm("DPSGD", noise, leaves, accuracy, stochastic=True, options=options)


ARMS = (
    Arm("none", None, 1.0, 0.85),
    _dpsgd(0.01, 0.7, 0.83),
    _dpsgd(0.1, 0.3, 0.78),
    _dpsgd(1.0, 0.0, 0.60),
    Arm("TopK", 0.5, 0.9, 0.84, options={"ratio": 0.5}),
    Arm("TopK", 0.9, 0.5, 0.80, options={"ratio": 0.1}),
)
FOES = (
    Foe("PriorGuess", 0.0, baseline=True),
    Foe("LinearLeakage", 1.0),
    Foe("InvertingGradients", 0.9, simulates=True, objective=True),
)


def make_results(
    folder: Path,
    *,
    scenarios: tuple[str, ...] | None = None,
    seeds: tuple[int, ...] = (0, 1),
    observations: int = 10,
    batch_size: int = 1,
    checkpoints: tuple[int, ...] = (0,),
    control: bool = True,
    baseline: bool = True,
    attack_success: float = 1.0,
    blind_success: float = 0.0,
    counterfactual: float = 0.0,
    optimiser_failures: float = 0.0,
    monotone: bool = True,
    labels_granted: bool = False,
    adaptive: bool = True,
    informed: float = 1.0,
    failed: int = 0,
    missing: int = 0,
    bound: float | None = None,
    candidates: bool = False,
    active: bool = False,
    refuses: str | None = None,
    cascade: bool = False,
    media: Media = "image/png",
    guaranteed: bool = False,
    measured: float | None = 1.0,
    private: bool = True,
    replay: dict[str, Any] | None = None,
    probe: dict[str, Any] | None = None,
    other_cohort: str = "",
    other_examples: str = "",
) -> Conclusions:
    """Write `results.sqlite` to a folder and return what it holds.

    Args:
        folder: Where the results go.
        scenarios: Which of `SCENARIOS`; all by default. Tables of one take half the time.
        seeds: Seeds of training; each has its own observations.
        observations: Observations per seed.
        batch_size: Victims per observation.
        checkpoints: Rounds whose models are attacked.
        control: Whether there is an undefended arm.
        baseline: Whether there is a blind guess.
        attack_success: Factor on the success of all attacks.
        blind_success: Success of the blind guess, under every defense.
        counterfactual: Success of attacks' guesses for another upload, under every defense.
        optimiser_failures: Fraction of defended observations where the guess of an optimising
            attack fits worse than the truth.
        monotone: If not, stronger DPSGD leaks more.
        labels_granted: Whether the adversaries are told the labels.
        adaptive: Whether simulating adversaries are granted the defense.
        informed: Factor on the success of attacks for knowing a defense.
        failed: Number of cells that end in an error.
        missing: Number of cells that never ran.
        bound: Proven bound on identification, claimed by DPSGD.
        candidates: Whether there is an attack that is given candidates, which never fails.
        active: Whether there is an attack that crafts parameters, which never fails.
        refuses: The defense that refuses crafted parameters, and some honest ones.
        cascade: Whether a defended upload is not attacked again once all its victims are found.
        media: How victims are shown.
        guaranteed: Whether what DPSGD claims is recorded.
        measured: What an audit finds of the claimed noise, as a share; None without an audit.
        private: Whether there is DPSGD at all.
        replay: What an examination of all replays finds, other than `SOUND`.
        probe: What a test of all uploads finds, other than `HONEST`.
        other_cohort: How TopK's attacked uploads are of other clients than the trained ones.
        other_examples: How all attacked uploads are of other examples than the trained ones.
    """
    arms = [arm for arm in ARMS if control or arm.family != "none"]
    if not monotone:
        arms = [*arms[:-5], *_reversed(arms[-5:-2]), *arms[-2:]]
    arms = [arm for arm in arms if private or arm.family != "DPSGD"]
    foes = [foe for foe in FOES if baseline or not foe.baseline]
    foes += [Foe("PriorAware", 1.0, simulates=True, candidates=True)] if candidates else []
    foes += [Foe("Imprint", 1.0, threat="parameters")] if active else []
    cells: list[tuple[Cell, Outcome]] = []
    for scenario, arm, seed in product(scenarios or SCENARIOS, arms, seeds):
        labels = _labels(scenario, arm, seed, batch_size)
        claims = (_claim(arm, measured),) if guaranteed and arm.family == "DPSGD" else ()
        utility = _utility(arm, seed, refused=3 if arm.label == refuses else 0)
        trained = Outcome(utility=utility, guarantees=claims, busy=20.0)
        others = {
            "other_cohort": other_cohort if arm.family == "TopK" else "",
            "other_examples": other_examples,
        }
        cells.append((Cell("train", config=labels, labels=labels | others), trained))
        if arm.family != "none" and seed == seeds[0]:
            examined = Outcome(
                replays=(replace(SOUND, **replay or {}),),
                probes=(replace(HONEST, **probe or {}),),
            )
            cells.append((_cell("replay", labels), examined))
        for checkpoint in checkpoints:
            found: set[tuple[int, int]] = set()
            for foe, knows in _variants(arm, foes, adaptive):
                success = foe.success * arm.leaves * attack_success * (1.0 if knows else 0.5)
                if knows and foe.simulates and arm.family != "none":
                    success *= informed
                success = 1.0 if foe.candidates or foe.threat != "passive" else success
                outcome = _attack(
                    foe,
                    success=blind_success if foe.baseline else success,
                    counterfactual=counterfactual,
                    absent=_absent(foe, scenario, refuses == arm.label),
                    fails=optimiser_failures if arm.family != "none" else 0.0,
                    shape=(seeds.index(seed), len(seeds), observations, batch_size),
                    labels_granted=foe.candidates or (labels_granted and not foe.baseline),
                    bound=bound if arm.family == "DPSGD" else None,
                    media=media,
                )
                if cascade and arm.family != "none" and not (foe.baseline or foe.candidates):
                    outcome = _still_safe(outcome, found)
                    found |= {(r.observation, r.victim) for r in outcome.attacks if r.identified}
                attack = {
                    "checkpoint": checkpoint,
                    "adversary": foe.label,
                    "adversary_name": foe.label,
                    "adversary_options": {},
                    "threat": foe.threat,
                    "baseline": foe.baseline,
                    "simulates": foe.simulates,
                    "candidates_granted": foe.candidates,
                    "knows_defense": knows,
                }
                cells.append((_cell("attack", labels | attack), outcome))
    return _write(folder, cells, failed, missing)


@cache
def shared_results(**options: Any) -> Conclusions:  # noqa: ANN401 - as above
    """Return what `make_results` does, made once for all who only read it, tables and all."""
    with TemporaryDirectory() as folder:
        return make_results(Path(folder), **options)


def _absent(foe: Foe, scenario: str, refuses: bool) -> AttackRow | None:
    """Return what an attack without a guess leaves of a victim."""
    if foe.label == "LinearLeakage" and scenario == SCENARIOS[0]:
        reason = "the first layer is a convolution"
        return AttackRow(0, 0, outcome="not applicable", reason=reason)
    if foe.threat != "passive" and refuses:
        return AttackRow(0, 0, outcome="refused", reason="the first layer isolates examples")
    return None


def _still_safe(outcome: Outcome, found: set[tuple[int, int]]) -> Outcome:
    """Return what a cascade leaves of an outcome: the uploads with a victim not yet found."""
    safe = {r.observation for r in outcome.attacks if (r.observation, r.victim) not in found}
    left = {
        name: tuple(row for row in getattr(outcome, name) if row.observation in safe)
        for name in ("attacks", "scores", "renderings")
    }
    return replace(outcome, **left, status="ok" if safe else "not needed")


def _write(
    folder: Path, cells: list[tuple[Cell, Outcome]], failed: int, missing: int
) -> Conclusions:
    store = Store(folder, create=True)
    config = {"scenarios": SCENARIOS, "rounds": ROUNDS[-1], "candidates": CANDIDATES}
    store.begin("panel-1", config, [cell for cell, _ in cells])
    with _at_once(store):
        for index, (cell, outcome) in enumerate(cells[: len(cells) - missing]):
            if index < failed:
                outcome = Outcome(status="error", error=_ERROR)
            store.write(cell.key, outcome, outcome.busy + 1.0)
    return store.results()


@contextmanager
def _at_once(store: Store) -> Iterator[None]:
    """Write all cells in one transaction: one for each takes longer than all else."""
    with store._connect(writing=True) as database, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_connect", lambda **_: nullcontext(database))
        yield


def _variants(arm: Arm, foes: list[Foe], adaptive: bool) -> Iterator[tuple[Foe, bool]]:
    for foe in foes:
        if arm.family == "none" or not foe.simulates or adaptive:
            yield foe, True
        if arm.family != "none" and foe.simulates:
            yield foe, False


def _reversed(arms: list[Arm]) -> list[Arm]:
    return [
        replace(arm, leaves=other.leaves) for arm, other in zip(arms, reversed(arms), strict=True)
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
        "defense_options": arm.options,
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


def _utility(arm: Arm, seed: int, refused: int) -> tuple[UtilityRow, ...]:
    progress = np.array([0.1, *[arm.accuracy] * (len(ROUNDS) - 1)]) + 0.005 * seed
    return tuple(
        UtilityRow(at, int(TEST_SIZE * accuracy), TEST_SIZE, 2 - accuracy, refused)
        for at, accuracy in zip(ROUNDS, progress.tolist(), strict=True)
    )


def _attack(
    foe: Foe,
    *,
    success: float,
    counterfactual: float,
    absent: AttackRow | None,
    fails: float,
    shape: tuple[int, int, int, int],
    labels_granted: bool,
    bound: float | None,
    media: Media,
) -> Outcome:
    """Return scores with an exact share of successes, over all seeds; each attack's own."""
    part, parts, observations, batch_size = shape
    places = list(product(range(observations), range(batch_size)))
    if absent is not None:
        return Outcome(
            attacks=tuple(replace(absent, observation=i, victim=victim) for i, victim in places)
        )
    rng = np.random.default_rng([len(foe.label), part])
    victims = observations * batch_size
    drawn = np.random.default_rng(len(foe.label))
    rank, other = (
        drawn.permutation(parts * victims).reshape(parts, observations, batch_size)[part]
        for _ in range(2)
    )
    rows, scores, renderings = [], [], []
    for observation, victim in places:
        identified = bool(rank[observation, victim] < round(success * parts * victims))
        failed = bool(rank[observation, 0] < round(fails * parts * victims))
        rows.append(
            AttackRow(
                observation=observation,
                victim=victim,
                identified=identified,
                counterfactual=bool(
                    other[observation, victim] < round(counterfactual * parts * victims)
                ),
                candidates=CANDIDATES,
                label_correct=None if foe.baseline else True,
                labels_granted=labels_granted,
                objective=_objective(identified, failed) if foe.objective else None,
                objective_at_truth=0.2 if foe.objective else None,
                bound=bound,
                seconds=1.5,
            )
        )
        for metric, value in _scores(media, identified, rng).items():
            scores.append(Score(observation, victim, metric, value))
        if part == 0 and observation * batch_size + victim < RENDERED:
            renderings.append(_rendering(media, observation, victim, identified))
    return Outcome(tuple(rows), tuple(scores), renderings=tuple(renderings), busy=1.5 * victims)


def _scores(media: Media, identified: bool, rng: np.random.Generator) -> dict[str, float]:
    if media == "tokens":
        return {"token_accuracy": 1.0 if identified else 0.25}
    psnr = float(rng.normal(24 if identified else 9, 1))
    if media == "audio/wav":
        return {"psnr": psnr, "snr": psnr - 6}
    return {
        "psnr": psnr,
        "ssim": float(np.clip(rng.normal(0.8 if identified else 0.1, 0.03), -1, 1)),
    }


def _objective(identified: bool, failed: bool) -> float:
    """Return what is above the truth's 0.2 if the optimiser failed, and lowest on success."""
    return 0.4 if failed else 0.1 if identified else 0.15


def _rendering(media: Media, observation: int, victim: int, identified: bool) -> Rendering:
    truth, noise = _victim(media, observation, victim)
    return Rendering(observation, victim, media, truth, truth if identified else noise)


@cache
def _victim(media: Media, observation: int, victim: int) -> tuple[bytes, bytes]:
    make = {"image/png": _image, "audio/wav": _sound, "tokens": _text}[media]
    return make(np.random.default_rng([observation, victim]))


def _image(rng: np.random.Generator) -> tuple[bytes, bytes]:
    across, down = np.meshgrid(np.linspace(0, 255, SHAPE[1]), np.linspace(0, 255, SHAPE[2]))
    truth = np.where(rng.integers(2), across, (across + down) / 2).astype(np.uint8)
    noise = rng.integers(0, 256, truth.shape, dtype=np.uint8)
    return png(truth.tobytes(), SHAPE), png(noise.tobytes(), SHAPE)


def _sound(rng: np.random.Generator) -> tuple[bytes, bytes]:
    tone = np.sin(np.arange(4000) * 2 * np.pi * rng.integers(200, 400) / 8000)
    return _wav(tone), _wav(rng.uniform(-1, 1, 4000))


def _wav(amplitudes: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((amplitudes * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _text(rng: np.random.Generator) -> tuple[bytes, bytes]:
    words = ["to ", "be ", "<or> ", "not"]
    return json.dumps(words).encode(), json.dumps(["to ", "&", "or ", "nit"]).encode()


TinyArm = tuple[str, str, float | None, int, list[bool]]


def write_tiny(
    folder: Path, arms: list[TinyArm], *, renderings: tuple[Rendering, ...] = (), seeds: int = 1
) -> Conclusions:
    """Write arms of (label, family, strength, correct of 1000, identified) and one attack.

    All seeds of training are alike. Uploads of the first are attacked.
    """
    cells = []
    for label, family, strength, correct, identified in arms:
        labels: dict[str, Any] = {
            "scenario": "tiny/model",
            "dataset": "tiny",
            "model": "model",
            "protocol": "FedSGD",
            "batch_size": 1,
            "seed": 0,
            "defense": label,
            "family": family,
            "defense_options": {} if strength is None else {"level": strength},
            "strength": strength,
            "stochastic": False,
        }
        attack = labels | {
            "checkpoint": 0,
            "adversary": "Attack",
            "adversary_name": "Attack",
            "adversary_options": {},
            "threat": "passive",
            "baseline": False,
            "simulates": False,
            "candidates_granted": False,
            "knows_defense": True,
        }
        rows = tuple(
            AttackRow(i, 0, identified=flag, counterfactual=False, candidates=100)
            for i, flag in enumerate(identified)
        )
        scores = tuple(
            Score(i, 0, metric, value)
            for i in range(len(rows))
            for metric, value in {"psnr": 10.0, "ssim": 0.1}.items()
        )
        trained = Outcome(utility=(UtilityRow(5, correct, 1000, 1.0),))
        for seed in range(seeds):
            own = labels | {"seed": seed}
            cells.append((Cell("train", own, own), trained))
        attacked = Outcome(rows, scores, renderings=renderings)
        cells.append((Cell("attack", attack, attack), attacked))
    store = Store(folder, create=True)
    store.begin("panel-1", {"name": "tiny"}, [cell for cell, _ in cells])
    with _at_once(store):
        for cell, outcome in cells:
            store.write(cell.key, outcome, 1.0)
    return store.results()
