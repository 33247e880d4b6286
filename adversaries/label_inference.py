"""Which labels are behind an update: read off the gradient of the last layer.

With logits z = W h + b and softmax cross-entropy, averaged over a batch of B examples,

    dL/db_c = mean_i (p_ic - [y_i = c]),    dL/dW_c = mean_i (p_ic - [y_i = c]) h_i.

References:
    [1] Zhao, Mopuri, Bilen. "iDLG: Improved Deep Leakage from Gradients." 2020.
        https://arxiv.org/abs/2001.02610
    [2] Ma, Sun, Cui, Li, Guo, Liu. "Instance-wise Batch Label Restoration via Gradients in
        Federated Learning." ICLR 2023. https://openreview.net/forum?id=FIrQfNSOoTr
"""

import torch
from torch import Tensor, nn

from .base import FedAvg, NotApplicable, Observation


def infer_targets(observation: Observation) -> Tensor:
    """Return the labels behind an update, sorted: those granted, or else inferred ones.

    Raises:
        NotApplicable: If the model does not end in a linear layer with a bias.
    """
    if observation.targets is not None:
        return observation.targets
    name, layer = _last_linear_layer(observation)
    weight = _mean_gradient(observation, f"{name}.weight" if name else "weight")
    bias = _mean_gradient(observation, f"{name}.bias" if name else "bias")
    if observation.batch_size == 1:
        return bias.argmin().unsqueeze(0)  # the only negative entry [1]
    counts = _batch_counts(layer, weight, bias, observation.batch_size)
    return torch.arange(len(counts)).repeat_interleave(counts)


def _last_linear_layer(observation: Observation) -> tuple[str, nn.Linear]:
    layers = [
        (name, module)
        for name, module in observation.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    if not layers or layers[-1][1].out_features != observation.space.classes:
        raise NotApplicable("labels cannot be inferred: the model does not end in a linear layer")
    if layers[-1][1].bias is None:
        raise NotApplicable("labels cannot be inferred: the last linear layer has no bias")
    return layers[-1]


def _mean_gradient(observation: Observation, name: str) -> Tensor:
    """Return the mean gradient per local step and client that the update amounts to."""
    value = observation.update[name] / observation.protocol.clients
    if not isinstance(observation.protocol, FedAvg):
        return value
    examples = observation.batch_size // observation.protocol.clients
    steps = observation.protocol.epochs * -(-examples // observation.protocol.batch_size)
    return -value / (observation.protocol.lr * steps)


def _batch_counts(layer: nn.Linear, weight: Tensor, bias: Tensor, batch_size: int) -> Tensor:
    """Return how many examples each class has, by a linear system over the classes present [2].

    Row c divided by its bias entry estimates the features of class c; the layer's own
    prediction on them says how each example of that class spreads over dL/db.
    """
    present = (bias < 0).nonzero().flatten()
    if len(present) == 0:
        present = bias.argmin().unsqueeze(0)
    features = weight[present] / bias[present].unsqueeze(1)
    with torch.no_grad():
        spread = layer(features).softmax(dim=1)
    spread[torch.arange(len(present)), present] -= 1
    system = torch.cat([spread.T, torch.ones(1, len(present))])
    right = torch.cat([batch_size * bias, torch.tensor([float(batch_size)])])
    solution = torch.linalg.lstsq(system, right.unsqueeze(1)).solution.flatten()
    counts = torch.zeros(len(bias))
    counts[present] = solution.nan_to_num().clamp(min=0)
    return _rounded(counts, batch_size)


def _rounded(counts: Tensor, total: int) -> Tensor:
    """Round to whole numbers with a given sum, by largest remainders."""
    if counts.sum() <= 0:
        counts = torch.ones_like(counts)
    counts = counts * total / counts.sum()
    whole = counts.floor().long()
    missing = total - int(whole.sum())
    whole[(counts - whole).topk(missing).indices] += 1
    return whole
