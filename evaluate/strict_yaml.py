"""YAML as users mean it: no key twice, and 1e-3 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml


def load_yaml(text: str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return what a YAML document holds.

    Raises:
        ValueError: If it is not valid; the message names line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class _Loader(yaml.SafeLoader):
    """Plain values only; YAML would let the last of equal keys win."""

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
