"""The gradient of a linear layer before a ReLU, and what its sparsity says about a batch.

A layer Z = WX + b with activation ReLU(Z) has dL/dW = G X^T and dL/db = G 1, where G = dL/dZ is
zero wherever Z is negative. Any factorisation dL/dW = LR has an invertible Q with G = LQ and
X^T = Q^-1 R [1, Theorem 3.2], so that the batch is known once the directions are known, up to
scale, that make LQ sparse.

References:
    [1] Dimitrov, Baader, Mueller, Vechev. "SPEAR: Exact Gradient Inversion of Batches in
        Federated Learning." NeurIPS 2024. https://arxiv.org/abs/2403.03945
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize
from torch.overrides import TorchFunctionMode

from .base import InputSpace, NotApplicable, Observation, Reconstruction
from .sphere import refine

_RELUS = (torch.relu, torch.relu_, functional.relu, Tensor.relu, Tensor.relu_)
_RANK_GAP = 100.0
"""Ratio of successive singular values that shows the rank; below it, noise has filled the gap."""
SAME = 0.95
"""Cosine above which two directions are one and the same; those of two examples are below 0.6."""


@dataclass(frozen=True)
class ReLULayer:
    """A linear layer followed by a ReLU.

    Attributes:
        name: Name of the module in the model.
        weight: W, of shape (outputs, inputs).
        bias: b.
        sees_inputs: Whether its inputs are the model's own, flattened.
    """

    name: str
    weight: Tensor
    bias: Tensor
    sees_inputs: bool

    def parameter(self, name: str) -> str:
        """Return the name of one of its parameters in the model."""
        return f"{self.name}.{name}" if self.name else name


def find_layer(observation: Observation, name: str | None) -> ReLULayer:
    """Return the named linear layer, or the one that sees the inputs.

    Raises:
        NotApplicable: If there is none, with a bias and a ReLU behind it.
    """
    if observation.space.vocabulary is not None:
        raise NotApplicable("token inputs are embedded before any linear layer")
    calls = _linear_calls(observation.model, observation.space)
    if name is None:
        chosen = next((call for call in calls if call.sees_inputs), None)
        if chosen is None:
            raise NotApplicable(
                "no linear layer sees the inputs; name a deeper one with `layer` to recover the "
                f"features before it: {', '.join(call.name for call in calls) or 'there is none'}"
            )
    else:
        chosen = next((call for call in calls if call.name == name), None)
        if chosen is None:
            known = ", ".join(call.name for call in calls)
            raise NotApplicable(f"the model has no linear layer {name!r}, only: {known or 'none'}")
    if chosen.bias is None:
        raise NotApplicable(f"layer {chosen.name!r} has no bias, which fixes the scale")
    if chosen.followed_by not in _RELUS:
        raise NotApplicable(
            f"layer {chosen.name!r} is followed by {_described(chosen.followed_by)}, not by a "
            "ReLU: its gradient has no exact zeros"
        )
    return ReLULayer(chosen.name, chosen.weight, chosen.bias, chosen.sees_inputs)


@dataclass
class _Call:
    name: str
    weight: Tensor
    bias: Tensor | None
    sees_inputs: bool
    output: Tensor
    followed_by: Callable[..., object] | None = None


class _Tracer(TorchFunctionMode):
    """Notes every linear layer that runs, and the function that first takes its output."""

    def __init__(self, names: Mapping[int, str], example: Tensor) -> None:
        super().__init__()
        self.names, self.example = names, example
        self.calls: list[_Call] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        for call in self.calls:
            if call.followed_by is None and any(call.output is value for value in args):
                call.followed_by = func
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and isinstance(result, Tensor) and result.ndim == 2:
            inputs, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            if id(weight) in self.names:
                seen = torch.equal(inputs.flatten(), self.example.flatten())
                self.calls.append(_Call(self.names[id(weight)], weight, bias, seen, result))
        return result


def _linear_calls(model: nn.Module, space: InputSpace) -> list[_Call]:
    """Return the linear layers in the order in which the model runs them."""
    names = {
        id(value): name.removesuffix("weight").removesuffix(".")
        for name, value in model.named_parameters()
    }
    some = next(model.parameters())
    example = torch.linspace(0, 1, math.prod(space.shape), dtype=some.dtype, device=some.device)
    example = example.view(1, *space.shape)
    training = model.training
    tracer = _Tracer(names, example)
    try:
        with torch.no_grad(), tracer:
            model.eval()(example)
    finally:
        model.train(training)
    return tracer.calls


def _described(function: Callable[..., object] | None) -> str:
    return "nothing" if function is None else getattr(function, "__name__", repr(function))


@dataclass(frozen=True)
class Factors:
    """dL/dW = LR with orthonormal L, and all that relates a direction q to the batch.

    Attributes:
        left: L, the left singular vectors, for the neurons that have any gradient.
        right: R, the right singular vectors times their singular values.
        noise: Standard deviation of an entry of Lq by coordinate of q, estimated from what is
            left of dL/dW beyond its rank.
        hidden: W R^T: the layer's outputs for inputs in the span of R.
        bias: b.
        bias_gradient: L^T dL/db, which is the sum of the columns of Q.
        dead: Number of neurons without any gradient.
    """

    left: Tensor
    right: Tensor
    noise: Tensor
    hidden: Tensor
    bias: Tensor
    bias_gradient: Tensor
    dead: int

    @property
    def rank(self) -> int:
        """Number of examples that are visible in the gradient."""
        return self.left.shape[1]

    def outputs(self, directions: Tensor) -> Tensor:
        """Return Lq for directions as rows."""
        return directions @ self.left.T

    def tolerance(self, directions: Tensor, outputs: Tensor) -> Tensor:
        """Return, for each direction, the size up to which an entry of Lq may be a zero."""
        noise = torch.linalg.vector_norm(directions * self.noise, dim=1, keepdim=True)
        return torch.maximum(3 * noise, 1e-6 * outputs.abs().amax(1, keepdim=True))

    def zeros(self, directions: Tensor) -> Tensor:
        """Return which entries of Lq are zero, as far as the noise lets one see."""
        outputs = self.outputs(directions)
        return outputs.abs() <= self.tolerance(directions, outputs)

    def sparsity(self, directions: Tensor) -> Tensor:
        """Return a score that is higher the more entries of Lq are near zero."""
        outputs = self.outputs(directions)
        width = self.tolerance(directions, outputs)
        return -(outputs.square() + width.square()).log().mean(1)

    def fewest_zeros(self, false_rejection: float) -> int:
        """Return how many zeros a true column has but with probability `false_rejection`.

        At random weights a neuron is off for half of all inputs, independently of other neurons;
        neurons without any gradient are off for the whole batch. A false column has hardly more
        zeros than any column can be made to have, one less than the rank.
        """
        neurons = len(self.left) + self.dead
        expected = int(binom.ppf(false_rejection, neurons, 0.5)) - self.dead
        return max(expected, min(self.rank + 5, len(self.left)))

    @property
    def noisy(self) -> bool:
        """Whether noise blurs the zeros, far beyond the rounding of single precision."""
        return float(self.noise.square().mean().sqrt()) * len(self.left) ** 0.5 > 1e-3


def factorise(observation: Observation, layer: ReLULayer) -> Factors:
    """Return the factors of the layer's gradient; their rank estimates the batch size.

    A randomised range finder is exact for a matrix of low rank, and much cheaper than a full
    decomposition of a wide layer. The scale of an update, such as a learning rate or a clipped
    norm, cancels between weight and bias.

    Raises:
        NotApplicable: If the batch is larger than the layer, or the update is without signal.
    """
    gradient = observation.update[layer.parameter("weight")].double()
    bias_gradient = observation.update[layer.parameter("bias")].double()
    outputs, inputs = gradient.shape
    if not observation.batch_size < min(outputs, inputs):
        raise NotApplicable(
            f"{observation.batch_size} examples behind one update do not fit the rank of layer "
            f"{layer.name!r}, {min(outputs, inputs)}"
        )
    live = gradient.abs().amax(1) > 0
    if not live.any() or not bias_gradient.any():
        raise NotApplicable(f"the update of layer {layer.name!r} is zero")
    gradient = gradient[live]
    basis, values, right = _truncated_svd(gradient, observation.batch_size)
    rank = _numeric_rank(values, observation.batch_size)
    left, values, right = basis[:, :rank], values[:rank], right[:rank]
    residual = gradient - (left * values) @ right
    degrees = max(1, (gradient.shape[0] - rank) * (inputs - rank))
    deviation = (residual.square().sum() / degrees).sqrt()
    right = values.unsqueeze(1) * right
    return Factors(
        left=left,
        right=right,
        noise=deviation / values,
        hidden=layer.weight.detach()[live].double() @ right.T,
        bias=layer.bias.detach()[live].double(),
        bias_gradient=left.T @ bias_gradient[live],
        dead=int((~live).sum()),
    )


def _truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular vectors and values, a few more than `rank`."""
    size = min(rank + 10, *matrix.shape)
    rng = torch.Generator(matrix.device).manual_seed(0)
    probes = torch.randn(
        matrix.shape[1], size, generator=rng, dtype=matrix.dtype, device=matrix.device
    )
    basis = torch.linalg.qr(matrix @ probes).Q
    for _ in range(2):  # subspace iterations, for a spectrum that noise has flattened
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left, values, right


