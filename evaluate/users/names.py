"""Names of defenses and adversaries in reports, built from their names and options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from leakfrontier.adversaries import ADVERSARIES, Adversary
from leakfrontier.defenses import DEFENSES

from .methods import Method


def label(method: Method) -> str:
    """Return a method's name with its options, as reports print it."""
    method = method.configured
    if method.links:
        return " then ".join(label(link) for link in method.links)
    name = _shown(method.name)
    options = ", ".join(f"{key}={value}" for key, value in method.options.items())
    return f"{name}({options})" if options else name


def _shown(name: str) -> str:
    """Return the name of a class. A user's class that is named like one of ours is told apart."""
    own = name.rpartition(":")[2]
    return f"{own} (own)" if own != name and own in {**DEFENSES, **ADVERSARIES} else own


def family(defense: Method) -> str:
    """Return the common name of a defense's configurations: its name, or its links' names."""
    if defense.links:
        return " then ".join(family(link) for link in defense.links)
    return label(Method(name=defense.name))


def options(method: Method) -> dict[str, Any]:
    """Return a method's options as data. Those of a chain's links have their place and name."""
    method = method.configured
    if not method.links:
        return dict(method.options)
    return {
        f"{number} {family(link)} {name}": value
        for number, link in enumerate(method.links, 1)
        for name, value in options(link).items()
    }


def adversary_label(method: Method, adversary: Adversary) -> str:
    """Return an adversary's name with the options that differ from its defaults."""
    defaults = {field.name: field.default for field in fields(adversary)}
    chosen = {name: value for name, value in vars(adversary).items() if value != defaults.get(name)}
    return label(Method(name=method.name, options=chosen))
