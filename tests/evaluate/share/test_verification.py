"""A pack that was tampered with is found out, as often as it is said to be."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from packing import rewritten
from rich.console import Console
from scipy import stats

from leakfrontier.evaluate.foundations.rows import TABLES
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.share import pack as pack_module
from leakfrontier.evaluate.share import verification
from leakfrontier.evaluate.share.archive import PackError
from leakfrontier.evaluate.share.pack import pack_run, read_pack
from leakfrontier.evaluate.share.verification import choose, escape_probability, escapes, verify

Command = Callable[..., tuple[int, str, str]]
Edit = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the pack of a small run, whose cascade leaves something out."""
    folder = tmp_path_factory.mktemp("run")
    config: dict[str, Any] = {
        "scenarios": [
            {
                "dataset": "digits",
                "model": {"name": "mlp", "width": 16},
                "candidates": 20,
                "checkpoints": [0, 2],
                "training": {"rounds": 2, "clients": 4, "batch_size": 1},
            }
        ],
        "defenses": ["none", {"name": "TopK", "ratio": 0.9, "error_feedback": False}],
        "adversaries": [
            "PriorGuess",
            "LinearLeakage",
            "DAGER",  # not applicable: its rows have no scores
            {"name": "InvertingGradients", "iterations": 2},
        ],
        "observations": 3,
    }
    run(load_config(config), folder, workers=1, console=Console(quiet=True))
    return pack_run(folder)


