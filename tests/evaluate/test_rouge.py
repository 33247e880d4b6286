import math

import pytest

from leakfrontier.evaluate.rouge import rouge


def test_the_f_measures_of_lin() -> None:
    scores = rouge(["police kill the gunman", ""], ["Police killed the gunman."] * 2)
    assert scores["rouge1"].tolist() == pytest.approx([3 / 4, 0])
    assert scores["rouge2"].tolist() == pytest.approx([1 / 3, 0])
    assert scores["rougeL"].tolist() == pytest.approx([3 / 4, 0])


def test_what_has_no_words_has_no_score() -> None:
    scores = rouge(["a b", "a"], ["\N{GREEK SMALL LETTER ALPHA}", "a"])
    assert math.isnan(scores["rouge1"][0])
    assert scores["rouge1"][1] == 1
    assert scores["rouge2"].isnan().all()
    assert rouge([], [])["rougeL"].tolist() == []
