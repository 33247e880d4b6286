"""An object in a process without the user's code."""

from __future__ import annotations

import os

import pytest
from clean_jobs import Counting, in_a_worker

from leakfrontier.evaluate.engines import clean
from leakfrontier.evaluate.engines.clean import CleanProcess, clean_process
from leakfrontier.evaluate.engines.engine import Failure, execute


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> CleanProcess:
    monkeypatch.setattr(clean, "_HERE", {})
    return clean_process()


def test_an_object_keeps_its_state_in_another_process(process: CleanProcess) -> None:
    assert process is clean_process()
    process.new(Counting, 5)
    assert process.call("add", b"abc") == b"8"
    assert process.call("add") == b"8"
    assert int(process.call("place")) != os.getpid()
    process.new(Counting, 0)
    assert process.call("add", b"a") == b"1"


def test_errors_come_back_and_a_death_is_told(process: CleanProcess) -> None:
    process.new(Counting, 0)
    with pytest.raises(ValueError, match=r"^no such round$"):
        process.call("fail")
    assert process.call("add") == b"0"
    with pytest.raises(RuntimeError, match="the process of the server died"):
        process.call("die")
    with pytest.raises(ValueError, match="Traceback"):
        clean_process().call("add")  # a new process, without an object


def test_every_worker_has_its_own() -> None:
    done = [one.result for one in execute(in_a_worker, range(3), workers=2, time_limit=60)]
    assert not any(isinstance(one, Failure) for one in done), done
    pairs = {one for one in done if not isinstance(one, Failure)}
    assert all(worker != server for worker, server in pairs)
    assert len({server for _, server in pairs}) == len({worker for worker, _ in pairs})
