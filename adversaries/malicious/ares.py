"""ARES: isolate the activations of single examples in a linear layer, then invert them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Crafted, Observation, Reconstruction, Round, Threat
from ..spaces import ContinuousSpace, InputSpace, NotApplicable
from .elimination import bias_gradients, eliminated
from .imprint import (
    Isolated,
    calibrated,
    deduplicated,
    direct_pass_,
    equal_columns_,
    isolate,
    need_trained,
    seen_by,
    some_weight,
    thresholds,
)
from .sparse_recovery import Measurement, inverse_cosine_transform, invert, natural_weights


class _Gains(NamedTuple):
    """Factors of the first and the imprinted layer, and the size of the head's values."""

    first: float
    imprinted: float
    head: float


_OF_CNN = _Gains(1.0, 1e-2, 1e2)
_OF_MLP = _Gains(1e-2, 1.0, 1e2)
"""Outputs are as with gains of 1, but the layer to read has nearly all of the gradient."""
_SHARP = _Gains(1e5, 1e2, 1e-7)
"""With these gains, GELU, SiLU and ELU act like a ReLU."""
_DRIFT = 1e-4
"""Local steps may move thresholds by this share of their size. It is less than a bin, but more
than the rounding of single precision."""
_NEWTON = 4
"""Number of Newton steps that fit the scale of an activation."""
_CALIBRATION = 512
"""Largest number of examples for the calibration of projections."""


