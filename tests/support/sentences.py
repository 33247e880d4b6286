"""Small language models of several families, and batches of sentences for them."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedSGD, Observation, Protocol, Reconstruction, TokenSpace
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality.modality import NextTokenLoss
from leakfrontier.evaluate.models.language import LanguageModel

VOCABULARY, LENGTH, WIDTH = 300, 10, 64


def space(task: str = "next-token", last: int | None = None) -> TokenSpace:
    classes = VOCABULARY if task == "next-token" else 2
    return TokenSpace((LENGTH,), classes, VOCABULARY, 0, task, last=last)  # type: ignore[arg-type]


def language_model(family: str, task: str = "next-token", layers: int = 3) -> LanguageModel:
    """Return a small model with new weights: absolute or rotary, grouped, fused, parallel."""
    import transformers

    classify = task == "classification"
    none = {"bos_token_id": None, "eos_token_id": None}
    gpt = {"n_layer": layers, "n_embd": WIDTH, "n_head": 4, "n_positions": 32, **none}
    llama = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    families: dict[str, tuple[str, dict[str, object]]] = {
        "gpt2": ("GPT2", gpt),
        "gptj": ("GPTJ", {**gpt, "rotary_dim": 8}),
        "llama": ("Llama", {**llama, "num_key_value_heads": 2, **none}),
        "qwen": ("Qwen3", {**llama, "num_key_value_heads": 2, "head_dim": 16, **none}),
        "bert": ("Bert", llama),
        "roberta": ("Roberta", {**llama, "pad_token_id": 1}),
    }
    name, options = families[family]
    head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    kind = getattr(transformers, name + ("ForSequenceClassification" if classify else head))
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, num_labels=2, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel.for_space(kind(config), space(task))


def tune(model: LanguageModel, steps: int) -> LanguageModel:
    """Fine-tune a model on sentences of few words, and return it."""
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=3e-3), NextTokenLoss(0)
    for step in range(steps):
        tokens = few_words(sentences([LENGTH] * 8, seed=step + 1))
        optimizer.zero_grad()
        loss(model(tokens), tokens).backward()
        optimizer.step()
    return model.requires_grad_(True)


def few_words(tokens: torch.Tensor) -> torch.Tensor:
    """Return sentences with 49 words only; padding is left alone."""
    return torch.where(tokens > 0, 1 + tokens % 49, 0)


def sentences(lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Return random sentences of given lengths, padded with 0."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), LENGTH), generator=draws)
    return tokens.masked_fill(torch.arange(LENGTH) >= torch.tensor(lengths)[:, None], 0)


def seen_by_server(
    model: nn.Module,
    tokens: torch.Tensor,
    task: str = "next-token",
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    last: int | None = None,
) -> Observation:
    loss: Callable[..., torch.Tensor] = NextTokenLoss(0) if task == "next-token" else cross_entropy
    targets = tokens if task == "next-token" else torch.arange(len(tokens)) // 2 % 2
    client = Client(model, loss, defense or Defense(), protocol or FedSGD(), space(task, last))
    threat = ThreatModel()
    (upload,) = observe(client, [Batch(tokens, targets)], threat, torch.Generator().manual_seed(1))
    return upload.observation


def recovered(guess: Reconstruction, tokens: torch.Tensor) -> float:
    """Return the share of sentences that are exact, each guess counted once."""
    left = [tuple(row) for row in guess.inputs.tolist()]
    hits = 0
    for row in tokens.tolist():
        if tuple(row) in left:
            left.remove(tuple(row))
            hits += 1
    return hits / len(tokens)
