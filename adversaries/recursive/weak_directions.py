"""Correct the inputs of a whole batch by gradients, where weights determine them poorly.

A convolution with as many outputs as inputs can be inverted, x = W^-1 z, but its smallest singular
values are tiny: four such layers lose all digits of double precision. The loss affects only a few
directions. If all examples of a batch are known, so are their slopes k, and the gradient

    dL/dW = sum_k k_k * x_k

must hold too. In the few weak directions, it has many more equations than unknowns for any number
of examples. The system is solved for the correction, which needs only a few digits.
"""

from __future__ import annotations

from torch import Tensor

from .constraints import conjugate_gradients
from .layer_system import WeightInverse

_DIRECTIONS = 64
"""Largest number of directions of a layer."""
_UNKNOWNS = 1500
"""Largest number of unknowns: directions times examples."""
_SPARE = 3
"""Smallest number of equations per unknown."""
_ITERATIONS = 80
"""Largest number of iterations of conjugate gradients."""
_DIGITS = 1e-5
"""Relative accuracy of the correction."""
_SIZE = 1e10
"""Size of right-hand sides; it must be far above the size that the solver treats as noise."""


def corrected(
    inverse: WeightInverse, inputs: Tensor, slopes: Tensor, gradient: Tensor
) -> tuple[Tensor, float]:
    """Return the inputs of a layer, and the part of dL/dW that they leave unexplained.

    Args:
        inverse: The way back by weights.
        inputs: Its result for each example of the batch, flat.
        slopes: k of each example.
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
