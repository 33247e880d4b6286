"""One torch thread per process: two on a busy machine are slower than one."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright

if TYPE_CHECKING:
    from leakfrontier.evaluate.data.data import Dataset

torch.set_num_threads(1)
os.environ.setdefault("LEAKFRONTIER_CACHE", str(Path(gettempdir()) / "leakfrontier-tests"))

HEADER = """
from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from leakfrontier.adversaries import Adversary, NotApplicable, PriorGuess, Reconstruction
from leakfrontier.defenses import Batch, Defense
"""


SLOWEST = (
    "test_no_attack_beats_its_bound.py",
    "test_run.py",
    "test_flower.py",
    "test_ray_engine.py",
    "test_devices.py",
    "test_defenses.py",
    "test_reproduce.py",
    "test_checks.py",
    "test_page.py",
    "test_presets.py",
    "test_smollm2.py",
    "test_recommendation.py",
    "test_docs.py",
    "test_end_to_end.py",
    "test_main.py",
    "test_membership.py",
    "test_examination.py",
    "test_audit.py",
    "test_readme.py",
    "test_promises.py",
    "test_leaderboard.py",
    "test_verification.py",
    "test_pack.py",
    "test_capture_run.py",
    "test_frontier.py",
    "test_analysis.py",
    "test_models.py",
    "test_federation.py",
    "test_store.py",
    "test_engine.py",
    "test_advise.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Take three workers for two cores: tests wait a quarter of their time for other processes."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) * 3 // 2 if hasattr(os, "sched_getaffinity") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest modules first: one alone at the end would keep all other cores waiting."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Return a configuration whose cells take a fraction of a second each."""
    return {
        "scenarios": [
            {
                "dataset": "digits",
                "model": {"name": "mlp", "width": 16},
                "candidates": 20,
                "checkpoints": [0],
                "training": {"rounds": 4, "clients": 4, "clients_per_round": 2, "batch_size": 8},
            }
        ],
        "defenses": ["none"],
        "adversaries": ["PriorGuess"],
        "observations": 3,
    }


@pytest.fixture(scope="module")
def uploads_are_kept() -> Iterator[None]:
    """Let many attacks of a module share uploads, as those of a run do."""
    from leakfrontier.evaluate.run import scenes

    yield
    scenes._SHOWN.clear()


@pytest.fixture(autouse=True)
def uploads_are_made_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no uploads from one cell to the next: a test that compares two would compare nothing."""
    scenes = sys.modules.get("leakfrontier.evaluate.run.scenes")
    if scenes is not None and "uploads_are_kept" not in request.fixturenames:
        monkeypatch.setattr(scenes, "_UPLOADS_KEPT", 0)


@pytest.fixture
def guarded() -> None:
    """Let users' files be loaded in a worker first, as they are outside of tests."""


@pytest.fixture(autouse=True)
def load_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load users' files here and now, unless a test is `guarded`: each worker takes seconds."""
    methods = sys.modules.get("leakfrontier.evaluate.users.methods")
    if methods is not None and "guarded" not in request.fixturenames:
        monkeypatch.setattr(methods, "is_loaded", lambda _: True)


@pytest.fixture
def gate() -> None:
    """Refuse code that the user did not name, as outside of tests."""


@pytest.fixture(autouse=True)
def code_of_tests_is_trusted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trust what a test builds itself; commands, workers and tests of the `gate` trust nothing."""
    plugins = sys.modules.get("leakfrontier.evaluate.foundations.plugins")
    if plugins is None:
        return
    if {"gate", "guarded", "command"} & {*request.fixturenames}:
        monkeypatch.setattr(plugins, "_TRUSTED", set())
    else:
        monkeypatch.setattr(plugins, "is_trusted", lambda _: True)


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a user's Python file, by default with all it may import.

    The user trusts what it defines.
    """
    from leakfrontier.evaluate.foundations.plugins import trust

    def write(code: str, name: str = "mine", header: str = HEADER) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(header + code)
        defined = re.findall(r"^(?:(?:class|def) )?(\w+)", code, re.MULTILINE)
        trust(f"{path}:{one}" for one in defined)
        return path

    return write


@pytest.fixture(scope="session")
def command() -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line here: its exit code, output and errors."""
    from leakfrontier.evaluate.commands.main import main  # seconds that most tests can do without

    def call(*arguments: object, columns: int = 120) -> tuple[int, str, str]:
        output, errors = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "argv", ["leakfrontier", *map(str, arguments)])
            with pytest.raises(SystemExit) as caught:
                main()
        return int(caught.value.code or 0), output.getvalue(), errors.getvalue()

    return call


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit claims and examine replays by few uploads: that it is done is asked, not how well."""
    from leakfrontier.evaluate.privacy import noise_alone, residual_noise
    from leakfrontier.evaluate.run import cells

    monkeypatch.setattr(cells, "EXAMINED_ROUNDS", 2)
    monkeypatch.setattr(residual_noise, "REPEATS", 4)
    monkeypatch.setattr(noise_alone, "REPEATS", (4, 4))
    monkeypatch.setattr(noise_alone, "LOCAL_STEPS", 2)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the files of figures empty: the page itself does not need them."""
    from leakfrontier.reports.charts import Figure

    monkeypatch.setattr(Figure, "svg", "")
    monkeypatch.setattr(Figure, "png", b"")


@pytest.fixture(scope="session")
def few_photos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return some images of CIFAR-10, 20 of each class to train on and 20 to test on."""
    from leakfrontier.evaluate.data.data import load_dataset

    source = Path(os.environ.get("LEAKFRONTIER_DATA", "")) / "cifar10"
    if not (source.is_absolute() and (source / "train").is_dir()):
        pytest.skip("LEAKFRONTIER_DATA does not name a folder with cifar10/train and cifar10/test")
    folder = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        for category in (source / split).iterdir():
            (folder / split / category.name).mkdir(parents=True)
            for image in sorted(category.iterdir())[:20]:
                (folder / split / category.name / image.name).symlink_to(image)
    return load_dataset(str(folder))


_FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-gpu",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None and "CI" not in os.environ:
        pytest.skip("chromium is not installed")
    assert chromium is not None, "CI has to install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    yield page
    page.close()
