"""The harness: runs clients under defenses, attacks what they upload, scores and records.

The package can be called: `leakfrontier.evaluate(...)` is `door.evaluation.evaluate`.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class _Evaluate(ModuleType):
    """A package that is a function as well."""

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - the function has types
        """Evaluate defenses: see `door.evaluation.evaluate`."""
        from .door.evaluation import evaluate

        return evaluate(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        from .door.evaluation import evaluate

        return inspect.signature(evaluate)


sys.modules[__name__].__class__ = _Evaluate
