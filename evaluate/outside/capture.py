"""Captures: updates from other training code, as folders that the panel can attack.

A capture contains these files:

- `capture.json`: the description of the update,
- `model.safetensors`: the weights that the client received,
- `update.safetensors`: the upload, by parameter name,
- `truth.safetensors` (optional, for scores): the private `inputs` and `targets`.

Nothing is pickled. Use it in your own training loop:

    about = Description(model="lenet", space=ImageSpace((1, 28, 28), 10), batch_size=8)
    with capture(model, "captures/one", about, truth=(images, labels)):
        loss(model(images), labels).backward()
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationInfo, field_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from leakfrontier.adversaries import ImageSpace, InputSpace, Protocol, TokenSpace, WaveSpace
from leakfrontier.defenses import Batch, Defense, Update, trainable

from ..data.data import DATASETS
from ..foundations.errors import UserError
from ..foundations.plugins import SESSION, file_of, local_files, trust
from ..foundations.seeds import generator
from ..models.models import Mode, build_model, training_differs
from ..users.methods import (
    MOST,
    Method,
    Strict,
    Whole,
    build_defense,
    build_protocol,
    check_steps,
    own_code,
)
from ..users.objects import methods_of

DESCRIPTION, WEIGHTS, UPDATE, TRUTH = (
    "capture.json",
    "model.safetensors",
    "update.safetensors",
    "truth.safetensors",
)
SPACES: dict[str, type[InputSpace]] = {
    "images": ImageSpace,
    "sound": WaveSpace,
    "tokens": TokenSpace,
}
"""The kinds of input spaces, by their names in `capture.json`."""

MOST_ENTRIES = 2**26
"""The largest number of entries of an example (256 MB) or a vocabulary."""

Truth = Batch | tuple[Tensor, Tensor]


class CaptureError(UserError):
    """A capture cannot be attacked. The message says what is wrong."""


class Description(Strict):
    """The description of a captured update: the content of `capture.json`."""

    model: Method
    """A model by name, or your own factory as file.py:factory, with its options."""
    space: dict[str, Any]
    """The public facts about inputs: `kind` (`images`, `sound` or `tokens`), `shape`, `classes` and
    the normalisation. You can also give an `InputSpace`."""
    batch_size: Whole = Field(ge=1, le=MOST)
    """Number of private examples in the update."""
    protocol: Method = Method(name="FedSGD")
    """`FedSGD` if the update is a gradient, `FedAvg` if it is a change of weights. With `clients`
    above 1, the update is the sum over these clients."""
    defense: Method | None = None
    """The defense of the client, as in a run; `none` without a defense, null if unknown."""
    labels: tuple[Whole, ...] | None = None
    """The private labels, if the adversary is told them."""
    dataset: str | None = None
    """The name of a dataset of the same kind, for look-alikes and public data."""
    mode: Mode = "eval"
    """The mode in which the client trained: `train` if it drew dropout masks. By default, `capture`
    finds it out from the model."""
    round: Whole = Field(default=0, ge=0, le=10**9)
    """Rounds of training before the update."""
    client: str = ""
    """The name of the client."""

    @field_validator("space", mode="before")
    @classmethod
    def _from_space(cls, value: object) -> object:
        for kind, known in SPACES.items():
            if type(value) is known:
                return {"kind": kind, **json.loads(json.dumps(asdict(value)))}
        return value

    @field_validator("space")
    @classmethod
    def _valid_space(cls, value: dict[str, Any]) -> dict[str, Any]:
        _space(value)
        return value

    @field_validator("protocol")
    @classmethod
    def _valid_protocol(cls, value: Method, info: ValidationInfo) -> Method:
        if not own_code(value):
            check_steps(value, info.data.get("batch_size", 1))
        return value

    @field_validator("defense")
    @classmethod
    def _defense_of_as_many_clients(
        cls, value: Method | None, info: ValidationInfo
    ) -> Method | None:
        protocol = info.data.get("protocol")
        if value is not None and protocol is not None and not own_code(value) + own_code(protocol):
            cohort, clients = build_defense(value).cohort, build_protocol(protocol).clients
            if cohort not in (1, clients):
                raise ValueError(
                    f"the defense shows the sum of {cohort} clients, but the protocol is of "
                    f"{clients}: give both the number of clients in the update"
                )
        return value

    @field_validator("labels")
    @classmethod
    def _one_label_each(
        cls, value: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        size = info.data.get("batch_size")
        if value is not None and size is not None and len(value) != size:
            raise ValueError(f"labels must be {size}, one per private example, got {len(value)}")
        space = info.data.get("space")
        classes = math.inf if space is None else _space(space).classes
        if value is not None and not all(0 <= one < classes for one in value):
            raise ValueError(f"labels must be from 0 to {classes - 1}, got {list(value)}")
        return value

    @property
    def code(self) -> list[str]:
        """Return the names of the user's classes and functions in the description."""
        named = (self.model, self.protocol, *([] if self.defense is None else [self.defense]))
        return [name for method in named for name in own_code(method)]

    @property
    def inputs(self) -> InputSpace:
        """Return the public facts about inputs."""
        return _space(self.space)

    @property
    def training(self) -> Protocol:
        """Return the protocol."""
        return build_protocol(self.protocol)

    @property
    def known_defense(self) -> Defense:
        """Return the defense of the client; no defense if it is unknown."""
        return Defense() if self.defense is None else build_defense(self.defense)

    def build(self) -> nn.Module:
        """Return the model with random weights."""
        options: dict[str, Any] = dict(self.model.options)
        rng = generator("captured model")
        model = build_model(self.model.name, self.inputs, rng, **options)
        return self.known_defense.on_model(model).train(self.mode == "train")


