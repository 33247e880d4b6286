from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from leakfrontier.adversaries import LinearLeakage
from leakfrontier.defenses import Chain, Defense, Soteria, TopK
from leakfrontier.evaluate.data.data import forget_digests
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.run.code_digests import (
    ATTACK,
    JOINT,
    ROOT,
    TRAINED,
    closure,
    imported,
    source_digest,
)
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import plan

# Runs on a copy of the package: which cells have another key after each edit of a file?
EDITS = """
import json, sys
from pathlib import Path
from leakfrontier.evaluate.run import code_digests
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.data.data import forget_digests
from leakfrontier.evaluate.run.run import plan

assert code_digests.ROOT == Path(sys.argv[1])
config, edits = json.loads(sys.argv[2]), json.loads(sys.argv[3])

def cells():
    for function in vars(code_digests).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    found = {}
    for trial in plan(load_config(config)):
        names = [trial.cell.labels.get(name) for name in ("defense", "adversary", "checkpoint")]
        found[" ".join(str(name) for name in names if name is not None)] = trial.cell
    return found

before, changed = cells(), {}
for name in edits:
    path = code_digests.ROOT / name
    whole = path.read_bytes()
    path.write_bytes(whole + b"\\n_EDITED = 1\\n")
    after = cells()
    path.write_bytes(whole)
    assert {key: cell.config_digest for key, cell in after.items()} == {
        key: cell.config_digest for key, cell in before.items()
    }
    changed[name] = [key for key in before if after[key].key != before[key].key]
print(json.dumps([list(before), changed]))
"""


def copy_of_the_package(folder: Path) -> Path:
    for name in ("adversaries", "defenses", "evaluate"):
        shutil.copytree(
            ROOT / name,
            folder / "leakfrontier" / name,
            ignore=shutil.ignore_patterns("__pycache__", "fashion_mini"),
        )
    shutil.copy(ROOT / "__init__.py", folder / "leakfrontier")  # else an installed one comes first
    return folder / "leakfrontier"


