"""What sentences are grown by; that whole batches come back is tested with DAGER and SOMP."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakfrontier.adversaries.text.sentence_growth import (
    Limit,
    Sentence,
    echoes,
    sentences_of,
    without_echoes,
)

ROTATED: Any = SimpleNamespace(absolute=False)
ABSOLUTE: Any = SimpleNamespace(absolute=True)


def test_an_echo_repeats_the_only_token_of_a_prefix() -> None:
    prefixes = torch.tensor([[7, 7], [7, 8]])
    assert echoes(prefixes, torch.tensor([7, 8])).tolist() == [[True, False], [False, False]]
    assert not echoes(prefixes[:, :0], torch.tensor([7, 8])).any()


def test_echoes_are_cut_where_positions_are_rotations_and_beginnings_are_left_out() -> None:
    found = [((7, 7, 7), 0.1), ((5, 6), 0.2), ((5, 6, 7), 0.3), ((5, 6, 7), 0.4)]
    assert without_echoes(found, ROTATED) == [Sentence((7,), 0.1), Sentence((5, 6, 7), 0.3)]
    assert without_echoes(found, ABSOLUTE) == [Sentence((7, 7, 7), 0.1), Sentence((5, 6, 7), 0.3)]


def test_sentences_have_the_mean_distance_of_their_tokens() -> None:
    found = sentences_of(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.5, 1.0]))
    assert found == [Sentence((1, 2), 0.25), Sentence((3, 4), 0.5)]
    assert sentences_of(torch.zeros(1, 0), torch.zeros(1)) == []


def test_a_limit_accepts_what_rounding_makes_and_no_stranger() -> None:
    limit = Limit(1e-6, 0.4, noisy=False)
    assert limit.clear
    assert limit.middle == pytest.approx((1e-6 * 0.4) ** 0.5)
    distances = torch.tensor([1e-7, 2e-6, 0.4, 0.9])
    assert limit.accepts(distances, most=2).tolist() == [True, True, False, False]
    assert not Limit(0.1, 0.4, noisy=True).clear
