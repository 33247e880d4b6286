"""Where sentences end, how often, and with which label: read off the last block's way out.

After the last block's attention, every token goes its own way. The gradient of the block's last
linear layer is sum_n d_n a_n^T over the tokens n, where a_n is the layer's input, a known
function of the prefix that ends in n, and d_n = J_n^T W^T sum_v w_nv (softmax(z_n) - e_v) the
slope of the cross-entropy: W is the output head, J_n the Jacobian of the last norm, and w_nv the
weight with which label v follows prefix n. Once the prefixes are known, so are the a_n, and a
least-squares problem gives every d_n, hence w_nv. That answers what spans of inputs cannot say:

- the last token of a sentence trained for next tokens, which is a label and never an input;
- that a sentence is the beginning of another, so that its prefixes were found already;
- that a sentence occurs more than once.

It holds for tied and for separate embeddings, needs no backward pass, and is scale-free: the
weights of all ends together are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .base import Observation
from .transformer import Transformer

_SHORTLIST = 16
"""Labels whose slopes are compared exactly."""

_NODES_AT_ONCE = 128


@dataclass(frozen=True)
class Ending:
    """A prefix at which sentences end.

    Attributes:
        prefix: The tokens that are inputs.
        label: What follows the prefix under the next-token loss, or else the sentence's class.
        count: How many sentences of the batch this is, as measured: near a whole number if all
            sentences were found.
        fit: How well the label explains the slope, in [0, 1].
        leaf: Whether no longer prefix continues this one.
    """

    prefix: tuple[int, ...]
    label: int
    count: float
    fit: float
    leaf: bool


def find_endings(
    view: Transformer, observation: Observation, sentences: Sequence[tuple[int, ...]]
) -> list[Ending] | None:
    """Return where sentences end, the surest first.

    Args:
        view: The model.
        observation: What was seen.
        sentences: The longest prefixes that were found.

    Returns:
        The endings; None if the last block was not uploaded, or there are more prefixes than its
        last layer has inputs.
    """
    head, layer = _head(view), view.last.down
    if head is None or view.final_norm is None or layer.name not in observation.update:
        return None
    nodes = sorted({s[:end] for s in sentences for end in range(1, len(s) + 1)})
    gradient = layer.gradient(observation).double()
    if not sentences or len(nodes) > gradient.shape[1]:
        return None
    activations, states = _states(view, sentences, nodes)
    slopes = _solve(activations.double(), gradient).to(states)
    next_token = view.space.task == "next-token"
    children: dict[tuple[int, ...], list[int]] = {node: [] for node in nodes}
    for node in nodes:
        if len(node) > 1:
            children[node[:-1]].append(node[-1])
    endings = []
    for start in range(0, len(nodes), _NODES_AT_ONCE):
        part = slice(start, start + _NODES_AT_ONCE)
        known = [children[node] if next_token else [] for node in nodes[part]]
        found = _labels(view.final_norm, head, states[part], slopes[part], known)
        for node, (label, weight, fit) in zip(nodes[part], found, strict=True):
            count = weight * len(node) if next_token else weight
            endings.append(Ending(node, label, count, fit, not children[node]))
    return _counted(endings, observation.batch_size)


def _head(view: Transformer) -> nn.Module | None:
    """Return the layer that makes logits of the last hidden states."""
    if view.space.task == "next-token":
        return cast(Any, view.whole).get_output_embeddings()
    return cast("nn.Module | None", getattr(view.whole, "score", None))


def _states(
    view: Transformer, sentences: Sequence[tuple[int, ...]], nodes: Sequence[tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Return the last layer's inputs and the last norm's, for every prefix."""
    place = {node: index for index, node in enumerate(nodes)}
    longest = max(len(sentence) for sentence in sentences)
    tokens = torch.zeros(len(sentences), longest, dtype=torch.int64)
    for row, sentence in enumerate(sentences):
        tokens[row, : len(sentence)] = torch.tensor(sentence)
    modules = [view.last.down.module, cast(nn.Module, view.final_norm)]
    given = view.sequences(tokens.to(view.device), modules)
    where = {
        place[sentence[: end + 1]]: (row, end)
        for row, sentence in enumerate(sentences)
        for end in range(len(sentence))
    }
    row, end = zip(*(where[index] for index in range(len(nodes))), strict=True)
    activations, states = (values[list(row), list(end)] for values in given)
    return activations, states


