"""The examples in docs/ run as they are."""

import os
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_notebook_runs() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "notebook.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Rounded(step=0.1)" in done.stdout
    assert "Results: " in done.stdout
    assert "Figure: " in done.stdout
    assert Path(done.stdout.split()[-1]).read_text().startswith("<!DOCTYPE html>")
    cells = (DOCS / "notebook.py").read_text().count("# %%")
    assert cells >= 5
