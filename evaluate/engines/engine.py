"""Run tasks in separate processes, so that a task that hangs or crashes does not harm others.

`concurrent.futures` is not enough. It cannot stop a single task, and if the system kills one worker
for lack of memory, the whole pool breaks. Messages are pickled here rather than by
`Connection.send`. Torch makes that function pass tensors as handles to the worker's memory, which
are lost when the worker ends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from types import ModuleType
from typing import Generic, Literal, Protocol, TypeVar

import cloudpickle

from ..foundations.by_value import pickled, receive
from ..foundations.plugins import trust, trusted
from . import clean

T = TypeVar("T")
R = TypeVar("R")

_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # With these, glibc keeps freed tensors for the next step. By default, it returns them to the
    # system and faults their pages in again.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
}

_PRELOADED = ["torch", "torch._dynamo", "opacus", "scipy.stats", "pydantic", "pandas", "rich"]
"""Slow imports that workers need. Our own modules are absent: users may edit them between runs."""


@dataclass(frozen=True)
class Failure:
    """The reason why a task gave no result.

    Attributes:
        kind: `error` (it raised), `timeout` (it was stopped) or `crash` (its process died).
        message: The reason, in one line.
        details: The traceback, if there is one.
    """

    kind: Literal["error", "timeout", "crash"]
    message: str
    details: str = ""


@dataclass(frozen=True)
class Done(Generic[T, R]):
    """A task that has ended.

    Attributes:
        task: The task.
        result: The function's result, or the reason why there is none.
        seconds: Wall time of the task, without the start of its worker.
    """

    task: T
    result: R | Failure
    seconds: float


class Engine(Protocol):
    """A place where tasks run: processes of this machine or of others."""

    def slots(self) -> int:
        """Return how many tasks can run at a time."""

    def execute(
        self, function: Callable[[T], R], tasks: Iterable[T], *, workers: int, time_limit: float
    ) -> Generator[Done[T, R], None, None]:
        """Apply a function to tasks in parallel: see `execute`."""


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine, one per core."""

    def slots(self) -> int:
        """Return the number of cores."""
        return cores()

    def execute(
        self, function: Callable[[T], R], tasks: Iterable[T], *, workers: int, time_limit: float
    ) -> Generator[Done[T, R], None, None]:
        """Apply a function to tasks in parallel: see `execute`."""
        return execute(function, tasks, workers=workers, time_limit=time_limit)


LOCAL = LocalEngine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_limits(workers: int, time_limit: float) -> None:
    """Raise if there are fewer than one worker or the time limit is not positive."""
    if not workers >= 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if not time_limit > 0:
        raise ValueError(f"time_limit must be positive, got {time_limit}")


def execute(
    function: Callable[[T], R], tasks: Iterable[T], *, workers: int, time_limit: float
) -> Generator[Done[T, R], None, None]:
    """Apply a function to tasks in parallel and yield them as they finish.

    Workers are single-threaded processes. Time limits are checked, and free workers get new tasks,
    only while the caller waits for the next result. Closing the iterator stops all workers.

    Args:
        function: A function. A function of a script or a notebook is sent by value.
        tasks: Arguments of the function. Tasks and results must be small and picklable. A deque is
            a queue: the caller may add tasks whenever a result has been yielded.
        workers: The maximum number of processes.
        time_limit: Seconds after which a task is stopped; `math.inf` for no limit.

    Raises:
        ValueError: If there are fewer than one worker or the time limit is not positive.
        RuntimeError: While iterating, if a worker cannot start.
    """
    check_limits(workers, time_limit)
    waiting = tasks if isinstance(tasks, deque) else deque(tasks)
    return _results(cloudpickle.dumps(function), waiting, workers, time_limit)


def _results(
    function: bytes, waiting: deque[T], workers: int, time_limit: float
) -> Generator[Done[T, R], None, None]:
    pool: list[_Worker[T, R]] = []
    try:
        while waiting or any(worker.busy for worker in pool):
            _assign(pool, waiting)
            wanted = sum(worker.busy for worker in pool) + len(waiting)
            while len(pool) < min(workers, wanted):
                pool.append(_Worker(function, time_limit))
            sources = [source for worker in pool for source in worker.sources]
            seconds = min(worker.deadline for worker in pool) - time.monotonic()
            wait(sources, timeout=min(max(seconds, 0), 3600))  # `wait` rejects infinity
            for worker in list(pool):
                report = worker.report()
                if report is None:
                    continue
                done = worker.conclude(report)
                if isinstance(report, Failure):
                    pool.remove(worker)
                    worker.stop()
                if done is not None:
                    _assign(pool, waiting)
                    yield done
    finally:
        for worker in pool:
            worker.stop()


def _assign(pool: Iterable[_Worker[T, R]], waiting: deque[T]) -> None:
    """Give the next tasks to free workers."""
    for worker in pool:
        if waiting and worker.free:
            worker.hand_over(waiting.popleft())


