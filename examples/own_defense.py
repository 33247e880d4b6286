"""Evaluate a defense and a model of your own, in a notebook or as a script.

Cells are in percent format: Jupyter (with jupytext), VS Code and PyCharm open it as a notebook.

python examples/own_defense.py
"""

# %% [markdown]
# # A defense of your own

# %%
import math
from dataclasses import dataclass

from torch import nn

import leakfrontier as lf


@dataclass
class Rounded(lf.defenses.Defense):
    """Round every entry of the upload to a multiple of `step`."""

    step: float = 0.01

    def on_update(self, update, rng):  # noqa: ANN001, ANN201 - short for a notebook
        """Round the upload."""
        return {name: (value / self.step).round() * self.step for name, value in update.items()}


# %% [markdown]
# # A model of your own
#
# A factory gets the input space: shape and number of classes.


# %%
def small(space):  # noqa: ANN001, ANN201 - short for a notebook
    """Return a perceptron with one hidden layer."""
    size = math.prod(space.shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, space.classes))


# %% [markdown]
# # Evaluate
#
# Three attacks and eight uploads take about a minute. By default, the whole panel attacks.

# %%
results = lf.evaluate(
    Rounded(step=0.001),
    Rounded(step=0.1),
    {"name": "DPSGD", "noise_multiplier": 1.0},
    scenario={"dataset": "digits", "candidates": 50, "training": {"rounds": 20, "clients": 4}},
    model=small,
    adversaries=[
        "PriorGuess",
        "LinearLeakage",
        lf.adversaries.InvertingGradients(iterations=50),
    ],
    observations=8,
    only=True,
    out="runs/own_defense",
)

# %% [markdown]
# In a notebook, a name alone shows the table or the chart.

# %%
print(results.rates()[["defense", "adversary", "text"]].to_string(index=False))

# %%
print(results.frontier().points[["name", "accuracy", "success_text", "verdict"]])

# %%
for check in results.checks():
    print(check.verdict, check.name)

# %%
chart = results.plot()

# %%
print(results.report())
