import ast

import pytest

from leakfrontier.evaluate.run.meaning import meaning

CODE = '''
"""A module."""
from __future__ import annotations
import os
from .here import limit as most

LEAST = 1
"""What is least."""


def clipped(value: float) -> float:
    """Return a value."""
    return min(max(value, LEAST), most)  # within bounds
'''
OURS = {"most": "abc limit"}


def meant(code: str, ours: dict[str, str] = OURS) -> str:
    return meaning(ast.parse(code), ours)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""\n', ""),
        ("Return a value", "Give it back"),
        ("What is least.", "The least."),
        ("  # within bounds", ""),
        ("from .here import", "from ..there import"),
        (
            "import os\nfrom .here import limit as most",
            "from .here import limit as most\nimport os",
        ),
        ("\n\n\ndef", "\n\ndef"),
    ],
)
def test_words_for_readers_do_not_count(old: str, new: str) -> None:
    assert old in CODE
    assert meant(CODE.replace(old, new)) == meant(CODE)


def test_what_a_name_of_ours_is_called_here_does_not_count() -> None:
    assert meant(CODE.replace("most", "bound"), {"bound": "abc limit"}) == meant(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LEAST = 1", "LEAST = 2"),
        ("LEAST = 1", "LEAST = 1.0"),
        ("LEAST = 1", "LEAST = '1'"),
        ("min(max(", "max(min("),
        ("import os", "import sys"),
        ("import os", "import os as sys"),
        ("value: float", "value: float = 0"),
        ("def clipped", "async def clipped"),
        ("return min", "yield min"),
    ],
)
def test_what_code_does_counts(old: str, new: str) -> None:
    assert old in CODE
    assert meant(CODE.replace(old, new)) != meant(CODE)


def test_what_a_name_of_ours_stands_for_counts() -> None:
    assert meant(CODE, {"most": "def limit"}) != meant(CODE)


def test_nothing_left_is_not_the_same_as_something() -> None:
    assert meant("def f():\n    'words'\n", {}) != meant("def f():\n    return 1\n", {})
    assert meant("if a:\n    b\nelse:\n    c", {}) != meant("if a:\n    b\n    c", {})
