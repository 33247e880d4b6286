"""A pack that was tampered with is found out by the cells that decide its claims."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from packing import rewritten
from rich.console import Console

from leakfrontier.evaluate.conclude import checks as checks_module
from leakfrontier.evaluate.conclude.checks import conclusion
from leakfrontier.evaluate.foundations.rows import TABLES, Outcome, ProbeRow
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import run
from leakfrontier.evaluate.share import pack as pack_module
from leakfrontier.evaluate.share import verification
from leakfrontier.evaluate.share.archive import PackError
from leakfrontier.evaluate.share.claims import PackClaim
from leakfrontier.evaluate.share.judgement import Compared, Judgement, Stored
from leakfrontier.evaluate.share.pack import Pack, derived, pack_run, read_pack
from leakfrontier.evaluate.share.packed_rows import frame_of
from leakfrontier.evaluate.share.statement import statements_beside
from leakfrontier.evaluate.share.verification import verify

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
        "defenses": [
            "none",
            {"name": "TopK", "ratio": 0.9, "error_feedback": False},
            {"name": "DPSGD", "noise_multiplier": 9.0, "max_grad_norm": 1.0},
        ],
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


def test_the_cells_of_a_claim_are_run_again_and_equal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for module, name in ((verification, "environment"), (pack_module, "from_csv")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), asked))
    pack = read_pack(path)
    assert (pack.cells["status"] == "not needed").any()
    found = verify(pack, defenses=["TopK"], seed=0, workers=1)
    assert asked.count("environment") == 1
    assert asked.count("from_csv") == 1 + len(TABLES)  # and cells.csv
    assert found.decision == "confirmed"
    assert not found.tolerated
    names = [
        (one.claim.defense.partition("(")[0], one.claim.checkpoint) for one in found.judgements
    ]
    assert names == [("none", 0), ("TopK", 0), ("none", 2), ("TopK", 2)]
    for one in found.judgements:
        assert one.equal == len(one.claim.chosen) >= 3
        assert one.claim.trainings_chosen == 1
    again = {pack.cells["cell"][n] for one in found.judgements for n in one.claim.chosen}
    attacks = pack.results.attacks
    never = attacks[attacks["adversary_name"] == "DAGER"]
    assert never["outcome"].eq("not applicable").all()
    assert not again & {*never["cell"]}


@pytest.mark.usefixtures("nothing_is_run")
def test_without_a_place_nothing_is_claimed(path: Path) -> None:
    found = verify(read_pack(path), seed=0)
    assert (found.judgements, found.decision) == ((), "undecided")


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_run", lambda *_, **__: {})


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
    found = verify(read_pack(path), defenses=["TopK"], seed=0, workers=1)
    assert found.decision == "refuted"
    control, other, *_ = found.judgements
    assert (control.decision, other.decision) == ("refuted", "confirmed")
    assert "LinearLeakage against none" in control.reasons[0]
    assert "scores differ" in control.reasons[0]


def forged(path: Path, edit: Edit) -> None:
    """Alter a pack as one does who knows what must follow from the rows, and the checksums."""

    def complete(entries: dict[str, bytes]) -> None:
        edit(entries)
        meta = json.loads(entries["pack.json"])
        results = Pack("", meta, entries).results
        entries.update(derived(results))
        meta["conclusion"] = conclusion(results.checks())
        entries["pack.json"] = json.dumps(meta).encode()

    rewritten(path, complete, sums=True)


def table(entries: dict[str, bytes], name: str) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(entries[name]), dtype=str, keep_default_na=False)


def put(entries: dict[str, bytes], name: str, frame: pd.DataFrame) -> None:
    entries[name] = frame.to_csv(index=False, lineterminator="\n").encode()


def numbers_of(cells: pd.DataFrame, kind: str, family: str) -> dict[str, int]:
    """Return the cells of a defense by what they do."""
    found = {}
    for number, cell in cells[cells["kind"] == kind].iterrows():
        labels = json.loads(cell["labels"])
        if labels["family"] == family:
            what = [labels.get(name) for name in ("adversary", "knows_defense", "checkpoint")]
            found[json.dumps([*what, labels["seed"]])] = int(str(number))
    return found


def _more_accurate(entries: dict[str, bytes]) -> None:
    own = {*map(str, numbers_of(table(entries, "cells.csv"), "train", "DPSGD").values())}
    utility = table(entries, "rows/utility.csv")
    chosen = utility["number"].isin(own) & (utility["round"] != "0")
    utility.loc[chosen, "correct"] = utility.loc[chosen, "total"]
    put(entries, "rows/utility.csv", utility)


def _copied(entries: dict[str, bytes]) -> None:
    """Give TopK the attack rows of DPSGD."""
    cells = table(entries, "cells.csv")
    source, target = (numbers_of(cells, "attack", name) for name in ("DPSGD", "TopK"))
    pairs = {str(source[what]): str(target[what]) for what in target}
    for theirs, own in pairs.items():
        cells.loc[int(own), "status"] = cells.loc[int(theirs), "status"]
    put(entries, "cells.csv", cells)
    for name in ("attacks", "scores", "renderings"):
        rows = table(entries, f"rows/{name}.csv")
        taken = rows[rows["number"].isin(pairs)]
        taken = taken.assign(number=taken["number"].map(pairs))
        kept = rows[~rows["number"].isin(pairs.values())]
        put(entries, f"rows/{name}.csv", pd.concat([kept, taken]))


def _of_another_torch(entries: dict[str, bytes]) -> None:
    meta = json.loads(entries["pack.json"])
    meta["versions"]["torch"] = "1.0"
    entries["pack.json"] = json.dumps(meta).encode()


@pytest.mark.parametrize("other", [False, True], ids=["same versions", "other versions"])
@pytest.mark.parametrize(
    ("edit", "defense", "reason"),
    [
        (_more_accurate, "DPSGD", "utility differ|the accuracy is"),
        (_copied, "TopK", "attacks|identified"),
    ],
)
def test_an_altered_claim_is_refuted(
    path: Path, edit: Edit, defense: str, reason: str, other: bool
) -> None:
    def all_of_it(entries: dict[str, bytes]) -> None:
        edit(entries)
        if other:
            _of_another_torch(entries)

    forged(path, all_of_it)
    found = verify(read_pack(path), defenses=[defense], seed=0, workers=1)
    assert found.problems == ()
    assert bool(found.differences) == other
    decisions = {one.claim.defense.partition("(")[0]: one for one in found.judgements}
    assert decisions["none"].decision == "confirmed"
    wrong = decisions[defense]
    # three uploads are too few to refute copied rows by statistics
    expected = "undecided" if other and edit is _copied else "refuted"
    assert wrong.decision == expected, wrong.reasons
    assert re.search(reason, wrong.reasons[0])
    assert found.decision == expected


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
def test_the_conclusion_and_the_notes_are_derived_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "probe", lambda *_, **__: ["Mine changes nothing"])

    def edit(entries: dict[str, bytes]) -> None:
        meta = json.loads(entries["pack.json"])
        assert meta["conclusion"] != "Evaluation: YES"
        entries["pack.json"] = json.dumps({**meta, "conclusion": "Evaluation: YES"}).encode()

    first, second = problems_of(path, edit)
    assert first.startswith("its conclusion does not follow from its rows, which give")
    assert second == "its notes lack a warning: Mine changes nothing"


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


def _without_probes(entries: dict[str, bytes]) -> None:
    entries["rows/probes.csv"] = entries["rows/probes.csv"].splitlines(keepends=True)[0]


def test_deleted_probes_are_found(path: Path) -> None:
    forged(path, _without_probes)
    found = verify(read_pack(path), defenses=["TopK"], seed=0, workers=1)
    assert found.decision == "refuted"
    assert any("probes differ" in reason for one in found.judgements for reason in one.reasons)


def test_a_pack_that_says_its_code_had_no_probes_confirms_no_failed_check(path: Path) -> None:
    """The rows that a new run adds decide."""
    forged(path, _without_probes)
    pack = read_pack(path)
    places = pack.results.cells.query("kind == 'replay' and family == 'TopK'")
    number = int(places.index[0])
    claim = PackClaim(str(places["scenario"].iloc[0]), 0, str(places["defense"].iloc[0]))
    judgement = Judgement(claim, "confirmed", 1)
    rows = {name: pack.rows(name).drop(columns="cell").iloc[:0] for name in TABLES}
    labels = (claim.scenario, claim.defense, "", 0)
    given = Stored("replay", "replay", *labels, rows=rows, digest="", same_code=False)
    for decoded, decision in ((0.1, "confirmed"), (1.0, "undecided")):
        probe = ProbeRow(decoded, 0.1, "a factor", needs_history=False, remaining_noise=1.0)
        new = rows | {"probes": frame_of(Outcome(probes=(probe,)), "probes")}
        spared = {(claim.scenario, claim.defense)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks_module, "_spared", lambda _, found=spared: found)
            (found,) = verification._with_new_tables(
                [judgement], pack, {number: Compared(given, new)}
            )
        assert found.decision == decision, found.reasons


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


def test_the_command_signs_what_it_finds(path: Path, command: Command) -> None:
    options = ("--seed", "3", "--workers", "1", "--sign", path.with_name("my.key"))
    code, output, _ = command("verify", path, "--defense", "TopK", *options)
    assert code == 0, output
    assert "New private key" in output
    assert "confirmed TopK(ratio=0.9, error_feedback=False)" in output
    assert output.splitlines()[-2] == "Confirmed"
    pack = read_pack(path)
    (statement,), refused = statements_beside(path, pack.digest)
    assert refused == []
    label = "TopK(ratio=0.9, error_feedback=False)"
    assert statement.on("digits/mlp(width=16)", 0, label) == "confirmed"
    board = path.with_name("board.html")
    code, output, _ = command("leaderboard", path, "--out", board, "--json")
    verified = {row["defense"]: row["verified"] for row in json.loads(output)}
    assert (verified.pop("none"), verified.pop(label), *verified.values()) == (1, 1, 0)
    assert "verified by 1" in board.read_text()
    other = "ab" * 32
    code, output, errors = command("leaderboard", path, "--out", board, "--json", "--key", other)
    assert not any(row["verified"] for row in json.loads(output))
    assert "is not among --key" in errors
    assert command("leaderboard", path, "--out", board, "--key", "mine")[0] != 0

    forged(path, _more_accurate)  # other bytes: the statement does not count any more
    code, output, errors = command("leaderboard", path, "--out", board, "--json")
    assert not any(row["verified"] for row in json.loads(output))
    assert "on another pack, or on other bytes of this pack" in " ".join(errors.split())
    code, output, _ = command("verify", path, "--defense", "DPSGD", *options)
    assert code == 1
    assert "New private key" not in output
    assert "Refuted" in output
    code, output, _ = command("leaderboard", path, "--out", board, "--json")
    refuted = {row["defense"].partition("(")[0] for row in json.loads(output) if row["refuted_by"]}
    assert refuted == {"DPSGD"}
    assert "refuted by 1" in board.read_text()

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
