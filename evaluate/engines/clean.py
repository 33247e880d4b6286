"""A process that runs none of the user's code, beside the process that runs it.

A server that aggregates and evaluates lives there. Users' code in the other process cannot reach
its objects. After the start, only plain bytes pass between the two.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_NEW, _CALL, _RESULT, _ERROR = b"new", b"call", b"result", b"error"
_HERE: dict[int, CleanProcess] = {}
"""The clean process of this process, by process number: a fork must not share it."""


class CleanProcess:
    """A clean process, as its user sees it. It holds one object at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def new(self, make: Callable[..., object], *args: object) -> None:
        """Make the object that later calls refer to.

        Args:
            make: A class or function of one of our modules. The object's methods take and return
                bytes.
            args: Its arguments, which are pickled.
        """
        self._send(_NEW, pickle.dumps((make, args)))

    def call(self, method: str, content: bytes = b"") -> bytes:
        """Call a method of the object, and return what it returns.

        Raises:
            ValueError: If the method raises.
        """
        return self._send(_CALL, len(method).to_bytes() + method.encode() + content)

    def _send(self, kind: bytes, content: bytes) -> bytes:
        try:
            self._connection.send_bytes(kind)
            self._connection.send_bytes(content)
            answer, result = self._connection.recv_bytes(), self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            _HERE.pop(os.getpid(), None)
            raise RuntimeError(
                "the process of the server died, perhaps for lack of memory"
            ) from error
        if answer == _ERROR:
            raise ValueError(result.decode())
        return result


def clean_process() -> CleanProcess:
    """Return the clean process of this process. It is started if there is none."""
    if os.getpid() not in _HERE:
        _HERE[os.getpid()] = _started()
    return _HERE[os.getpid()]


def prepare(*inherited: Connection) -> None:
    """Start the clean process before users' code is loaded, where that is cheap.

    Args:
        inherited: Connections of this process, which the clean process closes.
    """
    if sys.platform == "linux":
        _HERE[os.getpid()] = _forked(inherited)


def serve(connection: Connection) -> None:
    """Work as the clean process until the other one ends."""
    import torch  # hosts of workers do not need it

    torch.set_num_threads(1)
    made: Any = None
    with suppress(EOFError, OSError):
        while True:
            kind, content = connection.recv_bytes(), connection.recv_bytes()
            try:
                if kind == _NEW:
                    make, args = pickle.loads(content)
                    made, result = make(*args), b""
                else:
                    end = 1 + content[0]
                    result = getattr(made, content[1:end].decode())(content[end:])
            except Exception as error:  # the other process reports it
                connection.send_bytes(_ERROR)
                connection.send_bytes(_described(error).encode())
            else:
                connection.send_bytes(_RESULT)
                connection.send_bytes(result)


def _described(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return "".join(traceback.format_exception(error))


def _forked(inherited: Iterable[Connection]) -> CleanProcess:
    """Return a copy of this process, which has not loaded users' code yet."""
    ours, theirs = Pipe()
    if os.fork() == 0:
        for one in (ours, *inherited):
            one.close()
        serve(theirs)
        os._exit(0)
    theirs.close()
    return CleanProcess(ours)


def _started() -> CleanProcess:
    """Return a new process, with its own import of our modules."""
    ours, theirs = Pipe()
    code = (
        "from multiprocessing.connection import Connection;"
        f"from {__name__} import serve; serve(Connection({theirs.fileno()}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    return CleanProcess(ours)