def test_an_edit_changes_the_keys_of_what_runs_it_and_of_nothing_else(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    package = copy_of_the_package(tmp_path)
    tiny["scenarios"][0]["checkpoints"] = [0, 2]
    chain = {"name": "Chain", "links": [{"name": "Noise", "scale": 0.1}, {"name": "SignSGD"}]}
    tiny["defenses"] = ["none", {"name": "TopK", "ratio": 0.1}, chain]
    tiny["adversaries"] = ["PriorGuess", "LinearLeakage", "SME", "InvertingGradients"]
    edits = [
        "adversaries/matching/sme.py",
        "adversaries/matching/matching.py",
        "defenses/signsgd.py",
    ]
    edits += [
        "evaluate/client/client.py",
        "evaluate/client/averaging.py",
        "evaluate/run/training_server.py",
        "evaluate/run/scoring.py",
        "evaluate/run/server.py",
    ]
    edits += ["adversaries/__init__.py", "adversaries/panel.py", "evaluate/conclude/checks.py"]
    edits += ["evaluate/run/run.py", "adversaries/matching/dlg.py"]
    done = subprocess.run(
        [sys.executable, "-c", EDITS, package, json.dumps(tiny), json.dumps(edits)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    cells, changed = json.loads(done.stdout)

    def those(*words: str) -> list[str]:
        return [name for name in cells if any(word in name for word in words)]

    trained = [name for name in cells if len(name.split()) == 1 or not name.endswith(" 0")]
    attacks = those("PriorGuess", "LinearLeakage", "SME", "InvertingGradients")
    assert changed == {
        "adversaries/matching/sme.py": those("SME"),
        "adversaries/matching/matching.py": those("SME", "InvertingGradients"),
        "defenses/signsgd.py": those("SignSGD"),
        "evaluate/client/client.py": cells,
        "evaluate/client/averaging.py": cells,  # it also trains the clients that examine a defense
        "evaluate/run/training_server.py": trained,
        "evaluate/run/scoring.py": attacks,
        "evaluate/run/server.py": attacks,
        "adversaries/__init__.py": [],
        "adversaries/panel.py": [],
        "evaluate/conclude/checks.py": [],
        "evaluate/run/run.py": [],
        "adversaries/matching/dlg.py": [],
    }


KEYS = """
import json, sys
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import plan

print(json.dumps([trial.cell.key for trial in plan(load_config(json.loads(sys.argv[1])))]))
"""


def keys_of(package: Path, config: dict[str, Any]) -> list[str]:
    """Return the keys of all cells, as a copy of the package has them."""
    done = subprocess.run(
        [sys.executable, "-c", KEYS, json.dumps(config)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def replace_in(folder: Path, pattern: str, by: str) -> int:
    """Replace what matches a pattern in all modules below a folder, and return how often."""
    count = 0
    for path in folder.rglob("*.py"):
        text, found = re.subn(pattern, by, path.read_text())
        path.write_text(text)
        count += found
    return count


def renamed(package: Path) -> None:
    place = package / "adversaries" / "matching"
    (place / "matching.py").rename(place / "gradient_search.py")
    assert replace_in(place, r"from \.matching import", "from .gradient_search import") > 5
    others = r"from \.\.matching\.matching import", "from ..matching.gradient_search import"
    assert replace_in(package / "adversaries", *others) > 0


def moved(package: Path) -> None:
    place = package / "adversaries"
    (place / "room").mkdir()
    (place / "room" / "__init__.py").write_text('"""A room."""\n')
    (place / "matching" / "matching.py").rename(place / "room" / "matching.py")
    assert replace_in(place / "room", r"from \.(\w+) import", r"from ..matching.\1 import") > 1
    assert replace_in(place, r"from \.matching import", "from ..room.matching import") > 5
    assert (
        replace_in(place, r"from \.\.matching\.matching import", "from ..room.matching import") > 0
    )


def reworded(package: Path) -> None:
    assert replace_in(package / "adversaries", r'(?<=    """)Return', "Give back") > 50
    assert replace_in(package / "adversaries", r"(?m)  # .*$", "  # Another word.") > 50


def constant(package: Path) -> None:
    path = package / "adversaries" / "matching" / "matching.py"
    text, count = re.subn(r"(?m)^(_?[A-Z_]+ = )\d[\d.e-]*", r"\g<1>17", path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("edits", "same"), [((renamed, reworded), True), ((moved,), True), ((constant,), False)]
)
def test_what_code_means_counts_and_neither_its_place_nor_its_words(
    edits: tuple[Callable[[Path], None], ...], same: bool, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    tiny["adversaries"] = ["LinearLeakage", "InvertingGradients"]
    before = [trial.cell.key for trial in plan(load_config(tiny))]
    package = copy_of_the_package(tmp_path)
    for edit in edits:
        edit(package)
    after = keys_of(package, tiny)
    assert len(before) == len(after) > 2
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [False] * (len(before) - 1) + [not same]


def test_the_paths_name_all_that_cells_are_made_of() -> None:
    """What `cells` imports directly is told apart by kind: nothing may be left out."""
    named = {file for path in {*TRAINED, *ATTACK} for file in closure(ROOT / path)}
    assert imported(ROOT / JOINT) - {ROOT / "evaluate/run/code_digests.py"} <= named


def names(file: str) -> set[str]:
    return {str(found.relative_to(ROOT)) for found in closure(ROOT / file)}


def test_names_are_followed_to_where_they_are_defined() -> None:
    assert names("adversaries/priors/prior_guess.py") == {
        "adversaries/priors/prior_guess.py",
        "adversaries/base.py",
        "adversaries/protocols.py",
        "adversaries/spaces.py",
    }
    assert "adversaries/exact/sphere.py" in names(
        "adversaries/exact/spearpp.py"
    )  # from . import sphere
    assert "adversaries/matching/sme.py" in names(
        "evaluate/papers/sme.py"
    )  # from ...adversaries import SME
    assert "adversaries/matching/dlg.py" not in names("evaluate/papers/sme.py")


def test_a_chain_is_its_links() -> None:
    links = TopK(0.1), Soteria(0.5)
    found = [source_digest(ATTACK, Chain(chosen)) for chosen in ((), links[:1], links)]
    assert len(set(found)) == 3
    assert found[1] == source_digest(ATTACK, links[0])  # a chain itself is in the base of all


def test_what_a_users_file_imports_counts(
    tiny: dict[str, Any], user_file: Callable[..., Path]
) -> None:
    code = "class Mine({}): pass\n"
    header = "from leakfrontier.adversaries import {}\n"

    def key(base: str) -> str:
        file = user_file(code.format(base), base, header.format(base))
        tiny["adversaries"] = [f"{file}:Mine"]
        (trial,) = (t for t in plan(load_config(tiny)) if isinstance(t, AttackTrial))
        return trial.cell.code_digest

    first, second = key("PriorGuess"), key("LinearLeakage")
    assert first != second
    assert len({first, second, source_digest(ATTACK, Defense(), LinearLeakage())}) == 3


@pytest.mark.parametrize("method", [len, print])
def test_what_has_no_file_has_no_source(method: object) -> None:
    assert source_digest((), method) == source_digest(())


def keys(tiny: dict[str, Any]) -> set[str]:
    forget_digests()
    return {trial.cell.key for trial in plan(load_config(tiny))}


@pytest.mark.parametrize("kind", ["defenses", "adversaries", "model"])
def test_what_a_users_file_imports_from_its_folder_counts(
    tiny: dict[str, Any], tmp_path: Path, user_file: Callable[..., Path], kind: str
) -> None:
    base = "LinearLeakage" if kind == "adversaries" else "Defense"
    code = f"""
from helper import value
from leakfrontier.adversaries import LinearLeakage
from leakfrontier.evaluate.models.models import mlp as build

class Mine({base}): pass
"""
    file = user_file(code)
    helper = tmp_path / "helper.py"
    if kind == "model":
        tiny["scenarios"][0]["model"] = f"{file}:build"
    else:
        tiny[kind] = [f"{file}:Mine"]
    found = []
    for value in (1, 2, 1):
        helper.write_text(f"value = {value}\n")
        found.append(keys(tiny))
    assert found[0] == found[2]
    changed = [
        trial.cell.kind
        for trial in plan(load_config(tiny))
        if trial.cell.key in found[0] - found[1]
    ]
    assert (
        changed
        == {
            "defenses": ["replay", "train", "attack"],
            "adversaries": ["attack"],
            "model": ["train", "attack"],
        }[kind]
    )


def test_a_class_that_a_users_file_passes_on(
    tiny: dict[str, Any], tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    user_file("class Mine(Defense): pass\n", "helper")
    (tmp_path / "mine.py").write_text("from helper import Mine\n")
    tiny["defenses"] = [f"{tmp_path}/mine.py:Mine"]
    assert keys(tiny)


def test_images_that_are_replaced_count(tiny: dict[str, Any], tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for index in range(10):
            Image.new("L", (8, 8), index).save(tmp_path / label / f"{index}.png")
    tiny["scenarios"][0]["dataset"] = str(tmp_path)
    before = keys(tiny)
    Image.new("L", (8, 8), 99).save(tmp_path / "cat" / "3.png")
    assert not before & keys(tiny)
