"""YAML as users mean it: no key twice, and 1e-3 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..foundations.foreign import check_bounds

MOST_VALUES = 100_000
"""How many values a document may have, where every alias is written out."""


def load_yaml(text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return what a YAML document holds.

    Raises:
        ValueError: If it is not valid; the message names line and column.
    """
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_bounds(content)
    return content


class _Loader(yaml.SafeLoader):
    """Plain values only; YAML would let the last of equal keys win.

    An alias counts for all that it stands for: a few lines of aliases of aliases would otherwise
    become more values than there is memory.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - untyped
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        before = self._values
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[id(node)] = self._values - before
        elif id(node) in self._sizes:
            self._values += self._sizes[id(node)]
        else:
            raise yaml.MarkedYAMLError(f"the alias {event.anchor!r} stands for what it is in", mark)
        if self._values > MOST_VALUES:
            raise yaml.MarkedYAMLError(
                f"it has more than {MOST_VALUES:,} values", problem_mark=mark
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:  # noqa: ANN401 - untyped
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            place = (key.tag, key.value)
            if place in seen:
                raise yaml.MarkedYAMLError(
                    f"the key {key.value!r} is given", seen[place], "and again", key.start_mark
                )
            seen[place] = key.start_mark
        return node


_Loader.add_implicit_resolver(  # as in YAML 1.2; in 1.1 these are strings
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
