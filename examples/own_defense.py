"""A defense of one's own, evaluated in a notebook."""

# %% [markdown]
# # A defense of one's own, in a notebook
#
# Cells in percent format: Jupyter (with jupytext), VS Code and PyCharm open this file as a
# notebook, and `python docs/notebook.py` runs it as it is.

# %%
import tempfile
from pathlib import Path

from leakfrontier.adversaries import InvertingGradients, LinearLeakage
from leakfrontier.evaluate.run.run import load_config, run
from leakfrontier.reports import write_report
from leakfrontier.reports.frontier_figure import frontier_figure

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# A defense is a class in a file, because cells run in processes of their own.

# %%
(folder / "mine.py").write_text(
    """
from dataclasses import dataclass

from leakfrontier.defenses import Defense


@dataclass
class Rounded(Defense):
    step: float = 0.01

    def on_update(self, update, rng):
        return {name: (value / self.step).round() * self.step for name, value in update.items()}
"""
)

# %% [markdown]
# What is evaluated: small enough for a minute.


# %%
def main() -> None:
    """Evaluate, and show what a notebook shows."""
    config = load_config(
        {
            "scenarios": [
                {
                    "dataset": "digits",
                    "model": {"name": "mlp", "width": 32},
                    "candidates": 50,
                    "training": {"rounds": 20, "clients": 4},
                }
            ],
            "defenses": [
                "none",
                {"name": f"{folder / 'mine.py'}:Rounded", "step": [0.001, 0.1]},
                {"name": "DPSGD", "noise_multiplier": 1.0},
            ],
            "adversaries": [
                "PriorGuess",
                LinearLeakage.__name__,
                {"name": InvertingGradients.__name__, "iterations": 50},
            ],
            "observations": 8,
        }
    )
    results = run(config, folder / "run", workers=2)
    print(results.worst_case()[["defense", "text"]].to_string(index=False))
    # In a notebook, `results`, a frontier, a table or a figure is shown by its name alone:
    frontier = results.frontier()
    figure = frontier_figure(frontier.scenario, frontier.points)
    for shown in (results, frontier, *([] if figure is None else [figure])):
        print(f"{type(shown).__name__}: {len(shown._repr_html_())} characters of HTML")
    print(write_report(folder / "run"))


# %%
if __name__ == "__main__":  # processes of the run import this file as well
    main()
