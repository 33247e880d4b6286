import json

import pandas as pd

from leakfrontier.evaluate.conclude.tuned import chosen_settings, tried_settings


def tunings(*lines: tuple[str, int, int, float]) -> pd.DataFrame:
    """Return rows of tuning: the defense, the number of the setting, correct of 100, the loss."""
    return pd.DataFrame(
        [
            {
                "scenario": "here",
                "defense": defense,
                "attempt": number,
                "settings": json.dumps({"lr": number / 10}),
                "correct": correct,
                "total": 100,
                "loss": loss,
            }
            for defense, number, correct, loss in lines
        ]
    )


def test_the_best_mean_over_trainings_is_chosen() -> None:
    table = tunings(("A", 0, 90, 1), ("A", 0, 50, 1), ("A", 1, 75, 1), ("B", 1, 10, 1))
    found = tried_settings(table)
    assert found[["defense", "attempt", "accuracy", "trainings", "chosen"]].values.tolist() == [
        ["A", 0, 0.7, 2, False],
        ["A", 1, 0.75, 1, True],
        ["B", 1, 0.1, 1, True],
    ]
    assert chosen_settings(table, "here") == {"A": {"lr": 0.1}, "B": {"lr": 0.1}}
    assert chosen_settings(table, "elsewhere") == {}


def test_of_equal_ones_the_smaller_loss_and_then_the_earlier_one_is_chosen() -> None:
    assert chosen_settings(tunings(("A", 0, 50, 2), ("A", 1, 50, 1)), "here")["A"] == {"lr": 0.1}
    assert chosen_settings(tunings(("A", 1, 50, 1), ("A", 0, 50, 1)), "here")["A"] == {"lr": 0.0}


def test_without_tuning_nothing_is_tried() -> None:
    assert tried_settings(tunings(("A", 0, 1, 1)).iloc[:0]).empty
