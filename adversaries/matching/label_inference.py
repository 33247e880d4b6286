"""Label inference: read the labels behind an update off the bias gradient of the last layer.

With softmax cross-entropy averaged over a batch of B examples, the bias gradient of class c is
mean_i (p_ic - [y_i = c]). For one example, only the entry of the label is negative [1]. In general
the class has n_c = B (mean_i p_ic - dL/db_c) examples. The mean prediction is estimated on data
that the adversary has [2].

References:
    [1] Zhao, Mopuri, Bilen. "iDLG: Improved Deep Leakage from Gradients." 2020.
        https://arxiv.org/abs/2001.02610
    [2] Geng, Mou, Li, Li, Beyan, Decker, Rong. "Towards General Deep Leakage in Federated
        Learning." 2021. https://arxiv.org/abs/2110.09074
"""

import torch
from torch import Generator, Tensor, nn

from ..base import Observation
from ..spaces import NotApplicable, TokenSpace

_EXAMPLES = 500  # examples on which the mean prediction is estimated


def infer_targets(observation: Observation, rng: Generator) -> Tensor:
    """Return the granted labels, or else the inferred labels, sorted.

    Raises:
        NotApplicable: If the model does not end in a linear layer with a bias.
    """
    if observation.targets is not None:
        return observation.targets
    bias = observation.as_gradient(_last_bias(observation))
    if observation.batch_size == 1:
        return bias.argmin().unsqueeze(0)
    counts = observation.batch_size * (_mean_prediction(observation, rng) - bias)
    whole = _rounded(counts.clamp(min=0), observation.batch_size)
    return torch.arange(len(whole)).repeat_interleave(whole)


def _last_bias(observation: Observation) -> str:
    """Return the name of the bias of the layer that gives the logits."""
    linear = [
        (name, module)
        for name, module in observation.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    if not linear or linear[-1][1].out_features != observation.space.classes:
        raise NotApplicable("labels cannot be inferred: the model does not end in a linear layer")
    name, layer = linear[-1]
    if layer.bias is None:
        raise NotApplicable("labels cannot be inferred: the last linear layer has no bias")
    bias = f"{name}.bias" if name else "bias"
    if bias not in observation.update:
        raise NotApplicable("labels cannot be inferred: the last linear layer is frozen")
    return bias


@torch.no_grad()
def _mean_prediction(observation: Observation, rng: Generator) -> Tensor:
    """Return the model's mean prediction on public data, or on noise if there is none."""
    if observation.public is not None:
        inputs = observation.public.inputs[:_EXAMPLES]
    elif isinstance(observation.space, TokenSpace):
        shape = (_EXAMPLES, *observation.space.shape)
        inputs = torch.randint(observation.space.vocabulary, shape, generator=rng)
    else:
        inputs = torch.randn((_EXAMPLES, *observation.space.shape), generator=rng)
    outputs: Tensor = observation.model(inputs)
    return outputs.softmax(dim=1).mean(dim=0)


def _rounded(counts: Tensor, total: int) -> Tensor:
    """Round counts to whole numbers with the given sum, by largest remainders."""
    if counts.sum() <= 0:
        counts = torch.ones_like(counts)
    counts = counts * total / counts.sum()
    whole = counts.floor().long()
    missing = total - int(whole.sum())
    whole[(counts - whole).topk(missing).indices] += 1
    return whole
