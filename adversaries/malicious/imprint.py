"""Common parts of malicious servers that imprint examples into a linear layer.

All rows of a layer measure the same projection h = <w, x>. The biases are minus its quantiles
c_0 < c_1 < ..., so row k is active where h > c_k. If the columns of the next layer are equal too,
an example has the same gradient d in every active row. Neighbouring rows then differ by the
examples with c_k < h <= c_{k+1}. If there is one such example, the difference of the weights
divided by that of the biases is exactly this example [1, 2].

References:
    [1] Fowl, Geiping, Czaja, Goldblum, Goldstein. "Robbing the Fed: Directly Obtaining Private
        Data in Federated Learning with Modified Models." ICLR 2022.
        https://arxiv.org/abs/2110.13057
    [2] Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated Learning
        through Activation Recovery." IEEE S&P 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..base import Observation
from ..exact.affine_prefix import AffinePrefix, affine_prefix
from ..exact.relu_layer import RELUS, linear_calls
from ..spaces import InputSpace, NotApplicable

Quantiles = Callable[[Tensor], Tensor]
"""Maps masses in (0, 1) to the values below which they lie."""


def thresholds(bins: int, quantile: Quantiles) -> Tensor:
    """Return c_0 < ... < c_{K-1} with equal mass between them and no mass below c_0.

    Args:
        bins: K.
        quantile: Quantiles of the projection.
    """
    if not bins >= 2:
        raise ValueError(f"bins must be at least 2, got {bins}")
    inner = quantile(torch.arange(1, bins, dtype=torch.float64) / bins)
    low, middle, high = quantile(torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64))
    lowest = torch.minimum(middle, inner[0]) - 10 * (high - low)  # twenty standard deviations
    return torch.cat([lowest.view(1), inner])


def windows(bins: int, quantile: Quantiles) -> Tensor:
    """Return K + 1 edges of bins that are bounded on both sides, for `window_rows`.

    A share of 2 / (K + 2) of the examples lies beyond the edges, in no bin.
    """
    if not bins >= 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    return quantile(torch.arange(1, bins + 2, dtype=torch.float64) / (bins + 2))


def window_rows(query: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of rows that rise from 0 to 1 within their bin.

    A row is cut off below 0 and above 1. It then sees only the examples of its bin. Its gradient
    needs no differences and survives several local steps [1, section 4.2].
    """
    width = edges.diff().unsqueeze(1)
    return query / width, -edges[:-1] / width.squeeze(1)


def normal_quantiles(mean: float = 0.0, std: float = 1.0) -> Quantiles:
    """Return the quantiles of a normal distribution."""
    return lambda masses: mean + std * torch.special.ndtri(masses)


def laplace_quantiles(mean: float = 0.0, std: float = 1.0) -> Quantiles:
    """Return the quantiles of a Laplace distribution."""

    def quantile(masses: Tensor) -> Tensor:
        centred = masses - 0.5
        return mean - std / math.sqrt(2) * centred.sign() * torch.log1p(-2 * centred.abs())

    return quantile


def lognormal_quantiles(samples: Tensor) -> Quantiles:
    """Return the quantiles of the log-normal distribution that fits positive samples."""
    log = fitted(samples.double().log(), normal_quantiles)
    return lambda masses: log(masses).exp()


def calibrated(samples: Tensor) -> Quantiles:
    """Return quantiles fitted to samples: log-normal if all are positive, normal otherwise.

    Raises:
        NotApplicable: If all samples are equal.
    """
    if bool((samples > 0).all()):
        return lognormal_quantiles(samples)
    return fitted(samples, normal_quantiles)


def fitted(samples: Tensor, family: Callable[[float, float], Quantiles]) -> Quantiles:
    """Return the quantiles of the member of a family with the samples' mean and deviation.

    Raises:
        NotApplicable: If all samples are equal.
    """
    if not (len(samples) >= 2 and samples.std() > 0):
        raise NotApplicable(
            "the projection is the same for all public examples, or there is only one example"
        )
    return family(float(samples.mean()), float(samples.std()))


