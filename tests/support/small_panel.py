"""The panel's attacks, at about a second for twenty uploads of a small perceptron.

All but `OF_BATCHES` and `OF_OTHER_MODELS`.
"""

from pathlib import Path

from pydantic import JsonValue

from leakfrontier.evaluate.cells import AttackTrial
from leakfrontier.evaluate.methods import Method
from leakfrontier.evaluate.rows import AttackRow
from leakfrontier.evaluate.scenario import Scenario

_OPTIONS: dict[str, dict[str, JsonValue]] = {
    "LinearLeakage": {},
    "PriorAware": {},
    "SPEAR": {"samples": 500},
    "SPEARPlusPlus": {"initialisations": 20, "steps": 10},
    "InvertingGradients": {"iterations": 80},
    "SME": {"iterations": 60, "alpha_lr": 0.0},  # it would hardly move
    "LearningToInvert": {"uploads": 200},
    "DLG": {"iterations": 30},
    "IDLG": {"iterations": 30},
    "GradInversion": {"iterations": 100, "restarts": 1, "matching": 1.0},
    "FedLeak": {"iterations": 40, "lr": 0.1, "width": 0},
    "DLFA": {"iterations": 40, "order_prior": 0.0},
    "RobbingTheFed": {"bins": 16},
    "RobbingTheFedDirectPass": {},
    "LOKI": {},
    "TrapWeights": {},
    "ARES": {},
}
SMALL = {name: Method(name=name, options=options) for name, options in _OPTIONS.items()}
OF_WEIGHTS = {"SME", "DLFA"}
"""Those that need several local steps."""

OF_BATCHES = {"Fishing", "ScaleMIA"}
"""Those that need several examples, or convolutions."""

OF_OTHER_MODELS = {"RGAP", "RCONV", "DAGER", "SOMP", "LAMP", "GRAB", "LanguageGuess"}
"""Those that are made for convolutions or for language models: not yet tested here."""

OF_ONE_STEP = {"DLG", "IDLG", "GradInversion"}
"""Those that a second local step stops."""

OF_GRADIENTS = {name: method for name, method in SMALL.items() if name not in OF_WEIGHTS}


def attacked(
    scenario: Scenario, defense: Method, adversary: Method, uploads: int
) -> tuple[AttackRow, ...]:
    """Attack an untrained model, knowing the defense."""
    trial = AttackTrial(
        scenario,
        defense,
        adversary,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(uploads)),
    )
    return trial.run(Path()).attacks
