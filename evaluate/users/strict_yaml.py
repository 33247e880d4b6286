"""Strict YAML: repeated keys are errors, and 1e-3 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..foundations.foreign import check_bounds

MOST_VALUES = 100_000
"""Maximum number of values in a document, with every alias expanded."""


def load_yaml(text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return the value of a YAML document.

    Raises:
        ValueError: If it is not valid. The message names line and column.
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
    """Loads plain values only, and rejects repeated keys. YAML itself would keep the last one.

    An alias counts as many values as it stands for. Otherwise, a few lines of nested aliases could
    expand to more values than fit in memory.
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
            raise yaml.MarkedYAMLError(f"the alias {event.anchor!r} refers to its own value", mark)
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
