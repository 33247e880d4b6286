"""Print how long secure aggregation takes on one core, and how fast masks are made.

python benchmarks/secure_aggregation.py
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from leakfrontier.defenses.secagg_protocol import keystream
from leakfrontier.defenses.secure_aggregation import SecureAggregation

CLIENTS, PARAMETERS, REPEATS = 10, 1_000_000, 3


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest time of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Time a whole round, with and without lost clients, and one mask."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    updates = [{"w": torch.randn(PARAMETERS, generator=rng)} for _ in range(CLIENTS)]
    for dropout in (0.0, 0.3):
        defense = SecureAggregation(CLIENTS, dropout=dropout)
        taken = seconds(lambda defense=defense: defense.on_round(updates, rng))
        print(f"{CLIENTS} clients, {PARAMETERS:,} parameters, dropout {dropout}: {taken:.2f} s")

    vector = np.zeros(PARAMETERS, np.uint32)
    taken = seconds(lambda: keystream(bytes(16), vector))
    print(f"one mask: {1e3 * taken:.1f} ms, {vector.nbytes / taken / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
