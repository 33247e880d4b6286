"""Build defenses, adversaries and protocols from names and options of a configuration file."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeGuard, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from leakfrontier.adversaries import ADVERSARIES, Adversary, FedAvg, FedBuff, FedSGD, Protocol
from leakfrontier.defenses import DEFENSES, Chain, Defense

from ..engines.engine import Failure, execute
from ..engines.parcels import Bundle, Files, Traveller
from ..foundations.errors import UserError
from ..foundations.plugins import (
    SESSION,
    digest_with_imports,
    file_of,
    is_loaded,
    load_attribute,
    local_files,
)
from .contract import check_class

PROTOCOLS: dict[str, type[Protocol]] = {cls.__name__: cls for cls in (FedSGD, FedAvg, FedBuff)}
"""Every protocol by name. Add a class here to add a protocol."""

_NUMBERS = (int, float, *(kind + more for kind in ("int", "float") for more in ("", " | None")))

Whole = Annotated[int, Field(strict=True)]
"""A whole number in a configuration. `true` is not accepted."""

Number = Annotated[float, Field(strict=True)]
"""A number in a configuration. `true` is not accepted."""

MOST = 2**20
"""The maximum number of examples, clients, rounds and passes in a file."""

MOST_STEPS = 100_000
"""The maximum number of local steps behind one upload."""

MOST_COMBINATIONS = 10_000
"""The maximum number of methods that lists of values may produce."""

_SEQUENCE = re.compile(r"\b([tT]uple|[lL]ist|Sequence)\b")

LOADING = 60.0
"""Maximum seconds for loading a user's file."""


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder that paths of a configuration are relative to."""
    return Path((info.context or {}).get("folder", ""))


def placed(path: str, folder: Path) -> str:
    """Return a path relative to the current folder, given a path relative to `folder`."""
    return os.path.normpath(folder / Path(path).expanduser())


def placed_name(name: str, folder: Path) -> str:
    """Return a method's name. The path of a user's file is relative to `folder`."""
    source, _, attribute = name.rpartition(":")
    return f"{placed(source, folder)}:{attribute}" if source.endswith(".py") else name


class Strict(BaseModel):
    """A part of a configuration. An unknown key is an error that lists the known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    raise ValueError(
                        f"unknown key {key!r}; the keys are {', '.join(cls.model_fields)}"
                    )
        return value


