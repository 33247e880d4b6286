"""An object for a clean process, and a job that uses it."""

from __future__ import annotations

import os

from leakfrontier.evaluate.engines.clean import clean_process


class Counting:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, content: bytes) -> bytes:
        self.count += len(content)
        return str(self.count).encode()

    def place(self, _: bytes) -> bytes:
        return str(os.getpid()).encode()

    def fail(self, _: bytes) -> bytes:
        raise ValueError("no such round")

    def die(self, _: bytes) -> bytes:
        os._exit(1)


def in_a_worker(_: int) -> tuple[int, int]:
    process = clean_process()
    process.new(Counting, 0)
    return os.getpid(), int(process.call("place"))