def _space(value: Mapping[str, Any]) -> InputSpace:
    kind = value.get("kind")
    if kind not in SPACES:
        raise ValueError(f"kind must be one of {', '.join(SPACES)}, got {kind!r}")
    options = {name: option for name, option in value.items() if name != "kind"}
    known = [one.name for one in fields(SPACES[kind])]
    for name in options:
        if name not in known:
            raise ValueError(f"{kind} have no {name!r}; the keys are kind, {', '.join(known)}")
    lists: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in options.items()
    }
    try:
        space = SPACES[kind](**lists)
    except TypeError as error:
        raise ValueError(f"{str(error).rpartition('() ')[2]} (space of {kind})") from error
    sides = space.shape if isinstance(space.shape, tuple) else (0,)
    if not (sides and all(type(side) is int and side >= 1 for side in (*sides, space.classes))):
        raise ValueError(
            f"shape and classes must be whole numbers from 1, got {space.shape} and {space.classes}"
        )
    for name in ("mean", "std"):
        values = lists.get(name, (1.0,))
        if not (isinstance(values, tuple) and len(values) in (1, sides[0]) and _finite(values)):
            raise ValueError(f"{name} must hold a number for each channel, got {values!r}")
    if not all(value > 0 for value in lists.get("std", ())):
        raise ValueError(f"std must be positive, got {lists['std']}")
    if math.prod(sides) > MOST_ENTRIES or max(_sizes(space)) > MOST_ENTRIES:
        raise ValueError(f"no example and no vocabulary has more than {MOST_ENTRIES:,} entries")
    return space


def _finite(values: tuple[object, ...]) -> bool:
    return all(type(one) in (int, float) and math.isfinite(one) for one in values)  # type: ignore[arg-type]


def _sizes(space: InputSpace) -> tuple[int, ...]:
    vocabulary = space.vocabulary if isinstance(space, TokenSpace) else 1
    if type(vocabulary) is not int or vocabulary < 1:
        raise ValueError(f"vocabulary must be a whole number from 1, got {vocabulary!r}")
    return space.classes, vocabulary


@contextmanager
def capture(
    model: nn.Module,
    folder: Path | str,
    /,
    about: Description | None = None,
    *,
    truth: Truth | None = None,
    **description: Any,  # noqa: ANN401 - the keys of a description
) -> Iterator[None]:
    """Capture the local training in the `with` block, and write the folder after it.

    The protocol determines the update. Under FedSGD it is the gradients that the block leaves in
    the parameters, otherwise the change of the weights.

    Args:
        model: The model that the client received. The block trains it.
        folder: A new folder for the capture.
        about: The description of the update.
        truth: The private examples as model inputs, and their labels. Scores need them.
        description: The keys of a description, instead of `about`: `model`, `space`,
            `batch_size` and others.

    Raises:
        CaptureError: Before the block if the description does not fit the model, after it if
            there is no update.
    """
    about = _described(description) if about is None else about
    _check_files(about)
    trust(about.code)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    built = about.build()
    check_weights(built, weights, "the model")
    drops = model.training and training_differs(built, about.inputs)
    if drops and "mode" not in about.model_fields_set:
        about = about.model_copy(update={"mode": "train"})
    gradient = about.training.uploads_gradient
    if gradient and any(p.grad is not None and p.grad.any() for p in model.parameters()):
        raise CaptureError("the model has gradients of an earlier step: call model.zero_grad()")
    yield
    update: Update = {}
    for name, value in trainable(model).items():
        if not gradient:
            update[name] = value.detach() - weights[name]
        elif value.grad is None:
            raise CaptureError(f"{name!r} has no gradient: call backward() in the block")
        else:
            update[name] = value.grad.detach()
    write_capture(folder, about, weights=weights, update=update, truth=truth)


