"""Fishing for user data: a last layer that lets through one example of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..base import Adversary, Crafted, Observation, Reconstruction, Round, Threat
from ..matching.inverting_gradients import InvertingGradients
from ..spaces import InputSpace, NotApplicable
from .imprint import CraftedLayer, need_trained, seen_by, some_weight

_EXAMPLES = 500  # number of noise examples that show the size of features without public data
_SILENT = 1000.0  # how far the logit of a class lies below the others to make its softmax 0


@dataclass(frozen=True)
class Fishing(Adversary):
    """Craft the last layer so that only one example has a gradient, then invert that gradient.

    In the last layer, only the row of the target class t is not zero. The layers below therefore
    receive W_t (p_t - y_t). *Class fishing* keeps p_t at 0, so examples of other classes send
    nothing. *Feature fishing* is for a class with several examples. It uses one feature with a
    steep weight: p_t is 1 where the feature is beyond a cut, and examples of the class send nothing
    there either. Examples of other classes do send something there, unless a ReLU has switched the
    feature off. In class fishing, exactly -B dL/db_t examples are caught, and dL/dW_t / dL/db_t is
    their mean feature. In feature fishing, that number includes examples with the feature off.

    The paper finds the cut by binary search, which needs the same batch in several rounds, or from
    the answers of many other clients. Here there is one round and public data. Let s be the share
    of examples that a query would catch, and c the share of other classes' examples that would
    spoil it. The query catches exactly one example with probability B s (1 - s - c)^(B - 1). The
    attack makes the most promising query over all classes and features, with cuts at s = 1/B. In
    large batches, it succeeds with probability 1/e at best. Without public data, the attack fishes
    for a random class.

    The attack does not apply to several local steps, because the last layer would change. A sum of
    clients is one large batch.

    Attributes:
        class_multiplier: Weights of the target class's row, in class fishing.
        feature_multiplier: Weight of the feature, in feature fishing, per standard deviation.
        iterations: Steps of Inverting Gradients, which inverts the single gradient.
        restarts: Random starts of Inverting Gradients.
        total_variation: Weight of the prior of Inverting Gradients.

    References:
        Wen, Geiping, Fowl, Goldblum, Goldstein. "Fishing for User Data in Large-Batch Federated
        Learning via Gradient Magnification." ICML 2022. https://arxiv.org/abs/2202.00580
    """

    threat: ClassVar[Threat] = Threat.PARAMETERS
    simulates: ClassVar[bool] = True

    class_multiplier: float = 0.5
    feature_multiplier: float = 300.0
    iterations: int = 24_000
    restarts: int = 1
    total_variation: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("class_multiplier", "feature_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        self._inversion  # noqa: B018 (checks its own fields)

    @property
    def _inversion(self) -> InvertingGradients:
        return InvertingGradients(
            iterations=self.iterations,
            restarts=self.restarts,
            total_variation=self.total_variation,
        )

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return one model for all clients, with the query that has the best chance."""
        batch = round.clients * round.batch_size
        if not round.space.continuous:
            raise NotApplicable("tokens cannot be optimised by gradient descent")
        if batch == 1:
            raise NotApplicable("a single example need not be fished out of a batch")
        steps = round.protocol.local_steps(round.batch_size)
        if steps > 1:
            raise NotApplicable(f"the last layer would change over {steps} local steps")
        crafted = copy.deepcopy(model)
        last = _last_layer(crafted, round.space)
        if round.public is None:
            noise = torch.randn(_EXAMPLES, *round.space.shape, generator=rng)
            features = seen_by(last.layer, crafted, noise)
            target = int(torch.randint(round.space.classes, (), generator=rng))
            query = Query(target, chance=math.nan)
        else:
            features = seen_by(last.layer, crafted, round.public.inputs)
            query = best_query(features, round.public.targets, batch)
        self._bait(last.layer, query, features)
        return Crafted([crafted] * round.clients, Bait(last.kept, query.target))

    @torch.no_grad()
    def _bait(self, layer: nn.Linear, query: Query, features: Tensor) -> None:
        """Set the last layer to a query, given typical features."""
        layer.weight.zero_()
        layer.bias.zero_()
        if query.feature is None:
            layer.weight[query.target] = self.class_multiplier
            largest = self.class_multiplier * features.sum(dim=1).abs().max()
            layer.bias[query.target] = -_SILENT - 2 * largest
            return
        spread = features[:, query.feature].std().clamp(min=1e-30)
        steepness = query.side * self.feature_multiplier / spread
        layer.weight[query.target, query.feature] = steepness
        even = math.log(layer.out_features - 1)  # the logit at which p_t is a half
        layer.bias[query.target] = even - steepness * query.cut

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the caught example, if there is one."""
        if not observation.space.continuous:
            raise NotApplicable("tokens cannot be optimised by gradient descent")
        catch = caught(observation)
        if not any(value.any() for value in catch.body.values()):
            return Reconstruction(torch.zeros(0, *observation.space.shape))
        return self._inversion.reconstruct(_alone(observation, catch), rng)


class Query(NamedTuple):
    """What a crafted last layer fishes for.

    Attributes:
        target: Class whose examples have a gradient.
        chance: Estimated probability that the query catches exactly one example.
        feature: The feature that selects examples of the class, in feature fishing.
        cut: Examples of the class have no gradient if the feature is beyond this value.
        side: 1 if beyond means above the cut, -1 if it means below.
    """

    target: int
    chance: float
    feature: int | None = None
    cut: float = 0.0
    side: int = 1


def best_query(features: Tensor, targets: Tensor, batch: int) -> Query:
    """Return the query that is most likely to catch exactly one example of a batch.

    Args:
        features: Inputs of the last layer, for public examples.
        targets: Their labels.
        batch: Number of private examples.
    """
    queries = []
    off = features == 0  # after a ReLU, such a feature has no gradient
    for target in targets.unique().tolist():
        of_class = targets == target
        share = of_class.float().mean()
        queries.append(Query(target, float(_chance(share, torch.zeros(()), batch))))
        if share * batch <= 1:
            continue
        for side in (1, -1):
            values = side * features
            wanted = values[of_class].masked_fill(off[of_class], math.inf)
            cuts = wanted.quantile(1 / (share * batch), dim=0, interpolation="lower")
            beyond = values > cuts
            seen = (~beyond & ~off & of_class[:, None]).float().mean(dim=0)
            spoiling = (beyond & ~off & ~of_class[:, None]).float().mean(dim=0)
            chances = _chance(seen, spoiling, batch).where(cuts.isfinite(), 0.0)
            best = int(chances.argmax())
            cut = side * float(cuts[best])
            queries.append(Query(target, float(chances[best]), best, cut, side))
    return max(queries, key=lambda query: query.chance)


def _chance(seen: Tensor, spoiling: Tensor, batch: int) -> Tensor:
    """Return the probability that exactly one example is caught and none spoils it."""
    return batch * seen * (1 - seen - spoiling) ** (batch - 1)


@dataclass(frozen=True)
class Bait:
    """What the server keeps about a query.

    Attributes:
        layer: The last layer.
        target: Class whose examples have a gradient.
    """

    layer: CraftedLayer
    target: int


class Catch(NamedTuple):
    """What an update reveals about the caught examples.

    Attributes:
        target: Their class.
        examples: Their number, in class fishing.
        feature: Their mean feature.
        body: The update of all layers except the last. Only the caught examples contribute.
    """

    target: int
    examples: float
    feature: Tensor
    body: Mapping[str, Tensor]


def caught(observation: Observation) -> Catch:
    """Read the caught examples off an update.

    Raises:
        NotApplicable: If the last layer was not crafted.
    """
    kept = observation.kept
    bait = kept if isinstance(kept, Bait) else _recognised(observation)
    bait.layer.received(observation)
    target, names = bait.target, bait.layer.parameters
    weight, bias = (observation.as_gradient(name)[target] for name in names)
    body = {name: value for name, value in observation.update.items() if name not in names}
    examples = -observation.batch_size * float(bias)
    return Catch(target, examples, weight / bias, body)


def _recognised(observation: Observation) -> Bait:
    """Return the query of a model that this server did not send, as in a capture."""
    last = _last_layer(observation.model, observation.space)
    rows = last.layer.weight.detach().any(dim=1).nonzero().flatten()
    if len(rows) != 1:
        raise NotApplicable("the last layer was not crafted: it looks at more than one class")
    return Bait(last.kept, int(rows))


def _alone(observation: Observation, catch: Catch) -> Observation:
    """Return the update as if the caught example had been alone.

    Its direction is that of the example's own gradient. The last layer is left out, because other
    examples change its biases too.
    """
    clients = observation.protocol.clients

    def replay(
        inputs: Tensor,
        targets: Tensor,
        observed: Mapping[str, Tensor],
        /,
        *,
        by_epoch: bool = False,
    ) -> Mapping[str, Tensor]:
        guess = inputs.repeat(clients, *[1] * (inputs.dim() - 1)), targets.repeat(clients)
        update = observation.replay(*guess, {**observation.update, **observed}, by_epoch=by_epoch)
        return {name: update[name] for name in catch.body}

    return replace(
        observation,
        update=catch.body,
        protocol=replace(observation.protocol, clients=1),
        batch_size=1,
        replay=replay,
        targets=torch.tensor([catch.target]),
        log_likelihood=None,
        release=None,
    )


class _Last(NamedTuple):
    """The layer that returns the logits, and its name."""

    layer: nn.Linear
    name: str

    @property
    def kept(self) -> CraftedLayer:
        return CraftedLayer.of(self.layer, self.name)


def _last_layer(model: nn.Module, space: InputSpace) -> _Last:
    outputs: dict[str, tuple[nn.Linear, Tensor]] = {}

    def note(name: str, layer: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        return layer.register_forward_hook(
            lambda _, __, output: outputs.update({name: (layer, output)})
        )

    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    hooks = [note(*pair) for pair in linear]
    try:
        with torch.no_grad():
            logits = model(torch.zeros(2, *space.shape).to(some_weight(model)))
    finally:
        for hook in hooks:
            hook.remove()
    for name, (layer, output) in outputs.items():
        if output is logits and logits.ndim == 2:
            if layer.bias is None:
                raise NotApplicable(f"the last layer, {name!r}, has no bias to silence classes")
            need_trained(layer, name)
            return _Last(layer, name)
    raise NotApplicable("the model does not end in a linear layer")
