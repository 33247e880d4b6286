"""Texts from others are shown, and never obeyed."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.markup import escape
from rich.table import Table

from leakfrontier.evaluate.foundations.terminal import printable, terminal

HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x08\x9b31m\u202etxt.exe\u2028"
SHOWN = r"\x1b[2J\x1b]0;title\x07\r\x08\x9b31m\u202etxt.exe\u2028"


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("Grüße, 你好 🙂\n\tend") == "Grüße, 你好 🙂\n\tend"


@pytest.mark.parametrize("soft_wrap", [True, False])
def test_nothing_that_is_printed_is_obeyed(soft_wrap: bool) -> None:
    file = io.StringIO()
    console = terminal(file=file, width=200, soft_wrap=soft_wrap)
    table = Table(title=escape(HOSTILE))
    table.add_column(escape(HOSTILE))
    table.add_row(escape(HOSTILE))
    for what in (escape(HOSTILE), table):
        console.print(what)
    found = file.getvalue()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", found)
    assert found.count(r"\x1b[2J") == 4


def test_styles_are_our_own() -> None:
    file = io.StringIO()
    console = terminal(file=file, force_terminal=True, color_system="standard")
    console.print(f"[red]wrong[/red] {escape(HOSTILE)}")
    assert file.getvalue().startswith("\x1b[31mwrong\x1b[0m ")
    assert "\x1b[2J" not in file.getvalue()


def test_every_console_is_such_a_terminal() -> None:
    root = Path(__file__).parents[3]
    for path in [*(root / "evaluate").rglob("*.py"), *(root / "reports").rglob("*.py")]:
        if path.name != "terminal.py":
            assert not re.search(r"\bConsole\(", path.read_text()), path