def _described(description: Mapping[str, Any]) -> Description:
    """Return a description from its keys. Methods may be objects."""
    methods = [key for key in ("protocol", "defense") if description.get(key) is not None]
    try:
        found = {key: methods_of([description[key]])[0] for key in methods}
        return Description.model_validate({**description, **found})
    except ValueError as error:
        raise CaptureError(f"the description of the capture is wrong: {error}") from error


def _check_files(about: Description) -> None:
    """Raise if a description names code that is not in a file."""
    for name in about.code:
        if name.startswith(SESSION):
            raise CaptureError(
                f"{name.rpartition(':')[2]} is defined in a notebook or a script, but other "
                "programs must read the capture: write it into a file and name it as file.py:name"
            )


def write_capture(
    folder: Path | str,
    about: Description,
    *,
    weights: Mapping[str, Tensor],
    update: Mapping[str, Tensor],
    truth: Truth | None = None,
) -> Path:
    """Write a capture, and return its folder.

    Args:
        folder: A new folder for the capture. Your own factory is copied into it.
        about: The description of the update.
        weights: The state of the model that the client received, by name.
        update: The upload, by parameter name.
        truth: The private examples as model inputs, and their labels.
    """
    folder = Path(folder)
    if (folder / DESCRIPTION).exists():
        raise CaptureError(f"{folder} already contains a capture: choose another folder")
    if about.dataset is not None and about.dataset not in DATASETS:
        raise CaptureError(
            f"dataset must be one of {', '.join(DATASETS)}, got {about.dataset!r}. A capture "
            "contains no data: give the path with --dataset when you attack it"
        )
    _check_files(about)
    check_finite(update, "the update")
    folder.mkdir(parents=True, exist_ok=True)
    named = {"model": about.model, "protocol": about.protocol, "defense": about.defense}
    about = about.model_copy(
        update={role: method and _copied(method, folder) for role, method in named.items()}
    )
    save_file(_plain(weights), folder / WEIGHTS)
    save_file(_plain(update), folder / UPDATE)
    if truth is not None:
        inputs, targets = truth
        save_file(_plain({"inputs": inputs, "targets": targets}), folder / TRUTH)
    text = json.dumps(about.model_dump(mode="json"), indent=2, allow_nan=False)
    (folder / DESCRIPTION).write_text(text + "\n")  # written last: it marks the capture as complete
    return folder


def _copied(method: Method, folder: Path) -> Method:
    """Copy the file of a method and its local imports into the capture; return the new method."""
    links = tuple(_copied(link, folder) for link in method.links)
    method = method.model_copy(update={"links": links})
    file = file_of(method.name)
    if file is None:
        return method
    for found in local_files(file):
        place = folder / found.relative_to(file.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, place)
    return method.model_copy(update={"name": f"{file.name}:{method.name.rpartition(':')[2]}"})


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def check_weights(model: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Raise if weights do not fit a model. Of tied weights, one is enough."""
    wanted = model.state_dict()
    there = {wanted[name].data_ptr() for name in weights if name in wanted}
    own = {n: v for n, v in wanted.items() if n in weights or v.data_ptr() not in there}
    check_names(weights, own, what, "the described model's weights")


def check_names(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, whose: str
) -> None:
    """Raise if tensors have the wrong names or shapes."""
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        lacks = f"{', '.join(missing[:5])} missing" if missing else ""
        more = f"{', '.join(unknown[:5])} unknown" if unknown else ""
        raise CaptureError(
            f"{what} does not have {whose}: {'; '.join(filter(None, [lacks, more]))}"
        )
    for name, value in sorted(found.items()):
        if value.shape != wanted[name].shape:
            raise CaptureError(
                f"{what} has {name!r} of shape {tuple(value.shape)}, but {whose} have "
                f"{tuple(wanted[name].shape)}"
            )


def check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise if a value is not a finite number."""
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise CaptureError(f"{what} has NaN or infinite values in {name!r}")
