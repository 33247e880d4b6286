from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from torch import nn

from leakfrontier.evaluate.commands.analyse import print_analysis
from leakfrontier.evaluate.models.architecture import analyse


def test_the_command(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    drawing = tmp_path / "layers.svg"
    code, output, _ = command("analyse", "lenet", "--shape", "1,28,28", "--drawing", drawing)
    assert code == 0
    assert "does not resist" in output
    assert "<svg" in drawing.read_text()
    code, output, _ = command("analyse", "{name: lenet, activation: relu}", "--json")
    found = json.loads(output)
    assert code == 0
    assert found["layers"][0]["gradient"] == 900
    assert found["resists"]
    code, _, errors = command("analyse", "lenet", "--shape", "3,x")
    assert code == 2
    assert "whole numbers" in errors
    code, _, errors = command("analyse", "alexnet", "--shape", "3,8,8")
    assert code == 2
    assert "another --shape" in errors
    code, _, errors = command("analyse", "lenet", "--drawing", tmp_path / "layers.txt")
    assert code == 2
    assert ".svg or .png" in errors


def test_what_is_printed_names_layers_obstacles_and_the_verdict() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3, bias=False)
    )
    shown = io.StringIO()
    analysis = analyse(model, (1, 8, 8), "mine[1]")
    print_analysis(Console(file=shown, width=200), analysis)
    lines = shown.getvalue().splitlines()
    (convolution,) = (line.split() for line in lines if line.startswith("0 "))
    assert convolution[:3] == ["0", "convolution", "1x8x8"]
    assert convolution[3:6] == ["64", "72", "18"]  # pixels, outputs and weights
    assert any("obstacle" in line for line in lines)
    verdicts = [line for line in lines if line.startswith(("yes ", "no "))]
    assert len(verdicts) == len(analysis.verdicts)
    word = "resists" if analysis.resists else "does not resist"
    assert lines[-1] == f"mine[1] {word} analytic inversion by a passive server."