@pytest.fixture
def path(packed: bytes, tmp_path: Path) -> Path:
    (tmp_path / "small.zip").write_bytes(packed)
    return tmp_path / "small.zip"


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Note every call of a function."""

    def call(*args: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        calls.append(function.__name__)
        return function(*args)

    return call


def test_every_cell_is_run_again_and_equal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for module, name in ((verification, "environment"), (pack_module, "from_csv")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), asked))
    pack = read_pack(path)
    assert (pack.cells["status"] == "not needed").any()
    found = verify(pack, cells=1000, seed=0, workers=1)
    assert asked.count("environment") == 1
    assert asked.count("from_csv") == 1 + len(TABLES)  # and cells.csv
    assert found.passed
    assert found.chosen == found.cells == (pack.cells["status"] == "ok").sum()
    assert {one.verdict for one in found.reruns} == {"equal"}


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_run", lambda *_, **__: iter(()))


def problems_of(path: Path, edit: Edit) -> tuple[str, ...]:
    """Return what is wrong with a pack that was edited by one who knows how checksums work."""
    rewritten(path, edit, sums=True)
    return verify(read_pack(path), seed=0).problems


def _identified(entries: dict[str, bytes]) -> None:
    lines = entries["rows/attacks.csv"].split(b"\n")
    place = next(i for i, line in enumerate(lines) if b"scored,,True,True" in line)
    lines[place] = lines[place].replace(b"scored,,True,True", b"scored,,False,False")
    entries["rows/attacks.csv"] = b"\n".join(lines)


@pytest.mark.parametrize("rekeyed", [False, True])
def test_an_altered_row_is_found_by_its_cell(path: Path, rekeyed: bool) -> None:
    """Whoever alters a row, and all that follows from it, has still to fear that it is run.

    A cell of another key is by other code; not if the pack says that its code is this one.
    """
    before = read_pack(path)
    cell = before.results.attacks.query("control and adversary_name == 'LinearLeakage'").iloc[0]
    number = before.cells.index[before.cells["cell"] == cell["cell"]][0]

    def edit(entries: dict[str, bytes]) -> None:
        lines = entries["rows/scores.csv"].split(b"\n")
        place = next(i for i, line in enumerate(lines) if line.startswith(b"%d,0,0,psnr" % number))
        lines[place] = b"%d,0,0,psnr,12.5" % number
        entries["rows/scores.csv"] = b"\n".join(lines)
        if rekeyed:
            entries["cells.csv"] = entries["cells.csv"].replace(cell["cell"].encode(), b"mine")

    rewritten(path, edit, sums=True)
    pack = read_pack(path)
    pool = [n for n in range(len(pack.cells)) if pack.cells["status"][n] == "ok"]
    seed = next(seed for seed in range(1000) if choose(pool, 1, seed) == [number])
    found = verify(pack, cells=1, seed=seed, workers=1)
    assert not found.passed
    assert [one.verdict for one in found.reruns] == ["different"]
    assert "scores" in found.reruns[0].reason


@pytest.mark.usefixtures("nothing_is_run")
def test_what_does_not_follow_is_found_without_running(path: Path, packed: bytes) -> None:
    problems = problems_of(path, _identified)
    assert any("does not follow from its rows" in problem for problem in problems)

    def relabelled(entries: dict[str, bytes]) -> None:
        entries["cells.csv"] = entries["cells.csv"].replace(b"ratio=0.9", b"ratio=0.5")

    path.write_bytes(packed)
    problems = problems_of(path, relabelled)
    assert any("which its configuration asks for" in problem for problem in problems)


@pytest.mark.usefixtures("nothing_is_run")
@pytest.mark.parametrize(
    ("code", "number", "refused"),
    [(None, False, True), ("other", False, False), ("other", True, True)],
)
@pytest.mark.parametrize(
    ("name", "words", "wrong"),
    [("frontier", "verdict", {"accuracy": 2.0}), ("checks", "text", {"verdict": "fail"})],
)
def test_only_other_code_has_other_words_for_the_same_numbers(
    path: Path,
    name: str,
    words: str,
    wrong: dict[str, object],
    code: str | None,
    number: bool,
    refused: bool,
) -> None:
    file = f"tables/{name}.csv"

    def edit(entries: dict[str, bytes]) -> None:
        table = pd.read_csv(io.BytesIO(entries[file]))
        table[words] = "something else"
        if number:
            table = table.assign(**wrong)
        entries[file] = table.to_csv(index=False).encode()
        if code is not None:
            meta = json.loads(entries["pack.json"])
            entries["pack.json"] = json.dumps({**meta, "code": code}).encode()

    found = problems_of(path, edit)
    assert found == ((f"{file} does not follow from its rows",) if refused else ())


@pytest.mark.usefixtures("nothing_is_run")
@pytest.mark.parametrize("kind", ["train", "replay", "attack"])
def test_what_has_rows_is_run_again(path: Path, kind: str) -> None:
    """A cell that is never chosen must have nothing to say."""

    def edit(entries: dict[str, bytes]) -> None:
        was, becomes = f",{kind},ok,".encode(), f",{kind},not needed,".encode()
        entries["cells.csv"] = entries["cells.csv"].replace(was, becomes)

    assert "has the status 'not needed', but also rows" in problems_of(path, edit)[0]


@pytest.mark.usefixtures("nothing_is_run")
def test_training_is_always_needed(path: Path) -> None:
    def edit(entries: dict[str, bytes]) -> None:
        entries["cells.csv"] = entries["cells.csv"].replace(b",train,ok,", b",train,not needed,")
        for table in ("utility", "guarantees"):
            header = entries[f"rows/{table}.csv"].split(b"\n")[0]
            entries[f"rows/{table}.csv"] = header + b"\n"

    assert "has the status 'not needed', but is not an attack" in problems_of(path, edit)[0]


@pytest.mark.usefixtures("nothing_is_run")
def test_other_attacks_are_not_the_panel(path: Path) -> None:
    def edit(entries: dict[str, bytes]) -> None:
        panel = verification.PANEL.version
        entries["pack.json"] = entries["pack.json"].replace(
            f'"custom ({panel})"'.encode(), f'"{panel}"'.encode()
        )

    problems = problems_of(path, edit)
    assert any("its configuration has panel custom" in one for one in problems)


@pytest.mark.usefixtures("nothing_is_run")
def test_a_cascade_leaves_out_only_what_it_may(path: Path, packed: bytes) -> None:
    """An attack that succeeds must not be called not needed."""
    pack = read_pack(path)
    attacks = pack.results.attacks
    own = attacks[(attacks["adversary_name"] == "LinearLeakage") & ~attacks["control"]]
    key = str(own["cell"].iloc[0])
    number = pack.cells.index[pack.cells["cell"] == key][0]

    def edit(entries: dict[str, bytes]) -> None:
        for table in ("attacks", "scores", "renderings"):
            lines = entries[f"rows/{table}.csv"].split(b"\n")
            kept = [line for line in lines if not line.startswith(b"%d," % number)]
            entries[f"rows/{table}.csv"] = b"\n".join(kept)
        lines = entries["cells.csv"].split(b"\n")
        place = next(i for i, line in enumerate(lines) if line.startswith(key.encode()))
        lines[place] = lines[place].replace(b",ok,", b",not needed,", 1)
        entries["cells.csv"] = b"\n".join(lines)

    rewritten(path, edit, sums=True)
    pack = read_pack(path)
    config = load_config(pack.meta["config"])
    planned = verification.plan_of(config)
    ran = verification.narrowed(planned, pack.results)
    problems = verification._not_a_cascade(pack, planned, ran, config)
    assert len(problems) == 1
    assert "ran on 0 uploads, and not on the 3 that other attacks left" in problems[0]


def test_escape_is_as_probable_as_it_is_said_to_be() -> None:
    """One altered cell of 200, ten checked: caught in one of twenty cases, and so on."""
    rng = np.random.default_rng(0)
    for altered, checked in ((1, 10), (1, 100), (10, 10), (20, 30)):
        stated = escape_probability(200, altered, checked)
        bad = {*rng.permutation(200)[:altered].tolist()}
        trials = 2000
        caught = sum(bool(bad & {*choose(range(200), checked, seed)}) for seed in range(trials))
        low, high = stats.binom.interval(0.9999, trials, 1 - stated)
        assert low <= caught <= high, (altered, checked)
    assert escape_probability(200, 1, 10) == pytest.approx(0.95)
    assert escape_probability(200, 200, 1) == 0
    assert escape_probability(200, 5, 0) == 1
    assert [altered for altered, _ in escapes(200, 10)] == [1, 10, 20]
    with pytest.raises(ValueError, match="altered and checked"):
        escape_probability(10, 11, 1)


def test_rows_of_other_versions_need_not_be_bit_equal(path: Path) -> None:
    pack = read_pack(path)
    number = next(n for n, kind in enumerate(pack.cells["kind"]) if kind == "attack")
    key = str(pack.cells["cell"][number])
    given = {t: verification._rows(pack, t, key) for t in verification.TABLES}
    assert [*verification._beyond_tolerance(given, given)] == []
    other = dict(given)
    other["attacks"] = given["attacks"].assign(outcome="refused")
    assert [*verification._beyond_tolerance(given, other)] == ["other uploads were scored"]
    train = str(pack.cells.loc[pack.cells["kind"] == "train", "cell"].iloc[0])
    given = {t: verification._rows(pack, t, train) for t in verification.TABLES}
    wrong = given["utility"].assign(correct=given["utility"]["correct"] - 30)
    assert "the accuracy differs" in [
        *verification._beyond_tolerance(given, {**given, "utility": wrong})
    ]
    claims = pd.DataFrame({"epsilon": [1.0], "violated": [True]})
    denied = claims.assign(violated=False)
    assert [
        *verification._beyond_tolerance(
            {**given, "guarantees": claims}, {**given, "guarantees": denied}
        )
    ] == ["the verdict of the audit differs"]


def test_the_command(path: Path, command: Command) -> None:
    code, output, _ = command("verify", path, "--cells", "1", "--seed", "3", "--workers", "1")
    assert code == 0, output
    assert "equal" in output
    assert "1 of " in output
    assert "Not refuted" in output
    rewritten(path, _identified)
    code, output, _ = command("verify", path)
    assert code == 1
    assert "rows/attacks.csv does not match SHA256SUMS" in output


def _of_another_panel(entries: dict[str, bytes]) -> None:
    panel = f'"custom ({verification.PANEL.version})"'.encode()
    assert panel in entries["pack.json"]
    entries["pack.json"] = entries["pack.json"].replace(panel, b'"custom (1999.1)"')


def _with_code(entries: dict[str, bytes]) -> None:
    entries["sources/0/mine.py"] = b"raise SystemExit(3)"


def _naming_code(entries: dict[str, bytes]) -> None:
    entries["pack.json"] = entries["pack.json"].replace(b'"TopK"', b'"somewhere.mine:TopK"')


def _of_own_data(entries: dict[str, bytes]) -> None:
    entries["pack.json"] = entries["pack.json"].replace(b'"digits"', b'"data/mine"')


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_of_another_panel, r"made with panel 'custom \(1999\.1\)'"),
        (_with_code, r"contains or names code.*sources/0/mine\.py.*--trust-code"),
        (_naming_code, r"would be executed: read somewhere\.mine:TopK.*--trust-code"),
        (_of_own_data, "data that it does not contain: give --data"),
    ],
)
def test_what_cannot_be_verified_here(path: Path, edit: Edit, said: str) -> None:
    rewritten(path, edit, sums=True)
    with pytest.raises(PackError, match=said):
        verify(read_pack(path), seed=0)
    assert math.isclose(escape_probability(10, 0, 5), 1)
