import dataclasses
import math
import sys
from pathlib import Path

import pytest

from leakfrontier.evaluate.plugins import load_attribute

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class Mine:
    kind: ClassVar[str] = "mine"
    strength: float = 2.0
"""


def test_loads_from_an_installed_module() -> None:
    assert load_attribute("math:sqrt") is math.sqrt


def test_dataclass_from_a_file_is_usable_and_loaded_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    loaded = load_attribute(f"{file}:Mine")
    assert [field.name for field in dataclasses.fields(loaded)] == ["strength"]
    assert dataclasses.replace(loaded(), strength=3.0).strength == 3.0
    assert sys.modules[loaded.__module__].Mine is loaded
    assert load_attribute(f"{tmp_path}/../{tmp_path.name}/mine.py:Mine") is loaded


def test_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def name():\n    return {folder!r}\n")
    loaded = [load_attribute(f"{tmp_path}/{folder}/mine.py:name") for folder in ("a", "b")]
    assert [name() for name in loaded] == ["a", "b"]


def test_a_file_that_fails_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="fails when it is loaded: ZeroDivisionError"):
        load_attribute(f"{file}:name")
    file.write_text("name = 'mended by a longer file'\n")
    assert load_attribute(f"{file}:name") == "mended by a longer file"


@pytest.mark.parametrize("spec", ["", "math", "math:", ":sqrt", "mine.py"])
def test_malformed_names(spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected package.module:name"):
        load_attribute(spec)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    with pytest.raises(ValueError, match=r"no file .*absent.py"):
        load_attribute(f"{tmp_path}/absent.py:Mine")
    with pytest.raises(ValueError, match=r"has no 'Yours'; it defines Mine$"):
        load_attribute(f"{tmp_path}/mine.py:Yours")
    for module in ("no_such_module_here", ".relative"):
        with pytest.raises(ValueError, match=r"cannot import .*path of its .py file"):
            load_attribute(f"{module}:name")
