"""Rooms import only rooms before them, every method is registered, and every module is tested."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from leakfrontier.adversaries import ADVERSARIES, PANEL, Adversary
from leakfrontier.adversaries.base import THREATS
from leakfrontier.defenses import DEFENSES, Defense
from leakfrontier.evaluate.commands.audit import AuditName
from leakfrontier.evaluate.commands.list import Listing
from leakfrontier.evaluate.commands.listings import LISTINGS, TIMES
from leakfrontier.evaluate.commands.run import PresetName
from leakfrontier.evaluate.conclude.analysis import SERVERS
from leakfrontier.evaluate.foundations.rows import MEDIA, Media
from leakfrontier.evaluate.privacy.audit import AUDITS
from leakfrontier.evaluate.run.config import PRESETS
from leakfrontier.reports import gallery

ROOT = Path(__file__).parents[1]
FOLDERS = ("defenses", "adversaries", "evaluate", "reports")
DRAWING = "docs/architecture.md"
MOST_MODULES = 20

TESTED_ELSEWHERE = {  # where tests of one subject would otherwise be torn apart
    "evaluate/advise/advice.py": "reports/test_advice.py",
    "evaluate/commands/leaderboard.py": "evaluate/share/test_leaderboard.py",
    "evaluate/commands/listings.py": "evaluate/commands/test_list.py",
    "evaluate/commands/membership_report.py": "evaluate/commands/test_membership.py",
    "evaluate/commands/pack.py": "evaluate/share/test_pack.py",
    "evaluate/commands/reproduce.py": "evaluate/papers/test_reproduce.py",
    "evaluate/commands/run.py": "evaluate/commands/test_main.py",
    "evaluate/papers/ares.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/dager.py": "evaluate/papers/test_somp.py",
    "evaluate/papers/loki.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/robbing_the_fed.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/spearpp.py": "evaluate/papers/test_reproduce.py",
    "evaluate/papers/tables.py": "evaluate/papers/test_reproduce.py",
    "reports/architecture.py": "evaluate/commands/test_analyse.py",
    "reports/captured.py": "evaluate/outside/test_capture_run.py",
}


def modules(root: Path) -> list[Path]:
    """Return every module of ours, relative to the root."""
    return sorted(path.relative_to(root) for top in FOLDERS for path in (root / top).rglob("*.py"))


def rooms(root: Path) -> list[list[str]]:
    """Return the rooms of each line of the drawing, in the order in which they may be imported."""
    drawing = (root / DRAWING).read_text().partition("\n## ")[0]
    lines = re.findall(r"^\d+\. (.*?):", drawing, re.MULTILINE)
    return [re.findall(r"`([\w/.]+)`", line) for line in lines]


def room_of(module: Path, known: set[str]) -> str:
    """Return the room of a module: the longest name in the drawing that it lies below."""
    path = module.with_suffix("").as_posix().removesuffix("/__init__")
    below = [room for room in known if path == room or path.startswith(f"{room}/")]
    assert below, f"{module} is in no room of {DRAWING}"
    return max(below, key=len)


def imports(root: Path, module: Path) -> Iterator[Path]:
    """Yield the modules of ours that one imports, be it in a function or for types only."""
    for node in ast.walk(ast.parse((root / module).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (_module(root, Path(*one[1:])) for one in names if one[0] == "leakfrontier")
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                place = Path(*module.parts[: -node.level], *parts)
            elif parts[:1] == ["leakfrontier"]:
                place = Path(*parts[1:])
            else:
                continue
            yield from (_module(root, place, alias.name) for alias in node.names)


def _module(root: Path, place: Path, name: str = "") -> Path:
    for found in (place / f"{name}.py", place / name / "__init__.py", place.with_suffix(".py")):
        if name and (root / found).is_file():
            return found
    return place / "__init__.py" if (root / place).is_dir() else place.with_suffix(".py")


def wrong_imports(root: Path) -> list[str]:
    """Return the imports against the order of the rooms, and the cycles between modules."""
    order = {room: number for number, line in enumerate(rooms(root)) for room in line}
    found, graph = [], {}
    for module in modules(root):
        graph[module] = {*imports(root, module)} - {module}
        own = room_of(module, {*order})
        for used in sorted(graph[module]):
            room = room_of(used, {*order})
            if used.name == "__init__.py" and module.is_relative_to(used.parent):
                found.append(f"{module} imports its own package {used}")
            elif room != own and order[room] >= order[own]:
                found.append(f"{module} ({own}) imports {used} ({room})")
    return found + [f"cycle: {' -> '.join(map(str, cycle))}" for cycle in _cycles(graph)]


def _cycles(graph: dict[Path, set[Path]]) -> Iterator[list[Path]]:
    """Yield a cycle through each module that comes back to itself, shortest paths first."""
    done: set[Path] = set()
    for start in graph:
        waiting, seen = [[start]], {start}
        while waiting:
            path = waiting.pop(0)
            for after in graph.get(path[-1], set()):
                if after == start and start not in done:
                    done |= {*path}
                    yield [*path, after]
                elif after not in seen:
                    seen.add(after)
                    waiting.append([*path, after])


def test_rooms_import_only_rooms_before_them_and_there_is_no_cycle() -> None:
    assert wrong_imports(ROOT) == []


def copied(folder: Path) -> Path:
    for name in (*FOLDERS, "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "fashion_mini", "*.svg", "*.png")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


PLANTED = {
    "against the order": ("evaluate/foundations/seeds.py", "from ..world.scenario import Scenario"),
    "in a function": (
        "evaluate/data/audio.py",
        "def f() -> None:\n    from ..run.cells import run_trial\n",
    ),
    "for types only": (
        "evaluate/foundations/errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .plugins import trust\n",
    ),
    "across folders": ("defenses/topk.py", "import leakfrontier.evaluate.run.cells"),
    "between attacks": ("adversaries/matching/dlg.py", "from ..text.dager import DAGER"),
}


@pytest.mark.parametrize(("file", "code"), PLANTED.values(), ids=PLANTED)
def test_a_planted_import_is_found(file: str, code: str, tmp_path: Path) -> None:
    root = copied(tmp_path)
    (root / file).write_text((root / file).read_text() + f"\n{code}\n")
    found = wrong_imports(root)
    assert found
    assert all(file in one for one in found)


def test_the_drawing_has_every_room() -> None:
    drawn = [room for line in rooms(ROOT) for room in line]
    assert len(drawn) == len({*drawn})
    for room in drawn:
        assert (ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file(), room


@pytest.mark.parametrize("folder", ["adversaries", "evaluate"])
def test_no_folder_is_crowded(folder: str) -> None:
    for place in {module.parent for module in modules(ROOT) if module.parts[0] == folder}:
        own = [one for one in (ROOT / place).glob("*.py") if one.stem != "__init__"]
        assert len(own) <= MOST_MODULES, place


def unregistered(folder: str, base: type, registry: dict[str, type]) -> list[str]:
    """Return the modules of a folder that define methods, none of which is in the registry."""
    found = []
    for module in modules(ROOT):
        if module.parts[0] != folder or module.stem in ("__init__", "base"):
            continue
        loaded = import_module(".".join(("leakfrontier", *module.with_suffix("").parts)))
        methods = [
            one
            for one in vars(loaded).values()
            if isinstance(one, type) and issubclass(one, base) and not inspect.isabstract(one)
            if one.__module__ == loaded.__name__
        ]
        if methods and not {*methods} & {*registry.values()}:
            found.append(module.as_posix())
    return found


REPLAYED = "defenses/per_example.py"  # what an adversary can replay of several defenses


def test_every_method_is_registered() -> None:
    assert unregistered("defenses", Defense, DEFENSES) == [REPLAYED]
    assert unregistered("adversaries", Adversary, ADVERSARIES) == []


def test_a_method_without_a_line_in_the_registry_is_found() -> None:
    defenses = {name: cls for name, cls in DEFENSES.items() if name != "TopK"}
    assert unregistered("defenses", Defense, defenses) == [REPLAYED, "defenses/topk.py"]
    attacks = {name: cls for name, cls in ADVERSARIES.items() if name != "DAGER"}
    assert unregistered("adversaries", Adversary, attacks) == ["adversaries/text/dager.py"]


def untested(root: Path) -> set[str]:
    """Return the modules without a test module of their name."""
    return {
        module.as_posix()
        for module in modules(root)
        if not module.stem.startswith("__")
        and not (root / "tests" / module.parent / f"test_{module.name}").is_file()
    }


def test_every_module_has_a_test_module_of_its_name(tmp_path: Path) -> None:
    assert untested(ROOT) == {*TESTED_ELSEWHERE}
    assert all((ROOT / "tests" / name).is_file() for name in TESTED_ELSEWHERE.values())
    place = tmp_path / "adversaries" / "text"
    place.mkdir(parents=True)
    (place / "mine.py").touch()
    assert untested(tmp_path) == {"adversaries/text/mine.py"}


def classes_of_one_name(root: Path) -> dict[str, list[str]]:
    """Return the public classes that several modules define, by name."""
    found: dict[str, list[str]] = {}
    for module in modules(root):
        for node in ast.parse((root / module).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module.as_posix())
    return {name: places for name, places in found.items() if len(places) > 1}


def test_one_name_stands_for_one_class(tmp_path: Path) -> None:
    assert classes_of_one_name(ROOT) == {}
    root = copied(tmp_path)
    file = "reports/html.py"
    (root / file).write_text((root / file).read_text() + "\n\nclass Scenario:\n    pass\n")
    places = ["evaluate/world/scenario.py", file]
    assert classes_of_one_name(root) == {"Scenario": places}


def test_what_has_one_entry_per_threat_medium_audit_list_or_preset_has_them_all() -> None:
    assert tuple(SERVERS)[: len(THREATS)] == THREATS
    assert [one.replace("-", " ") for one in AuditName] == [*AUDITS]
    assert {*Listing} == {*LISTINGS}
    assert {*MEDIA} == {*gallery._VICTIMS} == {*get_args(Media)}
    files = (ROOT / "evaluate/run/presets").glob("*.yaml")
    assert tuple(PresetName) == PRESETS
    assert {*TIMES} == {*PRESETS} == {file.stem for file in files}


def test_the_panel_names_registered_adversaries_and_cannot_be_edited() -> None:
    for name, adversary in PANEL.members.items():
        assert ADVERSARIES[name] is type(adversary)
    with pytest.raises(TypeError):
        PANEL.members["mine"] = next(iter(PANEL.members.values()))  # type: ignore[index]


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'^    "leakfrontier\.([\w.]+)",$', text, re.MULTILINE)
    packages = {
        ".".join(module.parent.parts) for module in modules(ROOT) if module.name == "__init__.py"
    }
    assert {*listed} == packages


def test_lives_beside_hugging_face_evaluate(tmp_path: Path) -> None:
    script = (
        "import leakfrontier.evaluate, leakfrontier.evaluate.run.run, evaluate\n"
        "assert hasattr(evaluate, 'EvaluationModule') and hasattr(evaluate, 'load')\n"
        "assert evaluate.__file__ != leakfrontier.evaluate.__file__\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
