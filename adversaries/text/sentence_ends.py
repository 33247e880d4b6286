"""Where sentences end, how often, and with which label: read off the last block's output layer.

After the last block's attention, tokens do not interact. The gradient of the block's last linear
layer is sum_n d_n a_n^T over the tokens n. Here a_n is the layer's input, a known function of the
prefix that ends in n. The slope of the cross-entropy is d_n = J_n^T W^T sum_v w_nv (softmax(z_n) -
e_v). W is the output head, J_n is the Jacobian of the last norm, and w_nv is the weight of label v
after prefix n. Once the prefixes are known, so are the a_n. A least-squares problem then gives
every d_n, and hence w_nv. This reveals three facts that spans of inputs cannot show:

- the last token of a sentence trained for next tokens, which is a label and never an input;
- that a sentence is the beginning of another, so its prefixes were already found;
- that a sentence occurs more than once.

The method works for tied and for separate embeddings and needs no backward pass. It does not depend
on the scale: the weights of all ends together are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..base import Observation
from .transformer import Transformer

_SHORTLIST = 16
"""Number of labels whose slopes are compared exactly."""

_NODES_AT_ONCE = 128

_LABELS = 4
"""Largest number of different ends of one prefix to search for."""


class Following(NamedTuple):
    """A label that follows a prefix.

    Attributes:
        weight: The weight with which it follows.
        fit: How well it explains the part that other labels do not, in [0, 1].
    """

    weight: float
    fit: float


@dataclass(frozen=True)
class Ending:
    """A prefix at which sentences end.

    Attributes:
        prefix: The tokens that are inputs.
        label: The token that follows the prefix (next-token loss), or the sentence's class.
        count: Measured number of such sentences in the batch. It is near a whole number if all
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
    """Return where sentences end, most certain first.

    Args:
        view: The model.
        observation: The observed update.
        sentences: The longest prefixes that were found.

    Returns:
        The endings. None if the last block was not uploaded, or if there are more prefixes than its
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
    known: dict[tuple[int, ...], dict[int, Following]] = {node: {} for node in nodes}
    if view.space.task == "next-token":
        for node in nodes:
            if len(node) > 1:
                known[node[:-1]][node[-1]] = Following(0.0, 1.0)
    leaves = {*nodes} - {node[:-1] for node in nodes}
    pending = nodes
    for _ in range(_LABELS):  # each prefix gets one more label at a time
        places = [nodes.index(node) for node in pending]
        grown = []
        for start in range(0, len(pending), _NODES_AT_ONCE):
            part = slice(start, start + _NODES_AT_ONCE)
            rows = places[part]
            found = _labels(
                view.final_norm,
                head,
                states[rows],
                slopes[rows],
                [[*known[node]] for node in pending[part]],
            )
            for node, labels in zip(pending[part], found, strict=True):
                before = known[node]
                known[node] = {  # the fit of a label is the one from when it was found
                    label: Following(now.weight, before.get(label, now).fit)
                    for label, now in labels.items()
                }
                grown.append(node)
        if view.space.task != "next-token":
            break
        pending = [node for node in grown if _gained(known[node])]
        if not pending:
            break
    return _counted(_flows(view, known, leaves), observation.batch_size)


def _gained(labels: dict[int, Following]) -> bool:
    """Return whether the prefix really has the label that was found last."""
    weights = [following.weight for following in labels.values()]
    return weights[-1] > 0.1 * max(weights)


def _flows(
    view: Transformer,
    known: dict[tuple[int, ...], dict[int, Following]],
    leaves: set[tuple[int, ...]],
) -> list[Ending]:
    """Return the endings: the weight that reaches a prefix and does not continue from it.

    Under the next-token loss, a sentence of n tokens has the weight 1 / (n - 1) at each of its
    prefixes. If sentences are classified, it has the weight 1 at its end.
    """
    next_token = view.space.task == "next-token"
    endings = []
    for node, labels in known.items():
        for label, (weight, fit) in labels.items():
            child = known.get((*node, label)) if next_token else None
            rest = weight - sum(following.weight for following in (child or {}).values())
            count = max(0.0, rest) * (len(node) if next_token else 1)
            main = node in leaves and fit == max(f.fit for f in labels.values())
            endings.append(Ending(node, label, count, fit, main))
    return endings


def _head(view: Transformer) -> nn.Module | None:
    """Return the layer that maps the last hidden states to logits."""
    if view.space.task == "next-token":
        return cast("nn.Module | None", cast(Any, view.whole).get_output_embeddings())
    return cast("nn.Module | None", getattr(view.whole, "score", None))


def _states(
    view: Transformer, sentences: Sequence[tuple[int, ...]], nodes: Sequence[tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the last layer and of the last norm, for every prefix."""
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
    rows = [where[index][0] for index in range(len(nodes))]
    ends = [where[index][1] for index in range(len(nodes))]
    activations, states = (values[rows, ends] for values in given)
    return activations, states


