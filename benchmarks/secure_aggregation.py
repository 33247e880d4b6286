"""Print the time of rounds of secure aggregation, clients and server together.

python benchmarks/secure_aggregation.py [THREADS]
"""

import resource
import sys
import time

import numpy as np
import torch

from leakfrontier.defenses.secagg.masks import keystream
from leakfrontier.defenses.secagg.secure_aggregation import SecureAggregation

DISTINCT = 10
"""Number of different updates. Clients share them, so only the protocol needs memory."""

ROUNDS = [  # clients, parameters, neighbours, dropout
    (10, 1_000_000, None, 0.0),
    (10, 1_000_000, None, 0.3),
    (1000, 100_000, 50, 0.1),
    (100, 1_000_000, 20, 0.05),
    (100, 1_000_000, None, 0.0),
    (100, 1_000_000, None, 0.3),
    (1000, 1_000_000, 20, 0.0),
]


def main(threads: int = 2) -> None:
    """Time one mask, then whole rounds, and check their sums."""
    torch.set_num_threads(threads)
    vector = np.zeros(1_000_000, np.uint32)
    start = time.process_time()
    for number in range(100):
        keystream(bytes([number] * 16), vector)
    taken = (time.process_time() - start) / 100
    print(f"one mask: {1e3 * taken:.2f} CPU ms, {vector.nbytes / taken / 1e9:.1f} GB/s")

    rng = torch.Generator().manual_seed(0)
    print(
        f"{threads} threads\nclients parameters neighbours dropout  wall s  CPU s  peak GB  error"
    )
    for clients, parameters, neighbours, dropout in ROUNDS:
        drawn = [{"w": torch.randn(parameters, generator=rng)} for _ in range(DISTINCT)]
        updates = [drawn[client % DISTINCT] for client in range(clients)]
        defense = SecureAggregation(clients, dropout=dropout, neighbours=neighbours)
        wall, cpu = time.perf_counter(), time.process_time()
        (released,) = defense.on_round(updates, rng)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        exact = sum(update["w"].double() for update in drawn) * (clients / DISTINCT)
        error = float((released["w"] - exact).abs().max()) / clients / defense.step
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{clients:7} {parameters:10,} {neighbours or 'all':>10} {dropout:7} {wall:7.1f} "
            f"{cpu:6.1f} {memory:8.1f}  " + (f"{error:.2f} steps" if not dropout else "by losses"),
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
