"""What the README and the guides show works as it stands; examples run; the site is whole."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml
from documents import DOCS, GITHUB, RAW, ROOT, SMALL_RUN, Page, guides, pages, readers_folder
from synthetic import shared_results
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import leakfrontier
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.defenses.vector import flatten
from leakfrontier.evaluate.commands.main import app
from leakfrontier.evaluate.foundations.plugins import load_attribute
from leakfrontier.evaluate.privacy.accounting import epsilon as epsilon_of
from leakfrontier.evaluate.run.config import RunConfig, load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.world.scenario import Scenario, Training

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SUPPORT = Path(__file__).parent / "support"
COMMANDS = [(page, words) for page in pages() for words in page.commands]
OURS = sorted({tuple(words[1:]) for _, words in COMMANDS if words[0] == "leakfrontier"})
ANSWERED = ("list", "analyse", "audit", "advise")
"""Commands that take seconds, and are run; of the others, the options are checked."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return readers_folder(tmp_path)


def test_there_is_something_to_test() -> None:
    files = {name for page in guides() for name in page.files}
    assert {
        "my_defense.py",
        "my_private_defense.py",
        "my_attack.py",
        "my_server.py",
        "my_models.py",
    } <= files
    assert sum(bool(page.script) for page in guides()) >= 5
    assert len(OURS) >= 30


@pytest.mark.parametrize("page", [page for page in guides() if page.script], ids=lambda p: p.name)
def test_the_python_of_a_page_runs(folder: Path, page: Page) -> None:
    (folder / "script.py").write_text(page.script)
    done = subprocess.run(
        [sys.executable, SUPPORT / "run_small.py", folder / "script.py"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours = {line for line in page.script.splitlines() if "import" in line and "leakfron" in line}
    assert ours <= {
        "import leakfrontier as lf",
        "from leakfrontier.evaluate.foundations.system_draws import system_draws",
    }


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_commands_are_understood(words: tuple[str, ...]) -> None:
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], list(words[1:]))  # raises for unknown options


@pytest.mark.parametrize(
    "words",
    [words for words in OURS if words[0] in ANSWERED and "--dataset" not in words],
    ids=" ".join,
)
def test_quick_commands_answer(folder: Path, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    assert done.stdout


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: str(value)[:60])
def test_scripts_in_commands_exist(page: Page, words: list[str]) -> None:
    if words[0] == "python":
        assert (ROOT / words[1]).is_file(), page.name


def test_configurations_are_valid(folder: Path) -> None:
    found = [(page, text) for page in pages() for text in page.blocks("yaml")]
    assert len(found) >= 5
    for page, text in found:
        assert load_config(_whole(yaml.safe_load(text))).defenses, page.name


def _whole(content: Any) -> dict[str, Any]:  # noqa: ANN401 - YAML
    """Return the configuration of which a page shows a part: of defenses alone, or without them."""
    if isinstance(content, list):
        return {**SMALL_RUN, "defenses": content}
    return {"defenses": ["none"], **content}


def test_every_key_is_explained() -> None:
    text = (DOCS / "guides/configuration.md").read_text()
    for kind in (RunConfig, Scenario, Training):
        assert [key for key in kind.model_fields if f"| `{key}` |" not in text] == []


