import math
import random

import pytest

from leakfrontier.evaluate.modality.rouge import rouge


def test_the_f_measures_of_lin() -> None:
    scores = rouge(["police kill the gunman", ""], ["Police killed the gunman."] * 2)
    assert scores["rouge1"].tolist() == pytest.approx([3 / 4, 0])
    assert scores["rouge2"].tolist() == pytest.approx([1 / 3, 0])
    assert scores["rougeL"].tolist() == pytest.approx([3 / 4, 0])


@pytest.mark.parametrize(
    ("guess", "truth", "expected"),
    [
        ("die f\u00fc\u00dfe frieren", "Die F\u00fc\u00dfe brennen.", 2 / 3),
        ("die fue brennen", "Die F\u00fc\u00dfe brennen.", 2 / 3),  # f and e are no words
        ("u\u0308ber", "\u00dcBER", 1),  # two ways to write one letter
        ("\u6211\u4eec\u53bb", "\u6211\u4eec\u6765\u3002", 2 / 3),
        ("\u0e01\u0e34\u0e19", "\u0e01\u0e34\u0e19", 1),
        (
            "\u0646\u064e\u0635 \u0637\u0648\u064a\u0644",
            "\u0646\u064e\u0635 \u0642\u0635\u064a\u0631",
            1 / 2,
        ),
        ("\U0001f600\U0001f389", "\U0001f600\U0001f680", 1 / 2),
        ("?!", "?!", 1),
        ("some words", "\U0001f600", 0),
    ],
)
def test_words_of_any_script_count(guess: str, truth: str, expected: float) -> None:
    assert float(rouge([guess], [truth])["rouge1"]) == pytest.approx(expected)


def test_english_has_the_words_of_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    draws, kinds = random.Random(0), ["rouge1", "rouge2", "rougeL"]
    texts = ["".join(draws.choices("ab B7_'-. \n!", k=40)) for _ in range(200)]
    scorer, (guesses, truths) = RougeScorer(kinds), (texts[::2], texts[1::2])
    ours = rouge(guesses, truths)
    for place, (guess, truth) in enumerate(zip(guesses, truths, strict=True)):
        theirs = scorer.score(truth, guess)
        assert [float(ours[k][place]) for k in kinds] == [theirs[k].fmeasure for k in kinds]


def test_what_has_no_words_has_no_score() -> None:
    scores = rouge(["a b", "a"], [" ", "a"])
    assert math.isnan(scores["rouge1"][0])
    assert scores["rouge1"][1] == 1
    assert scores["rouge2"].isnan().all()
    assert rouge([], [])["rougeL"].tolist() == []
