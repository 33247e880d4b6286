"""A language of a few sentences, and small transformers that learn it in seconds."""

from functools import cache
from typing import Literal

import torch
from federated import rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from leakfrontier.adversaries import FedSGD, Observation, Protocol, TokenSpace
from leakfrontier.defenses import Batch, Defense, Loss, torchvision_ops  # noqa: F401
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality.modality import NextTokenLoss
from leakfrontier.evaluate.models.language import LanguageModel

Task = Literal["classification", "next-token"]

LENGTH = 9
PADDING, BEGIN, END = 0, 1, 2
DETERMINERS, ADJECTIVES, NOUNS, VERBS, ADVERBS = (
    range(3, 5),
    range(5, 15),
    range(15, 35),
    range(35, 50),
    range(50, 56),
)
VOCABULARY = 56


def sentences(count: int, seed: int, *, encoder: bool = False) -> Batch:
    """Return sentences of six or seven words, labelled by their verb.

    An encoder's begin and end with tokens of their own.
    """
    draws = rng(seed)

    def word(kind: range) -> int:
        return kind[int(torch.randint(len(kind), (1,), generator=draws))]

    rows = []
    for _ in range(count):
        words = [word(k) for k in (DETERMINERS, ADJECTIVES, NOUNS, VERBS, DETERMINERS, NOUNS)]
        if torch.rand(1, generator=draws) < 0.5:
            words.append(word(ADVERBS))
        rows.append([BEGIN, *words, END] if encoder else words)
    tokens = torch.stack([pad(torch.tensor(r), (0, LENGTH - len(r)), value=PADDING) for r in rows])
    verbs = tokens[:, 4 if encoder else 3]
    return Batch(tokens, verbs % 2)


def space_of(task: Task, *, encoder: bool = False) -> TokenSpace:
    classes = 2 if task == "classification" else VOCABULARY
    ends = {"first": BEGIN, "last": END} if encoder else {}
    special = (PADDING, BEGIN, END)
    return TokenSpace((LENGTH,), classes, VOCABULARY, PADDING, task, special=special, **ends)


@cache
def trained(task: Task, *, encoder: bool = False, steps: int = 150) -> LanguageModel:
    """Return a small GPT-2, or a small BERT, after some steps of training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        space = space_of(task, encoder=encoder)
        model = LanguageModel.for_space(_network(task, encoder), space)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(steps):
            batch = sentences(32, 1000 + step, encoder=encoder)
            targets = batch.inputs if task == "next-token" else batch.targets
            optimizer.zero_grad()
            loss_of(space)(model(batch.inputs), targets).backward()
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return model


def _network(task: Task, encoder: bool) -> nn.Module:
    import transformers

    network: nn.Module
    if encoder:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=16,
            pad_token_id=PADDING,
        )
        network = transformers.BertForSequenceClassification(config)
        return network
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=48,
        n_layer=2,
        n_head=4,
        pad_token_id=PADDING,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    kind = "GPT2LMHeadModel" if task == "next-token" else "GPT2ForSequenceClassification"
    network = getattr(transformers, kind)(config)
    return network


def loss_of(space: TokenSpace) -> Loss:
    return NextTokenLoss(space.padding) if space.task == "next-token" else cross_entropy


def observed(
    model: nn.Module,
    space: TokenSpace,
    batch: Batch,
    *,
    threat: ThreatModel | None = None,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
) -> Observation:
    """Return what a server sees of a client that trains on sentences."""
    client = Client(model, loss_of(space), defense or Defense(), protocol or FedSGD(), space)
    targets = batch.inputs if space.task == "next-token" else batch.targets
    share = Batch(batch.inputs, targets)
    (upload,) = observe(client, [share], threat or ThreatModel(), rng(1))
    return upload.observation


def right(guess: Tensor, truth: Tensor) -> float:
    """Return the share of right tokens, of those that are no padding."""
    return float((guess == truth)[truth != PADDING].float().mean())