def _numeric_rank(values: Tensor, batch_size: int) -> int:
    """Return the rank if a gap in the singular values shows it, and the batch size otherwise."""
    ratios = values[:batch_size] / values[1 : batch_size + 1].clamp(min=torch.finfo().tiny)
    gap, position = ratios.max(0)
    return int(position) + 1 if gap > _RANK_GAP else batch_size


@dataclass(frozen=True)
class Solution:
    """A batch that follows from directions.

    Attributes:
        inverse: Q^-1, so that X^T = Q^-1 R.
        agreement: For each example, the share of neurons at which its gradient is zero if and
            only if its output is not positive; their mean is the sparsity matching coefficient.
    """

    inverse: Tensor
    agreement: Tensor

    @property
    def coefficient(self) -> float:
        """The sparsity matching coefficient lambda [1, Definition 3.4]; 1 if exact."""
        return float(self.agreement.mean())


def solve(factors: Factors, directions: Tensor) -> Solution:
    """Scale a basis of directions by the bias gradient, and score it [1, Theorem 4.1]."""
    inverse = torch.linalg.inv(directions.T)
    inverse = inverse / _nonzero(inverse @ factors.bias_gradient).unsqueeze(1)
    outputs = inverse @ factors.hidden.T + factors.bias
    active = ~factors.zeros(directions)
    return Solution(inverse, ((outputs > 0) == active).double().mean(1))


