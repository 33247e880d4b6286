"""A pack holds a run: nothing is lost, nothing that it should not hold is in it, nothing is run."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from packing import make_pack, rewritten
from rich.console import Console

from leakfrontier.evaluate.conclude.analysis import victim_matrix
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.share.archive import AlteredError, PackError
from leakfrontier.evaluate.share.pack import pack_run, portable, read_pack
from leakfrontier.evaluate.share.packed_rows import outcomes_of, rows_digest

DEFENSE = """
import beside

@dataclass
class Mine(Defense):
    step: float = beside.STEP

    def on_update(self, update, rng):
        return {name: (value / self.step).round() * self.step for name, value in update.items()}
"""


@pytest.fixture
def ran(tiny: dict[str, Any], tmp_path: Path, user_file: Callable[..., Path]) -> Path:
    """Return the folder of a run with a defense of the user's own."""
    user_file("STEP = 0.01\n", name="beside", header="")
    mine = user_file(DEFENSE)
    tiny |= {"defenses": ["none", f"{mine}:Mine"], "adversaries": ["PriorGuess", "LinearLeakage"]}
    run(load_config(tiny), tmp_path / "run", workers=1, console=Console(quiet=True))
    return tmp_path / "run"


def test_a_run_comes_back(ran: Path, tmp_path: Path) -> None:
    content = pack_run(ran)
    assert pack_run(ran) == content
    (tmp_path / "mine.zip").write_bytes(content)
    pack = read_pack(tmp_path / "mine.zip")
    assert str(tmp_path) not in str(pack.meta)
    assert {*pack.sources} == {"sources/0/mine.py", "sources/0/beside.py"}
    assert pack.meta["config"]["defenses"][1]["name"] == "sources/0/mine.py:Mine"
    assert not any(name.endswith((".safetensors", ".sqlite")) for name in pack.entries)


def test_a_protocol_of_the_user_s_own_is_packed(
    tiny: dict[str, Any], tmp_path: Path, user_file: Callable[..., Path]
) -> None:
    header = "from dataclasses import dataclass\nfrom leakfrontier.adversaries import FedAvg\n"
    mine = user_file("@dataclass(frozen=True)\nclass Mine(FedAvg):\n    ...\n", header=header)
    tiny["scenarios"] = [{"dataset": "digits", "protocol": {"name": f"{mine}:Mine", "lr": 0.1}}]
    moved, files = portable(load_config(tiny))
    assert moved["scenarios"][0]["protocol"]["name"] == "sources/0/mine.py:Mine"
    assert files == {"sources/0/mine.py": mine.read_bytes()}
    assert str(tmp_path) not in str(moved)


