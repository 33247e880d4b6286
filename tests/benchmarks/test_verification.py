"""A handful of simulated packs of each kind: altered ones are caught, honest ones never refuted."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "verification.py"
PACKS = 5


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


@pytest.fixture(scope="module")
def truths(benchmark: dict[str, Any]) -> list[Any]:
    found: list[Any] = benchmark["truths_of"]([benchmark["STANDARD"] / "cnn.zip"])
    return found


def decisions(benchmark: dict[str, Any], truths: list[Any], kind: str) -> list[str]:
    rng = np.random.default_rng(0)
    return [benchmark["simulate"](kind, truths, rng) for _ in range(PACKS)]


@pytest.mark.parametrize(
    "kind",
    [
        "accuracy of no defense",
        "accuracy of no defense, one seed",
        "copied rows",
        "copied rows, other versions",
        "hidden successes",
        "fewer uploads or seeds",
    ],
)
def test_altered_packs_are_refuted(benchmark: dict[str, Any], truths: list[Any], kind: str) -> None:
    assert decisions(benchmark, truths, kind) == ["refuted"] * PACKS


@pytest.mark.parametrize(
    "kind", ["+3 points, claims other versions", "+3 points, has other versions"]
)
def test_three_points_of_accuracy_are_not_confirmed(
    benchmark: dict[str, Any], truths: list[Any], kind: str
) -> None:
    """Rounding may explain them, so they are not refuted."""
    assert "confirmed" not in decisions(benchmark, truths, kind)


@pytest.mark.parametrize(
    "kind",
    ["honest, same versions", "honest, other versions", "honest, other versions, control equal"],
)
def test_honest_packs_are_never_refuted(
    benchmark: dict[str, Any], truths: list[Any], kind: str
) -> None:
    found = decisions(benchmark, truths, kind)
    assert "refuted" not in found
    if kind == "honest, same versions":
        assert found == ["confirmed"] * PACKS