class Isolated(NamedTuple):
    """The contents of the bins of an imprint layer that are not empty.

    Attributes:
        inputs: The layer's inputs, one row per bin. A row is one example, or the mean of the
            examples in the bin, weighted by their d, which may differ in sign.
        bins: The k of each row.
        deltas: The summed d of each row.
    """

    inputs: Tensor
    bins: Tensor
    deltas: Tensor

    def at(self, rows: Tensor) -> Isolated:
        """Return some of the rows."""
        return Isolated(*(part[rows] for part in self))


def isolate(
    weight: Tensor,
    bias: Tensor,
    *,
    cumulative: bool = True,
    least: float = 1e-6,
    examples: int | None = None,
    groups: int = 1,
) -> Isolated:
    """Return the contents of all bins that are not empty.

    Args:
        weight: Gradient of the layer's weight, with thresholds ascending.
        bias: Gradient of its bias.
        cumulative: Whether a row sees all examples above its threshold, or only those of its bin.
        least: A bin is empty if its |d| is at most this share of the largest.
        examples: Number of examples. All other bins are empty and show the noise. A bin whose |d|
            is below four standard deviations of the noise counts as empty.
        groups: Number of equal parts of the rows, each with its own thresholds.
    """
    if cumulative:
        weight, bias = _differences(weight, groups), _differences(bias, groups)
    floor = least * float(bias.abs().max())
    if examples is not None:
        floor = max(floor, 4 * noise_of(weight, examples * groups))
    bins = (bias.abs() > floor).nonzero().flatten()
    return Isolated(weight[bins] / bias[bins, None], bins, bias[bins])


def _differences(rows: Tensor, groups: int) -> Tensor:
    """Return each row minus the next one; the last row of a group stays unchanged."""
    parts: Tensor = rows.unflatten(0, (groups, -1))
    return torch.cat([parts[:, :-1] - parts[:, 1:], parts[:, -1:]], dim=1).flatten(0, 1)


def noise_of(rows: Tensor, examples: int) -> float:
    """Return the standard deviation of the noise, if at most `examples` rows are not empty.

    It is the median over the emptiest rows. It is zero if no row must be empty.
    """
    if not len(rows) > examples:
        return 0.0
    empty = rows.square().mean(dim=1).sort().values[: len(rows) - examples]
    return float(empty.median().sqrt())


def outside(inputs: Tensor, space: InputSpace, tolerance: float = 1e-3) -> Tensor:
    """Return the share of each input's values that are out of range; high for mixtures."""
    values = space.to_unit(inputs).flatten(1)
    return ((values < -tolerance) | (values > 1 + tolerance)).to(inputs.dtype).mean(dim=1)


def occupied(
    outputs: Tensor, *, cumulative: bool = True, groups: int = 1, top: float = 1.0
) -> Tensor:
    """Return which bins inputs lie in, given the layer's outputs before the activation.

    Args:
        outputs: One row per input.
        cumulative: See `isolate`.
        groups: See `isolate`.
        top: Value at which the activation is cut off, if rows are not cumulative.
    """
    if not cumulative:
        return (outputs > 0) & (outputs < top)
    active: Tensor = (outputs > 0).unflatten(1, (groups, -1))
    above: Tensor = functional.pad(active[..., 1:], (0, 1))
    alone: Tensor = active & ~above
    return alone.flatten(1)


def within(isolated: Isolated, occupied: Tensor) -> Tensor:
    """Return which inputs lie in the bins that they were isolated from, and in no empty bin.

    An example always does. A mixture whose d differ in sign may lie outside its bin. With several
    groups, a mixture is unlikely to lie in full bins of all groups.

    Args:
        isolated: The contents of the bins.
        occupied: Which bins these inputs lie in.
    """
    full = occupied.new_zeros(occupied.shape[1])
    full[isolated.bins] = True
    own = occupied.gather(1, isolated.bins[:, None]).squeeze(1)
    return own & ~(occupied & ~full).any(dim=1)