def _solve(activations: Tensor, gradient: Tensor) -> Tensor:
    """Return the slopes d with sum_n d_n a_n^T = gradient, by least squares."""
    gram = activations @ activations.T
    ridge = 1e-12 * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    return torch.linalg.solve(gram, activations @ gradient.T)


@torch.no_grad()
def _labels(
    norm: nn.Module,
    head: nn.Module,
    states: Tensor,
    slopes: Tensor,
    known: Sequence[Sequence[int]],
) -> list[tuple[int, float, float]]:
    """Return the label that explains each slope beside known ones, its weight, and its fit."""
    hidden, pull_back = torch.func.vjp(norm, states)
    probabilities = head(hidden).softmax(-1)
    weight = cast(Tensor, head.weight)
    mean = probabilities @ weight
    rest = slopes - _explained(pull_back, weight, mean, slopes, known)
    _, pushed = torch.func.jvp(norm, (states,), (rest,))
    score = (mean * pushed).sum(1, keepdim=True) - pushed @ weight.T
    size = _square(mean) - 2 * mean @ weight.T + _square(weight).T
    score = score / size.clamp(min=1e-12).sqrt()
    for row, labels in enumerate(known):
        score[row, list(labels)] = -torch.inf
    shortlist = score.topk(min(_SHORTLIST, score.shape[1]), dim=1).indices
    best: list[tuple[int, float, float]] = [(0, 0.0, -1.0)] * len(states)
    for column in shortlist.T:
        (atom,) = pull_back(mean - weight[column])
        inner, norms = (atom * rest).sum(1), _square(atom)[:, 0].clamp(min=1e-30)
        fit = inner / (norms.sqrt() * _square(rest)[:, 0].sqrt().clamp(min=1e-30))
        for row, values in enumerate(zip(column, inner / norms, fit, strict=True)):
            label, amount, agreement = (value.item() for value in values)
            if agreement > best[row][2]:
                best[row] = (int(label), max(0.0, amount), agreement)
    return [(label, amount, max(0.0, fit)) for label, amount, fit in best]


def _explained(
    pull_back: Any,  # noqa: ANN401 - a function of torch.func without a type
    weight: Tensor,
    mean: Tensor,
    slopes: Tensor,
    known: Sequence[Sequence[int]],
) -> Tensor:
    """Return the part of each slope that its known labels explain, by least squares."""
    explained = torch.zeros_like(slopes)
    most = max((len(labels) for labels in known), default=0)
    if not most:
        return explained
    atoms = []
    for place in range(most):
        label = torch.tensor(
            [labels[place] if place < len(labels) else -1 for labels in known],
            device=mean.device,
        )
        (atom,) = pull_back(mean - weight[label.clamp(min=0)])
        atoms.append(torch.where(label[:, None] >= 0, atom, 0.0))
    stacked = torch.stack(atoms, dim=1).double()  # (nodes, labels, width)
    gram = stacked @ stacked.mT
    gram = gram + 1e-9 * (gram.diagonal(dim1=1, dim2=2).amax(1) + 1e-30)[:, None, None] * torch.eye(
        most, dtype=gram.dtype, device=gram.device
    )
    inner = (stacked @ slopes.double()[..., None]).clamp(min=0)
    weights = torch.linalg.solve(gram, inner).clamp(min=0)
    return (weights * stacked).sum(1).to(slopes)


def _counted(endings: Sequence[Ending], batch_size: int) -> list[Ending]:
    """Return the endings with counts that sum up to the batch, without those of no weight."""
    leaves = sum(ending.count for ending in endings if ending.leaf)
    if not leaves > 0:
        return [ending for ending in endings if ending.leaf]
    inner = [e for e in endings if not e.leaf and e.fit > 0.5 and e.count > 0]
    total = leaves + sum(ending.count for ending in inner)
    for _ in range(3):  # weights that are no whole sentence are errors, and no part of the batch
        inner = [e for e in inner if batch_size * e.count / total >= 0.5]
        total = leaves + sum(ending.count for ending in inner)
    kept = [ending for ending in endings if ending.leaf] + inner
    scaled = [
        Ending(e.prefix, e.label, batch_size * e.count / total, e.fit, e.leaf) for e in kept
    ]
    return sorted(scaled, key=lambda ending: (-round(ending.fit, 3), -ending.count))


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True)
