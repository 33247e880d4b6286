"""Run tasks on a Ray cluster, as `engine` does on this machine.

Ray chooses the place, and the local engine does the work there. Every Ray process is a host with
one local worker, so time limits, crashes and single threads use the same code as here. A host
itself does not run cells. If a host dies, its node was lost or Ray killed it, and its task goes to
another host. The machines share no disk: files travel through Ray's object store (`parcels`).
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..foundations.errors import OWN_FOLDER, UserError
from ..foundations.plugins import package_digest
from .engine import Done, Failure, check_limits, cores, execute
from .parcels import open_parcel, pack

T = TypeVar("T")
R = TypeVar("R")

LOSSES = 3
"""After losing this many hosts, a task counts as crashed."""

START_LIMIT = 300.0
"""Seconds within which the first host must start."""

POLL = 5.0
"""Seconds between checks of the cluster while no task ends."""


Answer = tuple[bytes, dict[str, bytes]]
"""A host's result: the pickled result and seconds, and the files that the task produced."""


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster.

    Attributes:
        address: Ray cluster address for `ray.init`. `auto` is the cluster that this machine belongs
            to. None starts a local cluster.
    """

    address: str | None = None

    def slots(self) -> int:
        """Return the number of CPUs of the cluster."""
        return max(1, int(_connected(self.address).cluster_resources().get("CPU", 1)))

    def execute(
        self, function: Callable[[T], R], tasks: Iterable[T], *, workers: int, time_limit: float
    ) -> Generator[Done[T, R], None, None]:
        """Apply a function to tasks in parallel: see `engine.execute`."""
        check_limits(workers, time_limit)
        waiting = tasks if isinstance(tasks, deque) else deque(tasks)
        run = _Run(_connected(self.address), pickle.dumps(function), time_limit)
        return _results(run, waiting, workers)


def _connected(address: str | None) -> Any:  # noqa: ANN401 - Ray is not typed here
    """Return Ray, connected to a cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"Ray is not installed ({error}): pip install 'leakfrontier[ray]'"
        ) from error
    if not ray.is_initialized():
        own = {"num_cpus": cores(), "include_dashboard": False} if address is None else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"there is no Ray cluster at {address!r} ({error}): start one with `ray start "
                "--head`, and pass its address"
            ) from error
    return ray


@dataclass
class _Run:
    """State that all hosts of a run share."""

    ray: Any
    function: bytes
    time_limit: float
    name: str = field(default_factory=lambda: f"{OWN_FOLDER}{uuid.uuid4().hex[:12]}")
    stored: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def store(self, name: str, read: Callable[[], bytes]) -> Any:  # noqa: ANN401 - a reference
        """Return a reference to content, which is stored once."""
        if name not in self.stored:
            self.stored[name] = self.ray.put(read())
        return self.stored[name]


@dataclass
class _Job(Generic[T]):
    task: T
    losses: int = 0


def _results(run: _Run, waiting: deque[T], workers: int) -> Generator[Done[T, Any], None, None]:
    pool: list[_Slot[T]] = []
    lost: deque[_Job[T]] = deque()  # tasks that lost their hosts
    try:
        while waiting or lost or any(slot.job for slot in pool):
            for slot in pool:
                if slot.free and (waiting or lost):
                    slot.hand_over(lost.popleft() if lost else _Job(waiting.popleft()))
            wanted = sum(slot.job is not None for slot in pool) + len(waiting) + len(lost)
            while len(pool) < min(workers, wanted):
                pool.append(_Slot(run))
            _check_start(run, pool)
            pending = [slot.pending for slot in pool if slot.pending is not None]
            ready, _ = run.ray.wait(pending, num_returns=1, timeout=POLL)
            for slot in [slot for slot in pool if slot.pending in ready]:
                job, done = slot.job, slot.conclude()
                if slot.dead:
                    pool.remove(slot)
                    if job is not None and done is None:
                        lost.append(job)
                if done is not None:
                    yield done
    finally:
        for slot in pool:
            slot.stop()


def _check_start(run: _Run, pool: Iterable[_Slot[Any]]) -> None:
    if any(slot.ready for slot in pool):
        run.started = time.monotonic()
    elif time.monotonic() - run.started > START_LIMIT:
        cpus = run.ray.cluster_resources().get("CPU", 0)
        raise RuntimeError(
            f"no process could start within {START_LIMIT:.0f} s on the Ray cluster, which has "
            f"{cpus:g} CPUs. Are they all in use?"
        )


