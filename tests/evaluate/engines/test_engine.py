from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import engine_jobs as jobs
import pytest

from leakfrontier.evaluate.engines.engine import Done, Failure, execute

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

SCRIPT = """
import signal
import sys
from pathlib import Path
import engine_jobs
from leakfrontier.evaluate.engines.engine import execute

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    for done in execute(
        engine_jobs.write_pid_and_wait,
        [Path(name) for name in sys.argv[1:]],
        workers=2,
        time_limit=60,
    ):
        print(done)
"""


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_gives_every_task_its_result(workers: int) -> None:
    done = list(execute(jobs.square, range(20), workers=workers, time_limit=math.inf))
    assert sorted((d.task, d.result) for d in done) == [(x, x * x) for x in range(20)]
    assert all(0 <= d.seconds < 1 for d in done)


def test_workers_are_processes_that_last() -> None:
    pids = {d.result for d in execute(jobs.pid, range(10), workers=1, time_limit=10)}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_no_tasks_give_no_results() -> None:
    assert list(execute(jobs.square, [], workers=2, time_limit=10)) == []


def test_a_result_is_yielded_while_others_are_at_work() -> None:
    iterator = execute(jobs.misbehave, ["sleep", "well"], workers=8, time_limit=30)
    assert next(iterator).task == "well"
    assert len(multiprocessing.active_children()) == 2  # no more than there were tasks
    iterator.close()


def test_a_queue_can_grow_while_its_results_are_asked_for() -> None:
    queue, found = deque([2, 3]), []
    for done in execute(jobs.square, queue, workers=2, time_limit=30):
        found.append(done.result)
        if done.result in (4, 9):
            queue.append(done.result)
    assert sorted(found) == [4, 9, 16, 81]


def test_a_worker_without_a_task_waits_for_more() -> None:
    queue, pids = deque([0.5, 0.0, 0.0]), []
    for done in execute(jobs.sleep_and_tell, queue, workers=2, time_limit=30):
        pids.append(done.result)
        if done.task == 0.5:
            queue += [0.2, 0.2]  # while the other worker has nothing to do
    assert len(set(pids)) == 2
    assert len(set(pids[-2:])) == 2


@needs_proc
def test_a_worker_that_dies_while_it_waits_is_replaced() -> None:
    queue, pids = deque([1.0, 0.0]), []
    for done in execute(jobs.sleep_and_tell, queue, workers=2, time_limit=30):
        pids.append(done.result)
        if done.task == 0.0:
            os.kill(done.result, signal.SIGKILL)
        if done.task == 1.0:
            queue += [0.3, 0.3]
    assert len(pids) == 4
    assert len(set(pids)) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_raises_is_its_result(workers: int) -> None:
    tasks = ["raise", "memory", "exit", "unpicklable", "unloadable", "well"]
    results = {
        d.task: d.result for d in execute(jobs.misbehave, tasks, workers=workers, time_limit=30)
    }
    assert results.pop("well") == "well"
    assert {result.kind for result in results.values()} == {"error"}
    assert results["raise"].message == "ValueError: first line second line"
    assert "in misbehave" in results["raise"].details
    assert results["memory"].message == "MemoryError"
    assert results["exit"].message == "SystemExit: leaving"
    assert results["unpicklable"].message == "TypeError: cannot pickle '_thread.lock' object"
    assert results["unloadable"].message.startswith("ValueError: invalid literal for int()")


@pytest.mark.parametrize("workers", [1, 2])
def test_time_limits_and_crashes_end_only_their_own_task(workers: int) -> None:
    tasks = ["a", "sleep", "loop", "b", "die", "segfault", "kill", "c"]
    done = list(execute(jobs.misbehave, tasks, workers=workers, time_limit=1.5))
    assert sorted(d.task for d in done) == sorted(tasks)
    results = {d.task: d.result for d in done}
    overdue = Failure("timeout", "exceeded the time limit of 1.5 s")
    assert results == {
        "a": "a",
        "b": "b",
        "c": "c",
        "sleep": overdue,
        "loop": overdue,
        "die": Failure("crash", "worker died with exit code 3"),
        "segfault": Failure("crash", "worker died with exit code -11 (SIGSEGV)"),
        "kill": Failure(
            "crash", "worker died with exit code -9 (SIGKILL), perhaps for lack of memory"
        ),
    }
    assert all(d.seconds == 1.5 for d in done if d.result == overdue)
    assert all(d.seconds < 1.5 for d in done if d.result != overdue)


