"""Folders import only what they may, every method is registered, and every module is tested."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leakfrontier.adversaries import ADVERSARIES, PANEL
from leakfrontier.defenses import DEFENSES

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs" / "architecture.md"
MAY_IMPORT: dict[str, set[str]] = {
    "defenses": set(),
    "adversaries": set(),
    "evaluate": {"defenses", "adversaries"},
    "reports": {"evaluate"},
}
COMMAND_LINE = set(
    (ROOT / "evaluate" / "commands").glob("*.py")
)  # commands end with a page or a figure
MACHINERY = {  # what methods share, none itself
    *("__init__", "base", "panel", "protocols", "spaces"),
    *(
        "ats_search",
        "discrete_gaussian",
        "per_example",
        "pld",
        "torchvision_ops",
        "transforms",
        "vector",
    ),
    *("secagg_keys", "secagg_masks", "secagg_protocol", "secagg_shamir"),
    *("label_inference", "matching", "optimizers"),
    *("disaggregation", "relu_layer", "sphere"),
    *("elimination", "imprint", "sparse_recovery"),
    *("activations", "constraints", "layer_chain", "layer_system", "recursion"),
    *("mixed_rows", "weak_directions", "softmax_head"),
    *("subspace", "transformer", "token_pool", "prefixes", "sentence_ends", "diverse_beams"),
    *("gradient_atoms", "language_prior", "reordering", "texts", "token_matching", "unfused_norms"),
}

TESTED_ELSEWHERE = {  # where tests of one subject would otherwise be torn apart
    "evaluate/advise/advice.py": "reports/test_advice.py",
    "evaluate/commands/leaderboard.py": "evaluate/test_leaderboard.py",
    "evaluate/commands/pack.py": "evaluate/test_pack.py",
    "evaluate/commands/reproduce.py": "evaluate/papers/test_reproduce.py",
    "evaluate/commands/run.py": "evaluate/commands/test_main.py",
    "evaluate/papers/ares.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/dager.py": "evaluate/papers/test_somp.py",
    "evaluate/papers/loki.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/robbing_the_fed.py": "evaluate/papers/test_servers.py",
    "evaluate/papers/spearpp.py": "evaluate/papers/test_reproduce.py",
    "evaluate/papers/tables.py": "evaluate/papers/test_reproduce.py",
    "reports/architecture.py": "evaluate/commands/test_analyse.py",
    "reports/captured.py": "evaluate/test_capture_run.py",
}


def imported_modules(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        "." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)
    }


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_rule(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        modules = imported_modules(path)
        ours = {name.split(".")[1] for name in modules if name.startswith("leakfrontier.")}
        allowed = MAY_IMPORT[folder] | ({"reports"} if path in COMMAND_LINE else set())
        assert ours <= allowed, f"{path} imports {ours}"
        depth = len(path.relative_to(ROOT / folder).parts)
        climbing = [name for name in modules if name.startswith("." * (depth + 1))]
        assert not climbing, f"{path} climbs out of {folder}: {climbing}"


def room_of(parts: tuple[str, ...]) -> str:
    """Return the box of the drawing that a module is in, given its path below the root."""
    inner = parts[0] == "evaluate" and len(parts) > 1 and (ROOT / "evaluate" / parts[1]).is_dir()
    return parts[1] if inner else parts[0]


def rooms_imported_by(path: Path) -> set[str]:
    place = path.relative_to(ROOT).parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        named = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            origin = place[: -node.level] + named
        elif named[:1] == ("leakfrontier",):
            origin = named[1:]
        else:
            continue
        rooms |= {room_of((*origin, alias.name)) for alias in node.names}
    return rooms


def test_the_drawing_shows_who_imports_whom() -> None:
    drawn = set(re.findall(r"^  (\w+) --> (\w+)$", DRAWING.read_text(), re.MULTILINE))
    files = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")]
    pairs = {(room_of(p.relative_to(ROOT).parts), r) for p in files for r in rooms_imported_by(p)}
    assert drawn == {(user, used) for user, used in pairs if user != used}


@pytest.mark.parametrize("registry", [DEFENSES, ADVERSARIES], ids=["defenses", "adversaries"])
def test_every_module_is_registered(registry: dict[str, type]) -> None:
    classes = registry.values()
    folder = ROOT / next(iter(classes)).__module__.split(".")[1]
    files = {path.stem for path in folder.glob("*.py")} - MACHINERY
    assert files == {cls.__module__.rsplit(".", 1)[1] for cls in classes} - MACHINERY


def test_every_module_has_a_test_module_of_its_name() -> None:
    tests = ROOT / "tests"
    files = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")]
    modules = {path.relative_to(ROOT) for path in files if not path.stem.startswith("__")}
    untested = {
        str(module)
        for module in modules
        if not (tests / module.parent / f"test_{module.name}").is_file()
    }
    assert untested == {*TESTED_ELSEWHERE}
    assert all((tests / name).is_file() for name in TESTED_ELSEWHERE.values())


def test_the_panel_names_registered_adversaries_and_cannot_be_edited() -> None:
    for name, adversary in PANEL.members.items():
        assert ADVERSARIES[name] is type(adversary)
    with pytest.raises(TypeError):
        PANEL.members["mine"] = next(iter(PANEL.members.values()))  # type: ignore[index]


def test_lives_beside_hugging_face_evaluate(tmp_path: Path) -> None:
    script = (
        "import leakfrontier.evaluate, leakfrontier.evaluate.run, evaluate\n"
        "assert hasattr(evaluate, 'EvaluationModule') and hasattr(evaluate, 'load')\n"
        "assert evaluate.__file__ != leakfrontier.evaluate.__file__\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
