import io
import json
import math

import pytest
import torch
from scipy.io import wavfile
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import ImageSpace, InputSpace, TokenSpace, WaveSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.modality.modality import Images, Modality, Text, Waves, modality_of

IMAGES = modality_of(ImageSpace((1, 8, 8), 3, mean=(0.4,), std=(0.2,)))
WAVES = modality_of(WaveSpace((1, 40), 3, mean=(0.5,), std=(0.02,), rate=8000))
VOCABULARY = ("[PAD]", "[UNK]", *(f" {letter}" for letter in "abcdefgh"))
TEXT = modality_of(TokenSpace((6,), 3, vocabulary=len(VOCABULARY), padding=0), VOCABULARY)
ALL = [IMAGES, WAVES, TEXT]


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def values(modality: Modality, count: int, seed: int = 0) -> Tensor:
    shape = (count, *modality.space.shape)
    if isinstance(modality, Text):
        return torch.randint(1, len(VOCABULARY), shape, generator=rng(seed))
    return torch.rand(shape, generator=rng(seed))


METRICS = {
    Images: {"psnr", "ssim"},
    Waves: {"psnr", "snr"},
    Text: {"token_accuracy", "exact", "rouge1", "rouge2", "rougeL"},
}


def by_name(modality: Modality) -> str:
    return type(modality).__name__


def test_every_space_has_its_modality() -> None:
    assert [type(modality) for modality in ALL] == [Images, Waves, Text]
    with pytest.raises(ValueError, match="images, sound or tokens"):
        modality_of(InputSpace((3,), 2))


@pytest.mark.parametrize("modality", ALL, ids=by_name)
def test_a_copy_is_found_identified_and_scored(modality: Modality) -> None:
    truth = values(modality, 5)
    guess = truth.flip(0)
    assert modality.match(guess, truth).tolist() == [4, 3, 2, 1, 0]
    pool = values(modality, 5 * 7, seed=1).view(5, 7, *modality.space.shape)
    assert modality.identified(truth, truth, pool).all()
    assert not modality.identified(truth, truth, torch.stack([truth, truth], 1)).any()
    right, wrong = modality.scores(truth, truth), modality.scores(guess[:2], truth[:2])
    assert set(right) == METRICS[type(modality)]
    assert all((right[name][:2] > wrong[name]).all() for name in right)


@pytest.mark.parametrize("modality", ALL, ids=by_name)
def test_values_and_inputs_are_inverse(modality: Modality) -> None:
    private = values(modality, 3)
    inputs = modality.inputs(private)
    assert inputs.dtype == modality.space.dtype
    torch.testing.assert_close(modality.values(inputs), private)


@pytest.mark.parametrize("modality", ALL, ids=by_name)
def test_no_guess_identifies_nobody(modality: Modality) -> None:
    truth = values(modality, 50)
    nothing = modality.nothing(truth[:0])
    assert nothing.shape == (1, *modality.space.shape)
    assert nothing.dtype == truth.dtype
    guess = nothing.expand_as(truth)
    if not isinstance(modality, Text):
        assert modality.scores(guess, truth)["psnr"].max() < 20
        return
    assert not modality.scores(guess, truth)["token_accuracy"].any()
    pool = values(modality, 100, seed=1).view(50, 2, -1)
    assert not modality.identified(guess, truth, pool).any()  # all are equally far


def test_scores_of_sound_are_of_amplitudes() -> None:
    truth = torch.full((1, 1, 40), 0.75)  # the amplitude 1/2
    silence = WAVES.nothing(truth)
    scores = WAVES.scores(silence, truth)
    assert scores["snr"].item() == pytest.approx(0)
    assert scores["psnr"].item() == pytest.approx(20 * math.log10(2 / 0.5))  # peak to peak: 2
    assert WAVES.scores(truth, silence)["snr"].isnan()


