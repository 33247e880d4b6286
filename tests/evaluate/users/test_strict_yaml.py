from __future__ import annotations

import pytest

from leakfrontier.evaluate.users.strict_yaml import load_yaml


def test_plain_values_are_those_of_yaml() -> None:
    assert load_yaml("a: [1, 2.5, text, true, null]\nb: {c: .inf}") == {
        "a": [1, 2.5, "text", True, None],
        "b": {"c": float("inf")},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("-2E5", -2e5), ("1.5e+2", 150.0), (".5e1", 5.0), ("1e", "1e"), ("e3", "e3")],
)
def test_powers_of_ten_are_numbers(text: str, value: object) -> None:
    assert load_yaml(f"a: {text}") == {"a": value}


def test_a_key_that_is_given_twice_is_named_with_both_lines() -> None:
    with pytest.raises(ValueError, match=r"(?s)the key 'c' is given.*line 3.*and again.*line 5"):
        load_yaml("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")


def test_keys_of_different_mappings_may_be_equal() -> None:
    assert load_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}\n1: d\n'1': e") == {
        "a": {"b": 1},
        "c": {"b": 2},
        1: "d",
        "1": "e",
    }


MANY = "a0: &a0 x\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


def test_few_aliases_are_welcome() -> None:
    assert load_yaml("a: &x [1, 2]\nb: *x\nc: [*x, *x]") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": [[1, 2], [1, 2]],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: }", "line 2"),
        ("a: !!python/object/apply:os.getcwd []", "python/object"),
        ("? [a]\n: 1", "unhashable key"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 100 + "]" * 100, "nested too deeply"),
        ("a: &a [*a]", "refers to its own value"),
        ("a: &a {b: *a}", "refers to its own value"),
        (MANY, "more than 100,000 values"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_yaml(text)
