"""Search for ATS policies: transformations that hide images and preserve accuracy.

Neither score trains a model. Both are heuristics of the authors. Only an evaluation can show what
a policy is worth.

References:
    Gao, Guo, Zhang, Qiu, Wen, Liu. "Privacy-preserving Collaborative Learning with Automatic
    Transformation Search." CVPR 2021. https://arxiv.org/abs/2011.12505
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .ats import ATS
from .base import Batch, Loss, Update, trainable
from .transforms import LONGEST, POOL, parse_policy

TOLERANCE = 1.35
"""The accuracy score may be this many times worse than without transformation.

The authors accept sums of at least -85 over one image of each class among 100 images of CIFAR-100.
These are about 63 images, hence -1.35 per image. Without transformation, a residual network scores
about -1, which is the best possible. Other networks score far worse.
"""

MEAN_WEIGHT, VARIANCE_WEIGHT = 0.7, 0.3
"""Weights of the privacy score's mean and of its variance over classes in the rank."""


class Normalisation(Protocol):
    """How inputs were normalised."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Return the mean that each channel was centred by."""

    @property
    def std(self) -> tuple[float, ...]:
        """Return the standard deviation that each channel was divided by."""

    def to_inputs(self, pixels: Tensor, /) -> Tensor:
        """Return pixels in [0, 1] as inputs."""


