"""The local engine's contract on a real cluster of two nodes, and of one that is lost."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_jobs as jobs
import pandas as pd
import pytest

from leakfrontier.evaluate.engines.engine import Failure
from leakfrontier.evaluate.engines.ray_engine import RayEngine
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run

ENGINE = RayEngine()  # whatever this process is connected to
TIMES = ["seconds", "busy"]

DEFENSE = """
@dataclass
class Rounded(Defense):
    step: float = 0.01

    def on_update(self, update, rng):
        return {name: (v / self.step).round() * self.step for name, v in update.items()}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},  # for engine_jobs
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_keeps_the_contract_of_the_local_engine(cluster: object) -> None:
    tasks = ["a", "raise", "sleep", "b", "segfault", "kill", "c"]
    done = list(ENGINE.execute(jobs.misbehave, tasks, workers=2, time_limit=2))
    assert sorted(one.task for one in done) == sorted(tasks)
    results = {one.task: one.result for one in done}
    failed = results.pop("raise")
    assert isinstance(failed, Failure)
    assert failed.message == "ValueError: first line second line"
    assert results == {
        "a": "a",
        "b": "b",
        "c": "c",
        "sleep": Failure("timeout", "exceeded the time limit of 2 s"),
        "segfault": Failure("crash", "worker died with exit code -11 (SIGSEGV)"),
        "kill": Failure(
            "crash", "worker died with exit code -9 (SIGKILL), perhaps for lack of memory"
        ),
    }


def test_rows_are_bit_equal_to_the_local_engine_s(
    cluster: object, tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    config = load_config(
        {
            "scenarios": [
                {
                    "dataset": "digits",
                    "model": {"name": "mlp", "width": 16},
                    "candidates": 20,
                    "checkpoints": [0, 3],
                    "training": {
                        "rounds": 3,
                        "clients": 4,
                        "clients_per_round": 2,
                        "batch_size": 8,
                    },
                }
            ],
            "defenses": ["none", f"{user_file(DEFENSE)}:Rounded", {"name": "TopK", "ratio": 0.2}],
            "adversaries": [
                "PriorGuess",
                "LinearLeakage",
                {"name": "InvertingGradients", "iterations": 10},
            ],
            "observations": 3,
        }
    )
    local = run(config, tmp_path / "local", workers=1)
    there = run(config, tmp_path / "ray", engine=ENGINE)
    assert set(there.cells["status"]) <= {"ok", "not needed"}
    for table in ("attacks", "scores", "utility", "replays", "renderings"):
        ours, theirs = (
            getattr(results, table).drop(columns=TIMES, errors="ignore")
            for results in (local, there)
        )
        assert len(ours)
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    kept = [sorted((tmp_path / name / "checkpoints").iterdir()) for name in ("local", "ray")]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]]
    for ours_, theirs_ in zip(*kept, strict=True):
        assert ours_.read_bytes() == theirs_.read_bytes()


def test_refuses_limits(cluster: object) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1"):
        ENGINE.execute(jobs.square, [1], workers=0, time_limit=1)
    with pytest.raises(ValueError, match="time_limit must be positive"):
        ENGINE.execute(jobs.square, [1], workers=1, time_limit=0)


def test_another_version_of_the_package_is_refused(
    cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakfrontier.evaluate.engines.ray_engine.package_digest", lambda: "other")
    with pytest.raises(RuntimeError, match="has another version of leakfrontier"):
        list(ENGINE.execute(jobs.square, [1], workers=1, time_limit=10))


def test_a_node_that_is_lost_in_mid_run_loses_nothing(cluster: Any) -> None:  # noqa: ANN401
    """The last test of the cluster, which has one node after it."""
    (doomed,) = cluster.worker_nodes
    queue: deque[float] = deque([0.3] * 4)
    found: list[object] = []
    given = len(queue)
    for done in ENGINE.execute(jobs.sleep_and_tell, queue, workers=2, time_limit=60):
        found.append(done.result)
        if not cluster.worker_nodes:
            continue
        if len(set(found)) == 2:  # both nodes are at work
            cluster.remove_node(doomed, allow_graceful=False)
        queue.append(0.3)
        given += 1
    assert not cluster.worker_nodes
    assert len(found) == given
    assert all(isinstance(pid, int) for pid in found)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'leakfrontier\[ray\]'"):
        RayEngine().slots()
