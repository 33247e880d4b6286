"""Broken and hostile files from others: one line that names the mistake, and nothing else happens.

To add a case, add a line to `CASES`: what is done to a sound file, the command that reads it, and
what must be said.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from strangers import (
    Edit,
    in_capture,
    in_labels,
    in_meta,
    in_pack,
    in_store,
    no_hang,
    with_value,
    without_workers,
    write_files,
)

Command = Callable[..., tuple[int, str, str]]

ATTACK = "attack capture --out out --adversary PriorGuess --workers 1"
VERIFY = "verify run.zip --seeds 0"
BOARD = "leaderboard run.zip --out board.html"
PICTURE = "report run.zip --picture picture.svg"
REPORT, PACK = "report run", "pack run --out other.zip"
RUN = "run given.yaml --out out --workers 1"

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 200 + "]" * 200
HUGE = 10**9
ESC = "\x1b[2J\x1b]0;gone\x07"


def about(**changes: Any) -> Edit:  # noqa: ANN401 - whatever a file may hold
    return in_capture(lambda found: {**found, **changes})


def local(**options: float) -> Edit:
    return about(protocol={"name": "FedAvg", **options})


def meta(*place: str | int, value: object) -> Edit:
    return in_meta(lambda found: with_value(found, place, value))


def label(name: str, value: object) -> Edit:
    return in_labels(lambda found: {**found, name: value})


def entry(name: str, old: str, new: str) -> Edit:
    """Return an edit of a pack's file, by a regular expression."""

    def change(entries: dict[str, bytes]) -> None:
        text, count = re.subn(old, new, entries[name].decode(), flags=re.MULTILINE)
        assert count, f"{old} is not in {name}"
        entries[name] = text.encode()

    return in_pack(change)


def config(text: str) -> Edit:
    return lambda root: (root / "given.yaml").write_text(text)


def replaced(name: str, content: bytes) -> Edit:
    return lambda root: (root / name).write_bytes(content)


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(root: Path) -> None:
        path = root / "capture" / file
        found = load_file(path)
        change(found)
        save_file(found, path)

    return edit


def pipe(name: str) -> Edit:
    def edit(root: Path) -> None:
        (root / name).unlink()
        os.mkfifo(root / name)

    return edit