def _nonzero(scales: Tensor) -> Tensor:
    tiny = torch.finfo(scales.dtype).tiny
    return torch.where(scales.abs() > tiny, scales, tiny)


def initial_filter(directions: Tensor) -> Tensor:
    """Return indices of the first directions, sparsest first, that are linearly independent."""
    chosen: list[int] = []
    basis = directions.new_zeros(0, directions.shape[1])
    for index, direction in enumerate(directions):
        rest = direction - (direction @ basis.T) @ basis
        rest = rest - (rest @ basis.T) @ basis
        norm = torch.linalg.vector_norm(rest)
        if norm > 1e-3:
            chosen.append(index)
            basis = torch.cat([basis, (rest / norm).unsqueeze(0)])
        if len(chosen) == directions.shape[1]:
            break
    return torch.tensor(chosen, dtype=torch.long, device=directions.device)


def greedy_filter(
    factors: Factors, directions: Tensor, others: Tensor, enough: float
) -> tuple[Tensor, Solution]:
    """Swap directions of a basis for others where the sparsity matching coefficient rises.

    Only directions that do not agree with their outputs are swapped, and only those that the
    other one has the largest parts of: without these, the basis would be nearly singular.
    """
    best = solve(factors, directions)
    for other in others:
        parts = (torch.linalg.solve(directions.T, other)).abs()
        parts[best.agreement >= enough] = 0
        for column in parts.topk(min(3, len(parts))).indices.tolist():
            if parts[column] < 1e-3:
                break
            swapped = directions.clone()
            swapped[column] = other
            trial = solve(factors, swapped)
            if trial.coefficient > best.coefficient:
                directions, best = swapped, trial
                break
    return directions, best


