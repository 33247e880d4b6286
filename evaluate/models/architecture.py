"""Whether an architecture alone resists analytic inversion: constraints against unknowns.

The analysis counts the constraints of every layer that an attack has to invert, by R-CONV++ (Eq. 26
to 28). It also inspects the operations between layers. It trains nothing and attacks nothing. Ranks
are computed at random weights and slopes. Almost all weights and slopes give the same ranks.

References:
    Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
    through Analytical Gradient Inversion Attacks." Computing 107:156, 2025, section 5.
    https://doi.org/10.1007/s00607-025-01508-w
    Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021, section 4.
    https://arxiv.org/abs/2010.07733
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from leakfrontier.adversaries import ImageSpace, InputSpace, NotApplicable, WaveSpace
from leakfrontier.adversaries.recursive.constraints import (
    Counts,
    count,
    gradient_matrix,
    weight_matrix,
)
from leakfrontier.adversaries.recursive.layer_chain import Layer, Obstacle, Path, passable, trace
from leakfrontier.defenses import torchvision_ops  # noqa: F401 (or torchvision may fail)

from ..foundations.errors import UserError
from ..foundations.plugins import load_attribute
from .models import MODELS, make_model

_RANKED = 800
"""The rank of a layer is computed only up to this many unknowns."""


@dataclass(frozen=True)
class LayerCounts:
    """A row of an analysis: a layer, or an obstacle.

    Attributes:
        name: Name of the layer, or of the function.
        kind: `convolution`, `linear` or `obstacle`.
        activation: The activation after the layer.
        input_shape: Shape of its input.
        unknowns: Number of entries of its input.
        weight: Number of weight constraints.
        gradient: Number of gradient constraints.
        gradient_rank: Maximum number of independent gradient constraints.
        rank: Rank of both together: the computed one, or its upper limit.
        computed: Whether the rank was computed.
        note: What stops an attack here, or which constraints are enough.
    """

    name: str
    kind: str
    activation: str = ""
    input_shape: tuple[int, ...] = ()
    unknowns: int = 0
    weight: int = 0
    gradient: int = 0
    gradient_rank: int = 0
    rank: int = 0
    computed: bool = False
    note: str = ""


@dataclass(frozen=True)
class AttackVerdict:
    """Whether an attack is possible.

    Attributes:
        attack: Its name.
        threat: What the server must do for it: `passive`, `parameters` or `architecture`.
        possible: Whether the architecture permits it.
        reason: Why not, or to what extent.
    """

    attack: str
    threat: str
    possible: bool
    reason: str


@dataclass(frozen=True)
class Analysis:
    """Which attacks an architecture permits.

    Attributes:
        model: Its name.
        shape: Shape of an example.
        layers: The layers and obstacles that an example passes, in order.
        verdicts: Whether each attack is possible.
    """

    model: str
    shape: tuple[int, ...]
    layers: tuple[LayerCounts, ...]
    verdicts: tuple[AttackVerdict, ...]

    @property
    def resists(self) -> bool:
        """Return whether no analytic attack of a passive server is possible."""
        return not any(v.possible for v in self.verdicts if v.threat == "passive")

    def document(self) -> dict[str, Any]:
        """Return the analysis as JSON values."""
        return {**asdict(self), "resists": self.resists}


def analyse(model: nn.Module, shape: Sequence[int], name: str = "model") -> Analysis:
    """Return which attacks a model's architecture permits.

    Args:
        model: The model. On the meta device, no values are computed.
        shape: Shape of an example.
        name: The model's name in the analysis.
    """
    path = trace(model, shape)
    rows = tuple(_row(step) for step in path)
    verdicts = tuple(_verdict(*attack, path) for attack in _ATTACKS)
    return Analysis(name, tuple(shape), rows, verdicts)


def build(name: str, space: InputSpace, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a model by name, without values if possible.

    Args:
        name: One of `MODELS`, a factory as `file.py:factory`, a torchvision model name, or one of
            Hugging Face: a kind of model, such as `resnet`, or a repository.
        space: Its inputs.
        options: Options of our models and of factories.
    """
    options = dict(options or {})
    factory: Callable[[], Any]
    if name in MODELS:
        factory = lambda: make_model(name, space, options)  # noqa: E731
    elif ":" in name:
        own = load_attribute(name)
        if not callable(own):
            raise UserError(f"{name} must be a function that returns a model, got {own!r}")
        factory = lambda: own(space, **options)  # noqa: E731
    else:
        factory = _of_library(name, space)
    try:
        with torch.device("meta"):
            model = factory()
            model(torch.zeros(1, *space.shape, device="meta"))  # initialises lazy layers
    except Exception:  # some models cannot be built without values
        model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _of_library(name: str, space: InputSpace) -> Callable[[], nn.Module]:
    from torchvision import models  # slow to import

    if name in models.list_models(module=models):
        return lambda: models.get_model(name, weights=None, num_classes=space.classes)
    from transformers import AutoConfig, AutoModelForImageClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        if name in CONFIG_MAPPING_NAMES:
            config = AutoConfig.for_model(name)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        config.num_labels = space.classes
        model = AutoModelForImageClassification
        return lambda: _Logits(model.from_config(config))
    except (OSError, ValueError) as error:
        raise UserError(
            f"unknown model {name!r}: use one of {', '.join(MODELS)}, FILE.py:factory, or a model "
            f"name of torchvision or of Hugging Face ({str(error).splitlines()[0]})"
        ) from error


