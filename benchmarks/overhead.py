"""Print the time that the harness adds to training and attacks, from the rows of a run.

python benchmarks/overhead.py runs/quick
"""

import sys
from pathlib import Path

from leakfrontier.evaluate.run.store import Store


def main(folder: Path) -> None:
    """Compare the wall time of each cell with the time of its training or attack."""
    cells = Store(folder).results().cells
    cells["what"] = cells["adversary"].fillna("training")
    sums = cells.groupby(["scenario", "what"])[["seconds", "busy"]].sum()
    sums.loc[("all", "all"), :] = sums.sum()
    sums["overhead %"] = 100 * (sums["seconds"] / sums["busy"] - 1)
    print(sums.round(1).to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
