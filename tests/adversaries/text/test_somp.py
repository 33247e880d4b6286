from dataclasses import replace
from typing import Any

import pytest
from federated import rng
from sentences import language_model, recovered, seen_by_server, sentences

from leakfrontier.adversaries import SOMP, FedAvg, NotApplicable
from leakfrontier.adversaries.text import somp
from leakfrontier.adversaries.text.diverse_beams import Candidate
from leakfrontier.adversaries.text.gradient_atoms import Selection, pursue
from leakfrontier.defenses import Noise


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("gpt2", "next-token"),
        ("gpt2", "classification"),
        ("llama", "next-token"),
        ("llama", "classification"),
    ],
)
def test_recovers_a_batch_exactly(family: str, task: str) -> None:
    model = language_model(family, task)
    repeated = sentences([10, 6, 8, 8])
    repeated[3] = repeated[2]
    for tokens in (sentences([10, 7, 8]), repeated):
        guess = SOMP().reconstruct(seen_by_server(model, tokens, task), rng())
        assert recovered(guess, tokens) == 1
        assert guess.objective is not None
        assert guess.objective < 0.01
        assert guess.confidence is not None
        assert guess.confidence.min() > 0.9


def test_recovers_sentences_of_two_words() -> None:
    """Whose only input leads to itself, again and again, if positions are rotations."""
    tokens = sentences([9, 2, 6])
    guess = SOMP().reconstruct(seen_by_server(language_model("llama"), tokens), rng())
    assert recovered(guess, tokens) == 1


def test_head_wise_scores_find_the_tokens_of_one_sentence() -> None:
    tokens = sentences([6])
    observation = seen_by_server(language_model("gpt2"), tokens)
    guess = SOMP(geometry="headwise", pool=40).reconstruct(observation, rng())
    assert recovered(guess, tokens) == 1


def test_recovers_a_sentence_under_noise() -> None:
    """The pool and the beams are DAGER's, and the pursuit chooses the length."""
    model = language_model("gpt2")
    for seed in (1, 2, 3):  # of the first, not even the pool has all tokens
        tokens = sentences([8], seed)
        observation = seen_by_server(model, tokens, defense=Noise(1e-3))
        assert recovered(SOMP().reconstruct(observation, rng()), tokens) == 1


def test_what_beams_lose_is_found_by_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(somp, "search", lambda *_: [Candidate((1, 2, 3), 0.0)])
    tokens = sentences([8, 6])
    observation = seen_by_server(language_model("gpt2"), tokens)
    assert recovered(SOMP().reconstruct(observation, rng()), tokens) == 1


def test_recovers_changes_of_weights() -> None:
    tokens = sentences([9, 7, 8, 6])
    protocol = FedAvg(epochs=10, batch_size=2, lr=1e-4)
    observation = seen_by_server(language_model("gpt2"), tokens, protocol=protocol)
    assert recovered(SOMP().reconstruct(observation, rng()), tokens) == 1


def test_where_the_space_is_full_it_still_answers() -> None:
    tokens = sentences([10] * 9)
    observation = seen_by_server(language_model("llama"), tokens)
    guess = SOMP(pool=40, width=2, groups=4).reconstruct(observation, rng())
    assert 1 <= len(guess.inputs) <= 9
    assert guess.objective is not None
    assert guess.objective < 1


def test_says_what_it_cannot_attack() -> None:
    tokens = sentences([6, 5])
    encoder = seen_by_server(language_model("bert", "classification"), tokens, "classification")
    with pytest.raises(NotApplicable, match="encoder"):
        SOMP().reconstruct(encoder, rng())
    observation = seen_by_server(language_model("gpt2"), tokens)
    frozen = {name: value for name, value in observation.update.items() if "attn" not in name}
    with pytest.raises(NotApplicable, match="attention is frozen"):
        SOMP().reconstruct(replace(observation, update=frozen), rng())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"geometry": "paper"}, "geometry must be 'stacked' or 'headwise'"),
        ({"width": 0}, "width must be at least 1"),
        ({"language": float("nan")}, "language must be >= 0 and finite"),
        ({"cluster": 1.5}, "cluster must be in"),
    ],
)
def test_rejects_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOMP(**options)  # type: ignore[arg-type]


def test_copies_leave_room_for_every_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sentences([9, 7, 8])
    observation = seen_by_server(language_model("gpt2"), tokens)

    def uneven(*given: Any, **options: Any) -> Selection:  # noqa: ANN401 - as they come
        found = pursue(*given, **options)
        return found._replace(amounts=[2.0, *[0.5] * (len(found.amounts) - 1)])

    monkeypatch.setattr(somp, "pursue", uneven)
    assert recovered(SOMP().reconstruct(observation, rng()), tokens) == 1
