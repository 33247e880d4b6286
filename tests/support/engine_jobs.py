"""Functions for the tests of the engine: its workers import them by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from leakfrontier.evaluate.foundations.plugins import load_attribute

SECONDS = 60


class Unloadable:
    """Can be pickled but not restored."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("not a number",)


def square(x: int) -> int:
    return x * x


def pid(_: object) -> int:
    return os.getpid()


def sleep_and_tell(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def write_pid_and_wait(path: Path) -> None:
    if path.name == "torch":
        import torch

        matrix = torch.rand(4000, 4000)
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    if path.name == "torch":
        torch.linalg.eigvals(matrix)  # one call, far longer than the test waits
    time.sleep(SECONDS)


def threads(_: object) -> tuple[int, str]:
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def misbehave(how: str) -> object:
    """Fail in the way that is named, or else return the name."""
    if how == "raise":
        raise ValueError("first line\nsecond line")
    if how == "memory":
        raise MemoryError
    if how == "exit":
        sys.exit("leaving")
    if how == "unpicklable":
        return threading.Lock()
    if how == "unloadable":
        return Unloadable()
    if how == "sleep":
        time.sleep(SECONDS)
    if how == "loop":
        while True:
            pass
    if how == "die":
        os._exit(3)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


def call_by_name(spec: str) -> object:
    """Return what a function, or a class with a step, makes of two."""
    made = load_attribute(spec)(2)
    return getattr(made, "step", made)
