"""Runs tasks on a Ray cluster, as `engine` does on this machine.

Ray finds the place, and the local engine does the work there: every Ray process is a host with one
worker below it, so that time limits, crashes and single threads are the same code as here. A host
itself runs nothing of ours; one that dies takes its node along, or was killed by Ray, and its task
is given to another. No disk is shared: files travel through Ray's object store (`parcels`).
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
"""Hosts that a task may lose before it counts as a crash."""

START_LIMIT = 300.0
"""Seconds within which the first host must have started."""

POLL = 5.0
"""Seconds between looks at the cluster while nothing ends."""


Answer = tuple[bytes, dict[str, bytes]]
"""What a host returns: the pickled result and seconds, and the files that the task has left."""


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster.

    Attributes:
        address: Where it is, as `ray.init` takes it; `auto` for the one that this machine is a
            part of, None for one of this machine alone, which is started.
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
                f"there is no Ray cluster at {address!r} ({error}): start one by `ray start "
                "--head`, and give its address"
            ) from error
    return ray


@dataclass
class _Run:
    """What all hosts of a run have in common."""

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
    lost: deque[_Job[T]] = deque()  # tasks whose hosts are gone
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
            f"{cpus:g} CPUs: are they all taken?"
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
        """Send it a task, with references to the files that this needs."""
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
        """Return the task that has ended, if one has; a host that is lost ends none."""
        exceptions, job = self._run.ray.exceptions, self.job
        pending, self.pending = self.pending, None
        try:
            answer = self._run.ray.get(pending)
        except exceptions.RayTaskError as error:  # of the host, not of the task
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
        """End the host, whatever it is doing."""
        with suppress(Exception):  # the cluster may be gone
            if self.free:
                self._run.ray.get(self._actor.close.remote(), timeout=5)
            self._run.ray.kill(self._actor)


def _deliver(files: Mapping[str, bytes], folder: Path) -> None:
    """Put what a task has left into the folder of its run, whole or not at all."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_bytes(content)
        unfinished.replace(path)


def _unpack(content: bytes, folder: Path) -> None:
    """Put the files of a bundle into a new folder, which is there as a whole or not at all."""
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
    """A process of Ray's, with a worker of the local engine below it."""

    def __init__(self, function: bytes, time_limit: float, name: str, digest: str) -> None:
        self._function, self._time_limit, self._digest = function, time_limit, digest
        self._shared = Path(tempfile.gettempdir()) / name
        self._own = self._shared / f"run-{os.getpid()}"
        self._queue: deque[tuple[bytes, bytes, dict[str, str]]] = deque()
        self._results: Generator[Done[Any, Any], None, None] | None = None

    def start(self) -> None:
        """Make the folders; refuse to be another version of the package."""
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
        """Do one task, and return what it has left."""
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
        """Leave nothing behind."""
        if self._results is not None:
            self._results.close()
        shutil.rmtree(self._shared, ignore_errors=True)


def call(message: tuple[bytes, bytes, Mapping[str, str]]) -> Any:  # noqa: ANN401 - any result
    """Apply a function to a task, both pickled, where its files are elsewhere."""
    function, task, places = message
    return pickle.loads(function)(open_parcel(task, places))