@dataclass(frozen=True)
class ARES(Adversary):
    """Isolate the activations of single examples, then invert them.

    In a CNN, the first convolution is Gaussian with filters of norm 1, and later convolutions copy
    its outputs. The first linear layer has identical rows with biases at quantiles. Neighbouring
    rows differ by the examples of one bin. If a bin has one example, the quotient of the
    differences is its activation: the output of the ReLU after the first convolution. Active units
    are equations in the pixels (`sparse_recovery`). The head has equal columns, with values that
    differ by class. With equal values, as in the authors' code, only rounding errors would leak.

    In an MLP, the first layer is Gaussian. The tail masses of its thresholds are spaced evenly in
    their logarithm, from 1 to 48 examples of a batch. With more than 48, the subtraction often
    stops before most examples are found. A row with a single active example reveals it, and the
    example is then subtracted from all rows (see `elimination`). The second layer is imprinted
    like that of a CNN, and the attack inverts the activations that it isolates. These have few
    equations, so the results are at best similar to the examples.

    Under secure aggregation, each client gets its own `kernels`, as in the paper, or its own
    `rows`. With `kernels`, the columns of the update keep clients apart, but bias gradients are
    summed. The attack then chooses the scale of an activation within its bin such that the head
    gives it the observed gradient. With `rows`, each client has its own bias gradients and all
    kernels, but fewer bins.

    For activations other than ReLU, large weights before them approximate a ReLU. Filters come in
    pairs of opposite sign, so one of a pair is active wherever the other is not. With independent
    filters, as published, flat parts of a picture may have fewer active filters than colours.

    Other differences from the authors' code: bins are calibrated on public data, or on noise with
    the spectrum of photos if there is none. Last rows are kept instead of first rows. Activations
    count as active if they exceed a multiple of the rms of the negative values, which are pure
    noise. Mixtures are not removed; they have a low confidence.

    Attributes:
        bins: Quantiles of the projection: `calibrated` (log-normal), or the `paper`'s, which are
            those of a standard normal distribution.
        separation: What each client gets for itself under secure aggregation.
        lift: Bias of the first convolution, in standard deviations of its outputs. At 3, hardly
            any unit is inactive. Kernels then only copy the channels, and one per channel
            suffices. The paper has no lift and loses half of the units.
        scale: Size of the head's values.
        clearance: A unit counts as active above this multiple of the noise.
        iterations: Largest number of iterations of the inversion.

    References:
        Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated Learning
        through Activation Recovery." IEEE S&P 2026. (Algorithms 1 and 2)
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS
    cost: ClassVar[int] = 0

    bins: Literal["calibrated", "paper"] = "calibrated"
    separation: Literal["kernels", "rows"] = "kernels"
    lift: float = 0.0
    scale: float = 1.0
    clearance: float = 6.0
    iterations: int = 400

    def __post_init__(self) -> None:
        if self.bins not in ("calibrated", "paper"):
            raise ValueError(f"bins must be 'calibrated' or 'paper', got {self.bins!r}")
        if self.separation not in ("kernels", "rows"):
            raise ValueError(f"separation must be 'kernels' or 'rows', got {self.separation!r}")
        for name in ("lift", "clearance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")
        if not self.iterations >= 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return one model per client. With several clients, each model is different."""
        public = _public(round, rng)
        names = _named(model, round.space)
        first = names.within(model, round.space).first
        drawn = torch.randn(first.weight.shape, generator=rng).to(first.weight)
        drawn = drawn / drawn.flatten(1).norm(dim=1).view(-1, *[1] * (drawn.ndim - 1))
        if not isinstance(first, nn.Linear):
            half = len(drawn) // 2
            drawn[half : 2 * half] = -drawn[:half]
        models = [
            self._crafted(model, names, round, drawn, public, i) for i in range(round.clients)
        ]
        return Crafted(models, Imprints(tuple(_noted(one, names, round.space) for one in models)))

    def _crafted(
        self,
        model: nn.Module,
        names: _Names,
        round: Round,
        drawn: Tensor,
        public: Tensor,
        client: int,
    ) -> nn.Module:
        """Return the model of one client.

        The ReLU gains are tried first. If the model then does not behave as crafted, the gains for
        other activations are tried.
        """
        agreed = names.within(model, round.space)
        plain, one_step = _OF_MLP if agreed.perceptron else _OF_CNN, round.protocol.uploads_gradient
        steady = _stable(round, agreed.imprinted.out_features)
        for gains in (plain, _SHARP) if one_step else (steady,):
            crafted = copy.deepcopy(model)
            layers = names.within(crafted, round.space)
            if layers.perceptron:
                self._craft_perceptron(layers, round, gains.first * drawn, public, client)
            else:
                self._craft_convolutional(layers, round, gains.first * drawn, public, client)
            with torch.no_grad():
                layers.imprinted.weight.mul_(gains.imprinted)
                layers.imprinted.bias.mul_(gains.imprinted)
            _craft_tail(layers, self.scale * gains.head)
            if _as_crafted(crafted, layers, public[:4]):
                return crafted
        raise NotApplicable(
            f"layer {names.imprinted!r} does not see the activations of the first layer, or the "
            "activation is not like a ReLU: pooling, normalisation or another function intervenes"
        )

    @torch.no_grad()
    def _craft_convolutional(
        self, layers: _Anatomy, round: Round, drawn: Tensor, public: Tensor, client: int
    ) -> None:
        first, imprinted, gain = layers.first, layers.imprinted, float(drawn[0].norm())
        own = _share(len(drawn), round.clients, client) if self.separation == "kernels" else ...
        first.weight.zero_()
        first.weight[own] = drawn[own]
        if first.bias is not None:
            first.bias.zero_()
        if self.lift:
            if first.bias is None:
                raise NotApplicable("the first convolution has no bias, which `lift` needs")
            kernels = first.weight[own]
            maps = layers.measurement.forward(public[:1])
            if len(kernels) >= public.shape[1] and maps.shape[2:] == public.shape[2:]:
                nn.init.dirac_(kernels).mul_(gain)
            deviation = float(layers.measurement.forward(public)[:, own].std())
            first.bias[own] = self.lift * deviation * kernels.flatten(1).any(dim=1)
        for convolution in layers.passing:
            direct_pass_(convolution)
        activations = layers.activations(public)
        live = (activations > 0).any(dim=0)
        count = int(live.sum()) if self.bins == "calibrated" else math.prod(round.space.shape)
        projections = activations.sum(dim=1) / count
        if self.bins == "calibrated":
            quantile = calibrated(projections)
        else:
            quantile = lambda masses: gain * torch.special.ndtri(masses)  # noqa: E731
        rows = torch.arange(imprinted.out_features)
        if self.separation == "rows":
            rows = rows[_share(len(rows), round.clients, client)]
        edges = thresholds(len(rows), quantile)
        edges[0] = -0.1 * gain if self.bins == "paper" else edges[0]
        size = math.prod(layers.measurement.forward(public[:1]).shape[1:])
        imprinted.weight.zero_()
        imprinted.bias.fill_(-1.0)  # rows without weights stay inactive
        imprinted.weight[rows, :size] = 1 / count
        imprinted.bias[rows] = -edges.to(imprinted.bias)

    @torch.no_grad()
    def _craft_perceptron(
        self, layers: _Anatomy, round: Round, drawn: Tensor, public: Tensor, client: int
    ) -> None:
        first, imprinted, own = (
            layers.first,
            layers.imprinted,
            _share(len(drawn), round.clients, client),
        )
        first.weight.zero_()
        first.weight[own] = drawn[own]
        examples = round.batch_size
        fewest, most = (min(count / examples, 0.5) for count in (1, 48))
        masses = torch.logspace(math.log10(fewest), math.log10(most), len(drawn[own]))
        projections = (public.flatten(1) @ drawn[own].T).flatten()
        order = projections.sort().values
        biases = torch.full((len(drawn),), -1.0)  # rows without weights stay inactive
        biases[own] = -order[((1 - masses) * (len(order) - 1)).long()]
        first.load_state_dict({"weight": first.weight, "bias": biases})
        quantile = calibrated(layers.activations(public).mean(dim=1))
        imprinted.weight.fill_(1 / imprinted.in_features)
        imprinted.bias.copy_(-thresholds(imprinted.out_features, quantile))

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the examples that explain the isolated activations, best explained first."""
        found: list[tuple[Tensor, Tensor]] = []
        for model, imprint in _imprints(observation):
            layers = imprint.received(observation, model)
            attack = self._of_perceptron if layers.perceptron else self._of_convolutional
            found.append(attack(observation, model, layers, imprint))
        inputs, confidence = (torch.cat(parts) for parts in zip(*found, strict=True))
        space, order = observation.space, confidence.argsort(descending=True, stable=True)
        rows = torch.cat([inputs[order].flatten(1), confidence[order, None]], dim=1)
        rows = deduplicated(rows)[: observation.batch_size]
        if not len(rows):
            rows = torch.zeros(1, math.prod(space.shape) + 1)
        inputs = rows[:, :-1].reshape(-1, *space.shape)
        return Reconstruction(space.clamp(inputs), confidence=rows[:, -1])

    def _of_convolutional(
        self, observation: Observation, model: nn.Module, layers: _Anatomy, imprint: ClientImprint
    ) -> tuple[Tensor, Tensor]:
        """Return examples and their confidences."""
        rows, own = imprint.rows, imprint.kernels
        outputs = torch.zeros(len(own), *_map_shape(layers), dtype=torch.bool)
        outputs[own] = True
        columns = _padded(outputs.flatten().to(rows.device), layers.imprinted.in_features)
        weight, bias = imprint.gradients(observation)
        weight, bias = weight[rows][:, columns], bias[rows]
        summed = observation.protocol.clients > 1 and bool((~own).any())
        examples = observation.batch_size // observation.protocol.clients
        if summed:
            weight = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
            edges = -layers.imprinted.bias.detach()[rows]
            bias = weight.sum(dim=1) * layers.imprinted.weight.detach().max() / _middles(edges)
        least = 1e-6 if observation.protocol.uploads_gradient else 1e-2  # local steps leave traces
        least = max(least, 1e-4 if summed else 0.0)
        isolated = isolate(weight, bias, cumulative=not summed, least=least, examples=examples)
        if summed and observation.protocol.uploads_gradient:
            isolated = _rescaled(isolated, rows, columns, observation, model, layers)
        low, high = _box(observation.space)
        recovered = invert(
            layers.measurement.of(own),
            self._cleared(isolated.inputs).view(-1, int(own.sum()), *outputs.shape[1:]),
            low.to(weight),
            high.to(weight),
            iterations=self.iterations,
        )
        return recovered.inputs, (1 - recovered.residual).clamp(min=0)

    def _of_perceptron(
        self, observation: Observation, model: nn.Module, layers: _Anatomy, imprint: ClientImprint
    ) -> tuple[Tensor, Tensor]:
        first, last = imprint.names.first, layers.tail[-1]
        inputs = eliminated(observation, model, first, last, imprint.kernels)
        confidence = inputs.new_ones(len(inputs))
        if observation.protocol.clients > 1:  # all clients share the second layer's rows
            return inputs, confidence
        weight, bias = imprint.gradients(observation)
        isolated = isolate(weight, bias, examples=observation.batch_size)
        activations = self._cleared(isolated.inputs)
        known = layers.activations(inputs.to(weight))
        distances = torch.cdist(activations, known) / activations.norm(dim=1, keepdim=True)
        activations = activations[(distances > 1e-2).all(dim=1)]
        low, high = (value.to(weight) for value in _box(observation.space))
        recovered = invert(layers.measurement, activations, low, high, iterations=self.iterations)
        likely = recovered.equations / math.prod(observation.space.shape)
        likely = likely * (1 - recovered.residual).clamp(min=0)
        return torch.cat([inputs, recovered.inputs]), torch.cat([confidence, likely])

    def _cleared(self, activations: Tensor) -> Tensor:
        """Return activations, with zeros where they may be noise."""
        negative = activations.clamp(max=0)
        count = (negative < 0).sum(dim=1, keepdim=True).clamp(min=1)
        noise = (negative.square().sum(dim=1, keepdim=True) / count).sqrt()
        return torch.where(activations > self.clearance * noise, activations, 0.0)


@dataclass(frozen=True)
class _Anatomy:
    """The layers of a model, in the order in which they run."""

    first: nn.Linear | nn.Conv1d | nn.Conv2d
    passing: tuple[nn.Conv1d | nn.Conv2d, ...]
    imprinted: nn.Linear
    tail: tuple[nn.Linear, ...]
    measurement: Measurement

    @property
    def perceptron(self) -> bool:
        return isinstance(self.first, nn.Linear)

    def activations(self, inputs: Tensor) -> Tensor:
        """Return the ReLU of the first layer's outputs, flattened."""
        outputs = self.measurement.forward(inputs) + self.measurement.bias
        return outputs.clamp(min=0).flatten(1)


