"""Code that lives in no file: classes, functions and models of a notebook or a running script.

A value in hand is pickled by value (cloudpickle) and sent only to our own worker processes. Its
name contains a digest of its bytecode, of everything that the bytecode refers to, and of its state.
An edited class gets another digest. Rerunning the same script, or the same notebook cell, gives the
same digest. Another version of Python may give another one.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle

from .plugins import INSTALLED, SESSION, digest_with_imports, hold

_IGNORED = frozenset(
    [
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__"),
        *("__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl"),
        *("__match_args__", "__abstractmethods__", "__parameters__", "__orig_bases__"),
    ]
)
"""Attributes that Python adds to a class. Its author did not write them."""

_GENERATED = frozenset(
    [
        *("__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("__setattr__", "__delattr__", "__replace__"),
    ]
)
"""Methods that `dataclass` makes."""

_PICKLED: dict[str, bytes] = {}
_IN_HAND: dict[str, object] = {}


def present(value: object, name: str, *, tagged: bool = False) -> str:
    """Return the name by which this process and its workers load a value.

    Args:
        value: A class, a function, or an object.
        name: The name that reports use.
        tagged: Whether the name gets a few digits that tell the value from others of its class.

    Raises:
        ValueError: If it cannot be sent to another process.
    """
    try:
        walk = _Digest()
        found = walk.of(value)
        spec = f"{SESSION}{found[:16]}:{name}" + (f" {found[:4]}" if tagged else "")
        content = _dumped(value, walk.modules)
    except Exception as error:  # parts of the value may raise anything
        raise ValueError(
            f"{name} cannot be sent to the processes that attack it: {error}. Remove open files, "
            "locks, generators and connections from it and from the variables that it uses"
        ) from error
    _IN_HAND[spec] = value
    receive({spec: content})
    return spec


def carried(value: object) -> bytes:
    """Return a pickled value with its code, for a process that cannot load this code."""
    walk = _Digest()
    walk.of(value)
    return _dumped(value, walk.modules)


def _dumped(value: object, names: Iterable[str]) -> bytes:
    """Return a pickled value, with the code of modules that workers cannot import."""
    modules = [sys.modules[name] for name in names if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """Also pickles cached properties, which hold a lock before Python 3.12, and `torch.classes`.

    That is a module of a class of its own. A method that uses the name `classes` refers to it.
    """

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - as pickle declares it
        """Return how to recreate a value."""
        if isinstance(value, cached_property):
            return _cached, (value.func, value.attrname)
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            return import_module, (value.__name__,)
        return super().reducer_override(value)


def _cached(function: Any, name: str) -> Any:  # noqa: ANN401 - of any class
    made = cached_property(function)
    made.__set_name__(object, name)
    return made


def pickled(specs: Iterable[str] | None = None) -> dict[str, bytes]:
    """Return the held values for another process: the named ones, or all."""
    names = _PICKLED if specs is None else specs
    return {spec: _PICKLED[spec] for spec in names if spec in _PICKLED}


def receive(values: Mapping[str, bytes]) -> None:
    """Take the values that the parent process holds. Each is loaded when it is first used."""
    for spec, value in values.items():
        _PICKLED[spec] = value
        hold(spec, partial(_found, spec))


def is_in_hand(value: object) -> bool:
    """Return whether a class, a function or the class of an object has no file.

    The name by which it was presented then identifies its code.
    """
    code = value if isinstance(value, type | FunctionType) else type(value)
    if any(code is one for one in _IN_HAND.values()):
        return True
    held = {type(one) for one in _IN_HAND.values()} - {type, FunctionType}
    return code in held and not is_importable(code)


def _found(spec: str) -> object:
    if spec not in _IN_HAND:
        _IN_HAND[spec] = cloudpickle.loads(_PICKLED[spec])
    return _IN_HAND[spec]


def is_importable(value: Any) -> bool:  # noqa: ANN401 - a class or a function
    """Return whether another process can import a class or function by its name."""
    module = sys.modules.get(value.__module__)
    if module is None or getattr(module, value.__qualname__, None) is not value:
        return False
    first = value.__module__.partition(".")[0]
    return first in sys.builtin_module_names or _found_again(first)


def _found_again(name: str) -> bool:
    """Return whether a new process would import the same top-level module."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    found = next((spec for spec in specs if spec is not None), None)
    known = getattr(sys.modules.get(name), "__spec__", None)
    return found is not None and known is not None and found.origin == known.origin


def digest(value: object) -> str:
    """Return a hash of what a value means: its source, what the source refers to, and its state."""
    return _Digest().of(value)


