import math
from dataclasses import replace

import pytest
import torch
from federated import batch, mlp, rng
from replaying import check_replay
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Update, batch_gradient
from leakfrontier.defenses.randomk import RandomK


def update(*values: float) -> Update:
    entries = torch.tensor(values, dtype=torch.float32)
    return {"weight": entries[:6], "bias": entries[6:]}


TEN = update(*range(1, 11))


def kept(sent: Update) -> int:
    return sum(int((value != 0).sum()) for value in sent.values())


@pytest.mark.parametrize("rescale", [True, False])
def test_identity_setting_is_the_undefended_update(rescale: bool) -> None:
    given = batch_gradient(mlp(), cross_entropy, batch(2))
    defense = RandomK(1.0, rescale=rescale)
    torch.testing.assert_close(defense.on_update(given, rng()), given, rtol=0, atol=0)
    assert not defense.stochastic
    assert defense.strength == 0


@pytest.mark.parametrize(("ratio", "count"), [(0.5, 5), (0.34, 3), (0.001, 1)])
def test_keeps_the_stated_share_as_it_is(ratio: float, count: int) -> None:
    for seed in range(20):
        sent = RandomK(ratio).on_update(TEN, rng(seed))
        assert kept(sent) == count
        for name, value in sent.items():
            assert ((value == 0) | (value == TEN[name])).all()


def test_per_layer_keeps_the_share_of_each_tensor() -> None:
    for seed in range(20):
        sent = RandomK(0.5, per_layer=True).on_update(TEN, rng(seed))
        assert [int((value != 0).sum()) for value in sent.values()] == [3, 2]
        assert kept(RandomK(0.01, per_layer=True).on_update(TEN, rng(seed))) == 2


@pytest.mark.parametrize(("ratio", "per_layer"), [(0.3, False), (0.3, True)])
def test_rescaled_it_is_unbiased(ratio: float, per_layer: bool) -> None:
    draws, generator = 2000, rng(1)
    defense = RandomK(ratio, rescale=True, per_layer=per_layer)
    sent = [defense.on_update(TEN, generator) for _ in range(draws)]
    for name, value in TEN.items():
        drawn = torch.stack([one[name] for one in sent])
        error = (drawn.mean(0) - value).abs()
        assert (error < 4 * drawn.std(0) / math.sqrt(draws)).all()


def test_every_upload_draws_anew_from_the_generator() -> None:
    defense, generator = RandomK(0.5), rng(1)
    first, second = (defense.on_update(TEN, generator) for _ in range(2))
    again = defense.on_update(TEN, rng(1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not all(torch.equal(first[name], second[name]) for name in first)
    assert defense.stochastic


def test_error_feedback_uploads_everything_in_the_end() -> None:
    defense, generator, rounds = RandomK(0.3, error_feedback=True), rng(), 200
    total = {name: torch.zeros_like(value) for name, value in TEN.items()}
    for _ in range(rounds):
        sent = defense.on_update(TEN, generator)
        total = {name: total[name] + sent[name] for name in TEN}
    left = torch.cat([rounds * TEN[name] - total[name] for name in TEN])
    torch.testing.assert_close(defense._dropped, left)
    assert (left <= 30 * torch.cat(list(TEN.values()))).all()  # without it, 140 of 200 rounds
    assert replace(defense)._dropped is None


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("per_layer", [True, False])
def test_replay_of_the_true_update_is_the_upload(rescale: bool, per_layer: bool) -> None:
    defense = RandomK(0.4, rescale=rescale, per_layer=per_layer)
    observed = defense.on_update(TEN, rng())
    torch.testing.assert_close(defense.replay(observed).on_update(TEN, rng(9)), observed)


@pytest.mark.parametrize("per_layer", [True, False])
def test_replay_is_differentiable_and_can_be_vectorised(per_layer: bool) -> None:
    check_replay(RandomK(0.1, rescale=True, per_layer=per_layer))


def test_strength_grows_with_what_is_dropped() -> None:
    assert RandomK(1.0).strength < RandomK(0.1).strength < RandomK(0.01).strength


@pytest.mark.parametrize("ratio", [0, 1.1, -0.1, math.nan])
def test_rejects_a_bad_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        RandomK(ratio)


def test_rejects_rescaling_with_error_feedback() -> None:
    with pytest.raises(ValueError, match="rescale must be False with error_feedback"):
        RandomK(0.5, rescale=True, error_feedback=True)