@dataclass(frozen=True)
class Remainder:
    """What known directions leave open.

    Attributes:
        rows: The known examples' rows of Q^-1, as far as they can be told.
        basis: An orthonormal basis of where the missing directions are, as rows.
    """

    rows: Tensor
    basis: Tensor


def deflate(factors: Factors, directions: Tensor) -> Remainder:
    """Return where the directions must be that are still missing.

    The rows a_i of Q^-1 are orthogonal to all directions but their own, so the missing
    directions lie in the complement of the known rows a_i. Known directions leave of a_i only the
    part in their own complement N open, and that is estimated from the ReLU: the example's
    outputs W R^T a_i + b are positive exactly where its gradient is not zero. A linear regression
    of that pattern on W R^T N gives it. Without it, a_i are the rows of the pseudo-inverse, and
    the result is the orthogonal complement of the directions, as in SPEAR++.
    """
    count = len(directions)
    orthogonal = torch.linalg.svd(directions, full_matrices=True).Vh[count:]
    rows = torch.linalg.pinv(directions).T
    pattern = (~factors.zeros(directions)).to(directions).T
    known = factors.hidden @ rows.T
    offsets = torch.stack([factors.bias, torch.ones_like(factors.bias)], 1)
    basis, triangle = torch.linalg.qr(torch.cat([factors.hidden @ orthogonal.T, offsets], 1))
    sizes = triangle.diagonal().abs()
    if count == 0 or not sizes.min() > 1e-12 * sizes.max():
        return Remainder(rows, orthogonal)
    free_pattern = pattern - basis @ (basis.T @ pattern)
    free_known = known - basis @ (basis.T @ known)
    scale = _nonzero((free_pattern * free_known).sum(0) / free_known.square().sum(0))
    rest = basis.T @ (pattern - scale * known)
    open_part = torch.linalg.solve_triangular(triangle, rest, upper=True)[: len(orthogonal)]
    rows = rows + (open_part / scale).T @ orthogonal
    return Remainder(rows, torch.linalg.svd(normalize(rows, dim=1), full_matrices=True).Vh[count:])


def pattern_starts(factors: Factors, rows: Tensor, basis: Tensor) -> Tensor:
    """Return directions that vanish where mixtures of examples would be off.

    A row of L is a mixture of rows of Q^-1, and dividing it by its bias gradient makes it a
    weighted mean of examples. Where one example dominates, the mean is off at nearly the same
    neurons, and the direction in the span of `basis` that is smallest there is close to its own.
    For a neuron that a single example activates, it is exact.
    """
    left = factors.left @ basis.T
    starts = []
    for part in rows.split(32):
        mean = part / _nonzero(part @ factors.bias_gradient).unsqueeze(1)
        off = (mean @ factors.hidden.T + factors.bias <= 0).to(left)
        gram = (left.T * off.unsqueeze(1)) @ left
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(1e-12 * (1 + diagonal.sum(1, keepdim=True)))
        factor = torch.linalg.cholesky(gram)
        smallest = normalize(part @ basis.T, dim=1).unsqueeze(2)
        for _ in range(3):  # inverse iteration
            smallest = normalize(torch.cholesky_solve(smallest, factor), dim=1)
        starts.append(smallest.squeeze(2) @ basis)
    return torch.cat(starts)


