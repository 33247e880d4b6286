"""Convert objects of a notebook or a script to the form of a configuration."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from pydantic import ValidationError
from torch import nn

from leakfrontier.adversaries import ADVERSARIES, Adversary, InputSpace, Protocol
from leakfrontier.defenses import DEFENSES, Chain, Defense

from ..foundations.by_value import is_importable, own_file, present
from ..foundations.errors import PLUGIN
from ..foundations.plugins import trust
from .methods import LOADING, PROTOCOLS, Method, check_loading, own_code

_REGISTERED: dict[type, str] = {
    cls: name for names in (DEFENSES, ADVERSARIES, PROTOCOLS) for name, cls in names.items()
}


def methods_of(values: Iterable[object]) -> tuple[Method, ...]:
    """Return the user's defenses, adversaries or protocols in the form of a configuration.

    Args:
        values: Objects, classes, names, or mappings as in a file.

    Raises:
        ValueError: If one is something else, or cannot be sent to other processes.
    """
    methods = tuple(_validated(_method_of(value)) for value in values)
    users_own(*methods)
    return methods


def given_model(value: object) -> Method:
    """Return the user's model in the form of a configuration.

    Args:
        value: A model, a class of models, a function from the input space to a model, a name, or a
            mapping as in a file.
    """
    model = _validated(_model_of(value))
    users_own(model)
    return model


def _validated(value: object) -> Method:
    try:
        return Method.model_validate(value)
    except ValidationError as error:
        reasons = [one.get("ctx", {}).get("error", one["msg"]) for one in error.errors()]
        raise ValueError("; ".join(map(str, reasons))) from error


def users_own(*methods: Method) -> None:
    """Trust the code that the user names, and check that it can be loaded."""
    code = [name for method in methods for name in own_code(method)]
    trust(code)
    check_loading(code, LOADING)


def in_configuration(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration or a scenario with its objects in the form of a file."""
    found = dict(content)
    for key in ("defenses", "adversaries"):
        if isinstance(found.get(key), list | tuple):
            found[key] = [_method_of(one) for one in found[key]]
    if isinstance(found.get("scenarios"), list | tuple):
        found["scenarios"] = [
            in_configuration(one) if isinstance(one, Mapping) else one for one in found["scenarios"]
        ]
    if "model" in found:
        found["model"] = _model_of(found["model"])
    if "protocol" in found:
        found["protocol"] = _method_of(found["protocol"])
    return found


def _method_of(value: object) -> object:
    if isinstance(value, str | Mapping | Method):
        return value
    if type(value) is Chain:
        links = tuple(Method.model_validate(_method_of(link)) for link in value.links)
        return Method(name=Chain.__name__, links=links)
    cls = value if isinstance(value, type) else type(value)
    if not issubclass(cls, Defense | Adversary | Protocol):
        raise ValueError(
            "expected a defense, an adversary or a protocol: an object, a class, a name or a "
            f"mapping with the key 'name', got {value!r}"
        )
    name = _name_of(cls)
    if isinstance(value, type):
        return Method(name=name)
    options = _options(value)
    if options is None:
        return Method(name=present(value, cls.__name__, tagged=True))
    if not isinstance(value, Protocol):  # a list would stand for one method per entry
        nested = (
            (key, [one] if isinstance(one, list | tuple) else one) for key, one in options.items()
        )
        options = dict(nested)
    return Method(name=name, options=options)


def _model_of(value: object) -> object:
    if isinstance(value, str | Mapping | Method):
        return value
    if isinstance(value, nn.Module):
        return Method(name=present(Given(value), type(value).__name__))
    if not callable(value):
        raise ValueError(
            "expected a model: an object, a class, a function of the input space, a name or a "
            f"mapping with the key 'name', got {value!r}"
        )
    name = getattr(value, "__name__", type(value).__name__).strip("<>")
    if isinstance(value, type) and not _takes_argument(value):
        return Method(name=present(Made(value), name))
    is_function = inspect.isfunction(value) or isinstance(value, type)
    return Method(name=_name_of(value) if is_function else present(value, name))


@dataclass(frozen=True, eq=False)
class Given:
    """Makes copies of the user's model. Every seed begins with its weights."""

    model: nn.Module

    def __call__(self, space: InputSpace) -> nn.Module:
        """Return a copy."""
        return copy.deepcopy(self.model)


@dataclass(frozen=True, eq=False)
class Made:
    """Makes models of a class whose constructor takes no input space."""

    cls: Callable[[], nn.Module]

    def __call__(self, space: InputSpace) -> nn.Module:
        """Return a new model."""
        return self.cls()


def _takes_argument(cls: type) -> bool:
    """Return whether a constructor needs an argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(cls).parameters.values()
    return any(one.kind in kinds and one.default is one.empty for one in parameters)


def _name_of(value: Any) -> str:  # noqa: ANN401 - a class or a function
    """Return the name by which workers load a class or function."""
    if value in _REGISTERED:
        return _REGISTERED[value]
    if value.__module__.startswith(PLUGIN) and "." not in value.__module__:
        spec = f"{sys.modules[value.__module__].__file__}:{value.__qualname__}"
    elif is_importable(value):
        spec = f"{own_file(value.__module__) or value.__module__}:{value.__qualname__}"
    else:
        return present(value, value.__name__.strip("<>"))
    trust([spec])
    return spec


def _options(method: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a dataclass
    """Return the options that make an equal object; None if options are not enough."""
    try:
        given = [one for one in fields(method) if one.init and not _is_default(one, method)]
        options = {one.name: getattr(method, one.name) for one in given}
        same = type(method)(**json.loads(json.dumps(options, allow_nan=False)))
        return options if vars(same) == vars(method) else None
    except Exception:  # not JSON, or parts that cannot be compared
        return None


def _is_default(field: Field[Any], method: object) -> bool:
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return default is not MISSING and bool(default == getattr(method, field.name))