class _Digest:
    """Walks through a value. A reference to an earlier part is named by the part's position.

    Attributes:
        modules: Modules of the visited classes and functions that workers cannot import.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._met: set[int] = set()
        self._kept: list[object] = []  # keeps objects alive, so that their ids are not reused

    def of(self, value: object) -> str:
        return hashlib.sha256("\n".join(self._lines(value)).encode()).hexdigest()

    def _lines(self, value: object) -> Iterator[str]:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield f"{type(value).__name__} {value!r}"
            return
        if id(value) in self._met:
            yield f"met {type(value).__qualname__} {getattr(value, '__qualname__', '')}"
            return
        self._met.add(id(value))
        self._kept.append(value)
        yield from self._walk(value)

    def _walk(self, value: Any) -> Iterator[str]:  # noqa: ANN401 - any value
        if isinstance(value, ModuleType):
            yield from _module(value.__name__)
        elif isinstance(value, type | FunctionType) and is_importable(value):
            yield value.__qualname__
            yield from _module(value.__module__)
        elif isinstance(value, type | FunctionType):
            if value.__module__ != "__main__" and _own(value.__module__) is not None:
                self.modules.add(value.__module__)
            yield from self._class(value) if isinstance(value, type) else self._function(value)
        elif (parts := _wrapped(value)) is not None:
            yield from (type(value).__name__, *map(self.of, parts))
        elif isinstance(value, Mapping):
            yield self.of(type(value))
            for key, one in value.items():
                yield f"{self.of(key)} {self.of(one)}"
        elif isinstance(value, list | tuple):
            yield from (self.of(type(value)), *map(self.of, value))
        elif isinstance(value, set | frozenset):
            yield from (type(value).__name__, *sorted(_Digest().of(one) for one in value))
        elif (entries := _entries(value)) is not None:
            yield from entries
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:  # noqa: ANN401 - any value
        if hasattr(value, "__dict__") and type(value).__module__ != "builtins":
            yield self.of(type(value))
            yield self.of(vars(value))
        else:
            yield hashlib.sha256(cloudpickle.dumps(value)).hexdigest()

    def _class(self, cls: type) -> Iterator[str]:
        yield f"class {cls.__qualname__}"
        yield from map(self.of, cls.__bases__)
        with suppress(NameError):  # an annotation may name something that does not exist
            yield from (f"{name}: {kind}" for name, kind in _annotations(cls).items())
        for one in fields(cls) if is_dataclass(cls) else ():
            yield f"{one.name} {one.init} {self.of(one.default)} {self.of(one.default_factory)}"
        for name, value in sorted(vars(cls).items()):
            if name not in _IGNORED and not _generated(cls, name, value):
                yield f"{name} {self.of(value)}"

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield repr(_bytecode(function.__code__))
        yield self.of([function.__defaults__, function.__kwdefaults__, vars(function)])
        for name in sorted({*_imports(function.__code__)}):
            yield from _module(name)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # the cell is empty
                yield self.of(cell.cell_contents)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield f"{name} {self.of(function.__globals__[name])}"


def _entries(value: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - any value
    """Return what a tensor or an array holds; None for everything else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # slow to import
    if torch is not None and isinstance(value, torch.Tensor):
        bytes_ = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
    elif numpy is not None and isinstance(value, numpy.ndarray):
        bytes_, kind = value.tobytes(), f"{value.dtype} {value.shape}"
    else:
        return None
    return kind, hashlib.sha256(bytes_).hexdigest()


def _annotations(cls: type) -> dict[str, object]:
    return {name: str(kind) for name, kind in inspect.get_annotations(cls).items()}


def _generated(cls: type, name: str, value: object) -> bool:
    """Return whether `dataclass` made a method from the fields, which the digest covers."""
    code, options = getattr(value, "__code__", None), getattr(cls, "__dataclass_params__", None)
    if options is None or code is None or code.co_filename != "<string>":
        return False
    return name in _GENERATED and (name != "__init__" or options.init)


def _wrapped(value: Any) -> list[object] | None:  # noqa: ANN401 - any value
    """Return what a wrapper of functions holds; None for other values."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, BuiltinFunctionType):
        return [f"{value.__module__}:{value.__qualname__}"]
    return None


def _module(name: str) -> Iterator[str]:
    """Yield a module's name and, if the module is the user's own, its content."""
    yield name
    file = _own(name)
    if file is not None:
        yield digest_with_imports(file)


def own_file(module: str) -> Path | None:
    """Return the file of a module that the user wrote, if it is in no package; else None."""
    return None if "." in module else _own(module)


def _own(module: str) -> Path | None:
    """Return the file of a module of the user's own; None for all other modules."""
    file = _file_of(module)
    if file is None or file.suffix != ".py" or module.partition(".")[0] == "leakfrontier":
        return None
    library = Path(inspect.__file__).resolve().parent
    installed = {*INSTALLED} & {*file.parts} or library in file.parents
    return None if installed else file


def _file_of(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        place = getattr(loaded, "__file__", None)
    else:
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):
            return None
        place = None if spec is None else spec.origin
    return None if place is None else Path(place).resolve()


def _bytecode(code: CodeType) -> tuple[object, ...]:
    """Return what a function does. Its docstring, its comments and its place do not count."""
    constants = code.co_consts[1:] if _has_docstring(code) else code.co_consts
    return (
        code.co_code,
        [_constant(one) for one in constants],
        code.co_names,
        code.co_varnames,
        code.co_freevars,
    )


def _has_docstring(code: CodeType) -> bool:
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & 0x4000000)  # inspect.CO_HAS_DOCSTRING
    named = not code.co_name.startswith("<")
    return named and bool(code.co_consts) and isinstance(code.co_consts[0], str)


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return _bytecode(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _imports(code: CodeType) -> Iterator[str]:
    """Yield the modules that a function imports when it is called."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _imports(one)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and its nested functions may look up."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names, inner))
