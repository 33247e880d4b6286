from leakfrontier.adversaries import InvertingGradients
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.users.names import adversary_label, family, label, options

TOPK = Method(name="TopK", options={"ratio": 0.1})
DPSGD = Method(name="DPSGD", options={"noise_multiplier": 1.0})
BOTH = Method(name="Chain", links=(DPSGD, TOPK))


def test_methods_are_called_by_name_and_options() -> None:
    assert label(Method(name="none")) == "none"
    assert label(TOPK) == "TopK(ratio=0.1)"
    assert label(Method(name="mine.py:Mine", options={"a": 1, "b": "x"})) == "Mine(a=1, b=x)"
    assert label(BOTH) == "DPSGD(noise_multiplier=1.0) then TopK(ratio=0.1)"


def test_a_family_is_what_settings_have_in_common() -> None:
    assert family(TOPK) == family(Method(name="TopK", options={"ratio": 0.2})) == "TopK"
    assert family(BOTH) == "DPSGD then TopK"


def test_options_of_a_chain_say_whose_they_are() -> None:
    assert options(TOPK) == {"ratio": 0.1}
    assert options(BOTH) == {"1 DPSGD noise_multiplier": 1.0, "2 TopK ratio": 0.1}


def test_an_adversary_is_called_by_what_differs_from_its_defaults() -> None:
    method = Method(name="InvertingGradients", options={"iterations": 7})
    assert adversary_label(method, InvertingGradients(iterations=7)) == (
        "InvertingGradients(iterations=7)"
    )
    assert adversary_label(method, InvertingGradients()) == "InvertingGradients"


def test_a_class_named_like_one_of_ours_is_told_apart() -> None:
    assert label(Method(name="mine.py:DPSGD", options={"a": 1})) == "DPSGD (own)(a=1)"
    assert family(Method(name="mine.py:none")) == "none (own)"
    assert family(Method(name="session-1:DPSGD")) != family(Method(name="DPSGD"))
