"""Measures what a federated-learning defense is worth.

    import leakfrontier as lf

    results = lf.evaluate(MyDefense(step=0.1))  # train, attack, compare with other defenses
    results.frontier(), results.rates(), results.checks(), results.plot(), results.report()

| name | what it does |
|---|---|
| `evaluate` | trains under defenses, attacks what clients upload, returns `Results` |
| `load` | returns the `Results` of an earlier run |
| `capture` | records an update of a training loop of your own |
| `attack` | attacks captured updates |
| `advise` | chooses parameters for differential privacy |
| `audit` | tests whether a defense keeps its privacy claim |
| `defenses` | every defense, and the base class of your own |
| `adversaries` | every attack, and the base class of your own |

Each part is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import adversaries, defenses
    from .evaluate.door.advising import advise
    from .evaluate.door.auditing import audit
    from .evaluate.door.evaluation import attack, evaluate, load
    from .evaluate.door.results import Results
    from .evaluate.outside.capture import capture

    __version__: str

__all__ = [
    "Results",
    "__version__",
    "adversaries",
    "advise",
    "attack",
    "audit",
    "capture",
    "defenses",
    "evaluate",
    "load",
]

_DOORS = {
    "Results": ".evaluate.door.results",
    "advise": ".evaluate.door.advising",
    "attack": ".evaluate.door.evaluation",
    "audit": ".evaluate.door.auditing",
    "capture": ".evaluate.outside.capture",
    "load": ".evaluate.door.evaluation",
}
"""Where each name is defined. The package `evaluate` is itself the function of that name."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - each has a type of its own
    """Import a part when it is first used."""
    if name in _DOORS:
        return getattr(import_module(_DOORS[name], __name__), name)
    if name in ("adversaries", "defenses", "evaluate"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
