"""What is built holds what it should, and the files around the code agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("adversaries", "defenses", "evaluate", "reports")
NOT_PACKED = (
    *(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"),
    *("runs", ".gitignore"),
)
BUILD = """
from setuptools.build_meta import build_sdist, build_wheel
build_sdist("dist")
build_wheel("dist")
"""


class Built(NamedTuple):
    """What was built of a copy of this repository: names of files, and all that was said."""

    tree: set[str]
    sdist: set[str]
    wheel: set[str]
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built") / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_PACKED))
    files = [file for file in folder.rglob("*") if file.is_file()]
    tree = {file.relative_to(folder).as_posix() for file in files}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = (folder.glob(f"dist/*.{end}") for end in ("tar.gz", "whl"))
    with tarfile.open(sdist) as archive:
        packed = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    return Built(tree, packed, {*zipfile.ZipFile(wheel).namelist()}, done.stdout + done.stderr)


def test_the_source_distribution_holds_all_that_its_tests_need(built: Built) -> None:
    made = {"PKG-INFO", "setup.cfg"} | {name for name in built.sdist if ".egg-info/" in name}
    assert {
        "tests/conftest.py",
        "tests/support/synthetic.py",
        "examples/own_defense.py",
    } < built.sdist
    assert built.sdist - made == built.tree - made


def test_the_wheel_holds_the_package_alone(built: Built) -> None:
    of_root = {name for name in built.tree if "/" not in name and name.endswith((".py", ".typed"))}
    package = {name for name in built.tree if name.startswith(tuple(f"{one}/" for one in FOLDERS))}
    described = {name for name in built.wheel if ".dist-info/" in name}
    assert built.wheel - described == {f"leakfrontier/{name}" for name in of_root | package}
    assert any(name.endswith("/licenses/NOTICE") for name in described)


def test_no_folder_of_data_is_taken_for_a_package(built: Built) -> None:
    assert "Warning" not in built.said
    assert "absent" not in built.said


def test_the_version_is_the_same_everywhere() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == PROJECT["version"]
    assert _yaml("CITATION.cff")["version"] == PROJECT["version"]


def test_every_version_of_python_that_is_admitted_is_tested() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    (job,) = _yaml(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == named
    first, last = (int(one.partition(".")[2]) for one in (named[0], named[-1]))
    assert PROJECT["requires-python"] == f">=3.{first},<3.{last + 1}"
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_what_is_checked_before_a_commit_is_checked_by_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (repository,) = _yaml(".pre-commit-config.yaml")["repos"]
    assert {hook["name"] for hook in repository["hooks"]} == {"ruff check", "ruff format", "mypy"}
    for hook in repository["hooks"]:
        assert f".venv/bin/{hook['name']}" in ci
        assert hook["entry"].startswith(f".venv/bin/{hook['name']}")


@pytest.mark.parametrize("name", ["bug", "method", "result"])
def test_issue_templates_ask_for_something(name: str) -> None:
    form = _yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "labels", "body"} == {*form}
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    assert all(part["attributes"]["label"] for part in form["body"])


def test_vulnerabilities_are_reported_in_private() -> None:
    private = f"{PROJECT['urls']['Homepage']}/security/advisories/new"
    assert private in (ROOT / "SECURITY.md").read_text()
    (link,) = _yaml(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]
    assert link["url"] == private


def _yaml(path: str) -> dict[Any, Any]:
    content = yaml.safe_load((ROOT / path).read_text())
    assert isinstance(content, dict)
    return content
