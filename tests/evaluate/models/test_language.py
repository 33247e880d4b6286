"""Language models of every family: padding, embeddings and tied weights change nothing."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedSGD, TokenSpace
from leakfrontier.defenses import DEFENSES, DPSGD, Batch, Defense, batch_gradient
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality.modality import NextTokenLoss
from leakfrontier.evaluate.models.language import LanguageModel, Task

VOCABULARY, PADDING, WIDTH = 40, 7, 16
FAMILIES = ("gpt2", "gptj", "llama", "qwen2", "bert")
CASES = [
    (family, task)
    for family in FAMILIES
    for task in ("next-token", "classification")
    if (family, task) != ("bert", "next-token")
]
OPTIONS: dict[str, dict[str, object]] = {
    "DPSGD": {"noise_multiplier": 0.5, "max_grad_norm": 0.05},
    "ClientDP": {"noise_multiplier": 0.5},
    "Noise": {"scale": 0.1},
    "TopK": {"ratio": 0.2},
    "RandomK": {"ratio": 0.2},
    "Quantization": {"bits": 8},
    "SecureAggregation": {"clients": 2},
    "DualPruning": {"largest": 0.05, "smallest": 0.3},
    "ATS": {"policy": "3-1-7"},
    "EDA": {"alpha": 0.3, "padding": PADDING},
    "Soteria": {"pruning_rate": 0.5},
}
IMAGES_ONLY = {"ATS", "Mixup", "Soteria"}
DRAWS_BY_PLACE = {"PRECODE"}  # what it draws depends on the shape of the batch


def configuration(family: str) -> object:
    import transformers

    small = {"vocab_size": VOCABULARY}
    if family in ("gpt2", "gptj"):
        small |= {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}
        if family == "gptj":
            return transformers.GPTJConfig(**small, rotary_dim=4)
        return transformers.GPT2Config(**small)
    small |= {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    if family == "bert":
        return transformers.BertConfig(**small, num_attention_heads=2, pad_token_id=PADDING)
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "llama":
        return transformers.LlamaConfig(**small, tie_word_embeddings=True)
    return transformers.Qwen2Config(**small)


@cache
def build(family: str, task: Task) -> LanguageModel:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if task == "next-token" else AutoModelForSequenceClassification
    config = configuration(family)
    config.num_labels = 3  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind.from_config(config)
        for parameter in model.parameters():  # ones and zeros would hide mistakes
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    return LanguageModel(model, padding=PADDING, task=task)


def batch(task: Task, length: int = 5) -> Batch:
    """Return three texts, of which two are shorter; one has the padding token inside."""
    rows = [[3, PADDING, 5], [4, 8, 2, 1, 9], [6, 6, 1, 2]]
    tokens = torch.tensor([row + [PADDING] * (length - len(row)) for row in rows])
    return Batch(tokens, tokens if task == "next-token" else torch.tensor([1, 2, 0]))


def loss_of(task: Task) -> nn.Module | NextTokenLoss:
    return NextTokenLoss(PADDING) if task == "next-token" else cross_entropy  # type: ignore[return-value]


@pytest.mark.parametrize(("family", "task"), CASES)
def test_padding_and_company_change_nothing(family: str, task: Task) -> None:
    model, loss = build(family, task), loss_of(task)
    together = batch_gradient(model, loss, batch(task, 8))
    alone = []
    for row, size in enumerate((3, 5, 4)):
        inputs, targets = batch(task).at(slice(row, row + 1))
        cut = targets[:, :size] if task == "next-token" else targets
        alone.append(batch_gradient(model, loss, Batch(inputs[:, :size], cut)))
    for name, value in together.items():
        mean = torch.stack([each[name] for each in alone]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_embeddings_stand_for_tokens(family: str, task: Task) -> None:
    model, (tokens, _) = build(family, task), batch(task)
    embedded = model.model.get_input_embeddings()(tokens)
    real = TokenSpace((5,), 3, VOCABULARY, PADDING).real(tokens)
    padded = embedded * real[..., None]
    outputs, expected = model(padded), model(tokens)
    if task == "next-token":
        outputs, expected = outputs[real], expected[real]
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_gradients_can_be_differentiated(family: str, task: Task) -> None:
    model, (tokens, targets) = build(family, task), batch(task)
    embedded = model.model.get_input_embeddings()(tokens).detach().requires_grad_()
    gradient = batch_gradient(model, loss_of(task), Batch(embedded, targets))
    torch.stack([value.square().sum() for value in gradient.values()]).sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()
    assert embedded.grad[1].any()


@pytest.mark.parametrize(
    "name", [name for name in DEFENSES if name not in IMAGES_ONLY | DRAWS_BY_PLACE]
)
@pytest.mark.parametrize("task", ["next-token", "classification"])
def test_padding_changes_nothing_under_any_defense(name: str, task: Task) -> None:
    # In double precision: a draw that decides between two levels of `Quantization` is never as
    # close to its threshold as rounding errors are.
    model = copy.deepcopy(build("gpt2", task)).double()
    for layer in model.model.transformer.h:  # no loss depends on a bias of keys: only rounding
        layer.attn.c_attn.bias.requires_grad_(False)
    defense: Defense = DEFENSES[name](**OPTIONS.get(name, {}))

    def uploads(length: int) -> list[Tensor]:
        private = batch(task, length)
        space = TokenSpace((length,), VOCABULARY, VOCABULARY, PADDING, task)
        agreed = defense.on_model(copy.deepcopy(model))
        client = Client(agreed, loss_of(task), defense, FedSGD(), space)
        shares = [private] * defense.cohort
        (seen, *_) = observe(client, shares, ThreatModel(), torch.Generator().manual_seed(3))
        observation = seen.observation
        guess = observation.simulate(
            torch.cat([private.inputs] * defense.cohort),
            torch.cat([private.targets] * defense.cohort),
        )
        return [*observation.update.values(), *guess.values()]

    for short, long in zip(uploads(5), uploads(9), strict=True):
        torch.testing.assert_close(long, short, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(IMAGES_ONLY))
def test_what_defends_images_refuses_texts(name: str) -> None:
    defense: Defense = DEFENSES[name](**OPTIONS.get(name, {}))
    space = TokenSpace((5,), VOCABULARY, VOCABULARY, PADDING, "next-token")
    agreed = defense.on_model(copy.deepcopy(build("gpt2", "next-token")))
    client = Client(agreed, NextTokenLoss(PADDING), defense, FedSGD(), space)
    with pytest.raises(ValueError, match=r"token|image|derivatives"):
        observe(client, [batch("next-token")], ThreatModel(), torch.Generator())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_examples_are_clipped_one_by_one(family: str, clipping: str) -> None:
    """By Opacus where it can, and by torch.func for tied weights: both as one by one."""
    task: Task = "classification" if family == "bert" else "next-token"
    model, loss, whole = build(family, task), loss_of(task), batch(task)
    defense = DPSGD(0.0, 0.05, clipping=clipping)  # type: ignore[arg-type]
    found = defense.gradient(model, loss, whole, torch.Generator())
    each = [
        DPSGD(0.0, 0.05, clipping=clipping).gradient(  # type: ignore[arg-type]
            model, loss, whole.at(slice(row, row + 1)), torch.Generator()
        )
        for row in range(3)
    ]
    for name, value in found.items():
        mean = torch.stack([one[name] for one in each]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-3, atol=1e-6)


def test_tied_weights_appear_once() -> None:
    model = build("gpt2", "next-token")
    names = dict(model.named_parameters())
    assert "model.transformer.wte.weight" in names
    assert "model.lm_head.weight" not in names
    assert copy.deepcopy(model).model.lm_head.weight.shape == (VOCABULARY, WIDTH)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_dropout_acts_in_training_mode_alone(family: str) -> None:
    model, (tokens, _) = (
        copy.deepcopy(build(family, "classification")),
        batch("classification"),
    )
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_an_encoder_does_not_predict_next_tokens() -> None:
    from transformers import BertForMaskedLM

    with pytest.raises(ValueError, match=r"is an encoder.*task: classification"):
        LanguageModel(BertForMaskedLM(configuration("bert")), padding=PADDING)


def test_the_loss_of_nothing_is_nothing() -> None:
    outputs = torch.randn(2, 4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[PADDING] * 4, [1, 2, 3, PADDING]])
    expected = cross_entropy(outputs[1, :2], tokens[1, 1:3]) / 2
    torch.testing.assert_close(NextTokenLoss(PADDING)(outputs, tokens), expected)
