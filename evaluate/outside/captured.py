"""Reads captures and checks them completely.

A capture may be broken or hostile. The reader loads no pickle and follows no path out of the
capture's folder. It executes code in a capture only if the user allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from leakfrontier.adversaries import TokenSpace
from leakfrontier.defenses import Batch, Update, trainable

from ..data.data import DATASETS
from ..foundations.foreign import parse_json
from ..foundations.plugins import file_digest, trust
from ..run.config import explain
from ..users.methods import Method, own_code, placed_name
from .capture import (
    DESCRIPTION,
    TRUTH,
    UPDATE,
    WEIGHTS,
    CaptureError,
    Description,
    check_finite,
    check_names,
    check_weights,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Capture:
    """A capture that passed all checks.

    Attributes:
        folder: Its folder.
        about: The description of the update. Paths of files are absolute.
        update: The upload.
        truth: The private examples, if they are known.
        device: The device of its tensors.
    """

    folder: Path
    about: Description
    update: Update
    truth: Batch | None
    device: torch.device = CPU

    @cached_property
    def model(self) -> nn.Module:
        """Return the model that the client received."""
        return _built(self.folder, self.about).to(self.device)

    def to(self, device: torch.device) -> Capture:
        """Return the capture with its tensors on a device."""
        update = {name: value.to(device) for name, value in self.update.items()}
        truth = None if self.truth is None else self.truth.to(device)
        return replace(self, update=update, truth=truth, device=device)

    @property
    def weights(self) -> str:
        """Return a hash of the weights."""
        return file_digest(self.folder / WEIGHTS)

    @property
    def victims(self) -> str:
        """Return an identifier of its victims: a hash of the weights and of the private examples.

        Without private examples, victims are unknown, and every upload has its own identifier.
        """
        if self.truth is None:
            return f"{self.folder.resolve()}"
        return self.weights + file_digest(self.folder / TRUTH)

    @property
    def content(self) -> str:
        """Return a hash of all its files."""
        names = [DESCRIPTION, WEIGHTS, UPDATE, *([TRUTH] if self.truth is not None else [])]
        return "".join(file_digest(self.folder / name) for name in names)


def find_captures(folder: Path) -> list[Path]:
    """Return the captures in a folder: the folder itself, or all below it."""
    if not folder.is_dir():
        raise CaptureError(f"there is no folder {folder}")
    found = sorted(path.parent for path in folder.rglob(DESCRIPTION))
    if not found:
        raise CaptureError(
            f"{folder} contains no capture. A capture is a folder with {DESCRIPTION}, {WEIGHTS} "
            f"and {UPDATE}: see leakfrontier.evaluate.outside.capture"
        )
    return found


def load_capture(
    folder: Path,
    *,
    trust_code: bool = False,
    dataset: str | None = None,
    model: Method | None = None,
    known: Description | None = None,
) -> Capture:
    """Read and check a capture.

    Args:
        folder: The folder of the capture.
        trust_code: Whether Python files in the capture may be executed.
        dataset: Data by name or path. Default: the dataset named in the capture.
        model: The model. Default: the model named in the capture.
        known: A description that was read before. It replaces methods and data.
    """
    given: dict[str, object] = {"dataset": dataset, "model": model}
    given = {name: value for name, value in given.items() if value is not None}
    if known is not None:
        given = {name: getattr(known, name) for name in ("dataset", *_METHODS)}
    about = _read_description(folder, given, trust_code)
    built = _built(folder, about)
    wanted = trainable(built)
    update = _read(folder, UPDATE)
    check_names(update, wanted, f"{folder / UPDATE}", "the model's parameters")
    check_finite(update, str(folder / UPDATE))
    update = {name: update[name].to(wanted[name].dtype) for name in wanted}
    return Capture(folder, about, update, _read_truth(folder, about))


def _read_description(folder: Path, given: Mapping[str, object], trust_code: bool) -> Description:
    path = _inside(folder, DESCRIPTION)
    try:
        content = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CaptureError(f"{path} must hold an object with the keys {_KEYS}")
    try:
        about = Description.model_validate(content)
        methods = {name: getattr(about, name) for name in _METHODS if name not in given}
        about = about.model_copy(
            update={name: method and _placed(method, folder) for name, method in methods.items()}
        )
        about = about.model_copy(update={name: given[name] for name in _METHODS if name in given})
        if trust_code:
            trust(about.code)
        about.training, about.known_defense  # noqa: B018 - raises if code is not trusted
        if about.dataset is not None and about.dataset not in DATASETS:
            raise ValueError(
                f"dataset must be one of {', '.join(DATASETS)}, got {about.dataset!r}; give other "
                "data as a path with --dataset"
            )
    except ValidationError as error:
        raise CaptureError(f"{path}: {explain(error)}") from error
    except ValueError as error:
        raise CaptureError(f"{path}: {error}") from error
    return about.model_copy(update=given)


_KEYS = ", ".join(Description.model_fields)
_METHODS = ("model", "protocol", "defense")


def _placed(method: Method, folder: Path) -> Method:
    """Return a method with the absolute path of its file, which must be in the capture."""
    if not own_code(method):
        return method
    links = tuple(_placed(link, folder) for link in method.links)
    name = method.name
    source = name.rpartition(":")[0]
    if source.endswith(".py"):
        _inside(folder, source)
        name = placed_name(name, folder.resolve())
    return method.model_copy(update={"name": name, "links": links})


def _inside(folder: Path, name: str) -> Path:
    """Return a file of a capture. Raise if it is missing or outside the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CaptureError(f"{name!r} leaves the folder of the capture, {folder}")
    if not path.is_file():
        raise CaptureError(f"{folder} has no {name}")
    return path