class _Slot(Generic[T]):
    """A host as this side sees it: first starting, then free or busy with a job."""

    def __init__(self, run: _Run) -> None:
        remote = run.ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Host)
        self._run = run
        self._actor = remote.remote(run.function, run.time_limit, run.name, package_digest())
        self.pending: Any = self._actor.start.remote()
        self.ready = self.dead = False
        self.job: _Job[T] | None = None

    @property
    def free(self) -> bool:
        """Return whether it waits for a job."""
        return self.ready and not self.dead and self.job is None

    def hand_over(self, job: _Job[T]) -> None:
        """Send it a task, with references to the files that the task needs."""
        parcel = pack(job.task)
        bundles = {
            path: (bundle.name, self._run.store(bundle.name, bundle.read), name)
            for path, (bundle, name) in parcel.bundles.items()
        }
        files = {
            name: self._run.store(f"file-{path}", path.read_bytes)
            for name, path in parcel.checkpoints.items()
        }
        self.job = job
        self.pending = self._actor.run.remote(parcel.task, bundles, files, parcel.folder)

    def conclude(self) -> Done[T, Any] | None:
        """Return the task that has ended; None if there is none or if the host is lost."""
        exceptions, job = self._run.ray.exceptions, self.job
        pending, self.pending = self.pending, None
        try:
            answer = self._run.ray.get(pending)
        except exceptions.RayTaskError as error:  # an error of the host, not of the task
            raise RuntimeError(f"a worker could not start: {error.cause}") from error
        except exceptions.RayError as error:
            self.dead = True
            return self._lost(error)
        if job is None:
            self.ready = True
            return None
        self.job = None
        message, files = answer
        if isinstance(job.task, tuple) and files:
            _deliver(files, job.task[1])
        result, seconds = pickle.loads(message)
        return Done(job.task, result, seconds)

    def _lost(self, error: Exception) -> Done[T, Any] | None:
        if self.job is None:
            return None
        self.job.losses += 1
        if self.job.losses < LOSSES:
            return None
        reason = " ".join(str(error).split())
        return Done(self.job.task, Failure("crash", f"{LOSSES} hosts were lost: {reason}"), 0.0)

    def stop(self) -> None:
        """End the host immediately."""
        with suppress(Exception):  # the cluster may be gone
            if self.free:
                self._run.ray.get(self._actor.close.remote(), timeout=5)
            self._run.ray.kill(self._actor)


def _deliver(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files that a task produced into the folder of its run, each atomically."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_bytes(content)
        unfinished.replace(path)


def _unpack(content: bytes, folder: Path) -> None:
    """Write the files of a bundle into a new folder, atomically."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
        if not folder.is_dir():
            raise


class _Host:
    """A Ray process with one worker of the local engine."""

    def __init__(self, function: bytes, time_limit: float, name: str, digest: str) -> None:
        self._function, self._time_limit, self._digest = function, time_limit, digest
        self._shared = Path(tempfile.gettempdir()) / name
        self._own = self._shared / f"run-{os.getpid()}"
        self._queue: deque[tuple[bytes, bytes, dict[str, str]]] = deque()
        self._results: Generator[Done[Any, Any], None, None] | None = None

    def start(self) -> None:
        """Make the folders. Raise if the package version differs."""
        if package_digest() != self._digest:
            raise RuntimeError(
                f"{os.uname().nodename} has another version of leakfrontier: install the same on "
                "every node"
            )
        self._own.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        task: bytes,
        bundles: Mapping[str, tuple[str, Any, str]],
        files: Mapping[str, Any],
        folder: str | None,
    ) -> Answer:
        """Run one task, and return its result and the files that it produced."""
        import ray

        places = {} if folder is None else {folder: str(self._own)}
        for path, (name, reference, within) in bundles.items():
            place = self._shared / name
            if not place.is_dir():
                _unpack(ray.get(reference), place)
            places[path] = str(place / within)
        for name, reference in files.items():
            if not (self._own / name).exists():
                _deliver({name: ray.get(reference)}, self._own)
        before = self._left()
        self._queue.append((self._function, task, places))
        if self._results is None:
            self._results = execute(call, self._queue, workers=1, time_limit=self._time_limit)
        done = next(self._results)
        new = {name: (self._own / name).read_bytes() for name in sorted(self._left() - before)}
        return pickle.dumps((done.result, done.seconds)), new

    def _left(self) -> set[str]:
        files = (path for path in self._own.rglob("*") if path.is_file())
        return {str(path.relative_to(self._own)) for path in files if path.suffix != ".tmp"}

    def close(self) -> None:
        """Remove all files."""
        if self._results is not None:
            self._results.close()
        shutil.rmtree(self._shared, ignore_errors=True)


def call(message: tuple[bytes, bytes, Mapping[str, str]]) -> Any:  # noqa: ANN401 - any result
    """Apply a pickled function to a pickled task whose files are in other places."""
    function, task, places = message
    return pickle.loads(function)(open_parcel(task, places))