def test_data_and_models_by_a_relative_path_have_no_folder(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my/pictures/train", "my/model", "my/tokens"):
        Path(name).mkdir(parents=True)
    model = {"name": "hf", "id": "my/model"}
    tiny["scenarios"] = [{"dataset": "my/pictures", "model": model, "tokenizer": "my/tokens"}]
    config = load_config(tiny)
    assert "my/" not in config.scenarios[0].name  # a label, and what draws depend on
    moved, _ = portable(config)
    assert moved["scenarios"][0]["dataset"] == "data/pictures"
    assert moved["scenarios"][0]["model"]["options"]["id"] == "data/model"
    assert moved["scenarios"][0]["tokenizer"] == "data/tokens"


def test_packs_of_older_versions_open_with_no_probes() -> None:
    pack = read_pack(Path(__file__).parents[3] / "benchmarks/standard/cnn.zip")
    assert "rows/probes.csv" not in pack.entries
    assert pack.results.probes.empty
    (check,) = (one for one in pack.results.checks() if one.name == "invertibility")
    assert check.verdict == "n/a"


def test_an_edited_file_is_not_packed(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("STEP = 0.02\n")
    with pytest.raises(PackError, match="the code has changed since the rows"):
        pack_run(ran)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Conclusions, Path]:
    """Return results and their pack, which tests leave as it is."""
    options = {"cascade": True, "active": True, "guaranteed": True, "candidates": True}
    return make_pack(tmp_path_factory.mktemp("made-up"), **options)


@pytest.fixture
def copied(made_up: tuple[Conclusions, Path], tmp_path: Path) -> Path:
    """Return a pack that tests may spoil."""
    return Path(shutil.copy(made_up[1], tmp_path / "spoiled.zip"))


def test_only_runs_are_packed(made_up: tuple[Conclusions, Path]) -> None:
    with pytest.raises(PackError, match="not a folder of `leakfrontier run`"):
        pack_run(made_up[1].parent)


def test_conclusions_are_those_of_the_run(made_up: tuple[Conclusions, Path]) -> None:
    results, path = made_up
    pack = read_pack(path)
    for table in ("rates", "worst_case", "final_utility", "claims"):
        own, given = (getattr(one, table)() for one in (pack.results, results))
        pd.testing.assert_frame_equal(own, given, rtol=1e-5, check_dtype=False, check_like=True)
    assert pack.results.checks() == results.checks()
    assert pack.meta["conclusion"].startswith("Evaluation: ")
    verdicts = pd.read_csv(io.BytesIO(pack.entries["tables/frontier.csv"]))["verdict"]
    expected = pd.concat([frontier.points for frontier in results.frontiers()])["verdict"]
    assert verdicts.tolist() == expected.tolist()
    assert path.stat().st_size < 1e6


def test_digests_are_of_all_digits(made_up: tuple[Conclusions, Path]) -> None:
    results, path = made_up
    cells = read_pack(path).cells.set_index("cell")["digest"]
    for key, outcome in outcomes_of(results).items():
        assert cells[key] == rows_digest(outcome)
    assert cells.nunique() > 10


def test_the_gallery_keeps_few_pictures_and_no_more(made_up: tuple[Conclusions, Path]) -> None:
    results, path = made_up
    kept = read_pack(path).results.renderings
    assert 0 < len(kept) < len(results.renderings)
    assert kept.groupby(["scenario", "checkpoint", "defense"]).size().eq(4).all()
    assert not kept["baseline"].any()
    every = {*results.renderings["truth"], *results.renderings["guess"]}
    assert {*kept["truth"], *kept["guess"]} <= every
    best = pd.concat(
        [
            victim_matrix(results, frontier.scenario, 0)["none"].rename(frontier.scenario)
            for frontier in results.frontiers()
        ],
        axis=1,
    )
    shown = kept[kept["control"]].merge(results.attacks, on=["cell", "observation", "victim"])
    for row in shown.itertuples():  # the best guess of each victim
        expected = best.loc[(row.seed_x, row.observation, row.victim), row.scenario_x]
        assert bool(row.identified) == bool(expected)


def _edited(entries: dict[str, bytes]) -> None:
    entries["rows/attacks.csv"] = entries["rows/attacks.csv"].replace(b"True", b"False", 1)


def test_alterations_are_seen_at_once(copied: Path) -> None:
    rewritten(copied, _edited)
    with pytest.raises(AlteredError, match="the pack was altered"):
        read_pack(copied)


def _garbled(entries: dict[str, bytes]) -> None:
    entries["rows/utility.csv"] = entries["rows/utility.csv"].replace(b"correct", b"wrong")


def _untyped(entries: dict[str, bytes]) -> None:
    entries["rows/attacks.csv"] = entries["rows/attacks.csv"].replace(b"True", b"perhaps")


def _no_json(entries: dict[str, bytes]) -> None:
    entries["pack.json"] = b"{"


def _no_panel(entries: dict[str, bytes]) -> None:
    entries["pack.json"] = b'{"format": 1}'


@pytest.mark.parametrize("edit", [_garbled, _untyped, _no_json, _no_panel])
def test_rows_that_are_none(copied: Path, edit: Callable[..., None]) -> None:
    rewritten(copied, edit, sums=True)
    with pytest.raises(PackError, match=r"cannot be read|lacks"):
        read_pack(copied)


def test_results_are_typed_like_those_of_a_folder(made_up: tuple[Conclusions, Path]) -> None:
    results, path = made_up
    pack: Conclusions = read_pack(path).results
    for name in ("attacks", "utility", "guarantees", "replays", "scores"):
        own, given = getattr(pack, name), getattr(results, name)
        assert own.dtypes.to_dict() == given.dtypes.to_dict(), name
