"""A terminal that shows control characters instead of obeying them.

Names and messages may come from files of others. Control characters in them could move the cursor,
or rewrite or hide printed text. The terminal shows them as escapes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.segment import Segment

_HARMLESS = "\n\t"
_HIDING = ("Cc", "Cf", "Zl", "Zp", "Cs")


def printable(text: str) -> str:
    """Return a text with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(one if _is_harmless(one) else _escaped(one) for one in text)


def terminal(**options: Any) -> Console:  # noqa: ANN401 - those of Console
    """Return a console that shows control characters instead of obeying them."""
    console = Console(**options)
    console.push_render_hook(_Cleaning())
    return console


class _Cleaning(RenderHook):
    """Removes control characters from everything that a console prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Clean(one) for one in renderables]


class _Clean:
    """Something to print. The styles are rich's own and not part of its text."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self._inner, options)
        for text, style, control in segments:
            yield Segment(text if control else printable(text), style, control)


def _is_harmless(character: str) -> bool:
    return character in _HARMLESS or unicodedata.category(character) not in _HIDING


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