class _Logits(nn.Module):
    """A Hugging Face model that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(inputs).logits
        return outputs


def space_of(shape: Sequence[int], classes: int) -> InputSpace:
    """Return an image space for three numbers, and a sound space for two."""
    if len(shape) not in (2, 3) or not all(size >= 1 for size in shape) or not classes >= 1:
        raise UserError(
            "--shape must be channels,height,width or channels,samples, all positive, got "
            + ",".join(map(str, shape))
        )
    kind = ImageSpace if len(shape) == 3 else WaveSpace
    return kind(tuple(shape), classes)


def _row(step: Layer | Obstacle) -> LayerCounts:
    if isinstance(step, Obstacle):
        return LayerCounts(step.name, "obstacle", note=step.reason)
    activation = step.activation.name if step.activation is not None else ""
    known = LayerCounts(step.name, "linear", activation, step.input_shape)
    if step.is_linear:
        size = step.input_shape[0]
        note = "reveals its input" if step.bias is not None else "no bias: only by its slope"
        return replace(known, unknowns=size, gradient=step.weight.numel(), rank=size, note=note)
    counts = count(step)
    rank = _rank(step, counts)
    return replace(
        known,
        kind="convolution",
        unknowns=counts.unknowns,
        weight=counts.weight,
        gradient=counts.gradient,
        gradient_rank=counts.gradient_rank,
        rank=counts.rank if rank is None else rank,
        computed=rank is not None,
        note=_enough(step, counts),
    )


def _enough(layer: Layer, counts: Counts) -> str:
    if layer.groups > 1:
        return "attacks do not invert grouped convolutions"
    if counts.by_gradient:
        return "gradient constraints are enough"
    if counts.by_weight:
        return "weight constraints are enough"
    return "both together can be enough" if counts.enough else "too few constraints"


def _rank(layer: Layer, counts: Counts) -> int | None:
    """Return the rank of both kinds of constraints at random weights; None for large layers."""
    if layer.groups > 1 or counts.unknowns > _RANKED or layer.weight.numel() > 10**6:
        return None
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(layer.weight.shape, generator=rng, dtype=torch.float64, device="cpu")
    slopes = torch.randn(layer.output_shape, generator=rng, dtype=torch.float64, device="cpu")
    like = replace(layer, weight=drawn)
    rows = torch.block_diag(*[gradient_matrix(like, slopes)] * layer.input_shape[0])
    if counts.weight:
        rows = torch.cat([rows, weight_matrix(like)])
    return int(torch.linalg.matrix_rank(rows.T @ rows, hermitian=True, rtol=1e-10))


def _verdict(attack: str, threat: str, check: Callable[[Path], str], path: Path) -> AttackVerdict:
    try:
        return AttackVerdict(attack, threat, True, check(path))
    except NotApplicable as reason:
        return AttackVerdict(attack, threat, False, str(reason))


def _single(path: Path) -> str:
    layers = passable(path)
    first = next(place for place, layer in enumerate(layers) if layer.is_linear)
    if layers[first].bias is None:
        raise NotApplicable(f"layer {layers[first].name!r} has no bias to divide by")
    _check_counts(layers)
    return "one example"


def _recursive(path: Path) -> str:
    layers = passable(path)
    for layer in layers[:-1]:
        if layer.activation is not None and layer.activation.partial:
            raise NotApplicable(f"{layer.activation.name} has no inverse")
    _check_counts(layers)
    return "one example, with or without a bias"


def _check_counts(layers: Sequence[Layer]) -> None:
    for layer in layers:
        if layer.is_linear:
            continue
        counts = count(layer)
        rank = _rank(layer, counts) if counts.enough else None
        reached = counts.rank if rank is None else rank
        if layer.groups > 1 or reached < counts.unknowns:
            raise NotApplicable(
                f"layer {layer.name!r}: {counts.weight} weight and {counts.gradient} gradient "
                f"constraints have at most rank {reached} for {counts.unknowns} unknowns"
            )


def _batch(path: Path) -> str:
    layers = passable(path)
    head = layers[-1]
    if sum(layer.is_linear for layer in layers) > 1 or any(
        isinstance(step, Obstacle) for step in path
    ):
        raise NotApplicable("the convolutions are followed by more than the layer of the logits")
    if head.bias is None:
        raise NotApplicable(f"layer {head.name!r} has no bias to divide by")
    for layer in layers[:-1]:
        counts = count(layer)
        if layer.groups > 1 or not counts.by_weight:
            raise NotApplicable(
                f"layer {layer.name!r}: {counts.weight} weight constraints for {counts.unknowns} "
                "unknowns"
            )
    return f"up to as many examples as classes, {head.output_shape[0]}"


def _first_linear(path: Path) -> Layer:
    first = path[0] if path else None
    if not isinstance(first, Layer) or not first.is_linear:
        raise NotApplicable("no linear layer sees the inputs")
    if first.bias is None:
        raise NotApplicable(f"layer {first.name!r} has no bias")
    return first


def _linear_leakage(path: Path) -> str:
    _first_linear(path)
    return "one example, and examples of a batch that are alone in a row"


def _spear(path: Path) -> str:
    layer = _first_linear(path)
    if layer.activation is None or layer.activation.name != "relu":
        raise NotApplicable(f"layer {layer.name!r} is not followed by a ReLU")
    return f"batches well below the layer's rank, {min(layer.weight.shape)}"


def _imprint(path: Path) -> str:
    linear = [step for step in path if isinstance(step, Layer) and step.is_linear]
    if len(linear) < 2:
        raise NotApplicable("an imprint needs two consecutive linear layers")
    layer = linear[0]
    if layer.bias is None or layer.activation is None or layer.activation.name != "relu":
        raise NotApplicable(f"layer {layer.name!r} needs a bias and must be followed by a ReLU")
    before = path[: path.index(layer)]
    blocked = next((step for step in before if isinstance(step, Obstacle)), None)
    if blocked is not None:
        raise NotApplicable(f"{blocked.name} is before layer {layer.name!r}: {blocked.reason}")
    return f"a share of a batch, by {layer.output_shape[0]} bins"


_ATTACKS: tuple[tuple[str, str, Callable[[Path], str]], ...] = (
    ("RCONV", "passive", _single),
    ("RCONV, batch", "passive", _batch),
    ("RGAP", "passive", _recursive),
    ("LinearLeakage", "passive", _linear_leakage),
    ("SPEARPlusPlus", "passive", _spear),
    ("imprint family", "parameters", _imprint),
    ("RobbingTheFed", "architecture", lambda _: "inserts its own module into any model"),
)
