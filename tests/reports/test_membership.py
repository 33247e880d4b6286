"""The curves of membership attacks, and the documented way to make them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from leakfrontier.adversaries import NotApplicable
from leakfrontier.evaluate.privacy.membership import ROC, replacement_bounds
from leakfrontier.reports.charts import Figure
from leakfrontier.reports.membership import membership_figure

DOCUMENT = Path(__file__).parents[2] / "docs" / "lab" / "membership.md"


def gaussian_roc(separation: float, size: int = 2000) -> ROC:
    draws = np.random.default_rng(0)
    return ROC(draws.standard_normal(size) + separation, draws.standard_normal(size))


def data(figure: Figure) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the attacks' points and the reference lines."""
    frames = [pd.DataFrame(values) for values in figure.spec["datasets"].values()]
    (curves,) = (frame for frame in frames if "attack" in frame)
    (lines,) = (frame for frame in frames if "line" in frame)
    return curves, lines


def test_a_perfect_attack_is_drawn_on_its_bound() -> None:
    figure = membership_figure({"best": gaussian_roc(1.0)}, replacement_bounds(2.0))
    curves, lines = data(figure)
    bound = lines[lines["line"] == "proven bound"]
    allowed = np.interp(curves["fpr"], bound["fpr"], bound["tpr"])
    assert np.abs(curves["tpr"] - allowed).max() < 0.05
    assert (curves["tpr_low"] <= curves["tpr"]).all()
    assert curves["fpr"].min() >= 10 / 2000  # ten false positives
    chance = lines[lines["line"] == "chance"]
    np.testing.assert_array_equal(chance["fpr"], chance["tpr"])


def test_axes_are_logarithmic_and_hold_no_zero() -> None:
    figure = membership_figure({"poor": ROC(np.zeros(100), np.arange(100.0))})
    curves, lines = data(figure)
    assert (curves[["fpr", "tpr", "tpr_low"]] > 0).all(axis=None)
    assert set(lines["line"]) == {"chance"}
    encodings: list[dict[str, Any]] = [layer["encoding"] for layer in figure.spec["layer"]]
    for encoding in encodings:
        assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
    assert "<svg" in figure.svg
    assert "bound" not in figure.caption


def test_what_was_not_applicable_is_said() -> None:
    absent = NotApplicable("no public examples")
    figure = membership_figure({"cosine": gaussian_roc(1.0), "ratio": absent})
    assert "Not applicable: ratio (no public examples)" in figure.caption
    with pytest.raises(ValueError, match="no attack was applicable: ratio: no public examples"):
        membership_figure({"ratio": absent})


def test_the_documented_way_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert "uploads=1000" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("uploads=1000", "uploads=20"), {})
    assert (tmp_path / "roc.png").stat().st_size > 5000
