"""What rows depend on besides their configuration."""

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch

from leakfrontier.evaluate.engines.engine import cores
from leakfrontier.evaluate.foundations import plugins
from leakfrontier.evaluate.foundations.plugins import ROOT
from leakfrontier.evaluate.run import environment as module
from leakfrontier.evaluate.run.environment import PACKAGES, environment


def test_versions_and_machine_are_those_of_here() -> None:
    found = environment()
    assert found["versions"].keys() == {"python", *PACKAGES}
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["machine"]["cores"] == cores()
    assert all(found["machine"].values())
    assert environment() == json.loads(json.dumps(found))


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package",))
    assert environment()["versions"]["no-such-package"] == "not installed"


def test_the_code_is_that_of_all_three_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("defenses", "adversaries", "evaluate"):
        (tmp_path / part / "deep").mkdir(parents=True)
        shutil.copy(ROOT / part / "__init__.py", tmp_path / part / "deep/module.py")
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    seen = [environment()["code"]]
    for part in ("defenses", "adversaries", "evaluate"):
        (tmp_path / part / "deep/module.py").write_text("# edited\n")
        seen.append(environment()["code"])
    (tmp_path / "evaluate/deep/module.py").rename(tmp_path / "evaluate/deep/renamed.py")
    seen.append(environment()["code"])
    assert len({*seen}) == 5
    (tmp_path / "evaluate/notes.txt").write_text("not code")
    assert environment()["code"] == seen[-1]