def test_the_private_defense_is_dpsgd_and_its_replay_leaves_out_the_noise(folder: Path) -> None:
    ours = load_attribute("my_private_defense.py:ClippedNoise")(sigma=0.5, norm=0.1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    data = Batch(torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))

    def upload(defense: Defense, seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        return flatten(defense.gradient(model, cross_entropy, data, rng))

    clipped = upload(ours.replay({}), 0)
    torch.testing.assert_close(clipped, upload(DPSGD(0.0, 0.1), 0))
    torch.testing.assert_close(clipped, upload(ours.replay({}), 1))
    noise = torch.stack([upload(ours, seed) - clipped for seed in range(200)])
    assert noise.std().item() == pytest.approx(0.5 * 0.1 / 5, rel=0.1)


def test_the_defenses_and_the_attack_of_the_guides_work(folder: Path) -> None:
    config = load_config("my_run.yaml", changes={"individual": True})
    results = run(config, folder / "runs/mine", workers=1)
    assert set(results.cells["status"]) == {"ok"}
    rates = results.rates().set_index(["defense", "adversary"])["rate"]
    assert rates["none", "Bias"] == 1.0
    assert rates["none", "OneRow"] == 1.0
    assert rates["Rounded", "Bias"] > 0
    assert rates["ClippedNoise", "Bias"] < 1
    (claim,) = results.guarantees.to_dict("records")
    assert (claim["defense"], claim["unit"]) == ("ClippedNoise", "record")
    assert claim["noise_multiplier"] == pytest.approx(1, rel=0.01)
    assert claim["measured_noise"] == pytest.approx(1, rel=0.05)
    assert not claim["violated"]


def test_every_check_has_its_section() -> None:
    names = [check.name for check in shared_results().checks()]
    sections = Page(DOCS / "guides/checks.md").text.split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == names
    for section in sections:
        for part in ("**Raised if**", "**What it means.**", "**What to do.**"):
            assert part in section, section


def test_the_numbers_of_the_guide_to_dp_are_those_of_the_accountant() -> None:
    text = (DOCS / "guides/choose_dp_parameters.md").read_text()
    known = {"clients": 5, "examples_per_client": 8000, "batch_size": 64, "rounds": 30}
    steps = leakfrontier.advise(epsilon=3, **known, quiet=True).recommended
    epochs = leakfrontier.advise(epsilon=3, **known, local_epochs=1, quiet=True).recommended
    assert steps is not None
    assert epochs is not None
    delta = min(1e-5, 40_000**-1.1)
    spent = epsilon_of(64 / 8000, steps.noise_multiplier, 3750, delta)
    assert f"| one step | 30 | {steps.noise_multiplier:.3f} | 3 |" in text
    assert f"| one epoch | 3,750 | {epochs.noise_multiplier:.3f} | {spent:.1f} |" in text
    bounds = {"run": epochs.run_bound, "upload": epochs.upload_bound, "both": epochs.bound}
    for name, bound in bounds.items():
        up = math.ceil(10_000 * bound) / 100  # as printed: rounded up to three digits
        assert f"| {name} | {up:.3g} % |" in text, name
    for epsilon, most in re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \|$", text, re.MULTILINE):
        digits = len(most.partition(".")[2])
        exact = 100 / (1 + math.exp(-float(epsilon)))
        assert f"{exact:.{digits}f}" == most


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        path, _, _ = link.partition("#")
        if path.startswith((GITHUB, RAW)):
            kind, branch, rest = _on_github(path)
            assert (kind, branch) in {("blob", "main"), ("tree", "main"), ("raw", "main")}, link
            assert (ROOT / rest).exists(), link
        elif path and not path.startswith(("http://", "https://")):
            assert (page.path.parent / path).exists(), link


def _on_github(path: str) -> tuple[str, str, str]:
    if path.startswith(RAW):
        branch, _, rest = path.removeprefix(RAW).partition("/")
        return "raw", branch, rest
    kind, branch, rest = path.removeprefix(GITHUB).split("/", 2)
    return kind, branch, rest


def test_the_navigation_holds_every_page() -> None:
    def leaves(node: Any) -> list[str]:  # noqa: ANN401 - a tree of YAML
        if isinstance(node, str):
            return [node]
        inner = node.values() if isinstance(node, dict) else node
        return [leaf for one in inner for leaf in leaves(one)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    there = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(leaves(config["nav"])) == sorted(there)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed: the extra `docs`")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "reference/defenses/index.html").read_text()
    assert "on_update" in page  # what docstrings say was found


def test_lab_notes_name_the_commit_of_their_figures() -> None:
    for path in sorted((DOCS / "lab").glob("*.md")):
        lines = path.read_text().split("\n", 3)
        assert "commit" in lines[2], path.name


@pytest.mark.parametrize("name", ["own_defense.py", "choose_dp.py"])
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    script = shutil.copy(ROOT / "examples" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, script],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {"own_defense.py": "Rounded(step=0.1)", "choose_dp.py": "Noise multiplier: 0.97"}
    assert said[name] in done.stdout


def test_all_examples_are_run() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert names == {"own_defense.py", "choose_dp.py", "flower_app.py"}  # the last by test_flower
