"""The meaning of code, as text. Two texts are equal if only comments, docstrings or imports differ.

Comments and docstrings are dropped, and imports are sorted. A name that is imported from our own
modules is replaced by what it stands for. So the path and the name of a module do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping


def meaning(tree: ast.Module, ours: Mapping[str, str]) -> str:
    """Return the meaning of a module: its syntax tree, node by node.

    Args:
        tree: Its syntax tree.
        ours: The names that it imports from our own modules, with what they stand for.
    """
    imports = sorted({line for node in ast.walk(tree) for line in _others(node, ours)})
    return " ".join([*imports, *_written(tree, ours)])


def _others(node: ast.AST, ours: Mapping[str, str]) -> Iterator[str]:
    """Yield the imports of a node that are not from our own modules."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        origin = f"{'.' * node.level}{node.module}" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if (alias.asname or alias.name) not in ours:
                yield f"import {origin} {alias.name} {alias.asname}"


def _written(node: ast.AST, ours: Mapping[str, str]) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):  # empty fields differ between versions of Python
        if isinstance(value, list):
            kept = [part for part in value if not _for_readers(part)]
            yield from (f"{name}[{len(kept)}]",) if kept else ()
            for part in kept:
                yield from _written(part, ours) if isinstance(part, ast.AST) else (repr(part),)
        elif isinstance(value, ast.AST):
            yield f"{name}="
            yield from _written(value, ours)
        elif value is not None:
            is_name = isinstance(node, ast.Name) and name == "id"
            yield f"{name}={ours.get(value, value) if is_name else value!r}"


def _for_readers(node: object) -> bool:
    """Return whether a node is an import (collected elsewhere) or a string without effect."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)
