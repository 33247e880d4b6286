"""Print the value of knowing the defense: informed and ignorant attacks on the same uploads.

leakfrontier run --preset quick && python benchmarks/adaptive.py runs/quick
"""

import sys
from pathlib import Path

from leakfrontier.evaluate.foundations.statistics import paired_difference, rate
from leakfrontier.evaluate.run.store import Store


def main(folder: Path) -> None:
    """Compare both variants of every attack that replays the client, arm by arm."""
    attacks = Store(folder).results().attacks
    attacks = attacks[attacks["simulates"].astype(bool) & (attacks["family"] != "none")]
    arms = attacks.groupby(["scenario", "checkpoint", "adversary", "defense"], sort=False)
    weaker = 0
    for (scenario, checkpoint, adversary, defense), rows in arms:
        rows = rows.dropna(subset=["identified"])
        both = rows.pivot_table(
            index=["seed", "observation", "victim"],
            columns="knows_defense",
            values="identified",
            aggfunc="first",
        ).dropna()
        units = (
            both.reset_index()["seed"].astype(str)
            + "/"
            + both.reset_index()["observation"].astype(str)
        )
        informed, ignorant = both[True].astype(bool), both[False].astype(bool)
        gain = paired_difference(informed, ignorant, units)
        weaker += gain.high < 0
        print(
            f"{scenario}, round {checkpoint}, {adversary}, {defense}: "
            f"informed {rate(informed, units)}, ignorant {rate(ignorant, units)}, "
            f"difference {100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        )
    print(f"informed significantly weaker in {weaker} of {arms.ngroups} arms")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