class _Worker(Generic[T, R]):
    """A process as its parent sees it: first starting, then free or busy with a task."""

    def __init__(self, function: bytes, time_limit: float) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        environment = {**os.environ, **_ENVIRONMENT}
        self._process = context.Process(
            target=_work, args=(theirs, function, environment, trusted(), pickled()), daemon=True
        )
        with _worker_environment(), _without_main():
            self._process.start()
        theirs.close()
        self._time_limit = time_limit
        self._ready = False
        self._task: tuple[T] | None = None
        self._handed_over = self.deadline = math.inf

    @property
    def sources(self) -> tuple[Connection, int]:
        """Return what to wait on: its messages and its end."""
        return self._connection, self._process.sentinel

    @property
    def busy(self) -> bool:
        """Return whether it has a task."""
        return self._task is not None

    @property
    def free(self) -> bool:
        """Return whether it waits for a task."""
        return self._ready and self._task is None

    def hand_over(self, task: T) -> None:
        """Give it a task and start the clock."""
        message = cloudpickle.dumps(task)
        self._task = (task,)
        self._handed_over = time.monotonic()
        self.deadline = self._handed_over + self._time_limit
        with suppress(OSError):  # it has just died; its next report says so
            self._connection.send_bytes(message)

    def report(self) -> bytes | Failure | None:
        """Return its message, or why none will come, or None if it is still working."""
        alive = self._process.is_alive()  # ask first: a last message may precede its end
        with suppress(EOFError, OSError):
            if self._connection.poll():
                return self._connection.recv_bytes()
            if alive and time.monotonic() < self.deadline:
                return None
            if alive:
                return Failure("timeout", f"exceeded the time limit of {self._time_limit:g} s")
        self._process.join(timeout=5)  # its end of the pipe closes shortly before it ends
        return Failure("crash", f"worker died with {_exit_reason(self._process.exitcode)}")

    def conclude(self, report: bytes | Failure) -> Done[T, R] | None:
        """Return the task that a report ends, and free the worker; None if it ends no task."""
        if self._task is None:
            if not self._ready:
                self._start(report)
            return None  # otherwise it died while it was free
        (task,), self._task = self._task, None
        seconds = min(time.monotonic() - self._handed_over, self._time_limit)
        self.deadline = math.inf
        if isinstance(report, Failure):
            return Done(task, report, seconds)
        try:
            return Done(task, *pickle.loads(report))
        except Exception as error:  # some classes can be pickled but not restored
            return Done(task, _failure(error), seconds)

    def _start(self, report: bytes | Failure) -> None:
        problem = report if isinstance(report, Failure) else pickle.loads(report)
        if problem is not None:
            reason = f"{problem.message}\n{problem.details or 'see its output above'}"
            raise RuntimeError(f"a worker could not start: {reason}")
        self._ready = True

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _context() -> ForkServerContext | SpawnContext:
    """Return how processes are started.

    Forking is not safe once torch has started threads, so a server forks. The server only imports.
    Outside Linux, even these imports may start threads.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Set variables that libraries read when they load, for processes started in this context."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main() -> Iterator[None]:
    """Start processes without executing the user's script again. They get code by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(
    connection: Connection,
    function: bytes,
    environment: Mapping[str, str],
    code: frozenset[str],
    values: Mapping[str, bytes],
) -> None:
    """Work as a process: report readiness (None) or a problem, then answer one task at a time."""
    os.environ.clear()  # it may come from an earlier run, when the fork server started
    os.environ.update(environment)
    trust(code)
    receive(values)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent handles it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        call = pickle.loads(function)
    except Exception as error:
        connection.send_bytes(pickle.dumps(_failure(error)))
        return
    clean.prepare(connection)  # our modules are loaded, and no cell has run yet
    if "torch" in sys.modules:  # an import may have requested more threads
        sys.modules["torch"].set_num_threads(1)
    with suppress(EOFError, OSError):  # the parent is gone
        connection.send_bytes(pickle.dumps(None))
        while True:
            connection.send_bytes(_answer(call, connection.recv_bytes()))


def _answer(function: Callable[[T], R], message: bytes) -> bytes:
    """Return the pickled result, or failure, of one task and its seconds."""
    start = time.perf_counter()
    try:
        result = function(pickle.loads(message))
        return pickle.dumps((result, time.perf_counter() - start))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes sys.exit and panics of Rust extensions
        return pickle.dumps((_failure(error), time.perf_counter() - start))


def _exit_with_parent() -> None:
    """Wait until the parent ends for any reason, then exit at once."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _failure(error: BaseException) -> Failure:
    message = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return Failure("error", message, "".join(traceback.format_exception(error)))


def _exit_reason(code: int | None) -> str:
    names = {-number: number.name for number in signal.Signals}
    if code is None or code not in names:
        return f"exit code {code}"
    hint = ", perhaps for lack of memory" if names[code] == "SIGKILL" else ""
    return f"exit code {code} ({names[code]}){hint}"
