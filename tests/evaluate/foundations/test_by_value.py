"""Classes and functions that live in no file, their names and how they travel."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_jobs
import pytest
import torch
from torch import nn

from leakfrontier.evaluate.engines.engine import Failure, execute
from leakfrontier.evaluate.foundations import by_value
from leakfrontier.evaluate.foundations.by_value import (
    digest,
    is_importable,
    is_in_hand,
    pickled,
    present,
    receive,
)
from leakfrontier.evaluate.foundations.plugins import load_attribute

SOURCE = """
from dataclasses import dataclass, field
import functools
FACTOR = 2.0

def helper(x):
    '''What readers see.'''
    return x * FACTOR

@dataclass
class Mine:
    step: float = 0.1
    names: list = field(default_factory=list)

    def scaled(self, x):
        return helper(x) + self.step

    @property
    def twice(self):
        return 2 * self.step

    @staticmethod
    def fixed():
        return 5

    @functools.cached_property
    def kept(self):
        return 6
"""

OTHERS = {
    "a constant that is used": ("FACTOR = 2.0", "FACTOR = 3.0"),
    "a helper": ("return x * FACTOR", "return x + FACTOR"),
    "a method": ("helper(x) + self.step", "helper(x) - self.step"),
    "a default": ("step: float = 0.1", "step: float = 0.2"),
    "a factory of defaults": ("default_factory=list", "default_factory=tuple"),
    "a property": ("2 * self.step", "3 * self.step"),
    "a static method": ("return 5", "return 7"),
    "a cached property": ("return 6", "return 8"),
    "a base": ("class Mine:", "class Mine(dict):"),
}


def session(source: str) -> dict[str, Any]:
    """Return what code leaves behind that is executed as by `python -c`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<string>", "exec"), names)
    return names


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_what_a_class_does_is_in_its_digest(change: tuple[str, str]) -> None:
    assert change[0] in SOURCE
    assert digest(session(SOURCE.replace(*change))["Mine"]) != digest(session(SOURCE)["Mine"])


def test_another_session_has_the_same_digest() -> None:
    assert digest(session(SOURCE)["Mine"]) == digest(session(SOURCE)["Mine"])
    unused = SOURCE + "\nUNUSED = 3\n"
    assert digest(session(unused)["Mine"]) == digest(session(SOURCE)["Mine"])


WRAPPED = """
import functools

def scaled(function):
    @functools.wraps(function)
    def inner(self, x):
        return 1.0 * function(self, x)
    return inner

class Mine:
    @scaled
    def f(self, x):
        'What readers see.'
        return x  # a comment
"""


def test_words_for_readers_do_not_count_and_wrappers_do() -> None:
    first = digest(session(WRAPPED)["Mine"])
    reworded = WRAPPED.replace("What readers see.", "Other words.").replace("  # a comment", "")
    assert digest(session("x = 1\n\n" + reworded)["Mine"]) == first
    assert digest(session(WRAPPED.replace("1.0 *", "2.0 *"))["Mine"]) != first
    assert digest(session(WRAPPED.replace("return x ", "return -x "))["Mine"]) != first


def test_what_a_function_carries_and_classes_of_its_containers_count() -> None:
    def function(source: str) -> str:
        return digest(session(source)["f"])

    assert function("def f(): pass\nf.c = 1") != function("def f(): pass\nf.c = 2")
    kind = "class D(dict):\n    def g(self): return {}\nd = D(a=1)\ndef f(): return d.g()"
    assert function(kind.format(1)) != function(kind.format(2))


def test_sets_of_constants_have_one_digest_in_all_processes() -> None:
    script = (
        "from leakfrontier.evaluate.foundations.by_value import digest\n"
        "print(digest(lambda x: x not in {'a', 'b', 'c', 'd', 'e', 'f'}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_module_that_a_method_imports_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    function = session("def f():\n    from my_inner_helper import g\n    return g()\n")["f"]
    found = []
    for constant in (1, 2):
        (tmp_path / "my_inner_helper.py").write_text(f"def g(): return {constant}\n")
        importlib.invalidate_caches()
        found.append(digest(function))
    assert found[0] != found[1]


def test_state_is_in_the_digest() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert digest(first) != digest(second)
    second.load_state_dict(first.state_dict())
    assert digest(first) == digest(second)
    assert digest(partial(sqrt, 2)) != digest(partial(sqrt, 3))
    assert digest({1, 2}) == digest({2, 1}) != digest({3, 1})
    assert digest(torch.zeros(2)) != digest(torch.zeros(1, 2))
    assert digest(lambda: 1) != digest(lambda: 2)


def test_what_refers_to_itself_has_a_digest() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest(loop) == digest(loop)
    recursive = "def f(n):\n    return f(n - 1) if n else 0\n"
    assert digest(session(recursive)["f"]) == digest(session(recursive)["f"])


def test_what_a_module_has_can_be_imported() -> None:
    assert is_importable(nn.Linear)
    assert is_importable(Failure)
    assert not is_importable(session(SOURCE)["Mine"])
    assert not is_importable(Local)  # test modules are in no folder that processes look into


@dataclass
class Local:
    step: float = 0.5


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda: session(SOURCE)["helper"], 4.0), (lambda: lambda x: x + FIVE, 7), (lambda: Local, 2)],
)
def test_workers_get_code_by_value(make: Callable[[], Any], expected: float) -> None:
    value = make()
    spec = present(value, "mine")
    assert spec.startswith("session-")
    assert load_attribute(spec) is value
    assert is_in_hand(value)
    (done,) = execute(engine_jobs.call_by_name, [spec], workers=1, time_limit=60)
    assert not isinstance(done.result, Failure), done.result
    assert done.result == expected


FIVE = 5


def test_names_of_submodules_of_torch_may_be_used() -> None:
    code = (
        "import torch\ndef build(n):\n    return torch.ones(n), getattr(n, 'x', 0) or n.classes\n"
    )
    assert present(session(code)["build"], "build").startswith("session-")


def test_what_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"opened cannot be sent .*Remove open files"):
        present(lambda: lock, "opened")


def test_only_values_that_are_named_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "_PICKLED", {})
    spec = present(session(SOURCE)["Mine"], "Mine")
    assert [*pickled()] == [*pickled([spec, "math:sqrt"])] == [spec]
    assert pickled(["math:sqrt"]) == {}


def test_a_value_is_loaded_when_it_is_used() -> None:
    receive({"session-broken:Mine": b"no pickle"})
    with pytest.raises(Exception, match="invalid load key"):
        load_attribute("session-broken:Mine")


def test_a_name_from_elsewhere_is_not_loaded() -> None:
    with pytest.raises(ValueError, match="Mine was defined in a notebook"):
        load_attribute("session-0123456789abcdef:Mine")


def test_digests_do_not_depend_on_the_process() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/evaluate/foundations')\n"
        "from leakfrontier.evaluate.foundations.by_value import digest\n"
        f"names = {{'__name__': '__main__'}}; exec({SOURCE!r}, names)\n"
        "print(digest(names['Mine']))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_a_module_of_the_users_is_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for constant in (1, 2):
        file = tmp_path / "my_helpers.py"
        file.write_text(f"VALUE = {constant}\n")
        module = ModuleType("my_helpers")
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "my_helpers", module)
        found.append(digest(module))
    assert found[0] != found[1]


def test_hosts_of_workers_need_not_import_torch() -> None:
    script = (
        "import sys, leakfrontier.evaluate.engines.ray_engine\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
