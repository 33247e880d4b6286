from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from federated import rng
from sentences import few_words, language_model, recovered, seen_by_server, sentences, tune
from small_language import observed

from leakfrontier.adversaries import DAGER, SOMP, Adversary, FedAvg, NotApplicable, TokenSpace
from leakfrontier.adversaries.text import dager, somp
from leakfrontier.adversaries.text.sentence_ends import Ending
from leakfrontier.defenses import DPSGD, Batch
from leakfrontier.evaluate.models.models import build_model


def with_repeats() -> torch.Tensor:
    """Return sentences of which one begins another, and two are the same."""
    tokens = sentences([10, 6, 8, 8])
    tokens[1, :6] = tokens[0, :6]
    tokens[3] = tokens[2]
    return tokens


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("gpt2", "next-token"),
        ("gpt2", "classification"),
        ("gptj", "next-token"),
        ("llama", "next-token"),
        ("llama", "classification"),
        ("qwen", "next-token"),
    ],
)
def test_recovers_a_batch_exactly_with_repeats_beginnings_and_last_tokens(
    family: str, task: str
) -> None:
    model = language_model(family, task)
    for tokens in (sentences([10, 7, 8]), with_repeats(), sentences([5])):
        guess = DAGER().reconstruct(seen_by_server(model, tokens, task), rng())
        assert recovered(guess, tokens) == 1
        assert len(guess.inputs) == len(tokens)
        assert guess.objective == pytest.approx(0, abs=1e-6)
        assert guess.confidence is not None
        assert guess.confidence.min() > 0.95


def test_a_first_word_that_is_repeated_is_followed_to_what_comes_after() -> None:
    tokens = sentences([8, 6])
    tokens[0, 1] = tokens[0, 0]
    model = language_model("llama")
    assert recovered(DAGER().reconstruct(seen_by_server(model, tokens), rng()), tokens) == 1


