"""The panel's attacks, at about a second for twenty uploads of a small model.

`SMALL` are those that attack a perceptron, `OF_OTHER_MODELS` those that are made for others.
"""

from pathlib import Path

from pydantic import JsonValue

from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

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

OF_BATCHES = {"Fishing"}
"""Those that single out one of several examples, and have nothing to do where there is one."""

_OTHER_MODELS: dict[str, dict[str, dict[str, JsonValue]]] = {
    "invertible": {"RGAP": {}, "RCONV": {}},
    "encoding": {"ScaleMIA": {"epochs": 3, "examples": 300}},
    "gpt2": {
        "DAGER": {},
        "SOMP": {},
        "LAMP": {"iterations": 40, "starts": 20, "orders": 20},
        "GRAB": {"iterations": 40, "starts": 20, "orders": 20, "rounds": 2, "beams": 2},
    },
}
OF_OTHER_MODELS = {
    model: {name: Method(name=name, options=options) for name, options in several.items()}
    for model, several in _OTHER_MODELS.items()
}
"""Those that are made for convolutions without gaps, with an encoder, or for language models."""

OF_ONE_STEP = {"DLG", "IDLG", "GradInversion", "RGAP", "RCONV"}
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
