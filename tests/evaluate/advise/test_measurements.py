import math

import numpy as np
import pytest

from leakfrontier.evaluate.advise.measurements import predicted_accuracy
from leakfrontier.evaluate.foundations.statistics import accuracy_interval


def test_one_more_run_is_predicted_not_the_mean() -> None:
    correct = [820, 800, 790, 810, 830]
    predicted, mean = (f(correct, [1000] * 5) for f in (predicted_accuracy, accuracy_interval))
    half = 2.776 * 0.0158114 * math.sqrt(1.2)  # Student's t with four degrees of freedom
    assert predicted.value == mean.value == pytest.approx(0.81)
    assert predicted.low == pytest.approx(0.81 - half, abs=1e-4)
    assert predicted.high == pytest.approx(0.81 + half, abs=1e-4)
    assert predicted.low < mean.low
    assert predicted_accuracy([8], [10]) == accuracy_interval([8], [10])
    many = [predicted_accuracy(draw[:5], [10**6] * 5) for draw in DRAWN]
    inside = [one.low <= draw[5] / 1e6 <= one.high for one, draw in zip(many, DRAWN, strict=True)]
    assert 0.93 < sum(inside) / len(inside) < 0.97


DRAWN = np.random.default_rng(0).normal(8e5, 2e4, (2000, 6)).astype(int).tolist()
