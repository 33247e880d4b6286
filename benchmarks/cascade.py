"""Compare the worst case of a cascade with that of all attacks on all uploads, per victim.

leakfrontier run --preset quick --out runs/cascade
leakfrontier run --preset quick --individual --out runs/individual
python benchmarks/cascade.py runs/cascade runs/individual
"""

import sys
from pathlib import Path

import pandas as pd

from leakfrontier.evaluate.conclude.analysis import SERVERS, victim_matrix
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.store import Store

PLACE = ["server", "scenario", "checkpoint", "defense"]


def main(cascade: Path, individual: Path) -> int:
    """Print how many victims differ, per arm and server. Return the total."""
    table = compared(*(Store(folder).results() for folder in (cascade, individual)))
    print(table.to_string(index=False))
    differing = int(table["differ"].sum())
    print(f"{differing} of {table['victims'].sum()} worst cases differ.")
    return differing


def compared(cascade: Conclusions, individual: Conclusions) -> pd.DataFrame:
    """Return one row per server and arm, with the numbers of victims, identified and differing.

    A victim differs if one run identifies it and the other does not, or never attacks it.
    """
    lines = [
        (server, *place, *counts)
        for server in SERVERS
        for place, counts in _arms(cascade, individual, server)
    ]
    return pd.DataFrame(lines, columns=[*PLACE, "victims", "cascade", "individual", "differ"])


def _arms(
    cascade: Conclusions, individual: Conclusions, server: str
) -> list[tuple[tuple[str, int, str], tuple[int, ...]]]:
    runs = (cascade, individual)
    both = pd.concat([run.attacks[["scenario", "checkpoint"]] for run in runs])
    arms = []
    for scenario, checkpoint in both.drop_duplicates().itertuples(index=False, name=None):
        one, other = (victim_matrix(run, scenario, checkpoint, server) for run in runs)
        one, other = one.align(other)  # victims of only one run differ
        for defense in one:
            pair = one[defense], other[defense]
            differ = (pair[0] != pair[1]) & ~(pair[0].isna() & pair[1].isna())
            counts = (len(differ), *(int(column.sum()) for column in pair), int(differ.sum()))
            arms.append(((scenario, int(checkpoint), str(defense)), counts))
    return arms


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])) > 0)
