"""Models by name, and the user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leakfrontier.adversaries import ImageSpace, InputSpace, TokenSpace, WaveSpace
from leakfrontier.defenses import torchvision_ops, trainable  # noqa: F401 (or torchvision may fail)

from ..foundations.plugins import load_attribute
from .features import FeatureModel, build_features
from .language_models import gpt2, hf, smollm2
from .rconv_networks import NETWORKS

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
"""The activations of `lenet` and `mlp`."""

FEATURES = "features"
"""The option that all our models have for what they see instead of images."""

Mode = Literal["eval", "train"]
"""The mode of training: without or with dropout and other randomness of training."""

LARGE = 4096
"""If an option is at least this large, the model's size is checked before it is made."""

MOST_PARAMETERS = 2**30

MOST_LAYERS = 100
"""The maximum number of hidden layers of `mlp`."""


def build_model(
    name: str,
    space: InputSpace,
    rng: Generator,
    *,
    replace_batch_norm: bool = False,
    **options: object,
) -> nn.Module:
    """Return a new model in evaluation mode, initialised only from `rng`.

    Args:
        name: One of `MODELS`, or your own factory as `package.module:factory` or
            `path/to/file.py:factory`. It is called as `factory(space, **options)`.
        space: The model's inputs and classes.
        rng: Source of the initial parameters. Torch's global generator does not change.
        replace_batch_norm: Whether to replace BatchNorm by GroupNorm, as Opacus does.
        **options: Options of that model. For one of `MODELS`, `features` is what it sees instead
            of images: see `build_features`.
    """
    factory = _find_factory(name)
    features, seen = _features(name, space, options)
    options = _of_head(name, options)
    _check_options(name, factory, seen, options)
    if name in NETWORKS:
        _image_shape(name, seen)  # raises if the space holds no images
    if name in MODELS and factory not in (hf, smollm2):  # files determine the sizes of these two
        _check_size(name, factory, seen, options)
    seed = int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[]):
        # Unlike torch.manual_seed, this does not change the generators of other devices.
        torch.default_generator.manual_seed(seed)
        model = _built(name, factory, seen, options)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
        if replace_batch_norm:
            model = _with_group_norm(model)
        if features is not None:
            model = FeatureModel(features, model)
        model.eval()
        _check_model(name, model, space)
    return model


def make_model(name: str, space: InputSpace, options: Mapping[str, Any]) -> nn.Module:
    """Return one of `MODELS` on its features, without the checks of `build_model`."""
    features, seen = _features(name, space, options)
    head = MODELS[name](seen, **_of_head(name, options))
    return head if features is None else FeatureModel(features, head)