@dataclass(frozen=True)
class _Names:
    """The names of a model's layers, in the order in which they run."""

    first: str
    passing: tuple[str, ...]
    imprinted: str
    tail: tuple[str, ...]

    def within(self, model: nn.Module, space: InputSpace) -> _Anatomy:
        """Return the layers of a model with these names.

        Raises:
            NotApplicable: If the model has different layers.
        """
        modules = dict(model.named_modules())
        first = modules.get(self.first)
        passing = [modules.get(name) for name in self.passing]
        linear = [modules.get(name) for name in (self.imprinted, *self.tail)]
        convolutions = tuple(one for one in passing if isinstance(one, nn.Conv1d | nn.Conv2d))
        behind = tuple(one for one in linear if isinstance(one, nn.Linear))
        same = (len(convolutions), len(behind)) == (len(passing), len(linear))
        if not (same and isinstance(first, nn.Linear | nn.Conv1d | nn.Conv2d)):
            raise NotApplicable(
                f"the client does not train layer {self.imprinted!r} as the server sent it"
            )
        measurement = Measurement(first, space.shape)
        return _Anatomy(first, convolutions, behind[0], behind[1:], measurement)


@dataclass(frozen=True, eq=False)
class ClientImprint:
    """What the server keeps about the model that it sent to a client.

    Attributes:
        names: The names of its layers.
        kernels: Which kernels, or rows, of the first layer belong to the client.
        rows: Which rows of the imprinted layer belong to the client.
    """

    names: _Names
    kernels: Tensor
    rows: Tensor

    def received(self, observation: Observation, model: nn.Module) -> _Anatomy:
        """Return the layers that the client received; a defense may have changed the model.

        Raises:
            NotApplicable: If the architecture is not the one that was sent.
        """
        layers = self.names.within(model, observation.space)
        sizes = len(layers.first.weight), layers.imprinted.out_features
        uploaded = all(name in observation.update for name in self._parameters)
        if sizes != (len(self.kernels), len(self.rows)) or not uploaded:
            raise NotApplicable(
                f"the client does not train layer {self.names.imprinted!r} as the server sent it"
            )
        return layers

    @property
    def _parameters(self) -> tuple[str, str]:
        return f"{self.names.imprinted}.weight", f"{self.names.imprinted}.bias"

    def gradients(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return the gradients of the imprinted layer's weight and bias."""
        weight, bias = map(observation.as_gradient, self._parameters)
        return weight, bias


@dataclass(frozen=True)
class Imprints:
    """What the server keeps: one imprint per client."""

    clients: tuple[ClientImprint, ...]


def _noted(model: nn.Module, names: _Names, space: InputSpace) -> ClientImprint:
    """Return the imprint of a crafted model. Only kernels and rows with weights belong to it."""
    layers = names.within(model, space)
    kernels = layers.first.weight.detach().flatten(1).any(dim=1)
    return ClientImprint(names, kernels, layers.imprinted.weight.detach().any(dim=1))


def _imprints(observation: Observation) -> list[tuple[nn.Module, ClientImprint]]:
    """Return the models that clients received, each with its imprint."""
    kept = observation.kept
    if isinstance(kept, Imprints):
        return [*zip(observation.models, kept.clients, strict=True)]
    return [(one, _recognised(one, observation.space)) for one in dict.fromkeys(observation.models)]


def _recognised(model: nn.Module, space: InputSpace) -> ClientImprint:
    """Return the imprint of a model that this server did not send, as in a capture.

    Raises:
        NotApplicable: If the rows of the layer are not identical.
    """
    names = _named(model, space)
    imprint = _noted(model, names, space)
    rows = names.within(model, space).imprinted.weight.detach()[imprint.rows]
    if not len(rows) or not bool((rows == rows[0]).all()):
        raise NotApplicable(f"the clients were not sent a model with bins in {names.imprinted!r}")
    return imprint


def _named(model: nn.Module, space: InputSpace) -> _Names:
    """Return the names of the layers that ARES crafts.

    Raises:
        NotApplicable: If the model has no such layers.
    """
    if not space.continuous:
        raise NotApplicable("token inputs are embedded before any linear layer")
    called = _called(model, space)
    kinds = [isinstance(module, nn.Linear) for module, _ in called]
    if not called or kinds != sorted(kinds):
        raise NotApplicable("the model is not a sequence of convolutions, then linear layers")
    convolutions = [name for module, name in called if not isinstance(module, nn.Linear)]
    linear = [(module, name) for module, name in called if isinstance(module, nn.Linear)]
    needed = 2 if convolutions else 3
    if len(linear) < needed:
        raise NotApplicable(
            f"the attack needs {needed} linear layers behind "
            f"{'the convolutions' if convolutions else 'each other'}, got {len(linear)}"
        )
    first, first_name = called[0]
    example = torch.zeros(1, *space.shape).to(some_weight(model))
    if seen_by(first, model, example).numel() != example.numel():
        raise NotApplicable(f"layer {first_name!r} sees features, not the pixels of an input")
    imprinted, name = linear[0 if convolutions else 1]
    for layer, of in [(imprinted, name), *([] if convolutions else [(first, first_name)])]:
        if layer.bias is None:
            raise NotApplicable(f"layer {of!r} has no bias for thresholds")
        need_trained(layer, of)
    tail = tuple(of for _, of in linear[needed - 1 :])
    return _Names(first_name, tuple(convolutions[1:]), name, tail)


def _called(
    model: nn.Module, space: InputSpace
) -> list[tuple[nn.Linear | nn.Conv1d | nn.Conv2d, str]]:
    """Return convolutions and linear layers with their names, in the order in which they run."""
    called: list[tuple[nn.Linear | nn.Conv1d | nn.Conv2d, str]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, _, name=name: called.append((module, name)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    ]
    some = some_weight(model)
    try:
        with torch.no_grad():
            model(torch.zeros(1, *space.shape, dtype=some.dtype, device=some.device))
    finally:
        for handle in handles:
            handle.remove()
    return called


def _as_crafted(model: nn.Module, layers: _Anatomy, probe: Tensor) -> bool:
    """Return whether the imprinted layer sees the first activations and a ReLU follows it."""
    expected = layers.activations(probe)
    seen = seen_by(layers.imprinted, model, probe)
    if seen.ndim != 2 or seen.shape[1] < expected.shape[1]:
        return False
    behind = seen_by(layers.tail[0], model, probe)
    with torch.no_grad():
        rectified = layers.imprinted(seen).clamp(min=0)
    return _close(seen, _padded(expected, seen.shape[1])) and _close(behind, rectified)


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def _stable(round: Round, rows: int) -> _Gains:
    """Return gains at which local steps hardly change any layer.

    Relative to the step size, a small head protects the thresholds. Small activations protect the
    rows behind them. Small outputs of these rows protect the head's equal columns.
    """
    protocol, examples = round.protocol, round.batch_size * round.protocol.clients
    path = -1 / float(protocol.as_gradient(torch.ones(()), examples)) / protocol.clients
    gains = _Gains(1e-2, 1e-1, 0.0)
    share = protocol.step_size(round.batch_size) / path  # examples per step and unit of rate
    return gains._replace(head=_DRIFT * gains.first * gains.imprinted * share * rows)


def _craft_tail(layers: _Anatomy, scale: float) -> None:
    """Make the later layers treat all rows alike, and classes differently."""
    *middle, last = layers.tail
    for layer in middle:
        nn.init.constant_(layer.weight, 1 / layer.in_features)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    equal_columns_(last, scale)


def _public(round: Round, rng: Generator) -> Tensor:
    """Return public examples, or noise with the spectrum of photos if there are none."""
    space = round.space
    if not isinstance(space, ContinuousSpace):
        raise NotApplicable("token inputs are embedded before any linear layer")
    if round.public is not None and len(round.public.inputs) > 1:
        return round.public.inputs[:_CALIBRATION]
    drawn = torch.randn(_CALIBRATION, *space.shape, generator=rng) / natural_weights(space.shape)
    signals = inverse_cosine_transform(drawn)
    return space.clamp(signals / signals.std())


def _rescaled(
    isolated: Isolated,
    rows: Tensor,
    columns: Tensor,
    observation: Observation,
    model: nn.Module,
    layers: _Anatomy,
) -> Isolated:
    """Return activations rescaled to fit their d; before, their scale was that of the bin.

    For a given activation, the head determines d, up to the value for the class. The value that
    is nearest to the bin's is taken. Newton's method finds the scale within the bin.
    """
    layer, clients = layers.imprinted, observation.protocol.clients
    blank = isolated.inputs.new_zeros(len(isolated.inputs), *observation.space.shape)

    def misfit(scale: Tensor) -> Tensor:
        """Return log(scale d / d of the bin), for each value of the head."""
        seen = layer.weight.new_zeros(len(scale), layer.in_features)
        seen[:, columns] = (scale[:, None] * isolated.inputs).to(seen)
        handle = layer.register_forward_pre_hook(lambda *_: (seen,))
        try:
            told = bias_gradients(observation, model, layer, layers.tail[-1], blank) / clients
        finally:
            handle.remove()
        ratios = scale[:, None] * told / isolated.deltas.double()[:, None]
        return ratios.clamp(min=torch.finfo().tiny).log()

    edges = -layer.bias.detach().double()[rows]
    middles = _middles(edges)
    above = torch.cat([edges[1:], edges.new_tensor([math.inf])])
    low, high = ((edge / middles).clamp(0.5, 2)[isolated.bins] for edge in (edges, above))
    scale = torch.ones_like(low)
    nearest = misfit(scale).abs().argmin(dim=1, keepdim=True)
    for _ in range(_NEWTON):
        here, beside = (misfit(s).gather(1, nearest).squeeze(1) for s in (scale, 1.001 * scale))
        slope = (beside - here) / math.log(1.001)
        step = (-here / slope).nan_to_num(0.0).exp()
        scale = torch.minimum(torch.maximum(scale * step, low), high)
    factors = scale.to(isolated.inputs)
    return isolated._replace(inputs=isolated.inputs * factors[:, None])


def _box(space: InputSpace) -> tuple[Tensor, Tensor]:
    return space.to_inputs(torch.zeros(space.shape)), space.to_inputs(torch.ones(space.shape))


def _share(count: int, clients: int, client: int) -> slice:
    """Return which rows or kernels belong to a client."""
    each = count // clients
    if not each:
        raise NotApplicable(f"{count} kernels or rows do not suffice for {clients} clients")
    return slice(client * each, (client + 1) * each)


def _padded(values: Tensor, size: int) -> Tensor:
    """Return values followed by zeros, for channels that the passing convolutions do not fill."""
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def _map_shape(layers: _Anatomy) -> tuple[int, ...]:
    """Return the size of the first convolution's maps."""
    probe = torch.zeros(1, *layers.measurement.shape).to(layers.first.weight)
    return tuple(layers.measurement.forward(probe).shape[2:])


def _middles(edges: Tensor) -> Tensor:
    """Return a projection inside each bin; the outer bins are open."""
    inner = (edges[1:-1] + edges[2:]) / 2
    return torch.cat([edges[1:2], inner, edges[-1:]])