def test_padding_counts_for_the_whole_text_only() -> None:
    truth = torch.tensor([[2, 3, 4, 0, 0, 0]] * 2)
    guess = torch.tensor([[2, 3, 5, 0, 0, 0], [2, 3, 4, 5, 0, 0]])
    scores = TEXT.scores(guess, truth)
    assert scores["token_accuracy"].tolist() == pytest.approx([2 / 3, 1.0])
    assert scores["exact"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("modality", ALL, ids=by_name)
def test_look_alikes_are_of_the_class_and_no_duplicates(modality: Modality) -> None:
    data = Batch(values(modality, 60), torch.arange(60) % 3)
    data.inputs[9] = data.inputs[0]
    exclude = torch.tensor([3, 6, 7])
    drawn = modality.look_alikes(0, data, exclude, 16, rng())
    assert sorted(drawn.tolist()) == list(range(12, 60, 3))
    assert torch.equal(drawn, modality.look_alikes(0, data, exclude, 16, rng()))
    assert not torch.equal(drawn, drawn.sort().values)
    with pytest.raises(ValueError, match=r"\[1, 16\]"):  # the duplicate is not the 17th
        modality.look_alikes(0, data, exclude, 17, rng())


def test_look_alikes_are_drawn_uniformly() -> None:
    data, draws = Batch(values(IMAGES, 6), torch.zeros(6, dtype=torch.long)), rng()
    drawn = [
        IMAGES.look_alikes(2, data, torch.tensor([2]), 2, draws).tolist() for _ in range(2_000)
    ]
    share = torch.bincount(torch.tensor(drawn).flatten(), minlength=6) / 2_000
    assert share[2] == 0
    assert (share[[0, 1, 3, 4, 5]] - 0.4).abs().max() < 4 * (0.4 * 0.6 / 2_000) ** 0.5


@pytest.mark.parametrize("count", [0, 20])
def test_look_alikes_name_the_class_that_is_too_small(count: int) -> None:
    data = Batch(values(IMAGES, 60), torch.arange(60) % 3)
    with pytest.raises(ValueError, match=rf"in \[1, 19\], .* class 2 .*got {count}"):
        IMAGES.look_alikes(2, data, torch.tensor([2]), count, rng())


def test_images_that_hardly_differ_are_duplicates() -> None:
    image = values(IMAGES, 1)[0] / 2
    others = torch.stack([image + 5e-4, image + 5e-3])
    assert IMAGES.differ(image, others).tolist() == [False, True]
    assert metrics.DUPLICATE_ERROR == 1e-6


def test_quiet_sounds_are_not_all_the_same() -> None:
    loud = values(WAVES, 3)
    quiet = 0.5 + (loud - 0.5) * 1e-3
    assert WAVES.differ(quiet[0], quiet).tolist() == [False, True, True]
    assert not WAVES.differ(loud[0], loud[:1] + 2e-4).any()
    assert not WAVES.differ(quiet[0], quiet[:1] + 1e-5).any()  # less than a step of 16 bits
    silence = torch.full((1, 40), 0.5)
    assert WAVES.differ(silence, torch.stack([silence, quiet[0]])).tolist() == [False, True]


def test_examples_are_shown() -> None:
    assert IMAGES.render(values(IMAGES, 1)[0]).startswith(b"\x89PNG")
    rate, samples = wavfile.read(io.BytesIO(WAVES.render(torch.full((1, 40), 0.75))))
    assert (rate, samples.tolist()) == (8000, [2**14] * 40)
    shown = TEXT.render(torch.tensor([2, 0, 4, -1, 0, 0]))
    assert json.loads(shown) == [" a", "[PAD]", " c", "\N{WHITE SQUARE}"]  # the end is left out
    assert json.loads(TEXT.render(torch.zeros(6, dtype=torch.long))) == []


@pytest.mark.parametrize("modality", ALL, ids=by_name)
def test_utility_is_accuracy_and_loss(modality: Modality) -> None:
    class Constant(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            assert not self.training
            return torch.tensor([1.0, 0.0, 0.0]).log_softmax(0).expand(len(inputs), 3)

    model = Constant()
    test = Batch(modality.inputs(values(modality, 6)), torch.tensor([0, 0, 0, 0, 1, 2]))
    utility = modality.evaluate(model, test)
    assert (utility.correct, utility.total) == (4, 6)
    assert utility.loss == pytest.approx(math.log(math.e + 2) - 4 / 6)
    assert model.training
    modality.evaluate(model.eval(), test)  # as pretrained models come
    assert not model.training


def test_a_model_that_fails_is_switched_back() -> None:
    class Failing(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("no luck")

    model = Failing()
    with pytest.raises(RuntimeError, match="no luck"):
        IMAGES.evaluate(model, Batch(values(IMAGES, 2), torch.tensor([0, 1])))
    assert model.training


def test_look_alikes_of_texts_are_of_like_length() -> None:
    space = TokenSpace((12,), 10, vocabulary=10, padding=0, task="next-token")
    text = Text(space, VOCABULARY)
    tokens = torch.randint(1, 10, (120, 12), generator=rng())
    lengths = 1 + torch.arange(120) // 10
    tokens = tokens.masked_fill(torch.arange(12) >= lengths[:, None], 0)
    tokens[:, 0] = 1 + torch.arange(120) % 9
    for index in (25, 110):
        found = text.look_alikes(index, Batch(tokens, tokens), torch.tensor([index]), 9, rng())
        assert len(found.unique()) == 9
        assert index not in found
        assert (lengths[found] - lengths[index]).abs().max() <= 2


def test_perplexity_is_of_tokens_and_accuracy_of_texts() -> None:
    space = TokenSpace((4,), 6, vocabulary=6, padding=0, task="next-token")
    tokens = torch.tensor([[1, 2, 3, 4], [1, 5, 0, 0]])

    class Always(torch.nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            scores = torch.zeros(*inputs.shape, 6)
            scores[..., 5] = 1.0
            return scores

    found = Text(space).evaluate(Always(), Batch(tokens, tokens))
    assert (found.correct, found.total) == (1, 2)  # one of the second text's one token
    right, wrong = (-math.log(math.exp(x) / (5 + math.e)) for x in (1, 0))
    assert found.loss == pytest.approx((3 * wrong + right) / 4)