def _of_head(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the features of our own models."""
    return {key: value for key, value in options.items() if name not in MODELS or key != FEATURES}


def _features(
    name: str, space: InputSpace, options: Mapping[str, Any]
) -> tuple[nn.Module | None, InputSpace]:
    """Return a model's frozen features, if it has any, and what its head sees."""
    if name not in MODELS or options.get(FEATURES) is None:
        return None, space
    if MODELS[name] in (hf, smollm2):
        raise ValueError(f"{name} takes no features: use linear, mlp, tanh_cnn or another model")
    _image_shape(FEATURES, space)  # raises if the space holds no images
    return build_features(cast(ImageSpace, space), options[FEATURES])


def some_inputs(space: InputSpace, count: int) -> Tensor:
    """Return inputs of a space, drawn from torch's global generator."""
    if isinstance(space, TokenSpace):
        return torch.randint(space.vocabulary, (count, *space.shape))
    return torch.randn((count, *space.shape), dtype=space.dtype)


@torch.no_grad()
def training_differs(model: nn.Module, space: InputSpace) -> bool:
    """Return whether a model behaves differently in training mode, e.g. by dropout.

    Args:
        model: The model. It ends in evaluation mode, and its buffers may change.
        space: Its inputs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inputs = some_inputs(space, 1).to(next(model.parameters()).device)
        expected = model.eval()(inputs)
        found = [model.train()(inputs) for _ in range(2)]
        model.eval()
    return not all(
        isinstance(one, Tensor) and one.shape == expected.shape and torch.allclose(one, expected)
        for one in found
    )


def dropping(model: nn.Module) -> list[str]:
    """Return the kinds of modules in a model that drop values in training."""
    kinds = {
        type(module).__name__: None
        for module in model.modules()
        if any(
            isinstance(value, float) and value > 0
            for name, value in vars(module).items()
            if "drop" in name.lower() or (name == "p" and "drop" in type(module).__name__.lower())
        )
    }
    return [*kinds]


def linear(space: InputSpace, zero_head: bool = True) -> nn.Module:
    """Return one linear layer: logistic regression.

    Args:
        space: Real-valued inputs, which are flattened.
        zero_head: Whether all weights start at zero. The loss is convex, so training needs no
            random start.
    """
    _check_continuous("linear", space)
    return nn.Sequential(nn.Flatten(), _head(math.prod(space.shape), space.classes, zero_head))


def mlp(
    space: InputSpace,
    width: int = 200,
    hidden: int = 3,
    activation: str = "relu",
    zero_head: bool = False,
) -> nn.Module:
    """Return a perceptron.

    Args:
        space: Real-valued inputs, which are flattened.
        width: Width of a hidden layer.
        hidden: Number of hidden layers.
        activation: One of `ACTIVATIONS`.
        zero_head: Whether the last layer starts at zero. The first step then changes no other.
    """
    if not width >= 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if not 1 <= hidden <= MOST_LAYERS:
        raise ValueError(f"hidden must be in [1, {MOST_LAYERS}], got {hidden}")
    _check_continuous("mlp", space)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((math.prod(space.shape), *[width] * hidden)):
        layers += [nn.Linear(inputs, outputs), _activation(activation)]
    return nn.Sequential(*layers, _head(width, space.classes, zero_head))


def cnn(space: InputSpace, hidden: int = 1024, filters: int = 12) -> nn.Module:
    """Return two convolutions at full resolution and a wide layer: the CNN of ARES.

    Args:
        space: Images.
        hidden: Width of the hidden layer.
        filters: Channels of the first convolution; the second has twice as many.
    """
    for name, value in (("hidden", hidden), ("filters", filters)):
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    channels, height, width = _image_shape("cnn", space)
    return nn.Sequential(
        nn.Conv2d(channels, filters, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(filters, 2 * filters, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * filters * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, space.classes),
    )


def lenet(space: InputSpace, activation: str = "sigmoid") -> nn.Module:
    """Return the LeNet of deep leakage from gradients.

    With sigmoids, all parameters are drawn from U(-0.5, 0.5) as in the paper. With torch's own
    initialisation, their gradients vanish.

    References:
        Zhu, Liu, Han. Deep Leakage from Gradients. NeurIPS 2019.
        https://arxiv.org/abs/1906.08935
    """
    channels, height, width = _image_shape("lenet", space)
    layers: list[nn.Module] = []
    for stride in (2, 2, 1):
        layers += [nn.Conv2d(channels, 12, kernel_size=5, padding=2, stride=stride)]
        layers += [_activation(activation)]
        channels, height, width = 12, math.ceil(height / stride), math.ceil(width / stride)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * height * width, space.classes))
    if activation == "sigmoid":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def tanh_cnn(space: InputSpace, deep: bool = False, zero_head: bool = False) -> nn.Module:
    """Return the small CNN with tanh whose accuracy under DP-SGD is published.

    Images below 16 x 16, such as features of `scattering`, get kernels of 3 x 3 without pooling,
    as in [2].

    Args:
        space: Images.
        deep: Whether to return the network for CIFAR-10: six convolutions, pooled after every two.
        zero_head: Whether the last layer starts at zero. The first step then changes no other.

    References:
        [1] Papernot, Thakurta, Song, Chien, Erlingsson. "Tempered Sigmoid Activations for Deep
            Learning with Differential Privacy." AAAI 2021. https://arxiv.org/abs/2007.14191
        [2] Tramer, Boneh. "Differentially Private Learning Needs Better Features (or Much More
            Data)." ICLR 2021, appendix C. https://arxiv.org/abs/2011.11660
    """
    channels, height, width = shape = _image_shape("tanh_cnn", space)
    smallest = min(height, width)
    if deep and smallest < 8:
        raise ValueError(f"tanh_cnn with deep needs images of at least 8 x 8, got {shape}")
    layers: list[nn.Module] = []
    stages = _DEEP if deep else _FEW_PIXELS if smallest < 16 else _USUAL
    for filters, kernel, stride, padding, pool in stages:
        layers += [nn.Conv2d(channels, filters, kernel, stride, padding), nn.Tanh()]
        layers += [nn.MaxPool2d(*pool)] if pool else []
        height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
        height, width = ((n - pool[0]) // pool[1] + 1 if pool else n for n in (height, width))
        channels = filters
    hidden = 128 if deep else 32
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.Tanh()]
    return nn.Sequential(*layers, _head(hidden, space.classes, zero_head))


_USUAL = ((16, 8, 2, 3, (2, 1)), (32, 4, 2, 0, (2, 1)))
_FEW_PIXELS = ((16, 3, 2, 1, ()), (32, 3, 1, 1, ()))
_DEEP = tuple((n, 3, 1, 1, pool) for n in (32, 64, 128) for pool in ((), (2, 2)))
"""Convolutions of `tanh_cnn`: filters, kernel, stride, padding, and kernel and stride of a pool."""


def resnet18(space: InputSpace, groups: int = 32, width: int = 64) -> nn.Module:
    """Return torchvision's ResNet-18 with GroupNorm in place of BatchNorm.

    Args:
        space: Images.
        groups: Groups of every GroupNorm.
        width: Channels of the first layers; the later ones have 2, 4 and 8 times as many.

    References:
        He et al. Deep Residual Learning for Image Recognition. CVPR 2016.
        https://arxiv.org/abs/1512.03385
        Wu, He. Group Normalization. ECCV 2018. https://arxiv.org/abs/1803.08494
    """
    if not width >= 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if not (groups >= 1 and width % groups == 0):
        raise ValueError(
            f"groups must divide {width}, the smallest number of channels, got {groups}"
        )
    channels, _, _ = _image_shape("resnet18", space)

    from torchvision.models.resnet import BasicBlock, ResNet  # slow to import

    class Scaled(ResNet):  # type: ignore[misc] # torchvision is untyped
        inplanes: int

        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:  # noqa: ANN401
            self.inplanes = width if planes == 64 else self.inplanes
            layer: nn.Sequential = super()._make_layer(block, planes * width // 64, *args, **kwargs)
            return layer

    model = Scaled(
        BasicBlock, [2, 2, 2, 2], space.classes, norm_layer=lambda n: nn.GroupNorm(groups, n)
    )
    model.conv1 = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if width != 64:
        model.bn1, model.fc = nn.GroupNorm(groups, width), nn.Linear(8 * width, space.classes)
    return cast(nn.Module, model)


def conv1d(space: InputSpace, channels: int = 32) -> nn.Module:
    """Return three convolutions over time, each with a stride of 4, and a linear layer."""
    if not channels >= 1:
        raise ValueError(f"channels must be at least 1, got {channels}")
    if not isinstance(space, WaveSpace):
        raise ValueError(f"conv1d needs sound of shape (channels, samples), got {_kind(space)}")
    seen, samples = space.shape
    layers: list[nn.Module] = []
    for made in (channels, 2 * channels, 2 * channels):
        layers += [nn.Conv1d(seen, made, kernel_size=9, padding=4, stride=4), nn.ReLU()]
        seen, samples = made, math.ceil(samples / 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(seen * samples, space.classes))


class _TokenMLP(nn.Module):
    """The sum of token and position embeddings, and a perceptron with a hidden layer."""

    def __init__(self, space: TokenSpace, width: int, hidden: int) -> None:
        super().__init__()
        (length,) = space.shape
        self.tokens = nn.Embedding(space.vocabulary, width)
        self.places = nn.Embedding(length, width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.perceptron = nn.Sequential(
            nn.Flatten(),
            nn.Linear(length * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, space.classes),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        # Repeat positions per example: Opacus treats the first axis of every input as the batch.
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        outputs: Tensor = self.perceptron(self.tokens(tokens) + self.places(places))
        return outputs


def token_mlp(space: InputSpace, width: int = 64, hidden: int = 64) -> nn.Module:
    """Return learned embeddings of tokens and of their positions, and a perceptron.

    Embeddings start as small as in BERT. With torch's own initialisation, the first steps of Adam
    switch every hidden unit off for good, and dead units leak nothing.

    Args:
        space: Tokens.
        width: Size of an embedding.
        hidden: Width of the hidden ReLU layer.
    """
    for name, value in (("width", width), ("hidden", hidden)):
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not isinstance(space, TokenSpace):
        raise ValueError(f"token_mlp needs tokens, got {_kind(space)}")
    return _TokenMLP(space, width, hidden)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "linear": linear,
    "cnn": cnn,
    "tanh_cnn": tanh_cnn,
    "lenet": lenet,
    "resnet18": resnet18,
    "conv1d": conv1d,
    "token_mlp": token_mlp,
    "gpt2": gpt2,
    "hf": hf,
    "smollm2": smollm2,
    **NETWORKS,
}
"""Every model by name, as `factory(space, **options)`. Add a line here to add a model."""


def _with_group_norm(model: nn.Module) -> nn.Module:
    from opacus.validators import ModuleValidator  # imported here because it takes seconds

    fixed: nn.Module = ModuleValidator.fix(model)
    return fixed


def _find_factory(name: str) -> Callable[..., nn.Module]:
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise ValueError(
            f"model must be one of {', '.join(MODELS)}, or your own factory as "
            f"package.module:factory or path/to/file.py:factory, got {name!r}"
        )
    factory = load_attribute(name)
    if isinstance(factory, nn.Module):
        function = name.rpartition(":")[2]
        raise ValueError(
            f"{name} is a model, not a function that makes one. Its weights would be the same "
            f"for every seed and every client. Write\n"
            f"    def build(space):\n"
            f"        return {type(factory).__name__}(...)  # the code that made {function}\n"
            "and name build instead"
        )
    if not callable(factory):
        raise ValueError(f"{name} must be a function that returns a model, got {factory!r}")
    return cast(Callable[..., nn.Module], factory)


def _check_options(
    name: str, factory: Callable[..., nn.Module], space: InputSpace, options: dict[str, object]
) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(space, **options)
    except TypeError as error:
        known = list(signature.parameters.values())[1:]  # the first is the input space
        allowed = ", ".join(str(option.replace(annotation=option.empty)) for option in known)
        if name in MODELS and space.continuous and factory is not hf:
            allowed += f", {FEATURES}=None"
        raise ValueError(
            f"{name} cannot be called with the input space and the options "
            f"{', '.join(options) or '(none)'}: {error}; its options are {allowed or '(none)'}"
        ) from error


def _check_size(
    name: str, factory: Callable[..., nn.Module], space: InputSpace, options: dict[str, object]
) -> None:
    """Raise if a model of ours is larger than any memory. A file of others may ask for that."""
    numbers = [value for value in options.values() if isinstance(value, int)]
    if max(numbers, default=0) < LARGE:
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            parameters = sum(one.numel() for one in factory(space, **options).parameters())
    except (RuntimeError, OverflowError, TypeError):  # no tensor can have these sizes
        parameters = MOST_PARAMETERS + 1
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{name} with {_listed(options)} would have more than {MOST_PARAMETERS:,} parameters: "
            "choose smaller options"
        )


def _built(
    name: str, factory: Callable[..., nn.Module], space: InputSpace, options: dict[str, object]
) -> nn.Module:
    """Return a model; raise an error that lists the options if one has the wrong type."""
    try:
        return factory(space, **options)
    except TypeError as error:
        if name not in MODELS:
            raise
        raise ValueError(f"{name} cannot be built with {_listed(options)}: {error}") from error


def _listed(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _check_model(name: str, model: nn.Module, space: InputSpace) -> None:
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"{name} has BatchNorm ({path or 'the model itself'}), whose statistics mix the "
                "examples of a batch: use GroupNorm, or set replace_batch_norm in the scenario"
            )
    _check_output(name, model, space)
    _check_parameters(name, model)  # the call above created those of lazy layers


def _check_parameters(name: str, model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} has NaN or infinite weights in {path!r}")
    if not trainable(model):
        raise ValueError(f"{name} has no trainable parameters: there is nothing to upload")


def _check_output(name: str, model: nn.Module, space: InputSpace) -> None:
    inputs = torch.zeros((2, *space.shape), dtype=space.dtype)
    try:
        with torch.no_grad():
            output = model(inputs)
    except Exception as error:  # the model may be a user's code
        raise ValueError(
            f"{name} fails on inputs of shape {tuple(inputs.shape)} and {inputs.dtype}: "
            f"{type(error).__name__}: {error}"
        ) from error
    each = isinstance(space, TokenSpace) and space.task == "next-token"
    expected = (2, *(space.shape if each else ()), space.classes)
    found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if each and isinstance(output, Tensor) and output.dim() == 3:
        found = (
            *output.shape[:2],
            min(output.shape[2], space.classes),
        )  # rows without a token do no harm
    if found != expected:
        raise ValueError(f"{name} must map 2 examples to shape {expected}, got {found}")
    if not output.is_floating_point():
        raise ValueError(f"{name} must return floating-point logits, got {output.dtype}")


def _head(inputs: int, classes: int, zero: bool) -> nn.Linear:
    """Return the layer of the logits."""
    head = nn.Linear(inputs, classes)
    if zero:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return head


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]()


def _check_continuous(name: str, space: InputSpace) -> None:
    if not space.continuous:
        raise ValueError(f"{name} needs real-valued inputs, got {_kind(space)}")


def _image_shape(name: str, space: InputSpace) -> tuple[int, int, int]:
    if not isinstance(space, ImageSpace) or len(space.shape) != 3:
        raise ValueError(
            f"{name} needs images of shape (channels, height, width), got {_kind(space)}"
        )
    channels, height, width = space.shape
    return channels, height, width


def _kind(space: InputSpace) -> str:
    """Return a description of a space, with the models that fit it."""
    if isinstance(space, TokenSpace):
        models = "token_mlp, gpt2, smollm2, hf or your own model"
        return f"sequences of {space.shape[0]} tokens; use {models}"
    if isinstance(space, WaveSpace):
        return f"sound of shape {space.shape}; use conv1d, mlp or your own model"
    return f"inputs of shape {space.shape}; use mlp or your own model"
