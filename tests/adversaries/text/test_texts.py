"""What is read off an update of a language model before the search: places, tokens, labels."""

from dataclasses import replace

import pytest
import torch
from federated import batch, mlp, rng
from federated import observed as observed_images
from small_language import BEGIN, END, LENGTH, PADDING, observed, sentences, space_of, trained

from leakfrontier.adversaries import NotApplicable, Observation
from leakfrontier.adversaries.text.texts import Texts
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.client.client import ThreatModel

ENCODER = {"encoder": True}


def read(observation: Observation, **options: object) -> Texts:
    settings = {"lengths": None, "use_embedding": False, "blocks": None, **options}
    return Texts.of(observation, rng(), **settings)  # type: ignore[arg-type]


def private(count: int, seed: int = 5, *, encoder: bool = False) -> Batch:
    return sentences(count, seed, encoder=encoder)


@pytest.mark.parametrize("seed", range(6))
def test_finds_length_and_tokens_of_one_sentence_that_is_learned_by_next_tokens(seed: int) -> None:
    truth = private(1, seed)
    texts = read(observed(trained("next-token"), space_of("next-token"), truth))
    real = space_of("next-token").real(truth.inputs)
    assert texts.real.tolist() == real[:, : int(real.sum())].tolist()
    assert torch.isin(truth.inputs[real], texts.allowed).all()
    assert len(texts.allowed) <= 2 * int(real.sum())


def test_of_several_sentences_it_sees_the_longest_and_how_many_beginnings_there_are() -> None:
    truth = private(3, 8)
    rows = [row[row != PADDING].tolist() for row in truth.inputs]
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row))}
    texts = read(observed(trained("next-token"), space_of("next-token"), truth))
    assert texts.real.sum() == len(beginnings) + 3  # and the last tokens, which are no inputs
    assert texts.known.shape[1] == max(map(len, rows))


def test_an_encoder_has_known_tokens_at_both_ends() -> None:
    truth = private(1, **ENCODER)
    observation = observed(
        trained("classification", steps=10, **ENCODER), space_of("classification", **ENCODER), truth
    )
    texts = read(observation)
    assert texts.known[0, 0] == BEGIN
    assert texts.known[0, -1] == END
    assert texts.free.sum() == (truth.inputs > END).sum()
    assert not torch.isin(torch.tensor([PADDING, BEGIN, END]), texts.allowed).any()
    assert texts.targets is not None
    assert texts.targets.tolist() == truth.targets.tolist()  # from the bias of the last layer


def test_the_embeddings_of_a_classifier_show_its_tokens() -> None:
    truth = private(2)
    model, space = trained("classification", steps=10), space_of("classification")
    every = read(observed(model, space, truth))
    seen = read(observed(model, space, truth), use_embedding=True)
    assert len(every.allowed) == 53
    assert set(seen.allowed.tolist()) == set(truth.inputs.flatten().tolist()) - {PADDING}


def test_a_replay_on_embeddings_is_the_clients_own_update() -> None:
    for task in ("next-token", "classification"):
        truth, space = private(2), space_of(task)
        observation = observed(trained(task, steps=10), space, truth)
        targets = truth.inputs if task == "next-token" else truth.targets
        texts = Texts.at(observation, truth.inputs, targets, None)
        replayed = texts.replay(texts.embedded(truth.inputs), targets)
        assert "model.transformer.wte.weight" in observation.update.keys() - replayed.keys()
        for name, value in replayed.items():
            torch.testing.assert_close(value, observation.update[name], atol=1e-6, rtol=1e-3)


def test_known_tokens_and_padding_are_put_back() -> None:
    observation = observed(trained("next-token"), space_of("next-token"), private(2))
    texts = read(observation, lengths=(5, 3))
    inputs = texts.settled(torch.randn(2, 5, texts.table.shape[1], generator=rng()))
    assert not inputs[1, 3:].any()
    tokens = texts.nearest(inputs)
    assert tokens[1, 3:].tolist() == [PADDING] * 2
    assert torch.isin(tokens[texts.free], texts.allowed).all()
    assert texts.nearest(3 * texts.embedded(tokens)).tolist() == tokens.tolist()
    assert texts.padded(tokens).shape == (2, LENGTH)


def test_only_the_parameters_of_the_first_blocks_are_compared_if_so_asked() -> None:
    observation = observed(trained("next-token"), space_of("next-token"), private(1))
    names = read(observation, blocks=1).names
    assert any(".h.0." in name for name in names)
    assert not any(".h.1." in name for name in names)
    assert "model.transformer.wpe.weight" in names
    assert set(names) < set(read(observation).names)


def test_it_says_what_is_missing() -> None:
    with pytest.raises(NotApplicable, match="not tokens"):
        read(observed_images(mlp(), batch(1)))
    observation = observed(trained("next-token"), space_of("next-token"), private(1))
    with pytest.raises(ValueError, match="lengths must be 1 numbers of at most 9"):
        read(observation, lengths=(3, 4))
    threat = ThreatModel(knows_targets=True)
    granted = observed(
        trained("classification", steps=10), space_of("classification"), private(1), threat=threat
    )
    assert read(granted).targets is not None
    frozen = dict(granted.update)
    frozen.pop("model.transformer.wte.weight")
    with pytest.raises(NotApplicable, match="embeddings"):
        read(replace(granted, update=frozen), use_embedding=True)