def deduplicated(inputs: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Return inputs without those that equal an earlier one, up to a relative tolerance."""
    return inputs[_first(_near(inputs, tolerance))]


def _near(inputs: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Return which inputs are equal, up to a relative tolerance."""
    rows = inputs.flatten(1).double()  # single precision would separate them by rounding
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    near: Tensor = torch.cdist(rows, rows) <= tolerance * norms
    return near


def _first(near: Tensor) -> Tensor:
    """Return which inputs have no earlier equal."""
    return ~near.tril(diagonal=-1).any(dim=1)


def chosen(isolated: Isolated, sound: Tensor, most: int, tolerance: float = 1e-3) -> Tensor:
    """Return the indices of the isolated rows to keep: the best distinct ones.

    Rows that were isolated more than once come first, because mixtures rarely are. Then come
    sound rows, then rows with the largest |d|.

    Args:
        isolated: The contents of the bins.
        sound: Whether, or how well, each row passed the tests for mixtures.
        most: Number of rows to keep.
        tolerance: Rows are equal up to this distance, relative to the norm.
    """
    near = _near(isolated.inputs, tolerance)
    order = isolated.deltas.abs().argsort(descending=True)
    for key in (sound, near.sum(dim=1)):
        order = order[key[order].argsort(descending=True, stable=True)]
    return order[_first(near[order][:, order])][:most]


@torch.no_grad()
def direct_pass_(convolution: nn.Conv1d | nn.Conv2d) -> None:
    """Make a convolution copy its input to its first channels and set the others to zero.

    Raises:
        NotApplicable: If the convolution cannot copy.
    """
    kernel, inputs, outputs = (
        convolution.kernel_size,
        convolution.in_channels,
        convolution.out_channels,
    )
    padding = convolution.padding
    same = padding == "same" or padding == tuple(
        spread * (size // 2) for spread, size in zip(convolution.dilation, kernel, strict=True)
    )
    if any(stride != 1 for stride in convolution.stride):
        raise NotApplicable(f"a convolution with stride {convolution.stride} drops inputs")
    if any(size % 2 == 0 for size in kernel) or not same:
        raise NotApplicable(f"a kernel of {kernel} with padding {padding} has no centre to copy")
    if outputs < inputs or convolution.groups != 1:
        raise NotApplicable(
            f"a convolution from {inputs} to {outputs} channels in {convolution.groups} groups "
            "cannot copy them"
        )
    nn.init.dirac_(convolution.weight)
    if convolution.bias is not None:
        convolution.bias.zero_()


@torch.no_grad()
def equal_columns_(layer: nn.Linear, scale: float = 1.0) -> None:
    """Make a layer treat all inputs alike, with values that differ between outputs.

    V_cj = scale v_c / K, where v sums to zero. If v_c were the same for all classes, d would be a
    sum of p - y, which is zero up to rounding. While the outputs are small, d is about
    -scale v_y / K times the example's share of the loss.

    Raises:
        NotApplicable: If the layer has one output, because the only such v is then zero.
    """
    outputs = layer.out_features
    if outputs < 2:
        raise NotApplicable("a layer with one output has no values that differ and sum to zero")
    values = 1.0 - 2.0 * (torch.arange(outputs) % 2)
    if outputs % 2:
        values[-3:] = torch.tensor([1.0, 1.0, -2.0])
    layer.weight.copy_((scale / layer.in_features) * values.to(layer.weight)[:, None])
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def carry_on_(layer: nn.Linear, scale: float, rng: Generator) -> None:
    """Make a layer pass on what an inserted imprint measures, as a pattern added to noise.

    The columns are equal, as `equal_columns_` makes them. A model that normalises its inputs
    ignores the brightness of a picture, but not how strong a pattern is against another one.
    """
    equal_columns_(layer, scale)
    noise = torch.randn(layer.out_features, generator=rng, device=rng.device)
    layer.bias.copy_(noise)


def expected_recovery(examples: int, bins: int) -> float:
    """Return the expected share of examples that are alone in their bin: (1 - 1/K)^(n-1)."""
    return float((1 - 1 / bins) ** (examples - 1))


def counted_recovery(examples: int, bins: int) -> float:
    """Return the share that [1] and [2, Eq. 16] expect; independent examples have more.

    They assume that all ways to fill K bins with n indistinguishable examples are equally likely.
    The sums of Eq. 16 are the expected number of bins with one example,
    K(K-1)n / ((n+K-1)(n+K-2)); Eq. 16 subtracts n/K.
    """
    if not bins >= 2:
        raise ValueError(f"bins must be at least 2, got {bins}")
    singles = bins * (bins - 1) / ((examples + bins - 1) * (examples + bins - 2))
    return singles - 1 / bins


@dataclass(frozen=True)
class Anatomy:
    """The layers that an imprint needs if the architecture stays unchanged.

    Attributes:
        convolutions: The convolutions before the layer, in the order in which they run.
        layer: The linear layer that is imprinted. It has a bias, and a ReLU follows it.
        head: The linear layer that takes its outputs.
        name: Name of `layer` in the model.
    """

    convolutions: tuple[nn.Conv1d | nn.Conv2d, ...]
    layer: nn.Linear
    head: nn.Linear
    name: str


@dataclass(frozen=True)
class CraftedLayer:
    """The linear layer with a bias that a server crafted and will read.

    Attributes:
        name: Its name in the model.
        shape: Outputs and inputs.
        prefix: The map from the model's inputs to its own. None if they are its first inputs, and
            the others are zero.
    """

    name: str
    shape: tuple[int, int]
    prefix: AffinePrefix | None = None

    @classmethod
    def of(cls, layer: nn.Linear, name: str, prefix: AffinePrefix | None = None) -> CraftedLayer:
        """Return what a server keeps about a layer."""
        return cls(name, (layer.out_features, layer.in_features), prefix)

    def on_inputs(self, layer: nn.Linear, size: int) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of a layer as functions of the model's flattened inputs."""
        if self.prefix is None:
            return layer.weight[:, :size], layer.bias
        return self.prefix.on_inputs(layer.weight, layer.bias)

    def inputs(self, isolated: Isolated, size: int) -> Isolated:
        """Return bins that hold the model's flattened inputs instead of the layer's inputs."""
        if self.prefix is None:
            return isolated._replace(inputs=isolated.inputs[:, :size])
        return isolated._replace(inputs=self.prefix.inputs(isolated.inputs))

    @property
    def parameters(self) -> tuple[str, str]:
        """Return the names of its weight and of its bias."""
        prefix = f"{self.name}." if self.name else ""
        return f"{prefix}weight", f"{prefix}bias"

    def received(self, observation: Observation, model: nn.Module | None = None) -> nn.Linear:
        """Return the layer that a client received; a defense may have changed the model.

        Raises:
            NotApplicable: If the client does not train such a layer.
        """
        found = dict((model or observation.model).named_modules()).get(self.name)
        uploaded = all(name in observation.update for name in self.parameters)
        if not (isinstance(found, nn.Linear) and found.weight.shape == self.shape and uploaded):
            raise NotApplicable(
                f"the client does not train layer {self.name!r} as the server sent it"
            )
        return found


def dissect(model: nn.Module, space: InputSpace) -> Anatomy:
    """Return the layers to imprint: the first linear layer, those before it and the next one.

    Other modules between them are not checked here. See `seen_by`.

    Raises:
        NotApplicable: If the model has no such layers.
    """
    if not space.continuous:
        raise NotApplicable("token inputs are embedded before any linear layer")
    modules = dict(model.named_modules())
    calls = linear_calls(model, space)
    first = (place for place, call in enumerate(calls) if call.weight.requires_grad)
    calls = calls[next(first, 0) :]  # frozen layers in front stay as they are: see `way_to`
    linear = [modules[call.name] for call in calls]
    if len(linear) < 2:
        raise NotApplicable("an imprint needs two linear layers, one behind the other")
    layer, head = linear[:2]
    if not (isinstance(layer, nn.Linear) and isinstance(head, nn.Linear)):
        raise NotApplicable("the model's linear layers are not torch.nn.Linear")
    if layer.bias is None:
        raise NotApplicable(f"layer {calls[0].name!r} has no bias for thresholds")
    if calls[0].followed_by not in RELUS:
        raise NotApplicable(f"layer {calls[0].name!r} is not followed by a ReLU")
    need_trained(layer, calls[0].name)
    return Anatomy(_convolutions_before(model, layer, space), layer, head, calls[0].name)


def imprinted_layer(observation: Observation) -> CraftedLayer:
    """Return the layer with bins of a model that this server did not send, as in a capture.

    Raises:
        NotApplicable: If its rows are not identical.
    """
    anatomy = dissect(observation.model, observation.space)
    weight = anatomy.layer.weight
    if not bool((weight == weight[0]).all()):
        raise NotApplicable(
            f"the clients were not sent a model with an imprint in {anatomy.name!r}"
        )
    return CraftedLayer.of(anatomy.layer, anatomy.name)


def need_trained(layer: nn.Module, name: str) -> None:
    """Refuse a frozen layer, because clients do not upload it.

    Raises:
        NotApplicable: If one of its parameters is frozen.
    """
    if not all(parameter.requires_grad for parameter in layer.parameters()):
        raise NotApplicable(f"layer {name!r} is frozen, so the update does not contain it")


def some_weight(model: nn.Module) -> Tensor:
    """Return a parameter of a model, as a template for the type and device of tensors."""
    return next(value for value in model.parameters() if value.is_floating_point())


def seen_by(layer: nn.Module, model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer when the model runs on given inputs."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        handle.remove()
    return seen[0]


def check_passed_on(model: nn.Module, layer: nn.Module, space: InputSpace) -> None:
    """Refuse a model with anything but copies and ReLUs before a layer.

    Raises:
        NotApplicable: If inputs in [0, 1] do not reach its first columns unchanged.
    """
    some, size = some_weight(model), math.prod(space.shape)
    example = torch.linspace(0, 1, size).to(some).view(1, *space.shape)
    seen = seen_by(layer, model, example)[:, :size]
    if seen.shape != (1, size) or not torch.allclose(seen, example.flatten(1), atol=1e-5):
        raise NotApplicable(
            "the linear layer does not see the inputs behind direct-pass convolutions: something "
            "lies in between, such as pooling, normalisation or dropout"
        )


def way_to(layer: nn.Module, model: nn.Module, space: InputSpace) -> AffinePrefix | None:
    """Return the map from a model's inputs to a layer; None if they are its first inputs.

    Raises:
        NotApplicable: If the layer does not see the inputs, and they cannot be computed from what
            it sees.
    """
    try:
        check_passed_on(model, layer, space)
    except NotApplicable:
        try:
            prefix = affine_prefix(model, layer, space)
        except NotApplicable:
            prefix = None
        if prefix is None:
            raise
        return prefix
    return None


def place_(layer: nn.Linear, weight: Tensor, bias: Tensor, prefix: AffinePrefix | None) -> None:
    """Make a layer compute a linear function of the model's flattened inputs."""
    with torch.no_grad():
        layer.weight.zero_()
        if prefix is not None:
            weight, bias = prefix.on_features(weight, bias)
        layer.weight[:, : weight.shape[1]] = weight
        layer.bias.copy_(bias)


def _convolutions_before(
    model: nn.Module, layer: nn.Module, space: InputSpace
) -> tuple[nn.Conv1d | nn.Conv2d, ...]:
    called: list[nn.Module] = []

    def note(module: nn.Module, _: object) -> None:
        called.append(module)

    kinds = (nn.Conv1d, nn.Conv2d)
    watched = [module for module in model.modules() if isinstance(module, kinds) or module is layer]
    handles = [module.register_forward_pre_hook(note) for module in watched]
    some = some_weight(model)
    try:
        with torch.no_grad():
            model(torch.zeros(1, *space.shape, dtype=some.dtype, device=some.device))
    finally:
        for handle in handles:
            handle.remove()
    before = called[: called.index(layer)]
    return tuple(module for module in before if isinstance(module, kinds))