@pytest.mark.parametrize("attack", [DAGER(), SOMP()], ids=["DAGER", "SOMP"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_dozen_words_are_enough(attack: Adversary, count: int) -> None:
    """All of them are behind the upload, at many positions: no token is far from the span."""
    space = TokenSpace((6,), 12, 12, 0, "next-token")
    model = build_model("gpt2", space, rng(), layers=2, width=32, heads=4)
    found = []
    for seed in range(3):
        tokens = torch.randint(1, 12, (count, 6), generator=rng(seed))
        tokens[0, 4:] = 0
        guess = attack.reconstruct(observed(model, space, Batch(tokens, tokens)), rng())
        found.append(recovered(guess, tokens))
    assert sum(found) == 3


@pytest.mark.parametrize("family", ["bert", "roberta"])  # whose positions begin at 0 and at 2
def test_recovers_an_encoders_sentences(family: str) -> None:
    tokens = sentences([6, 5])
    tokens[:, 0] = 2
    tokens[0, 5] = tokens[1, 4] = 3
    observation = seen_by_server(
        language_model(family, "classification"), tokens, "classification", last=3
    )
    guess = DAGER().reconstruct(observation, rng())
    assert recovered(guess, tokens) == 1
    few = DAGER(combinations=8).reconstruct(observation, rng())  # climbs from random ones
    assert recovered(few, tokens) >= 0.5
    endless = replace(observation, space=replace(observation.space, last=1))  # in no sentence
    with pytest.raises(NotApplicable, match="where a sentence may end"):
        DAGER().reconstruct(endless, rng())


def test_copies_leave_room_for_every_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sentences([9, 9, 6])
    tokens[1] = tokens[0]
    observation = seen_by_server(language_model("gpt2"), tokens)
    endings = dager.find_endings

    def miscounted(*given: Any) -> list[Ending]:  # noqa: ANN401 - as they come
        return [replace(one, count=3.0 * one.count) for one in endings(*given) or []]

    monkeypatch.setattr(dager, "find_endings", miscounted)
    guess = DAGER().reconstruct(observation, rng())
    assert len(guess.inputs) == len(tokens)
    assert {*map(tuple, guess.inputs.tolist())} == {*map(tuple, tokens.tolist())}


def test_recovers_changes_of_weights() -> None:
    tokens = sentences([9, 7, 8, 6])
    protocol = FedAvg(epochs=10, batch_size=2, lr=1e-4)
    observation = seen_by_server(language_model("gpt2"), tokens, protocol=protocol)
    assert recovered(DAGER().reconstruct(observation, rng()), tokens) == 1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("steps", [8, 50])
def test_recovers_a_batch_of_a_model_that_was_fine_tuned(family: str, steps: int) -> None:
    """One direction outweighs all others in its gradients, and many are weak."""
    model = tune(language_model(family), steps)
    for size in (1, 4, 6):
        tokens = few_words(sentences([10] * size, seed=99))
        clipping = DPSGD(noise_multiplier=0.0, max_grad_norm=0.1, poisson_sampling=False)
        for defense in (None, clipping):
            observation = seen_by_server(model, tokens, defense=defense)
            guess = DAGER().reconstruct(observation, rng())
            assert recovered(guess, tokens) == 1
            assert guess.confidence is not None
            assert guess.confidence.min() > 0.9


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recovers_uploads_of_16_bits(family: str, dtype: torch.dtype) -> None:
    tokens = sentences([10, 7])
    seen = seen_by_server(language_model(family), tokens)
    narrow = {name: value.to(dtype) for name, value in seen.update.items()}
    widened = {name: value.float() for name, value in narrow.items()}
    for update in (narrow, widened):
        for attack in (DAGER(), SOMP()):
            guess = attack.reconstruct(replace(seen, update=update), rng())
            assert recovered(guess, tokens) == 1


def test_says_what_else_fills_the_rank() -> None:
    tokens = few_words(sentences([10] * 4, seed=99))
    seen = seen_by_server(tune(language_model("llama"), 50), tokens)
    signs = {name: value / (value.abs() + 1e-8) for name, value in seen.update.items()}
    with pytest.raises(NotApplicable, match=r"at most 36 tokens .* adaptive optimizer"):
        DAGER().reconstruct(replace(seen, update=signs), rng())


@pytest.mark.parametrize("attack", [DAGER(), SOMP()], ids=["DAGER", "SOMP"])
def test_what_explains_little_is_not_certain_and_not_copied(
    monkeypatch: pytest.MonkeyPatch, attack: Adversary
) -> None:
    tokens = sentences([10, 10, 10, 10])
    seen = seen_by_server(language_model("gpt2"), tokens)
    one = [dager.Sentence(tuple(tokens[0, :9].tolist()), 0.0)]
    for module in (dager, somp):
        monkeypatch.setattr(module, "grow", lambda *given: one)
    monkeypatch.setattr(somp, "search", lambda *given: [])
    guess = attack.reconstruct(seen, rng())
    assert len(guess.inputs) == 1
    assert guess.confidence is not None
    assert guess.confidence.max() < 0.6


def test_differential_privacy_is_not_broken() -> None:
    tokens = sentences([9, 7])
    defense = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
    observation = seen_by_server(language_model("gpt2"), tokens, defense=defense)
    with suppress(NotApplicable):
        assert recovered(DAGER().reconstruct(observation, rng()), tokens) == 0


def test_says_what_it_cannot_attack() -> None:
    observation = seen_by_server(language_model("gpt2"), sentences([6, 5]))
    frozen = {name: value for name, value in observation.update.items() if "attn" not in name}
    with pytest.raises(NotApplicable, match="attention is frozen"):
        DAGER().reconstruct(replace(observation, update=frozen), rng())
    adapters = frozen | {"model.transformer.h.0.mlp.lora_A.weight": torch.ones(2, 2)}
    with pytest.raises(NotApplicable, match="only adapters of other layers"):
        DAGER().reconstruct(replace(observation, update=adapters), rng())
    zero = {name: torch.zeros_like(value) for name, value in observation.update.items()}
    with pytest.raises(NotApplicable, match="gradient is zero"):
        DAGER().reconstruct(replace(observation, update=zero), rng())
    broken = {name: value * torch.nan for name, value in observation.update.items()}
    with pytest.raises(NotApplicable, match="not finite"):
        DAGER().reconstruct(replace(observation, update=broken), rng())


def test_more_tokens_than_dimensions_saturate_the_rank() -> None:
    tokens = sentences([10] * 10)
    observation = seen_by_server(language_model("llama"), tokens)
    with pytest.raises(NotApplicable, match=r"saturated: .* up to \d+ tokens may be behind"):
        DAGER().reconstruct(observation, rng())
    guess = DAGER(rank_cutoff=20).reconstruct(observation, rng())
    assert guess.inputs.shape[1] == 10


def test_without_the_last_block_only_its_knowledge_is_missing() -> None:
    tokens = sentences([10, 7])
    observation = seen_by_server(language_model("gpt2"), tokens)
    known = {name: value for name, value in observation.update.items() if ".h.2." not in name}
    guess = DAGER().reconstruct(replace(observation, update=known), rng())
    before = tokens.clone()
    before[0, 9] = before[1, 6] = 0
    assert recovered(guess, before) == 1
    assert guess.confidence is not None  # each lacks its last token
    assert guess.confidence.tolist() == pytest.approx([9 / 10, 6 / 7], abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_cutoff": 0}, "rank_cutoff must be at least 1"),
        ({"tolerance": float("nan")}, "tolerance must be in"),
        ({"pool": 0}, "pool must be at least 1"),
        ({"combinations": -1}, "combinations must be at least 1"),
    ],
)
def test_rejects_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DAGER(**options)  # type: ignore[arg-type]