class Pool:
    """Candidate directions without duplicates or negatives, sparsest first, and their best basis.

    Attributes:
        factors: What the directions factorise.
        enough: Agreement of gradient and output, over the neurons, that confirms an example.
        directions: Candidates, as rows.
        basis: Independent ones among them, as many as there are.
        solution: The batch that follows from the basis; None unless it is complete.
    """

    def __init__(self, factors: Factors, enough: float) -> None:
        self.factors, self.enough = factors, enough
        self.directions = factors.left.new_zeros(0, factors.rank)
        self.basis = self.directions
        self.solution: Solution | None = None
        self._sparse = factors.fewest_zeros(1e-5)
        self._typical = factors.fewest_zeros(1e-2)

    @property
    def confirmed(self) -> bool:
        """Whether the basis explains the pattern of zeros of every example."""
        return self.solution is not None and bool((self.solution.agreement >= self.enough).all())

    @property
    def trusted(self) -> Tensor:
        """Directions of the basis that are taken for true while others are sought."""
        if self.solution is not None:
            return self.basis[self.solution.agreement >= self.enough]
        return self.basis[self.factors.zeros(self.basis).sum(1) >= self._typical]

    @property
    def progress(self) -> float:
        """What the search increases: directions of the basis, then their coefficient."""
        return len(self.basis) + (self.solution.coefficient if self.solution else 0.0)

    def add(self, candidates: Tensor) -> bool:
        """Polish candidates and add the sparse and new ones; return whether that was progress."""
        before = self.progress
        candidates = self._nearly_sparse(candidates.double())
        known = self.directions
        fresh = _unique(torch.cat([known, candidates]))[len(known) :]
        fresh = refine(self.factors.left, fresh, self._sparse, self.factors.noise)
        fresh = fresh[self.factors.zeros(fresh).sum(1) >= self._sparse]
        if len(fresh):
            pool = torch.cat([known, fresh])
            order = self.factors.sparsity(pool).argsort(descending=True)
            self.directions = _unique(pool[order])
            self._choose_basis()
        return self.progress > before

    def _nearly_sparse(self, candidates: Tensor) -> Tensor:
        """Return the candidates that may be sparse once polished, sparsest first."""
        outputs = self.factors.outputs(candidates).abs()
        near = torch.maximum(
            1e-2 * outputs.amax(1, keepdim=True), self.factors.tolerance(candidates, outputs)
        )
        counts = (outputs <= near).sum(1)
        order = counts.argsort(descending=True)
        return candidates[order[counts[order] >= self._sparse]]

    def _choose_basis(self) -> None:
        chosen = initial_filter(self.directions)
        self.basis, self.solution = self.directions[chosen], None
        if len(chosen) == self.factors.rank:
            others = torch.ones(len(self.directions), dtype=torch.bool)
            others[chosen] = False
            self.basis, self.solution = greedy_filter(
                self.factors, self.basis, self.directions[others], self.enough
            )


def _unique(directions: Tensor) -> Tensor:
    """Return directions without those that repeat an earlier one, up to sign."""
    repeats = ((directions @ directions.T).abs() > SAME).tril(-1)
    kept: list[int] = []
    for index, row in enumerate(repeats):
        if not row[kept].any():
            kept.append(index)
    return directions[kept]


def reconstruction(observation: Observation, layer: ReLULayer, pool: Pool) -> Reconstruction:
    """Return the examples of the pool's basis, with missing directions filled in."""
    factors, found = pool.factors, len(pool.basis)
    solution = pool.solution
    if solution is None:
        filled = torch.cat([pool.basis, deflate(factors, pool.basis).basis])
        solution = solve(factors, filled)
    inputs = (solution.inverse[:found] @ factors.right).to(layer.weight.dtype)
    if layer.sees_inputs:
        inputs = observation.space.clamp(inputs.view(-1, *observation.space.shape))
    return Reconstruction(
        inputs=inputs,
        objective=1 - solution.coefficient,
        confidence=solution.agreement[:found],
        layer=None if layer.sees_inputs else layer.name,
    )
