"""`import leakfrontier`: quick to import, typed, and at home in scripts and notebooks."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import leakfrontier as lf

SCRIPT = """
from dataclasses import dataclass

from torch import nn

import leakfrontier as lf

STEP = 1e-3


def rounded(value, step):
    return (value / step).round() * step


@dataclass
class Rounded(lf.defenses.Defense):
    step: float = STEP

    def on_update(self, update, rng):
        return {name: rounded(value, self.step) for name, value in update.items()}


@dataclass(frozen=True)
class Mean(lf.adversaries.Adversary):
    def reconstruct(self, observation, rng):
        public = observation.public.inputs.mean(0, keepdim=True)
        return lf.adversaries.Reconstruction(public.repeat(observation.batch_size, 1, 1, 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.layers(x)

"""

CALL = """
results = lf.evaluate(
    Rounded(0.5),
    Rounded,
    scenario={{
        "dataset": "digits",
        "model": Net,
        "candidates": 20,
        "training": {{"rounds": 2, "clients": 4}},
    }},
    adversaries=["LinearLeakage", Mean()],
    observations=3,
    only=True,
    out={out!r},
    quiet=True,
)
points = results.frontier().points
found = {{
    "defenses": sorted(points["defense"]),
    "cells": sorted(results.cells["cell"]),
    "failed": int((~results.cells["status"].isin(["ok", "not needed"])).sum()),
    "attacks": sorted({{*results.rates()["adversary"]}}),
}}
"""

PRINT = "\nimport json\nprint(json.dumps(found))\n"


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Return the folder of a run by a script without a guard for `__main__`, and what it found."""
    folder = tmp_path_factory.mktemp("script")
    file = folder / "study.py"
    file.write_text(SCRIPT + CALL.format(out=str(folder / "run")) + PRINT)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=200, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", json.loads(done.stdout)


def test_a_script_evaluates_what_is_in_its_own_body(
    script_run: tuple[Path, dict[str, list[str]]],
) -> None:
    _, found = script_run
    assert found["defenses"] == ["Rounded", "Rounded(step=0.5)", "none"]
    assert found["attacks"] == ["LinearLeakage", "Mean"]
    assert found["failed"] == 0


def test_a_notebook_does_the_same(
    script_run: tuple[Path, dict[str, list[str]]],
) -> None:
    folder, found = script_run
    notebook = (
        "import json\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in ({SCRIPT!r}, {CALL.format(out=str(folder))!r}):\n"
        "    shell.run_cell(cell, store_history=True).raise_error()\n"
        "print(json.dumps(shell.user_ns['found']))\n"
        "formatted, _ = shell.display_formatter.format(shell.user_ns['results'])\n"
        "assert '<table' in formatted['text/html'], formatted\n"
        "for name in ('frontier()', 'rates()', 'checks()', 'plot()'):\n"
        "    value = shell.ev('results.' + name)\n"
        "    shown, _ = shell.display_formatter.format(value)\n"
        "    assert len(shown) > 1, (name, shown)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", notebook], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout.strip().splitlines()[-1])
    assert {**again, "cells": []} == {**found, "cells": []}


def test_importing_it_takes_little_beyond_torch(tmp_path: Path) -> None:
    program = (
        "import time, torch; start = time.process_time()\nimport leakfrontier\n"
        "leakfrontier.__version__, dir(leakfrontier)\nprint(time.process_time() - start)\n"
        "import sys; assert not [one for one in sys.modules if one.startswith('leakfrontier.')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert float(done.stdout) < 1


def test_it_offers_what_it_says_and_nothing_else() -> None:
    assert dir(lf) == sorted(lf.__all__)
    for name in lf.__all__:
        assert getattr(lf, name) is not None
        assert f"`{name}`" in (lf.__doc__ or "") or name in ("Results", "__version__")
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        lf.missing  # noqa: B018


def test_every_door_has_types_and_words() -> None:
    from leakfrontier.evaluate.door.evaluation import evaluate

    assert inspect.signature(lf.evaluate) == inspect.signature(evaluate)
    for door in (evaluate, lf.load, lf.attack, lf.advise, lf.audit, lf.capture):
        signature = inspect.signature(door)
        assert signature.return_annotation is not inspect.Signature.empty
        for name, parameter in signature.parameters.items():
            assert parameter.annotation is not inspect.Parameter.empty
            assert f"{name}: " in (door.__doc__ or ""), (door, name)
