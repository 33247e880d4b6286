"""Inputs of a whole batch, corrected by gradients where weights say little of them.

A convolution with as many outputs as inputs can be inverted, x = W^-1 z, but its smallest singular
values are tiny: what four of them lose is all that double precision has. What is lost lies in few
directions. If all examples of a batch are known, so are their slopes k, and the gradient

    dL/dW = sum_k k_k * x_k

must hold as well. In those directions alone it has many more equations than unknowns, however many
examples there are. Solved for is the correction, of which a few digits are enough.
"""

from __future__ import annotations

from torch import Tensor

from .constraints import conjugate_gradients
from .layer_system import WeightInverse

_DIRECTIONS = 64
"""Most directions of a layer."""
_UNKNOWNS = 1500
"""Most unknowns: directions times examples."""
_SPARE = 3
"""Fewest equations for an unknown."""
_ITERATIONS = 80
"""Most iterations of conjugate gradients."""
_DIGITS = 1e-5
"""Accuracy of the correction."""
_SIZE = 1e10
"""Size of right-hand sides, far above that of rows at which a solver takes them for noise."""


def corrected(
    inverse: WeightInverse, inputs: Tensor, slopes: Tensor, gradient: Tensor
) -> tuple[Tensor, float]:
    """Return the inputs of a layer, and the part of dL/dW that they leave unexplained.

    Args:
        inverse: The way back by weights.
        inputs: What it gave for each example of the batch, flat.
        slopes: k, of each example.
        gradient: dL/dW, summed over the examples.
    """
    convolution, shape = inverse.convolution, (-1, *inverse.layer.input_shape)

    def made(moves: Tensor) -> Tensor:
        return convolution.weight_gradient(moves.view(shape), slopes)

    size = gradient.norm().clamp(min=1e-300)
    rest = gradient - made(inputs)
    count = min(_DIRECTIONS, _UNKNOWNS // len(slopes), gradient.numel() // (_SPARE * len(slopes)))
    weak = inverse.weak(count)
    if weak is None or not rest.norm() > 0:
        return inputs, float(rest.norm() / size)
    scale = rest.norm() / _SIZE
    steps = conjugate_gradients(
        lambda steps: made(steps[0] @ weak).view(1, -1),
        lambda rows: (
            convolution.weight_gradient_back(rows.view(gradient.shape), slopes).flatten(1) @ weak.T
        ).unsqueeze(0),
        (rest / scale).view(1, -1),
        lambda steps: steps,
        inputs.new_zeros(1, len(slopes), len(weak)),
        _ITERATIONS,
        _DIGITS,
    )
    inputs = inputs + scale * steps[0] @ weak
    return inputs, float((gradient - made(inputs)).norm() / size)