def _read(folder: Path, name: str) -> dict[str, Tensor]:
    path = _inside(folder, name)
    content = path.read_bytes()  # not mapped: overwriting a mapped file would crash the process
    try:
        return load(content)
    except (SafetensorError, ValueError) as error:
        pickled = content[:1] == b"\x80" or content[:2] == b"PK"
        hint = "it looks like a pickle (torch.save?), which is never read" if pickled else error
        raise CaptureError(f"{path} is not a safetensors file: {hint}") from error


def _read_truth(folder: Path, about: Description) -> Batch | None:
    if not (folder / TRUTH).is_symlink() and not (folder / TRUTH).exists():
        return None
    path, found, space = folder / TRUTH, _read(folder, TRUTH), about.inputs
    if set(found) != {"inputs", "targets"}:
        raise CaptureError(f"{path} must hold inputs and targets, got {', '.join(sorted(found))}")
    inputs, targets = found["inputs"], found["targets"]
    expected = (about.batch_size, *space.shape)
    of_tokens = isinstance(space, TokenSpace) and tuple(targets.shape) == expected
    if tuple(inputs.shape) != expected or not (
        tuple(targets.shape) == (about.batch_size,) or of_tokens
    ):
        raise CaptureError(
            f"{path} must hold inputs of shape {expected} and as many targets, got "
            f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    check_finite(found, str(path))
    if targets.dim() == 1 and not ((targets >= 0) & (targets < space.classes)).all():
        raise CaptureError(f"{path} has targets that are not from 0 to {space.classes - 1}")
    return Batch(inputs.to(space.dtype), targets.long())


def _built(folder: Path, about: Description) -> nn.Module:
    """Return the captured model with its weights."""
    weights = _read(folder, WEIGHTS)
    try:
        model = about.build()
    except ValueError as error:
        raise CaptureError(f"{folder / DESCRIPTION}: {error}") from error
    check_finite(weights, str(folder / WEIGHTS))
    check_weights(model, weights, str(folder / WEIGHTS))
    model.load_state_dict(weights, strict=False)
    return model
