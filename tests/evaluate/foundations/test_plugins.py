import dataclasses
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leakfrontier.evaluate.engines.engine import Failure, execute
from leakfrontier.evaluate.foundations.plugins import (
    UntrustedCodeError,
    digest_with_imports,
    load_attribute,
    trust,
    trusted,
)

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


def test_modules_beside_a_file_belong_to_it_alone(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "parts").mkdir(parents=True)
        (tmp_path / folder / "helper.py").write_text(
            f"from deeper import at\nname = at + {folder!r}"
        )
        (tmp_path / folder / "deeper.py").write_text("import math\nat = 'in '\n")
        (tmp_path / folder / "parts" / "one.py").write_text("from .two import two\n")
        (tmp_path / folder / "parts" / "two.py").write_text(f"two = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text(
            "import parts.one\nfrom helper import name\n"
            "def late():\n    import helper\n    from parts import two\n"
            "    return helper.name, two.two, parts.one.two\n"
        )
    for folder in ("a", "b"):
        file = tmp_path / folder / "mine.py"
        assert load_attribute(f"{file}:name") == f"in {folder}"
        assert load_attribute(f"{file}:late")() == (f"in {folder}", folder, folder)
    assert not {"helper", "deeper", "parts"} & {*sys.modules}
    assert str(tmp_path / "a") not in sys.path
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_class_of_a_module_beside_the_file_knows_its_module(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(SOURCE)
    (tmp_path / "mine.py").write_text("from helper import Mine\n")
    loaded = load_attribute(f"{tmp_path}/mine.py:Mine")
    assert pickle.loads(pickle.dumps(loaded(3.0))) == loaded(3.0)


def test_an_edit_beside_the_file_loads_it_again(tmp_path: Path) -> None:
    file, helper, deeper = (tmp_path / name for name in ("mine.py", "helper.py", "deeper.py"))
    file.write_text("def mine():\n    from helper import value\n    return value\n")
    helper.write_text("from deeper import value\n")
    deeper.write_text("value = 1\n")
    (tmp_path / "stranger.py").write_text("value = 1\n")
    before = digest_with_imports(file)
    first = load_attribute(f"{file}:mine")
    (tmp_path / "stranger.py").write_text("value = 2\n")
    assert load_attribute(f"{file}:mine") is first
    assert digest_with_imports(file) == before
    deeper.write_text("value = 2\n")
    assert load_attribute(f"{file}:mine")() == 2
    assert digest_with_imports(file) != before


def test_a_module_that_is_missing_beside_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from helper import name\n")
    with pytest.raises(ValueError, match="ModuleNotFoundError: No module named 'helper'"):
        load_attribute(f"{file}:name")
    (tmp_path / "helper.py").write_text("from nowhere import name\n")
    with pytest.raises(ValueError, match="ModuleNotFoundError: No module named 'nowhere'"):
        load_attribute(f"{file}:name")
    (tmp_path / "helper.py").write_text("name = 'mended'\n")
    assert load_attribute(f"{file}:name") == "mended"


def test_a_folder_does_not_hide_a_library(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "mine.py").write_text("import torch\nname = torch.__name__\n")
    assert load_attribute(f"{tmp_path}/mine.py:name") == "torch"


@pytest.mark.usefixtures("gate")
def test_nothing_is_loaded_that_the_user_did_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("name, other = 'mine', 'other'\n")
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/mine.py:name", "mine.py:name", "math:sqrt"):
        with pytest.raises(UntrustedCodeError, match="executed only with --trust-code"):
            load_attribute(spec)
    trust(["mine.py:name", "math:sqrt", "TopK"])
    assert load_attribute(f"{tmp_path}/mine.py:name") == "mine"
    assert load_attribute("math:sqrt") is math.sqrt
    for spec in ("mine.py:other", "math:cos"):  # no more than what was named
        with pytest.raises(UntrustedCodeError):
            load_attribute(spec)
    assert trusted() == {f"{tmp_path.resolve()}/mine.py:name", "math:sqrt"}


@pytest.mark.usefixtures("gate")
def test_workers_trust_what_their_parent_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("name, other = 'mine', 'other'\n")
    specs = [f"{tmp_path}/mine.py:{name}" for name in ("name", "other")]
    trust(specs[:1])
    done = {
        one.task: one.result for one in execute(load_attribute, specs, workers=1, time_limit=60)
    }
    assert done[specs[0]] == "mine"
    refused = done[specs[1]]
    assert isinstance(refused, Failure)
    assert "executed only with --trust-code" in refused.message


def test_who_may_speak_for_the_user() -> None:
    """Whoever calls `trust` says that the user named the code: look twice before adding one."""
    root = Path(__file__).parents[3]
    speaking = {
        str(path.relative_to(root))
        for folder in ("evaluate", "reports")
        for path in (root / folder).rglob("*.py")
        if re.search(r"\btrust\(", path.read_text())
    }
    assert speaking == {
        "evaluate/foundations/plugins.py",  # defines it
        "evaluate/users/objects.py",  # command lines, and objects in Python
        "evaluate/run/config.py",  # configuration files; those of others with --trust-code
        "evaluate/outside/capture.py",  # Python, where updates are captured
        "evaluate/outside/flower.py",  # likewise
        "evaluate/outside/captured.py",  # captures, with --trust-code
        "evaluate/engines/engine.py",  # what the parent trusts
        "evaluate/engines/parcels.py",  # likewise
    }
    loading = re.compile(r"\b(load_config|received_config)\(")
    calling = {
        str(path.relative_to(root)): {*loading.findall(path.read_text())}
        for path in (root / "evaluate").rglob("*.py")
        if loading.search(path.read_text()) and path.name != "config.py"
    }
    assert calling == {
        "evaluate/commands/listings.py": {"load_config"},  # our presets, which name no code
        "evaluate/commands/run.py": {"load_config"},
        "evaluate/door/evaluation.py": {"load_config"},  # Python
        "evaluate/share/pack.py": {"received_config"},
        "evaluate/share/verification.py": {"received_config"},
    }


def test_importing_the_package_hooks_no_imports() -> None:
    script = (
        "import sys, leakfrontier.evaluate.run.run\n"
        "own = [one for one in sys.meta_path if type(one).__module__.startswith('leakfrontier')]\n"
        "assert not own, own\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
