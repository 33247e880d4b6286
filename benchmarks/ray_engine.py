"""Compare Ray with the local engine: equal rows, overhead per cell, and a projection.

python benchmarks/ray_engine.py runs/ray_benchmark

The script runs the first cells of the quick preset with the local engine and on a Ray cluster of
two nodes on this machine. It compares their rows bit by bit. The overhead is that of empty tasks.
The projection is a simulation. The script prints its assumptions.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import ray
from ray.cluster_utils import Cluster

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.engines.engine import LOCAL, Engine
from leakfrontier.evaluate.engines.ray_engine import RayEngine
from leakfrontier.evaluate.run.cells import run_trial
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import plan, run_trials

CELLS, TASKS, WORKERS = 60, 200, 2
PROJECTED_CELLS, PROJECTED_WORKERS = 1000, 100
TABLES = ("attacks", "scores", "utility", "guarantees", "replays", "probes", "renderings")


def main(folder: Path) -> int:
    """Print all figures. Return how many tables differ."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    engines: dict[str, Engine] = {"local": LOCAL, "ray": RayEngine(cluster.address)}
    idle = {name: overhead(engine) for name, engine in engines.items()}
    for name, (start, each) in idle.items():
        print(f"{name}: first result after {start:.1f} s, then {1000 * each:.1f} ms per empty task")
    results = {name: evaluated(engine, folder / name, name) for name, engine in engines.items()}
    ray.shutdown()
    cluster.shutdown()
    differing = [table for table in TABLES if not equal(*results.values(), table)]
    cells = results["ray"].cells
    print(
        f"{len(cells)} cells, {(cells['status'] == 'ok').sum()} ok; tables that differ: {differing}"
    )
    project(results["local"].cells["seconds"].tolist(), *idle["ray"])
    return len(differing)


def overhead(engine: Engine) -> tuple[float, float]:
    """Return the seconds until the first result, and per further result."""
    start = time.perf_counter()
    done = engine.execute(abs, range(TASKS), workers=WORKERS, time_limit=60)
    next(done)
    first = time.perf_counter()
    for _ in done:
        pass
    return first - start, (time.perf_counter() - first) / (TASKS - 1)


def evaluated(engine: Engine, out: Path, name: str) -> Conclusions:
    """Run the first cells of the quick preset."""
    config = load_config("quick")
    start = time.perf_counter()
    results = run_trials(
        plan(config)[:CELLS],
        out,
        panel=config.panel,
        config=config.model_dump(mode="json"),
        workers=WORKERS,
        engine=engine,
    )
    wall, spent = time.perf_counter() - start, results.cells["seconds"].sum()
    print(f"{name}: {wall:.1f} s for {spent:.1f} s of {run_trial.__name__} on {WORKERS} workers")
    return results


def equal(one: Conclusions, other: Conclusions, table: str) -> bool:
    """Return whether two runs have the same rows, except for their times."""
    frames = [getattr(r, table).drop(columns="seconds", errors="ignore") for r in (one, other)]
    return frames[0].equals(frames[1])


def project(seconds: Sequence[float], start: float, dispatch: float) -> None:
    """Print the projected time of many cells on many workers, and the ideal time."""
    rng = random.Random(0)
    costs = rng.choices(seconds, k=PROJECTED_CELLS)
    ideal = max(max(costs), sum(costs) / PROJECTED_WORKERS)
    wall = simulated(costs, PROJECTED_WORKERS, start, dispatch)
    print(
        f"Projection: {PROJECTED_CELLS} cells of {mean(costs):.1f} s on {PROJECTED_WORKERS} "
        f"workers take {wall:.0f} s, and without overhead at least {ideal:.0f} s. One worker takes "
        f"{sum(costs):.0f} s: a speed-up of {sum(costs) / wall:.0f}.\n"
        "Assumptions: Cells cost the same as those measured here (drawn with replacement). No cell "
        f"waits for another. All workers start in {start:.1f} s. The driver handles one cell at a "
        f"time, {1000 * dispatch:.1f} ms each, as measured with two workers. The network is as "
        "fast as this machine's memory."
    )


def simulated(costs: Sequence[float], workers: int, start: float, dispatch: float) -> float:
    """Return when the last cell ends, if each cell goes to the first free worker."""
    free, driver, last = [start] * workers, start, start
    for cost in costs:
        driver = max(driver, heapq.heappop(free)) + dispatch
        last = max(last, driver + cost)
        heapq.heappush(free, driver + cost)
    return last


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) > 0)