@dataclass(frozen=True)
class ScoredPolicy:
    """A policy that the search accepted.

    Attributes:
        policy: The policy, as `ATS` takes it.
        rank: The value that the search minimises, in [0, 1], relative to other accepted policies.
        privacy: Mean privacy score over classes; lower hides more.
        variance: Variance of the privacy score over classes.
        accuracy: Accuracy score; higher is better.
    """

    policy: str
    rank: float
    privacy: float
    variance: float
    accuracy: float

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        for name in ("rank", "privacy", "variance", "accuracy"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")


def privacy_score(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    policy: str,
    space: Normalisation,
    rng: Generator,
    steps: int = 20,
) -> Tensor:
    """Return how well gradients lead from noise to each transformed image; lower hides more.

    The score compares the gradients at T(x) and at (1 - i) noise + i T(x). It is the area under
    their similarity for i from 0 to 1. The similarity is the unweighted mean of the cosines of all
    parameter tensors.

    Args:
        model: A model that has been trained a little.
        loss: Its loss.
        batch: Images, as the model's inputs, and their labels.
        policy: The policy.
        space: How inputs were normalised.
        rng: Source of the draws of T and of the noise.
        steps: Intervals of the area.
    """
    if not steps >= 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    noise = torch.rand(batch.inputs.shape, generator=rng, device=rng.device)
    starts = space.to_inputs(noise.to(batch.inputs))
    ends = _transformed(batch, policy, space, rng)
    weights = torch.linspace(0, 1, steps + 1).to(ends).view(-1, *[1] * (ends.dim() - 1))
    areas = []
    for start, end, target in zip(starts, ends, batch.targets, strict=True):
        gradients = _gradients(model, loss, (1 - weights) * start + weights * end, target)
        similarity = torch.stack([_cosine_to_last(value) for value in gradients]).mean(0)
        areas.append(torch.trapezoid(similarity, dx=1 / steps))
    return torch.stack(areas)


def accuracy_score(
    model: nn.Module, batch: Batch, policy: str, space: Normalisation, rng: Generator
) -> float:
    """Return how differently a model responds to transformed images; higher is better.

    The function computes the gradient of the summed outputs with respect to each input. Let s be
    the eigenvalues of the correlation matrix of these gradients. The score is the mean of
    -log(s) - 1/s. It is at most -1, when the gradients are uncorrelated. The authors sum over
    images instead. The score comes from architecture search.

    Args:
        model: An untrained model.
        batch: Images, as the model's inputs, and their labels. The labels are not used.
        policy: The policy.
        space: How inputs were normalised.
        rng: Source of the draws of T.

    References:
        Mellor, Turner, Storkey, Crowley. "Neural Architecture Search without Training."
        ICML 2021. https://arxiv.org/abs/2006.04647
    """
    if not len(batch.inputs) >= 2:
        raise ValueError(f"batch must hold at least 2 images, got {len(batch.inputs)}")
    inputs = _transformed(batch, policy, space, rng).detach().requires_grad_()
    (jacobian,) = torch.autograd.grad(model(inputs).sum(), inputs)
    correlation = torch.corrcoef(jacobian.flatten(1).double())
    # A constant gradient has no correlation. Zeros give it the worst score.
    eigenvalues = torch.linalg.eigvalsh(correlation.nan_to_num()).clamp(min=0) + 1e-5
    return float(-(eigenvalues.log() + 1 / eigenvalues).mean())


def search(
    semi_trained: nn.Module,
    untrained: nn.Module,
    loss: Loss,
    data: Batch,
    space: Normalisation,
    rng: Generator,
    *,
    candidates: int = 1600,
    per_class: int = 1,
    steps: int = 10,
    images: int = 100,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
) -> list[ScoredPolicy]:
    """Return the accepted policies among random ones, best first.

    The defaults suit one core. The authors use 5 images of each class and 20 steps for the privacy
    score, and the mean of 10 accuracy scores. All candidates see the same images, noise and draws.

    Args:
        semi_trained: The model of the privacy score; the authors' has seen a tenth of the data.
        untrained: The model of the accuracy score.
        loss: The loss.
        data: Public images, as model inputs, and their labels.
        space: How inputs were normalised.
        rng: Source of all randomness.
        candidates: Policies to draw. A policy that is drawn twice is scored once.
        per_class: Images of each class for the privacy score.
        steps: Intervals of the privacy score.
        images: Images for the accuracy score; all images if there are fewer.
        tolerance: The accuracy score may be this many times worse than without transformation.
        console: Console that shows progress. Default: the terminal.

    Raises:
        ValueError: If no policy is accepted.
    """
    _check_at_least(1, candidates=candidates, per_class=per_class)
    if not 1 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be in [1, inf), got {tolerance}")
    semi_trained, untrained = (copy.deepcopy(model).eval() for model in (semi_trained, untrained))
    policies = draw_policies(candidates, rng)
    shuffled = _rows(data, torch.randperm(len(data.targets), generator=rng))
    classes = _by_class(shuffled, per_class)
    last = _rows(shuffled, torch.arange(len(data.targets))[-images:])
    seed = int(torch.randint(2**62, (), generator=rng))

    def accuracy(policy: str) -> float:
        return accuracy_score(untrained, last, policy, space, _seeded(seed))

    def privacy(policy: str) -> Tensor:
        scores = privacy_score(semi_trained, loss, classes, policy, space, _seeded(seed), steps)
        return scores.view(-1, per_class).mean(1)

    least = tolerance * accuracy("")
    accuracies: dict[str, float] = {}
    privacies: dict[str, Tensor] = {}
    with _progress(console) as progress:
        for policy in progress.track(policies, description="policies"):
            accuracies[policy] = accuracy(policy)
            if accuracies[policy] >= least:
                privacies[policy] = privacy(policy)
    if not privacies:
        raise ValueError(
            f"none of {len(policies)} policies has an accuracy score of at least {least:.3g}. "
            f"The best has {max(accuracies.values()):.3g}: raise tolerance or candidates"
        )
    return _ranked(accuracies, privacies)


def draw_policies(count: int, rng: Generator) -> list[str]:
    """Return random policies of up to three transformations, without repetitions."""
    drawn = torch.randint(-1, len(POOL), (count, LONGEST), generator=rng).tolist()
    texts = ("-".join(str(entry) for entry in entries if entry >= 0) for entries in drawn)
    return list(dict.fromkeys(texts))


def _ranked(accuracies: dict[str, float], privacies: dict[str, Tensor]) -> list[ScoredPolicy]:
    scores = torch.stack(list(privacies.values()))
    means, variances = scores.mean(1), scores.var(1, correction=0)
    ranks = MEAN_WEIGHT * _spread(means) + VARIANCE_WEIGHT * _spread(variances)
    columns = zip(privacies, ranks.tolist(), means.tolist(), variances.tolist(), strict=True)
    scored = [ScoredPolicy(*column, accuracies[column[0]]) for column in columns]
    return sorted(scored, key=lambda one: one.rank)


def _spread(values: Tensor) -> Tensor:
    """Return values shifted and scaled to [0, 1]."""
    return (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)


def _transformed(batch: Batch, policy: str, space: Normalisation, rng: Generator) -> Tensor:
    return ATS(policy).for_space(space.mean, space.std).on_batch(batch, rng).inputs


def _gradients(model: nn.Module, loss: Loss, inputs: Tensor, target: Tensor) -> list[Tensor]:
    """Return the gradient at each input, flat, for each parameter tensor."""
    parameters = {name: value.detach() for name, value in trainable(model).items()}

    def example_loss(parameters: Update, example: Tensor) -> Tensor:
        return loss(functional_call(model, parameters, (example[None],)), target[None])

    gradients = vmap(grad(example_loss), in_dims=(None, 0))(parameters, inputs)
    return [value.flatten(1) for value in gradients.values()]


def _cosine_to_last(rows: Tensor) -> Tensor:
    directions = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-30)
    return torch.mv(directions, directions[-1])


def _by_class(data: Batch, per_class: int) -> Batch:
    """Return the first examples of each class, one class after the other."""
    classes = data.targets.unique()
    rows = [(data.targets == label).nonzero().flatten()[:per_class] for label in classes]
    if any(len(found) < per_class for found in rows):
        raise ValueError(f"per_class must be at most {min(map(len, rows))}, got {per_class}")
    return _rows(data, torch.cat(rows))


def _rows(data: Batch, rows: Tensor) -> Batch:
    return Batch(data.inputs[rows], data.targets[rows])


def _seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def _check_at_least(least: int, **options: int) -> None:
    for name, value in options.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