def test_start_up_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import time\ntime.sleep(1)\ndef identity(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_import

    [done] = execute(slow_import.identity, [1], workers=1, time_limit=0.5)
    assert done == Done(1, 1, done.seconds)


def test_a_result_that_came_in_time_is_kept_for_a_slow_consumer() -> None:
    iterator = execute(jobs.square, [1, 2, 3], workers=2, time_limit=0.5)
    first = next(iterator)
    time.sleep(1)
    assert sorted(d.result for d in (first, *iterator)) == [1, 4, 9]


def test_workers_have_one_thread_and_the_parent_keeps_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ)
    [done] = execute(jobs.threads, [0], workers=1, time_limit=60)
    assert done.result == (1, "1")
    assert dict(os.environ) == before


def test_a_worker_that_cannot_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def identity(x):\n    return x\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import only_here
    with pytest.raises(RuntimeError, match=r"could not start: ModuleNotFoundError.*only_here"):
        list(execute(only_here.identity, [1, 2, 3], workers=2, time_limit=10))


def test_a_worker_that_dies_while_starting_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal_import.py").write_text("def identity(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fatal_import

    (tmp_path / "fatal_import.py").write_text("import os\nos._exit(4)  # not as it was before\n")
    with pytest.raises(RuntimeError, match="could not start: worker died with exit code 4"):
        list(execute(fatal_import.identity, [1, 2, 3], workers=2, time_limit=10))


@pytest.mark.parametrize("workers", [0, -1, math.nan])
def test_refuses_workers(workers: float) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1"):
        execute(jobs.square, [1], workers=workers, time_limit=1)


@pytest.mark.parametrize("time_limit", [0, -1.0, math.nan])
def test_refuses_time_limits(time_limit: float) -> None:
    with pytest.raises(ValueError, match="time_limit must be positive"):
        execute(jobs.square, [1], workers=1, time_limit=time_limit)


@needs_proc
def test_closing_early_leaves_no_process() -> None:
    iterator = execute(jobs.pid, range(9), workers=2, time_limit=30)
    next(iterator)
    workers = [child.pid for child in multiprocessing.active_children()]
    assert len(workers) == 2
    iterator.close()
    assert [state(worker) for worker in workers] == ["", ""]  # not even a zombie


@needs_proc
def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, ["sleep", "torch"]) as (parent, workers):
        time.sleep(0.3)  # so that torch is at work
        assert all(running(worker) for worker in workers)
        parent.kill()
        parent.wait()
        assert becomes_true(lambda: not any(running(worker) for worker in workers), seconds=2)


@needs_proc
def test_an_interrupt_ends_all_and_only_the_parent_speaks(tmp_path: Path) -> None:
    with script(tmp_path, ["sleep", "sleep too"]) as (parent, workers):
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=10)
        assert errors.count("KeyboardInterrupt") == errors.count("Traceback") == 1
        assert not any(running(worker) for worker in workers)


@contextmanager
def script(folder: Path, names: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start two workers below another process; give it and their process ids."""
    (folder / "script.py").write_text(SCRIPT)
    paths = [folder / name for name in names]
    with subprocess.Popen(
        [sys.executable, "script.py", *map(str, paths)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert becomes_true(lambda: all(path.exists() for path in paths), seconds=30)
            yield parent, [int(path.read_text()) for path in paths]
        finally:
            parent.kill()


def state(pid: int) -> str:
    """Return the one-letter state of a process, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def running(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")  # an orphan's zombie is for init to reap


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