def laughs(merge: str = "") -> str:
    """Return few lines of YAML that stand for a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    if merge:
        lines = ["a0: &a0 {k: x}"]
    for level in range(1, 10):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        body = f"{{<<: [{aliases}]}}" if merge else f"[{aliases}]"
        lines.append(f"a{level}: &a{level} {body}")
    return "\n".join(lines)


def hot_journal(root: Path) -> None:
    """Leave a journal that SQLite would play back."""
    header = bytes.fromhex("d9d505f920a163d7") + bytes(3) + b"\1"
    (root / "run/results.sqlite-journal").write_bytes(header.ljust(512, b"\0"))


def grid(found: dict[str, Any]) -> dict[str, Any]:
    lists = {f"option{number}": list(range(10)) for number in range(9)}
    return with_value(found, ("config", "defenses", 0), {"name": "TopK", **lists})


CASES: dict[str, tuple[str, Edit, str]] = {
    # capture.json
    "capture: deep JSON": (ATTACK, in_capture(lambda _: DEEP), "nested too deeply"),
    "capture: nested JSON": (ATTACK, in_capture(lambda _: NESTED), "nested too deeply"),
    "capture: a deep option": (
        ATTACK,
        about(model={"name": "mlp", "width": json.loads(NESTED)}),
        "nested too deeply",
    ),
    "capture: no JSON": (ATTACK, in_capture(lambda _: "{'a': 1}"), "cannot be read as JSON"),
    "capture: a list": (ATTACK, in_capture(lambda _: "[]"), "must hold an object"),
    "capture: binary": (
        ATTACK,
        replaced("capture/capture.json", bytes(range(128, 256))),
        "cannot be read as JSON",
    ),
    "capture: a number of many digits": (
        ATTACK,
        in_capture(lambda _: '{"batch_size": ' + "9" * 10_000 + "}"),
        "cannot be read as JSON",
    ),
    "capture: a width beyond all memory": (
        ATTACK,
        about(model={"name": "mlp", "width": HUGE}),
        "more than 1,073,741,824 parameters",
    ),
    "capture: a width beyond all tensors": (
        ATTACK,
        about(model={"name": "mlp", "width": 10**30}),
        "more than 1,073,741,824 parameters",
    ),
    "capture: a width of text": (
        ATTACK,
        about(model={"name": "mlp", "width": "wide"}),
        "mlp cannot be built with width=wide",
    ),
    "capture: a negative width": (
        ATTACK,
        about(model={"name": "mlp", "width": -1}),
        "width must be at least 1",
    ),
    "capture: a huge shape": (
        ATTACK,
        about(space={"kind": "images", "shape": [1, HUGE, HUGE], "classes": 10}),
        "no example and no vocabulary has more than",
    ),
    "capture: a huge vocabulary": (
        ATTACK,
        about(space={"kind": "tokens", "shape": [4], "classes": 2, "vocabulary": 10**12}),
        "no example and no vocabulary has more than",
    ),
    "capture: many classes": (
        ATTACK,
        about(space={"kind": "images", "shape": [1, 8, 8], "classes": 10**12}),
        "no example and no vocabulary has more than",
    ),
    "capture: a space of text": (ATTACK, about(space="images"), "space"),
    "capture: a shape of texts": (
        ATTACK,
        about(space={"kind": "images", "shape": ["a", "b"], "classes": 10}),
        "must be whole numbers from 1",
    ),
    "capture: a std of texts": (
        ATTACK,
        about(space={"kind": "images", "shape": [1, 8, 8], "classes": 10, "std": ["a"]}),
        "std",
    ),
    "capture: many examples": (ATTACK, about(batch_size=10**12), "batch_size"),
    "capture: an endless round": (ATTACK, about(round=10**400), "1,329 bits is too large"),
    "capture: a round of no training": (ATTACK, about(round=10**12), "must be at most 1000000000"),
    "capture: an endless mean": (
        ATTACK,
        about(space={"kind": "images", "shape": [1, 8, 8], "classes": 10, "mean": [10**400]}),
        "is too large",
    ),
    "capture: endless epochs": (ATTACK, local(epochs=10**12), "epochs must be at most 1,048,576"),
    "capture: half an epoch": (ATTACK, local(epochs=1.5), "epochs must be a whole number"),
    "capture: many epochs": (ATTACK, local(epochs=10**6), "1,000,000 local steps"),
    "capture: endless steps": (ATTACK, local(steps=10**12), "steps must be at most"),
    "capture: many steps": (ATTACK, local(steps=10**6), "1,000,000 local steps"),
    "capture: endless clients": (ATTACK, local(clients=10**12), "clients must be at most"),
    "capture: many clients": (ATTACK, local(clients=10**6), "1,000,000 local steps"),
    "capture: an endless batch": (ATTACK, local(batch_size=10**12), "batch_size must be at most"),
    "capture: labels of text": (ATTACK, about(labels=["three"]), "labels"),
    "capture: labels as an object": (ATTACK, about(labels={"a": 3}), "labels"),
    "capture: a label of no class": (ATTACK, about(labels=[10**6]), "labels must be from 0 to 9"),
    "capture: a negative label": (ATTACK, about(labels=[-1]), "labels must be from 0 to 9"),
    "capture: a client of numbers": (ATTACK, about(client=3), "client"),
    "capture: escape sequences": (ATTACK, about(dataset=ESC), r"\x1b[2J"),
    "capture: a protocol of code": (
        ATTACK,
        about(protocol="os:getcwd"),
        "executed only with --trust-code",
    ),
    "capture: truth as a pipe": (ATTACK, pipe("capture/truth.safetensors"), "truth.safetensors"),
    "capture: an update of integers": (
        ATTACK,
        tensors("update.safetensors", lambda t: t.update({"1.bias": torch.zeros(9).int()})),
        "'1.bias' of shape (9,)",
    ),
    "capture: targets of many axes": (
        ATTACK,
        tensors("truth.safetensors", lambda t: t.update(targets=torch.zeros(1, 2, 3))),
        "targets",
    ),
    "capture: inputs of another type": (
        ATTACK,
        tensors("truth.safetensors", lambda t: t.update(inputs=torch.zeros(1, 3, 8, 8))),
        "must hold inputs of shape (1, 1, 8, 8)",
    ),
    # pack.json
    "pack: deep JSON": (VERIFY, in_meta(lambda _: DEEP), "nested too deeply"),
    "pack: a deep panel": (
        VERIFY,
        meta("panel", value=json.loads(NESTED)),
        "nested too deeply",
    ),
    "pack: deep notes": (BOARD, meta("notes", value=json.loads(NESTED)), "nested too deeply"),
    "pack: a list": (VERIFY, in_meta(lambda _: "[]"), "must be an object, got a list"),
    "pack: a number": (VERIFY, in_meta(lambda _: "3"), "must be an object"),
    "pack: config as a list": (VERIFY, meta("config", value=[]), "'config' must be an object"),
    "pack: versions as a list": (VERIFY, meta("versions", value=[]), "'versions' must be an"),
    "pack: versions of numbers": (
        VERIFY,
        meta("versions", value={"torch": 2}),
        "'versions' must be an object of texts",
    ),
    "pack: machine as text": (VERIFY, meta("machine", value="mine"), "'machine' must be an object"),
    "pack: notes as text": (
        BOARD,
        meta("notes", value="a note"),
        "'notes' must be a list of texts",
    ),
    "pack: notes of numbers": (BOARD, meta("notes", value=[1]), "'notes' must be a list of texts"),
    "pack: a panel of numbers": (VERIFY, meta("panel", value=3), "'panel' must be a text"),
    "pack: code as a list": (VERIFY, meta("code", value=[]), "'code' must be a text"),
    "pack: a format of text": (VERIFY, meta("format", value="one"), "has format one"),
    "pack: escape sequences": (VERIFY, meta("panel", value=ESC), r"\x1b[2J"),
    "pack: scenarios as text": (
        VERIFY,
        meta("config", "scenarios", value="all"),
        "scenarios: must be a list",
    ),
    "pack: a scenario as a list": (
        VERIFY,
        meta("config", "scenarios", 0, value=[]),
        "scenarios.0",
    ),
    "pack: a model as a list": (
        VERIFY,
        meta("config", "scenarios", 0, "model", value=[]),
        "expected a name, or a mapping",
    ),
    "pack: an unknown dataset": (
        VERIFY,
        meta("config", "scenarios", 0, "dataset", value="nothing"),
        "dataset must be one of",
    ),
    "pack: a protocol of code": (
        VERIFY,
        meta("config", "scenarios", 0, "protocol", "name", value="os:getcwd"),
        "--trust-code",
    ),
    "pack: many seeds": (VERIFY, meta("config", "seeds", value=10_000), "20,000 trainings"),
    "pack: many uploads": (VERIFY, meta("config", "observations", value=HUGE), "uploads"),
    "pack: a grid of a billion": (VERIFY, in_meta(grid), "make more than 10,000 methods"),
    "pack: another configuration": (
        VERIFY,
        meta("config", "adversaries", value=["PriorGuess"]),
        "its configuration asks for",
    ),
    **{
        f"pack: endless {place[-1]}": (
            VERIFY,
            meta("config", "scenarios", 0, *place, value=10**12),
            f"{place[-1]}",
        )
        for place in (
            ("batch_size",),
            ("candidates",),
            ("length",),
            ("training", "rounds"),
            ("training", "clients"),
            ("protocol", "options", "epochs"),
        )
    },
    # Tables of a pack
    "pack: deep labels": (
        BOARD,
        entry("cells.csv", r'"\{.*\}"$', f'"{{""a"": {NESTED}}}"'),
        "nested too deeply",
    ),
    "pack: labels as a list": (
        BOARD,
        entry("cells.csv", r'"\{.*\}"$', '"[]"'),
        "labels must be an object",
    ),
    "pack: no labels": (BOARD, entry("cells.csv", r'"\{.*\}"$', '"{}"'), "has no label 'scenario'"),
    "pack: a defense of numbers": (
        BOARD,
        entry("cells.csv", r'""defense"": ""none""', '""defense"": 3'),
        "the label 'defense' must be a text, got 3",
    ),
    "pack: options as text": (
        BOARD,
        entry("cells.csv", r'""defense_options"": \{\}', '""defense_options"": ""x""'),
        "'defense_options' must be an object",
    ),
    "pack: an unknown threat": (
        BOARD,
        entry("cells.csv", r'""passive""', '""harmless""'),
        "'threat' must be one of passive",
    ),
    "pack: an unknown status": (BOARD, entry("cells.csv", ",ok,", ",fine,"), "status of a cell"),
    "pack: an unknown kind": (BOARD, entry("cells.csv", ",train,", ",test,"), "kind of a cell"),
    "pack: seconds of text": (BOARD, entry("cells.csv", r"ok,,,[\d.]+", "ok,,,long"), "long"),
    "pack: more correct than there are": (
        BOARD,
        entry("rows/utility.csv", r"^(\d+,\d+),\d+,", r"\1,9999,"),
        "correct must be at most total",
    ),
    "pack: of no predictions": (
        BOARD,
        entry("rows/utility.csv", r"^(\d+,\d+),\d+,\d+,", r"\1,0,0,"),
        "total must be a whole number from 1, got 0",
    ),
    "pack: a negative number correct": (
        BOARD,
        entry("rows/utility.csv", r"^(\d+,\d+),\d+,", r"\1,-1,"),
        "correct must be a whole number from 0, got -1",
    ),
    "pack: rows of no cell": (
        BOARD,
        entry("rows/utility.csv", r"^\d+,", "999,"),
        "rows that cannot be read",
    ),
    "pack: an unknown medium": (
        BOARD,
        entry("rows/renderings.csv", "image/png", "text/html"),
        "media must be one of image/png",
    ),
    "pack: pictures as tokens": (
        BOARD,
        entry("rows/renderings.csv", "image/png", "tokens"),
        "rows that cannot be read",
    ),
    "pack: a picture that is not there": (
        PICTURE,
        entry("rows/renderings.csv", r"gallery/\w+", "gallery/none"),
        "rows that cannot be read",
    ),
    "pack: an unknown outcome": (
        BOARD,
        entry("rows/attacks.csv", ",scored,", ",won,"),
        "outcome must be one of scored",
    ),
    "pack: an upload of text": (
        BOARD,
        entry("rows/attacks.csv", r"^(\d+),\d+,", r"\1,first,"),
        "rows that cannot be read",
    ),
    "pack: an endless number": (
        BOARD,
        entry("rows/attacks.csv", r"^(\d+),\d+,", rf"\1,{'9' * 400},"),
        "rows that cannot be read",
    ),
    "pack: a victim twice": (
        BOARD,
        entry("rows/attacks.csv", r"^(\d+),\d+,\d+,", r"\1,0,0,"),
        "two rows have the same cell",
    ),
    "pack: other columns": (
        BOARD,
        entry("rows/scores.csv", "^number,", "numbers,"),
        "columns must be number",
    ),
    "pack: an empty table": (
        BOARD,
        in_pack(lambda entries: entries.update({"rows/scores.csv": b""})),
        "rows that cannot be read",
    ),
    "pack: a binary table": (
        BOARD,
        in_pack(lambda entries: entries.update({"rows/scores.csv": bytes(range(256))})),
        "rows that cannot be read",
    ),
    "pack: no archive": (BOARD, replaced("run.zip", b"PK" + bytes(100)), "not a pack, or damaged"),
    "pack: a pipe": (BOARD, pipe("run.zip"), "is not a file"),
    "pack: binary checksums": (
        BOARD,
        lambda root: _with_sums(root / "run.zip", bytes(range(128, 256))),
        "does not match SHA256SUMS",
    ),
    # results.sqlite
    "results: a recursive view": (
        REPORT,
        in_store(
            "DROP TABLE attacks",
            "CREATE VIEW attacks AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT i AS cell, i AS observation FROM n",
        ),
        "has the view 'attacks', which no run makes",
    ),
    "results: a view of another name": (
        PACK,
        in_store("CREATE VIEW more AS SELECT 1"),
        "has the view 'more', which no run makes",
    ),
    "results: a trigger": (
        "run given.yaml --out run --workers 1",
        lambda root: (
            config(json.dumps({"scenarios": ["digits/mlp"], "defenses": ["none"]}))(root),
            in_store(
                "CREATE TRIGGER gone AFTER INSERT ON plan BEGIN DELETE FROM attacks; END",
            )(root),
        ),
        "has the trigger 'gone', which no run makes",
    ),
    "results: a computed column": (
        REPORT,
        in_store(
            "DROP TABLE scores", "CREATE TABLE scores (cell, value AS (zeroblob(1000000000)))"
        ),
        "has the table 'scores', which no run makes",
    ),
    "results: a virtual table": (
        REPORT,
        in_store("CREATE VIRTUAL TABLE found USING fts5(text)"),
        "which no run makes",
    ),
    "results: a computed index": (
        REPORT,
        in_store("CREATE INDEX slow ON plan (hex(cell))"),
        "has the index 'slow', which no run makes",
    ),
    "results: a hot journal to report": (REPORT, hot_journal, "interrupted while writing"),
    "results: a hot journal to pack": (PACK, hot_journal, "interrupted while writing"),
    "results: a write-ahead log": (
        PACK,
        replaced("run/results.sqlite-wal", b"x"),
        "results.sqlite-wal lies beside it, which no run makes",
    ),
    "results: no table of outcomes": (REPORT, in_store("DROP TABLE outcomes"), "outcomes"),
    "results: other columns": (
        REPORT,
        in_store("ALTER TABLE outcomes RENAME COLUMN status TO state"),
        "rows that cannot be read",
    ),
    "results: deep notes": (
        REPORT,
        in_store(f"UPDATE meta SET value = '{DEEP}' WHERE name = 'notes'"),
        "nested too deeply",
    ),
    "results: notes of objects": (
        REPORT,
        in_store("""UPDATE meta SET value = '[{"a": 1}]' WHERE name = 'notes'"""),
        "'notes' must be a list of texts",
    ),
    "results: a configuration as a list": (
        REPORT,
        in_store("UPDATE meta SET value = '[]' WHERE name = 'config'"),
        "'config' must be an object",
    ),
    "results: a panel of numbers": (
        PACK,
        in_store("UPDATE meta SET value = '3' WHERE name = 'panel'"),
        "'panel' must be a text",
    ),
    "results: meta of bytes": (
        REPORT,
        in_store("UPDATE meta SET value = x'ff00ff'"),
        "rows that cannot be read",
    ),
    "results: no meta": (REPORT, in_store("UPDATE meta SET value = NULL"), "cannot be read"),
    "results: deep labels": (REPORT, in_labels(lambda _: DEEP), "nested too deeply"),
    "results: labels as a list": (REPORT, in_labels(lambda _: "[1]"), "labels must be an object"),
    "results: labels of nothing": (
        REPORT,
        in_store("UPDATE plan SET labels = NULL"),
        "rows that cannot be read",
    ),
    "results: a defense of lists": (REPORT, label("defense", []), "'defense' must be a text"),
    "results: a seed of text": (REPORT, label("seed", "one"), "'seed' must be a whole number"),
    "results: a strength of text": (REPORT, label("strength", "strong"), "'strength' must be a"),
    "results: an endless checkpoint": (REPORT, label("checkpoint", 10**400), "cannot be read"),
    "results: options as a list": (REPORT, label("adversary_options", [1]), "must be an object"),
    "results: an unknown threat": (REPORT, label("threat", ESC), r"\x1b[2J"),
    "results: a flag of text": (REPORT, label("baseline", "yes"), "must be true or false"),
    "results: more correct than there are": (
        REPORT,
        in_store("UPDATE utility SET correct = total + 1"),
        "correct must be at most total",
    ),
    "results: of no predictions": (
        REPORT,
        in_store("UPDATE utility SET correct = 0, total = 0"),
        "total must be a whole number from 1, got 0",
    ),
    "results: accuracy of text": (
        REPORT,
        in_store("UPDATE utility SET correct = 'all'"),
        "correct",
    ),
    "results: accuracy of bytes": (REPORT, in_store("UPDATE utility SET total = x'00'"), "total"),
    "results: half a prediction": (REPORT, in_store("UPDATE utility SET total = 1.5"), "total"),
    "results: a loss of text": (REPORT, in_store("UPDATE utility SET loss = 'low'"), "loss"),
    "results: an upload of nothing": (
        REPORT,
        in_store("UPDATE attacks SET observation = NULL"),
        "observation must be a whole number from 0",
    ),
    "results: a flag of numbers": (REPORT, in_store("UPDATE attacks SET identified = 7"), "cannot"),
    "results: an unknown outcome": (
        REPORT,
        in_store("UPDATE attacks SET outcome = 'won'"),
        "outcome must be one of scored",
    ),
    "results: a score of text": (REPORT, in_store("UPDATE scores SET value = 'good'"), "good"),
    "results: an unknown medium": (
        REPORT,
        in_store("UPDATE renderings SET media = 'text/html'"),
        "media must be one of image/png",
    ),
    "results: pictures of text": (
        REPORT,
        in_store("UPDATE renderings SET guess = 'a picture'"),
        "guess must be bytes",
    ),
    "results: pictures as tokens": (
        REPORT,
        in_store("UPDATE renderings SET media = 'tokens'"),
        "rows that cannot be read",
    ),
    "results: an unknown status": (
        REPORT,
        in_store("UPDATE outcomes SET status = 'fine'"),
        "status of a cell must be one of ok",
    ),
    "results: seconds of text": (
        REPORT,
        in_store("UPDATE outcomes SET busy = 'long'"),
        "busy of a",
    ),
    "results: an unknown kind": (
        REPORT,
        in_store("UPDATE plan SET kind = 'test'"),
        "kind of a cell must be one of",
    ),
    "results: a pipe": (REPORT, pipe("run/results.sqlite"), "has no results.sqlite"),
    "results: cut short": (
        REPORT,
        lambda root: os.truncate(root / "run/results.sqlite", 8192),
        "cannot be used as a results file",
    ),
    "results: a protocol of code": (
        PACK,
        in_store(
            "UPDATE meta SET value = json_set(value, '$.scenarios[0].protocol.name', 'os:getcwd')"
            " WHERE name = 'config'"
        ),
        "executed only with --trust-code",
    ),
    "results: many uploads": (
        PACK,
        in_store(
            f"UPDATE meta SET value = json_set(value, '$.observations', {HUGE})"
            " WHERE name = 'config'"
        ),
        "1,000,000,000 uploads",
    ),
    # Configurations
    "YAML: a billion laughs": (RUN, config(laughs()), "more than 100,000 values"),
    "YAML: a billion merged": (RUN, config(laughs("merged")), "more than 100,000 values"),
    "YAML: itself": (RUN, config("scenarios: &a [*a]\ndefenses: [none]"), "refers to its own"),
    "YAML: nested": (RUN, config(f"scenarios: {NESTED}"), "nested too deeply"),
    "YAML: deep": (RUN, config(f"scenarios: {DEEP}"), "nested too deeply"),
    "YAML: a grid of a billion": (
        RUN,
        config(
            json.dumps(
                {
                    "scenarios": ["digits/mlp"],
                    "defenses": [{"name": "TopK", **{f"o{n}": [*range(10)] for n in range(9)}}],
                }
            )
        ),
        "make more than 10,000 methods",
    ),
    "YAML: a width beyond all memory": (
        RUN,
        config(
            "defenses: [none]\n"
            "scenarios: [{dataset: digits, model: {name: mlp, width: 1000000000}}]"
        ),
        "more than 1,073,741,824 parameters",
    ),
}


def _with_sums(path: Path, sums: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in {**entries, "SHA256SUMS": sums}.items():
            archive.writestr(name, body)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_files(root)
    return root


def _files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith("-journal")
    }


@pytest.mark.parametrize("case", CASES)
def test_a_foreign_file_is_refused(
    case: str, originals: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, edit, said = CASES[case]
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    monkeypatch.chdir(root)
    edit(root)
    before = _files(root)
    with without_workers(), no_hang():
        code, output, errors = command(*line.split(), columns=10_000)
    assert code in (1, 2), output + errors
    assert said in output + errors
    assert "Traceback" not in output + errors
    assert "\x1b" not in output + errors
    assert _files(root) | before == _files(root)  # nothing is lost, and what was there is as it was


def test_sound_files_are_read(
    originals: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the cases above could be refused for another reason."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for line in (ATTACK, VERIFY, BOARD, PICTURE, PACK):
        with without_workers():
            _, output, errors = command(*line.split())
        assert "Error" not in output + errors, line


def test_every_case_is_another_file_and_there_are_enough() -> None:
    assert len(CASES) >= 60
    assert len({(line, id(edit)) for line, edit, _ in CASES.values()}) == len(CASES)
