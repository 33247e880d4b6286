"""Scenarios: a dataset, a model, a protocol and a threat model, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from torch import Tensor, nn

from leakfrontier.adversaries import (
    ContinuousSpace,
    InputSpace,
    Protocol,
    PublicData,
    Threat,
    TokenSpace,
)
from leakfrontier.defenses import Batch, Defense

from ..client.client import Client, ThreatModel
from ..data.data import data_digest, data_files, is_named, load_dataset
from ..data.dataset import Dataset
from ..data.text import HUB, Reading
from ..data.tokenizers import TOKENIZERS
from ..engines.parcels import Files, Traveller
from ..foundations.devices import Device, current_device, on_device
from ..foundations.examples import Examples
from ..foundations.seeds import generator
from ..modality.modality import Modality
from ..models.features import DEFAULT
from ..models.language_models import pretrained_of, tokenizer_of
from ..models.models import MODELS, Mode, build_model
from ..models.pretrained import Task, is_path, missing, model_digest, model_files, model_places
from ..users.copies import copied
from ..users.methods import (
    MOST,
    MOST_COMBINATIONS,
    Method,
    Number,
    Strict,
    TunedMethod,
    Whole,
    build_defense,
    build_protocol,
    check_steps,
    defense_grid,
    folder_of,
    placed,
)
from ..users.names import family, label


class Training(Strict):
    """Training under each defense, which measures what the defense costs."""

    rounds: Whole = Field(default=150, ge=1, le=MOST)
    """Rounds of federated training."""
    clients: Whole = Field(default=20, ge=1, le=MOST)
    """Clients that share the training data."""
    small_clients: dict[Annotated[Whole, Field(ge=1, le=MOST)], Annotated[Whole, Field(ge=1)]] = (
        Field(default={})
    )
    """Further clients, by their number of examples. `{1: 17, 8: 5}` adds 17 clients of one example
    and 5 of eight. `clients` share the rest of the data."""
    size_ratio: Number = Field(default=1, ge=1, allow_inf_nan=False)
    """How many times as many examples the largest of `clients` has as the smallest. Sizes grow
    geometrically."""
    clients_per_round: Whole | Literal["all"] = Field(default=16)
    """Clients sampled in each round, or `all`. If there are fewer clients than the default, all of
    them."""
    batch_size: Whole | Literal["all"] | None = None
    """Examples per client and round under FedSGD, or `all` examples of a client. FedAvg uses all.
    Default: the scenario's batch_size."""
    weighting: Literal["equal", "examples"] = "equal"
    """How uploads count: `equal`, or in proportion to the `examples` behind them."""
    server: Literal["sgd", "adam"] = "adam"
    """The server's optimizer: `sgd` (FedAvg; with momentum, FedAvgM) or `adam` (FedAdam)."""
    momentum: Number = Field(default=0, ge=0, lt=1)
    """Momentum of `sgd`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the server's learning rate changes over the rounds. `linear` and `cosine` end near 0."""
    lr: Number = Field(default=0.005, gt=0, allow_inf_nan=False)
    """The server's learning rate."""
    defense_lr: dict[str, Annotated[Number, Field(gt=0, allow_inf_nan=False)]] = Field(default={})
    """Other learning rates for some defenses: by family, e.g. `DPSGD`, or by a defense's name in
    reports."""
    partition: Literal["iid", "label-skew", "feature-skew"] = "iid"
    """How the data is distributed over clients: `iid`, `label-skew` or `feature-skew`."""
    alpha: Number = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Concentration of the Dirichlet distribution of `label-skew`. Near 0, each client has one
    class."""

    def lr_under(self, defense: Method) -> float:
        """Return the server's learning rate under a defense."""
        of_family = self.defense_lr.get(family(defense), self.lr)
        return self.defense_lr.get(label(defense), of_family)

    @property
    def all_clients(self) -> int:
        """Return the number of all clients, small ones included."""
        return self.clients + sum(self.small_clients.values())

    @property
    def participants(self) -> int:
        """Return the number of clients that are sampled in each round."""
        several = self.clients_per_round
        return self.all_clients if several == "all" else several

    def described(self) -> str:
        """Return who takes part in the federation, in words."""
        small = [f"{count} of {size}" for size, count in self.small_clients.items()]
        beside = f", beside {' and '.join(small)} examples each" if small else ""
        largest = f", the largest {self.size_ratio:g} times as many as the smallest"
        unequal = largest if self.size_ratio > 1 else ""
        count = "by their examples" if self.weighting == "examples" else "equally"
        return (
            f"{self.clients} clients share the data{unequal}{beside}. {self.participants} take "
            f"part in each of {self.rounds} rounds. Uploads count {count}."
        )

    @field_validator("clients_per_round", "batch_size")
    @classmethod
    def _positive(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise ValueError(f"{info.field_name} must be from 1 to {MOST}, or all, got {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _at_most_all(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if not isinstance(value, dict) or "clients_per_round" in value:
            return value
        if value.get("small_clients"):
            return {**value, "clients_per_round": "all"}
        clients, usual = value.get("clients"), cls.model_fields["clients_per_round"].default
        if isinstance(clients, int) and 1 <= clients < usual:
            return {**value, "clients_per_round": clients}
        return value

    @model_validator(mode="after")
    def _enough_clients(self) -> Training:
        if self.participants > self.all_clients:
            raise ValueError(
                f"clients_per_round must be at most clients = {self.all_clients}, "
                f"got {self.clients_per_round}"
            )
        if self.momentum and self.server != "sgd":
            raise ValueError(f"momentum needs server: sgd, got {self.server}")
        return self


_NEWER = ("small_clients", "size_ratio", "weighting", "momentum", "schedule")
"""Options that are left out of a cell's identity at their defaults. It was made before them."""

FEDERATION = (
    "rounds",
    "clients",
    "clients_per_round",
    "partition",
    "alpha",
    "defense_lr",
    "small_clients",
    "size_ratio",
    "weighting",
)
"""Keys of training that are the same for all defenses, so they are not tuned."""


class Tune(Strict):
    """Settings to choose on the validation examples, for the control and every defense alike.

    In a file, options stand beside `budget` and `seeds`: `tune: {lr: [0.1, 1], budget: 6}`.
    """

    budget: Whole = Field(default=9, ge=1, le=10_000)
    """Trainings of each defense and of the control. With fewer settings, they are repeated."""
    seeds: Whole = Field(default=1, ge=1, le=100)
    """Trainings of each setting at least. More seeds try fewer settings."""
    options: dict[str, tuple[JsonValue, ...]] = Field(default={})
    """The values of each option: a key of training, or `Family.option` of a defense."""
    chosen: dict[str, dict[str, JsonValue]] = Field(default={})
    """The chosen values by the name of the defense. A run fills them in."""
    before: dict[str, JsonValue] = Field(default={})
    """The configured values of an arm's training. A run fills them in."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if not isinstance(value, dict) or "options" in value:
            return value
        fixed = {key: value[key] for key in cls.model_fields if key in value}
        return {**fixed, "options": {k: v for k, v in value.items() if k not in fixed}}

    @field_validator("options")
    @classmethod
    def _valid_options(
        cls, value: dict[str, tuple[JsonValue, ...]]
    ) -> dict[str, tuple[JsonValue, ...]]:
        tunable = [name for name in Training.model_fields if name not in FEDERATION]
        for name, values in value.items():
            if not values:
                raise ValueError(f"{name} must list at least one value, got none")
            if "." not in name and name not in tunable:
                raise ValueError(
                    f"{name!r} cannot be tuned: give {', '.join(tunable)}, or an option of a "
                    "defense such as DPSGD.max_grad_norm"
                )
            for one in values if "." not in name else ():
                Training.model_validate({name: one})
        if math.prod(len(values) for values in value.values()) > MOST_COMBINATIONS:
            raise ValueError(f"the lists make more than {MOST_COMBINATIONS:,} combinations")
        return value


class Scenario(Strict, Traveller):
    """Everything about an evaluation except the defense and the adversary."""

    download: ClassVar[tuple[str, str]] = ("data_folder", "dataset")

    title: str | None = None
    """Name in reports. Default: the dataset, the model and all settings that are not defaults."""
    dataset: str = "fashion-mini"
    """A dataset by name, a path (a folder of images or sounds, or a JSONL file), or `hub:` and the
    id of texts on the Hugging Face hub."""
    data_folder: Path | None = None
    """Folder of full datasets in torchvision's layout, also for downloads. Default:
    ~/.cache/leakfrontier."""
    validation: Number = Field(default=0, ge=0, le=0.5)
    """Share of the training data that clients do not hold. Settings are tuned on it. Default: none,
    or a tenth if settings are tuned."""
    model: Method = Method(name="mlp")
    """A model by name, or your own file.py:factory, and its options."""
    task: Task = "classification"
    """What the model learns: `classification`, or `next-token` (each token of a text from the
    tokens before it)."""
    tokenizer: str | None = None
    """How texts become tokens: `characters`, `words`, `bytes`, or a model whose tokenizer to use.
    Default: the model's own, words for `gpt2`, and characters for others."""
    length: Whole | None = Field(default=None, ge=2, le=MOST)
    """Tokens of a text. Longer texts are cut. Default: the length that nine of ten texts do not
    exceed, at most 128."""
    replace_batch_norm: bool = False
    """Whether to replace a model's BatchNorm by GroupNorm, under every defense."""
    mode: Mode = "eval"
    """Mode in which clients train: `eval` is without dropout and other randomness of training,
    `train` is with it. An adversary's replay draws its own masks."""
    protocol: Method = Method(name="FedSGD")
    """`FedSGD`, `FedAvg` or `FedBuff`, and its options."""
    batch_size: Whole = Field(default=1, ge=1, le=MOST)
    """Private examples behind one attacked upload. Smaller batches are easier to attack. 1 is the
    worst case."""
    checkpoints: tuple[Whole, ...] = (150,)
    """Attacked uploads come from random rounds of training up to this one, after a client's first.
    0 is the first upload of a new client, for the untrained model. Default: all rounds."""
    knows_targets: bool = False
    """Whether adversaries are told the labels."""
    public_data: bool = True
    """Whether adversaries have auxiliary data: the test split."""
    threat: Threat = Threat.ARCHITECTURE
    """The most that a server may do: read uploads, send crafted parameters, or send a crafted
    architecture. An attack that does more is not applicable."""
    candidates: Whole = Field(default=100, ge=2, le=MOST)
    """Number of look-alikes of the same class, including the victim, among which an attack must
    identify the victim."""
    defenses: tuple[Method, ...] = ()
    """Defenses to evaluate only in this scenario, in addition to those of the run."""
    device: Device = "cpu"
    """Where cells run: `cpu`, `cuda`, `mps`, or `auto` for the best available device. Random draws
    are the same on all devices. Results differ by rounding. The folder of a run does not
    distinguish devices."""
    training: Training = Training()
    """How utility is measured. See the keys of training."""
    tune: Tune | None = None
    """Settings that are chosen on the validation examples before the evaluation."""

    @field_validator("dataset")
    @classmethod
    def _placed_dataset(cls, value: str, info: ValidationInfo) -> str:
        found = placed(value, folder_of(info))
        is_path = "/" in value or value.startswith("~") or Path(found).exists()
        return found if is_path and not is_named(value) else value

    @field_validator("data_folder")
    @classmethod
    def _placed_downloads(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        return None if value is None else Path(placed(str(value), folder_of(info)))

    @field_validator("defenses")
    @classmethod
    def _valid_defenses(cls, value: tuple[Method, ...]) -> tuple[Method, ...]:
        return tuple(defense_grid(value))

    @field_validator("protocol")
    @classmethod
    def _valid_protocol(cls, value: Method) -> Method:
        build_protocol(value)
        return value

    @field_validator("model")
    @classmethod
    def _placed_model(cls, value: Method, info: ValidationInfo) -> Method:
        options, folder = dict(value.options), folder_of(info)
        if value.name == "hf" and isinstance(options.get("id"), str):
            options["id"] = _placed_source(str(options["id"]), folder)
        features = options.get("features")
        if value.name in MODELS and isinstance(features, dict):
            options["features"] = _placed_features(features, folder)
        return value.model_copy(update={"options": options})

    @field_validator("tokenizer")
    @classmethod
    def _placed_tokenizer(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or value in TOKENIZERS:
            return value
        return _placed_source(value, folder_of(info))

    @model_validator(mode="after")
    def _bounded_steps(self) -> Scenario:
        check_steps(self.protocol, self.batch_size)
        return self

    @model_validator(mode="after")
    def _secret_tokens(self) -> Scenario:
        if self.task == "next-token" and self.knows_targets:
            raise ValueError(
                "knows_targets must be false for task: next-token: the targets are the private text"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _tuned_on_a_tenth(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if not isinstance(value, dict) or value.get("tune") is None or "validation" in value:
            return value
        return {**value, "validation": 0.1}

    @model_validator(mode="after")
    def _can_tune(self) -> Scenario:
        if self.tune is not None and not self.validation:
            raise ValueError("tune needs validation examples: raise validation above 0")
        if self.tune is not None and "lr" in self.tune.options and self.training.defense_lr:
            raise ValueError("tune.lr and training.defense_lr exclude each other: leave one out")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that older versions lack, so that equal configurations stay equal."""
        content: dict[str, Any] = dump(self)
        for key in ("validation", "tune"):
            if getattr(self, key) == type(self).model_fields[key].default:
                content.pop(key, None)
        return content

    @model_validator(mode="before")
    @classmethod
    def _all_rounds(cls, value: Any) -> Any:  # noqa: ANN401 - whatever the file holds
        if not isinstance(value, dict) or "checkpoints" in value:
            return value
        training = value.get("training", {})
        rounds = training.get("rounds") if isinstance(training, dict) else training.rounds
        return {**value, "checkpoints": (rounds,)} if isinstance(rounds, int) else value

    @model_validator(mode="after")
    def _reachable_checkpoints(self) -> Scenario:
        if not self.checkpoints or not all(
            0 <= c <= self.training.rounds for c in self.checkpoints
        ):
            raise ValueError(
                f"checkpoints must be rounds in [0, {self.training.rounds}], "
                f"got {list(self.checkpoints)}"
            )
        return self

    @property
    def name(self) -> str:
        """Return the name in reports."""
        return self.description if self.title is None else self.title

    @property
    def description(self) -> str:
        """Return the dataset, the model and what differs from the defaults."""
        parts = [self.data_name, self.model_label]
        if self.protocol != Method(name="FedSGD"):
            parts.append(label(self.protocol))
        if self.task != "classification":
            parts.append(self.task)
        if self.batch_size != 1:
            parts.append(f"batch {self.batch_size}")
        if self.knows_targets:
            parts.append("labels known")
        if self.mode != "eval":
            parts.append("training mode")
        return "/".join(parts)

    @property
    def data_name(self) -> str:
        """Return the name of the dataset, without its folder."""
        return self.dataset if is_named(self.dataset) else Path(self.dataset).name

    def clients_examples(self, training: int) -> int:
        """Return the number of training examples that clients hold, given that of the dataset."""
        return _clients_examples(training, self.validation)

    def files(self) -> Files:
        """Yield the data and the pretrained model that are on this machine."""
        yield from data_files(self.dataset, self.data_folder)
        yield from model_files(self.model.name, self.model.options)

    def config(self) -> dict[str, Any]:
        """Return everything that a result depends on, as plain JSON values."""
        shown = {"title", "device", "defenses", "tune"}
        config = self.model_dump(mode="json", exclude=shown) | {"data_folder": None}
        for key in ("threat", "task", "tokenizer", "length", "mode"):
            if getattr(self, key) == type(self).model_fields[key].default:
                del config[key]  # keeps the keys of cells from before this option existed
        for key in ("defense_lr", *_NEWER):
            if getattr(self.training, key) == Training.model_fields[key].default:
                del config["training"][key]
        if not is_named(self.dataset) or self.dataset.startswith(HUB):
            config |= {"dataset": self.data_name, "content": data_digest(self.dataset)}
        if self.tune is not None and self.tune.before:
            config["training"]["before_tuning"] = self.tune.before
        return {**config, "model": self.model_identity()}

    def paired_config(self) -> dict[str, Any]:
        """Return what draws depend on: the configuration without the choices of tuning.

        Arms of one scenario may have other settings, but the same clients and rounds.
        """
        config = self.config()
        before = config["training"].pop("before_tuning", {})
        return config | {"training": config["training"] | before}

    def arm(
        self, defense: Method, values: Mapping[str, JsonValue] | None = None
    ) -> tuple[Scenario, Method]:
        """Return the scenario and the defense with some of the tuned settings.

        Args:
            defense: The defense as configured.
            values: The settings. Default: the chosen ones.
        """
        if self.tune is None:
            return self, defense
        chosen = self.tune.chosen.get(label(defense), {}) if values is None else values
        own = {name: value for name, value in chosen.items() if "." not in name}
        training = Training.model_validate({**self.training.model_dump(), **own})
        dumped = self.training.model_dump(mode="json")
        tune = Tune(before={name: dumped[name] for name in own}) if own else None
        scenario = self.model_copy(update={"training": training, "tune": tune})
        options = {name: value for name, value in chosen.items() if "." in name}
        if not options:
            return scenario, defense
        tuned = _with_options(defense, options)
        return scenario, TunedMethod(
            name=tuned.name, options=tuned.options, links=tuned.links, before=defense
        )

    def model_identity(self) -> dict[str, Any]:
        """Return the model. If it is read from files, their content replaces the folder."""
        source = pretrained_of(self.model) or next(self._places, None)
        content = model_digest(source) if source else ""
        config = self.model.config()
        if content and config["options"]:
            config["options"] = self._named_options
        return {**config, "content": content} if content else config

    @property
    def model_label(self) -> str:
        """Return the model's name in reports. A model from a folder has the folder's name."""
        return label(self.model.model_copy(update={"options": self._named_options}))

    @property
    def _places(self) -> Iterator[str]:
        return model_places(self.model.name, self.model.options)

    @property
    def _named_options(self) -> dict[str, JsonValue]:
        """Return the model's options, with names instead of the paths of files and folders."""
        names: dict[JsonValue, str] = {place: Path(place).name for place in self._places}

        def named(value: JsonValue) -> JsonValue:
            if isinstance(value, dict):
                return {key: named(one) for key, one in value.items()}
            return names.get(value, value) if isinstance(value, str) else value

        return {key: named(value) for key, value in self.model.options.items()}

    @property
    def reading(self) -> Reading:
        """Return how texts become examples."""
        return Reading(self.task, self.tokenizer or tokenizer_of(self.model), self.length)


def own_options(defense: Method, names: Iterable[str]) -> list[str]:
    """Return the tuned options, as `Family.option`, that a defense or one of its links has."""
    families = {family(one) for one in (defense, *defense.links)}
    return [name for name in names if name.rpartition(".")[0] in families]


def _with_options(method: Method, values: Mapping[str, JsonValue]) -> Method:
    """Return a defense with other options, given as `Family.option`."""
    own = {
        name.rpartition(".")[2]: value
        for name, value in values.items()
        if name.rpartition(".")[0] == family(method) and not method.links
    }
    links = tuple(_with_options(link, values) for link in method.links)
    return method.model_copy(update={"options": {**method.options, **own}, "links": links})


def _layer(named: tuple[str, nn.Module]) -> tuple[object, ...]:
    name, module = named
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return (name, type(module), *map(len, hooks))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.requires_grad == other.requires_grad and torch.equal(one, other)


def _placed_source(name: str, folder: Path) -> str:
    """Return a model's id on the hub, or its path relative to the current folder."""
    if not is_path(name, folder):
        return name
    found = placed(name, folder)
    if not Path(found).exists():
        raise missing(found)
    return found


def _placed_features(features: dict[str, JsonValue], folder: Path) -> dict[str, JsonValue]:
    """Return the options of features, with the path of weights or of a backbone placed."""
    weights, backbone = features.get("weights"), features.get("backbone")
    if isinstance(weights, str) and weights != DEFAULT:
        return {**features, "weights": placed(weights, folder)}
    if weights is None and isinstance(backbone, str):
        return {**features, "backbone": _placed_source(backbone, folder)}
    return features


@dataclass(frozen=True)
class World:
    """A scenario with its data, as model inputs.

    Attributes:
        scenario: The scenario.
        modality: The kind of data.
        train: The clients' examples.
        test: Held-out examples, for accuracy and as the adversary's public data.
        validation: Training examples that no client holds, for tuning; None without them.
    """

    scenario: Scenario
    modality: Modality
    train: Examples
    test: Batch
    validation: Batch | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the data."""
        return self.train.targets.device

    @property
    def space(self) -> InputSpace:
        """Return the public knowledge about the inputs."""
        return self.modality.space

    @cached_property
    def train_values(self) -> Examples:
        """Return the clients' examples on the scale of the data."""
        return self.train.then(self.modality.values)

    @property
    def protocol(self) -> Protocol:
        """Return the protocol."""
        return build_protocol(self.scenario.protocol)

    @property
    def share_sizes(self) -> tuple[int, ...]:
        """Return the number of examples of each client, small clients first."""
        training, available = self.scenario.training, len(self.train.targets)
        small = [size for size, count in training.small_clients.items() for _ in range(count)]
        rest, clients = available - sum(small), training.clients
        if rest < clients and not small:
            raise ValueError(
                f"training.clients must be at most {available}, got {clients}: "
                f"{self.scenario.dataset} has {available} training examples"
            )
        if rest < clients:
            raise ValueError(
                f"training.clients and training.small_clients need {sum(small) + clients} "
                f"examples, but {self.scenario.dataset} has {available} training examples"
            )
        growth = torch.linspace(0, 1, clients, dtype=torch.float64)
        parts = (training.size_ratio**growth).cumsum(0)
        ends = (1 + (rest - clients) * parts / parts[-1] + torch.arange(clients)).round().long()
        sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.long))
        return (*small, *sizes.tolist())

    @cached_property
    def drawn_sizes(self) -> tuple[int, ...]:
        """Return how many examples each client uses in a round. It may be one more."""
        batch = self.scenario.training.batch_size or self.scenario.batch_size
        if batch == "all" or not self.protocol.uploads_gradient:
            return self.share_sizes
        return tuple(min(batch, size) for size in self.share_sizes)

    def defense(self, method: Method) -> Defense:
        """Return a defense that knows how the inputs were normalised."""
        built = build_defense(method)
        if not isinstance(self.space, ContinuousSpace):
            return built
        return built.for_space(self.space.mean, self.space.std)

    def model(self, defense: Defense, seed: int) -> nn.Module:
        """Return the initial model. It is the same for every defense, apart from its `on_model`."""
        model = copied(defense.on_model(self.built(seed)))  # the defense may keep its own
        return model.train(self.scenario.mode == "train").to(self.device)

    def is_changed(self, defense: Defense, seed: int) -> bool:
        """Return whether a defense changes the layers, the values or the hooks of the model."""
        models = [self.model(one, seed) for one in (Defense(), defense)]
        layers = [[*map(_layer, model.named_modules())] for model in models]
        tensors = [[*model.named_parameters(), *model.named_buffers()] for model in models]
        if layers[0] != layers[1] or len(tensors[0]) != len(tensors[1]):
            return True
        return not all(
            names[0] == names[1] and _is_same(*values)
            for names, values in (zip(*pair, strict=True) for pair in zip(*tensors, strict=True))
        )

    def built(self, seed: int) -> nn.Module:
        """Return the model as its factory returns it.

        It is made on the CPU, so that its weights are the same on all devices.
        """
        scenario = self.scenario
        rng = generator("model", scenario.model_identity(), scenario.data_name, seed)
        method = scenario.model
        with on_device("cpu"):
            return build_model(
                method.name,
                self.space,
                rng,
                replace_batch_norm=scenario.replace_batch_norm,
                **method.options,
            )

    def client(self, defense: Defense, model: nn.Module) -> Client:
        """Return a client of the scenario."""
        return Client(model, self.modality.loss, defense, self.protocol, self.space)

    def threat(self, knows_defense: bool) -> ThreatModel:
        """Return what the adversary knows in the scenario."""
        public = PublicData(*self.test) if self.scenario.public_data else None
        return ThreatModel(self.scenario.knows_targets, knows_defense, public)


def load_world(scenario: Scenario) -> World:
    """Return a scenario with its data, on the current device."""
    data = load_dataset(scenario.dataset, scenario.data_folder, scenario.reading)
    if scenario.task == "next-token" and not isinstance(data.space, TokenSpace):
        raise ValueError(f"task: next-token needs texts, but {scenario.dataset} holds none")
    train, test = data.normalised
    here, validation = current_device(), None
    if scenario.validation:
        train, held_out = _held_out(data, scenario.data_name, scenario.validation)
        validation = held_out.to(here)
    return World(scenario, data.modality, train.to(here), test.to(here), validation)


@lru_cache(maxsize=2)
def _held_out(data: Dataset, name: str, share: float) -> tuple[Examples, Batch]:
    """Return the examples that clients hold, and those for validation.

    The choice depends only on the name of the dataset, its size and the share.
    """
    train, _ = data.normalised
    order = torch.randperm(len(train.targets), generator=generator("validation", name))
    count = _clients_examples(len(order), share)
    return train.part(order[:count].sort().values), train.at(order[count:].sort().values)


def _clients_examples(total: int, share: float) -> int:
    return total - (max(1, round(total * share)) if share else 0)


SCENARIOS: dict[str, Scenario] = {
    "fashion-mini/mlp": Scenario(),
    "fashion-mini/lenet": Scenario(model=Method(name="lenet")),
    "fashion-mini/cnn": Scenario(model=Method(name="cnn")),
    "digits/mlp": Scenario(dataset="digits"),
    "cifar10/lenet": Scenario(dataset="cifar10", model=Method(name="lenet")),
    "cifar10/resnet18": Scenario(dataset="cifar10", model=Method(name="resnet18")),
}
"""Scenarios by name. Configuration files describe other scenarios in full."""