class Method(Strict, Traveller):
    """A name and its options; in a file, `TopK`, or `{name: TopK, ratio: 0.1}`.

    Attributes:
        name: A registered name, or `file.py:Name` or `package.module:Name`.
        options: Keyword arguments. The other options have their defaults.
        links: The defenses of a `Chain`, in the order in which they are applied.
    """

    name: str
    options: dict[str, JsonValue] = {}
    links: tuple[Method, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "name" in value and "options" not in value:
            fixed = {key: value[key] for key in ("name", "links") if key in value}
            return {**fixed, "options": {k: v for k, v in value.items() if k not in fixed}}
        if not isinstance(value, Mapping) or "name" not in value:
            raise ValueError(f"expected a name, or a mapping with the key 'name', got {value!r}")
        return value

    @field_validator("name")
    @classmethod
    def _placed(cls, name: str, info: ValidationInfo) -> str:
        return placed_name(name, folder_of(info))

    def grid(self, class_of: Callable[[Method], type]) -> list[Method]:
        """Return one method per combination of the options that are lists.

        If the type of an option is a list, it must hold lists to give several combinations.

        Args:
            class_of: Function that returns the class of a method, which declares its options.
        """
        sequences = () if self.links else _sequences(class_of(self))
        values = [
            value if _is_choice(value, key in sequences) else [value]
            for key, value in self.options.items()
        ]
        if not all(values):
            raise ValueError(f"{self.name}: a list of values must not be empty, got {self.options}")
        if self._combinations() > MOST_COMBINATIONS:
            raise ValueError(
                f"{self.name}: the lists of values make more than {MOST_COMBINATIONS:,} methods"
            )
        return [
            Method(
                name=self.name, options=dict(zip(self.options, chosen, strict=True)), links=links
            )
            for links in product(*(link.grid(class_of) for link in self.links))
            for chosen in product(*values)
        ]

    def _combinations(self) -> int:
        own = math.prod(len(v) for v in self.options.values() if isinstance(v, list))
        return own * math.prod(link._combinations() for link in self.links)

    def config(self) -> dict[str, Any]:
        """Return everything that the method depends on: of a user's file, only its content."""
        label = self.name.rpartition(":")[2]
        config: dict[str, Any] = {"name": self.name, "options": self.options}
        file = file_of(self.name)
        if file is not None and file.is_file():  # its folder does not matter
            config |= {"name": f"{file.name}:{label}", "source": digest_with_imports(file)}
        if self.links:
            config["links"] = [link.config() for link in self.links]
        return config

    def files(self) -> Files:
        """Yield the user's file and the files of its folder that it imports."""
        file = file_of(self.name)
        if file is not None and file.is_file():
            found = {str(one.relative_to(file.parent)): one for one in local_files(file)}
            bundle = Bundle(f"code-{digest_with_imports(file)}", found)
            yield self.name.rpartition(":")[0], (bundle, file.name)

    def code(self) -> list[str]:
        """Return the method's name if it is the user's own code."""
        return [self.name] if ":" in self.name else []

    @property
    def configured(self) -> Method:
        """Return the method as the configuration has it, by which reports name it."""
        return self


class TunedMethod(Method):
    """A method whose options were chosen by tuning. It keeps its name in reports.

    Attributes:
        before: The method as the configuration has it.
    """

    before: Method

    @property
    def configured(self) -> Method:
        """Return the method as the configuration has it, by which reports name it."""
        return self.before

    def config(self) -> dict[str, Any]:
        """Return everything that the method depends on."""
        return {**super().config(), "configured": self.before.config()}


def _is_choice(value: JsonValue, is_sequence: bool) -> TypeGuard[list[JsonValue]]:
    """Return whether an option is a list of values, one per method."""
    if not isinstance(value, list):
        return False
    return not is_sequence or (bool(value) and all(isinstance(one, list) for one in value))


def own_code(method: Method) -> list[str]:
    """Return the names of the user's own code: the method, and the links of a chain."""
    return method.code() + [name for link in method.links for name in own_code(link)]


def check_loading(specs: Iterable[str], time_limit: float) -> None:
    """Load users' code in a worker first, where it can hang or crash without harm.

    Args:
        specs: Names as `load_attribute` takes them.
        time_limit: Seconds that each may take.

    Raises:
        UserError: If loading does not finish. `load_attribute` reports other mistakes.
    """
    unknown = [spec for spec in dict.fromkeys(specs) if not is_loaded(spec)]
    limit = min(time_limit, LOADING)
    for done in execute(_load_quietly, unknown, workers=1, time_limit=limit) if unknown else ():
        source = done.task.rpartition(":")[0]
        if isinstance(done.result, Failure) and done.result.kind == "timeout":
            raise UserError(f"{source} did not finish loading within {limit:g} s")
        if isinstance(done.result, Failure):
            raise UserError(f"{source} cannot be loaded: {done.result.message}")


def _load_quietly(spec: str) -> None:
    with suppress(Exception):
        load_attribute(spec)


def build_defense(method: Method) -> Defense:
    """Return the defense that a configuration names."""
    if method.name == Chain.__name__:
        _check_options(method, ["links"], "defense")
        if not method.links:
            raise ValueError("a Chain must have links: the defenses, first applied first")
        return Chain(tuple(build_defense(link) for link in method.links))
    if method.links:
        raise ValueError(f"only a {Chain.__name__} has links, got {method.name}")
    defense: Defense = _build(method, defense_class(method), "defense")
    return defense


def build_adversary(method: Method) -> Adversary:
    """Return the adversary that a configuration names."""
    adversary: Adversary = _build(method, _adversary_class(method), "adversary")
    return adversary


def adversary_grid(methods: Iterable[Method]) -> list[Method]:
    """Return one adversary per combination of the options that are lists, and check each."""
    found = [one for method in methods for one in method.grid(_adversary_class)]
    for method in found:
        build_adversary(method)
    return found


def defense_grid(methods: Iterable[Method]) -> list[Method]:
    """Return one defense per combination of the options that are lists, and check each."""
    found = [one for method in methods for one in method.grid(defense_class)]
    for method in found:
        build_defense(method)
    return found


def build_protocol(method: Method) -> Protocol:
    """Return the protocol that a configuration names; raise if a number exceeds `MOST`."""
    cls = _class_of(method, PROTOCOLS, Protocol, "protocol")
    protocol: Protocol = _build(method, cls, "protocol")
    for field in fields(protocol):
        value = getattr(protocol, field.name)
        if isinstance(value, float) and field.type in ("int", "int | None"):
            raise ValueError(f"{method.name}: {field.name} must be a whole number, got {value}")
        if isinstance(value, int | float) and not value <= MOST:
            raise ValueError(f"{method.name}: {field.name} must be at most {MOST:,}, got {value}")
    return protocol


def check_steps(method: Method, examples: int) -> None:
    """Raise a ValueError if clients would take more than `MOST_STEPS` local steps.

    Args:
        method: The protocol.
        examples: Private examples behind one upload, of all its clients together.
    """
    protocol = build_protocol(method)
    steps = protocol.local_steps(max(1, examples // protocol.clients)) * protocol.clients
    if steps > MOST_STEPS:
        raise ValueError(
            f"{method.name}: {examples:,} examples make {steps:,} local steps behind one upload, "
            f"but at most {MOST_STEPS:,} are allowed: lower epochs, steps or clients"
        )


def _class_of(method: Method, registry: Mapping[str, type], base: type, kind: str) -> Any:  # noqa: ANN401 - a dataclass
    """Return the class that a configuration names."""
    if method.name in registry:
        return registry[method.name]
    if ":" not in method.name:
        raise ValueError(
            f"unknown {kind} {method.name!r}: choose one of {', '.join(registry)}, "
            "or name your own class as file.py:Class"
        )
    cls: Any = load_attribute(method.name)
    if method.name.startswith(SESSION) and isinstance(cls, base):
        cls = type(cls)
    elif not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"{method.name} must be a subclass of {base.__name__}, got {cls!r}")
    check_class(cls, base)
    return cls


def defense_class(method: Method) -> type[Defense]:
    """Return the class of a defense that a configuration names."""
    found: type[Defense] = _class_of(
        method, {**DEFENSES, Chain.__name__: Chain}, Defense, "defense"
    )
    return found


def _adversary_class(method: Method) -> type[Adversary]:
    found: type[Adversary] = _class_of(method, ADVERSARIES, Adversary, "adversary")
    return found


def _sequences(cls: type) -> list[str]:
    """Return the options of a class whose types are lists."""
    try:
        types = get_type_hints(cls)
    except Exception:  # names that exist only for type checkers
        types = {}
    own = fields(cls) if is_dataclass(cls) else ()
    return [one.name for one in own if _SEQUENCE.search(str(types.get(one.name, one.type)))]


def _build(method: Method, cls: Any, kind: str) -> Any:  # noqa: ANN401 - a dataclass
    if method.name.startswith(SESSION) and isinstance(given := load_attribute(method.name), cls):
        _check_options(method, (), kind)  # the object already holds its options
        return copy.deepcopy(given)
    options = [field.name for field in fields(cls) if field.init]
    _check_options(method, options, kind)
    _check_numbers(method, cls, kind)
    try:
        return cls(**method.options)
    except ValueError:
        raise
    except TypeError as error:
        reason = str(error).rpartition("() ")[2]
        raise ValueError(
            f"{kind} {method.name}: cannot be built with {method.options or 'no options'}: "
            f"{reason}; its options are {', '.join(options) or 'none'}"
        ) from error
    except Exception as error:  # a mistake in the user's class
        raise ValueError(f"{kind} {method.name}: {type(error).__name__}: {error}") from error


def _check_numbers(method: Method, cls: type, kind: str) -> None:
    """Raise if an option is `true` but must be a number. Python treats `true` as 1."""
    for field in fields(cls):
        value = method.options.get(field.name)
        if isinstance(value, bool) and field.type in _NUMBERS:
            raise ValueError(
                f"{kind} {method.name}: {field.name} must be a number, got {str(value).lower()}"
            )


def _check_options(method: Method, known: Iterable[str], kind: str) -> None:
    known = list(known)
    for option in method.options:
        if option not in known:
            raise ValueError(
                f"{kind} {method.name} has no option {option!r}; "
                f"its options are {', '.join(known) or 'none'}"
            )