def _solve(activations: Tensor, gradient: Tensor) -> Tensor:
    """Return the slopes d with sum_n d_n a_n^T = gradient, by least squares."""
    gram = activations @ activations.T
    ridge = 1e-12 * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    slopes: Tensor = torch.linalg.solve(gram, activations @ gradient.T)
    return slopes


@torch.no_grad()
def _labels(
    norm: nn.Module,
    head: nn.Module,
    states: Tensor,
    slopes: Tensor,
    known: Sequence[Sequence[int]],
) -> list[dict[int, Following]]:
    """Return the weights of known labels, and of the one that best explains the remainder."""
    hidden, pull_back = cast(Any, torch.func.vjp(norm, states))
    weight = cast(Tensor, head.weight)
    mean = head(hidden).softmax(-1) @ weight

    def slope(labels: Tensor) -> Tensor:
        """Return the slope of the loss for one label per row; 0 for label -1."""
        (atom,) = pull_back(mean - weight[labels.clamp(min=0)])
        return torch.where(labels[:, None] >= 0, atom, 0.0)

    known = [[*labels] for labels in known]
    before = _fit([slope(labels) for labels in _columns(known, mean.device)], slopes)
    rest = slopes - before.explained
    _, pushed = cast(Any, torch.func.jvp(norm, (states,), (rest,)))
    score = (mean * pushed).sum(1, keepdim=True) - pushed @ weight.T
    size = _square(mean) - 2 * mean @ weight.T + _square(weight).T
    score = score / size.clamp(min=1e-12).sqrt()
    for row, labels in enumerate(known):
        score[row, labels] = -torch.inf
    shortlist = score.topk(min(_SHORTLIST, score.shape[1]), dim=1).indices
    fits = torch.stack(
        [torch.cosine_similarity(slope(column), rest, dim=1) for column in shortlist.T], dim=1
    )
    best = shortlist.gather(1, fits.argmax(1, keepdim=True))
    together = [[*labels, int(label)] for labels, label in zip(known, best, strict=True)]
    after = _fit([slope(labels) for labels in _columns(together, mean.device)], slopes)
    found = []
    for row, labels in enumerate(together):
        weights = after.weights[row, : len(labels)].tolist()
        fit = max(0.0, float(fits[row].max()))
        agreement = [1.0] * (len(labels) - 1) + [fit]
        found.append(
            {
                label: Following(amount, good)
                for label, amount, good in zip(labels, weights, agreement, strict=True)
            }
        )
    return found


def _columns(labels: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the labels of all rows as columns: the first labels, the second, ...; -1 for none."""
    most = max((len(row) for row in labels), default=0)
    rows = [[*row, *[-1] * (most - len(row))] for row in labels]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(labels), most).T


class _Fit(NamedTuple):
    weights: Tensor
    explained: Tensor


def _fit(atoms: Sequence[Tensor], slopes: Tensor) -> _Fit:
    """Return the least-squares weights of the atoms in each slope, and the part they explain."""
    if not atoms:
        return _Fit(slopes.new_zeros(len(slopes), 0), torch.zeros_like(slopes))
    stacked = torch.stack([*atoms], dim=1).double()  # (prefixes, labels, width)
    gram = stacked @ stacked.mT
    size = gram.diagonal(dim1=1, dim2=2).amax(1).clamp(min=1e-30)
    ridge = 1e-9 * torch.eye(len(atoms), dtype=gram.dtype, device=gram.device)
    gram = gram + size[:, None, None] * ridge
    weights = torch.linalg.solve(gram, stacked @ slopes.double()[..., None]).clamp(min=0)
    return _Fit(weights[..., 0], (weights * stacked).sum(1).to(slopes))


def _counted(endings: Sequence[Ending], batch_size: int) -> list[Ending]:
    """Return endings whose counts sum up to the batch size, without those of no weight."""
    leaves = sum(ending.count for ending in endings if ending.leaf)
    if not leaves > 0:
        return [ending for ending in endings if ending.leaf]
    inner = [e for e in endings if not e.leaf and e.fit > 0.9 and e.count > 0]
    total = leaves + sum(ending.count for ending in inner)
    for _ in range(3):  # weights of less than half a sentence are errors
        inner = [e for e in inner if batch_size * e.count / total >= 0.5]
        total = leaves + sum(ending.count for ending in inner)
    kept = [ending for ending in endings if ending.leaf] + inner
    scaled = [Ending(e.prefix, e.label, batch_size * e.count / total, e.fit, e.leaf) for e in kept]
    return sorted(scaled, key=lambda ending: (-round(ending.fit, 3), -ending.count))


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1, keepdim=True)


def sentence_of(view: Transformer, ending: Ending) -> tuple[int, ...]:
    """Return the tokens of a sentence; under a next-token loss, the label is the last one."""
    if view.space.task == "next-token":
        return (*ending.prefix, ending.label)
    return ending.prefix
