"""One client's local training under a defense, and what the server sees of it.

`release` is the only path. Training for utility, the observation that is attacked and the
adversary's replay all use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from leakfrontier.adversaries import (
    Candidates,
    InputSpace,
    Observation,
    Protocol,
    PublicData,
    Replay,
)
from leakfrontier.defenses import Batch, Defense, Loss, Update, trainable

from ..foundations.seeds import copied, fork, global_draws
from ..users.alone import Alone, fresh
from ..users.contract import Checked
from ..users.copies import CLIENTS, SIMULATED, in_precision_of
from .math_attention import math_attention
from .mending import AS_GIVEN, AVERAGED, Expected, Mending, mean, refuse_stack, straight_through
from .side_by_side import Asked, summed

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Client:
    """Everything that produces an upload from private examples.

    Attributes:
        model: The model as the client received it. Hooks get a copy of it (`copies`).
        loss: Mean loss of a batch.
        defense: The client's own defense.
        protocol: How the client computes an update from its examples.
        space: The public knowledge about the inputs.
    """

    model: nn.Module
    loss: Loss
    defense: Defense
    protocol: Protocol
    space: InputSpace

    def upload(
        self, examples: Batch, rng: Generator, *, in_order: bool = False, by_epoch: bool = False
    ) -> Update:
        """Return the client's gradient or change of weights, after its `on_update`.

        The order of the examples has its own generator, separate from the noise. So all defenses
        that do not draw their own batches see the same order.

        Args:
            examples: The client's private examples of this round.
            rng: Source of all its randomness.
            in_order: Whether local steps see the examples in order, as in a replay.
            by_epoch: Whether each epoch has its own examples, one epoch after another.
        """
        model = CLIENTS.of(self.model)
        start = {name: value.detach() for name, value in trainable(model).items()}
        step = _Step(model, self.loss, self.defense)
        if in_order:
            batches = partial(self._in_order, examples, by_epoch=by_epoch)
        else:
            batches = partial(self._drawn, examples, fork(rng))
        with math_attention():
            update = self.protocol.train(
                start, examples, batches, lambda weights, part: step.gradient(weights, part, rng)
            )
        return self.defense.on_update(dict(update), rng)

    def _drawn(
        self, examples: Batch, rng: Generator, batch_size: int, epochs: int
    ) -> Iterator[Batch]:
        for rows in self.defense.batches(len(examples.inputs), batch_size, epochs, rng):
            yield examples.at(rows)

    def _in_order(
        self, examples: Batch, batch_size: int, epochs: int, *, by_epoch: bool
    ) -> Iterator[Batch]:
        """Yield the local steps of a replay."""
        self.defense.expect(batch_size)
        size = len(examples.inputs) // (epochs if by_epoch else 1)
        rows = torch.arange(size).split(batch_size)
        for epoch in range(epochs):
            for part in rows:
                yield examples.at(part + epoch * size if by_epoch else part)


def release(
    clients: Sequence[Client],
    shares: Sequence[Batch],
    rng: Generator,
    *,
    in_order: bool = False,
    by_epoch: bool = False,
) -> list[Update]:
    """Return what the server sees of the clients of one round.

    Each client has its own generator, so its draws do not depend on other clients.

    Args:
        clients: The clients.
        shares: The private examples of each client.
        rng: Source of all their randomness.
        in_order: See `Client.upload`.
        by_epoch: See `Client.upload`.

    Returns:
        One update per client, or fewer if the defense aggregates.
    """
    updates = [
        client.upload(share, own, in_order=in_order, by_epoch=by_epoch)
        for client, share, own in zip(clients, shares, [fork(rng) for _ in clients], strict=True)
    ]
    return shown(clients, updates, rng)


def shown(clients: Sequence[Client], updates: Sequence[Update], rng: Generator) -> list[Update]:
    """Return what the server sees of the updates of some clients."""
    defense = clients[0].defense
    defense.on_cohort([CLIENTS.of(client.model) for client in clients])
    return defense.on_round(updates, rng)


class _Step(nn.Module):
    """One local step, at weights that may depend on earlier steps.

    It is a module, so that `functional_call` can put these weights into the model while the defense
    uses it.
    """

    def __init__(self, model: nn.Module, loss: Loss, defense: Defense) -> None:
        super().__init__()
        self.model, self.loss, self.defense = model, loss, defense

    def gradient(self, weights: Mapping[str, Tensor], batch: Batch, rng: Generator) -> Update:
        """Return the defense's gradient, computed together with other clients where possible."""
        trained_on: Batch = self._at(weights, "on_batch", batch, rng)
        rule = self.defense.summing if isinstance(self.defense, Checked) else None
        total = None
        if rule is not None:
            total = summed(Asked(self.model, self.loss, weights, trained_on, rule.clipped))
        hook, given = ("gradient", ()) if total is None else ("from_sum", (total,))
        found: Update = self._at(weights, hook, *given, self.model, self.loss, trained_on, rng)
        return found

    def _at(self, weights: Mapping[str, Tensor], hook: str, *args: object) -> Any:  # noqa: ANN401
        """Return what a hook returns while the model has the weights of this step."""
        function = getattr(self.defense, hook)
        if isinstance(self.defense, Checked) and not self.defense.needs_model(hook):
            return function(*args)
        placed = {f"model.{name}": value for name, value in weights.items()}
        return functional_call(self, placed, (function, *args))

    def forward(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function while the model has the weights of this step."""
        return function(*args, **options)


@dataclass(frozen=True)
class ThreatModel:
    """What the adversary knows besides the model and the update.

    Attributes:
        knows_targets: The private labels.
        knows_defense: The defense and its parameters, but never its random draws.
        public: Auxiliary data of the same distribution.
        candidates: Alternatives for each private example.
    """

    knows_targets: bool = False
    knows_defense: bool = True
    public: PublicData | None = None
    candidates: Candidates | None = None

    def believed(self, defense: Defense) -> Defense:
        """Return a copy of the defense if it is known, otherwise the undefended client."""
        return fresh(defense) if self.knows_defense else Defense()


@dataclass(frozen=True)
class Upload:
    """An observation, together with the secrets behind it.

    Attributes:
        observation: What the adversary receives.
        truth: The private examples behind it.
        trained_on: What local training last saw of each of them, e.g. augmented.
    """

    observation: Observation
    truth: Batch
    trained_on: Batch


@dataclass(frozen=True)
class Released:
    """The uploads of clients, and what each client last trained on."""

    updates: Sequence[Update]
    trained_on: Sequence[Batch]


def send(
    client: Client,
    shares: Sequence[Batch],
    rng: Generator,
    *,
    models: Sequence[nn.Module] | None = None,
) -> Released:
    """Let clients train on their shares, and check their defense's contract.

    Args:
        client: The template of all clients. Its defense is copied for each.
        shares: The private examples of each client.
        rng: Source of all the clients' randomness.
        models: The model that each client received. Default: the template's model.
    """
    if not all(len(share.inputs) for share in shares):
        raise ValueError("the private batch is empty")
    models = models or [client.model] * len(shares)
    defenses = [Checked(fresh(client.defense), share) for share in shares]
    clients = [
        replace(client, model=model, defense=defense)
        for model, defense in zip(models, defenses, strict=True)
    ]
    with global_draws(rng):
        updates = release(clients, shares, rng)
    seen = [defense.trained_on or share for defense, share in zip(defenses, shares, strict=True)]
    return Released(updates, seen)


def observe(
    client: Client,
    shares: Sequence[Batch],
    threat: ThreatModel,
    rng: Generator,
    *,
    models: Sequence[nn.Module] | None = None,
    replay: Replay | None = None,
    released: Released | None = None,
    kept: object = None,
    mending: Mending = AS_GIVEN,
) -> list[Upload]:
    """Return what the server sees when clients train on their shares.

    Args:
        client: The template of all clients. Its defense is copied for each.
        shares: The private examples of each client.
        threat: What the adversary knows.
        rng: Source of all the clients' randomness.
        models: The model that each client received. Default: the template's model.
        replay: A replay that `make_replay` made for these models. Default: a new one for each
            upload whose clients received different models.
        released: The uploads, if they are known already.
        kept: What the server kept when it crafted the models.
        mending: The repairs of what adversaries know of the defense.
    """
    models = models or [client.model] * len(shares)
    released = released or send(client, shares, rng, models=models)
    together = len(shares) if len(released.updates) < len(shares) else 1
    replays: dict[tuple[nn.Module, ...], Replay] = {}
    uploads = []
    for index, update in enumerate(released.updates):
        behind = slice(index, index + together)
        truth = Batch.joined(shares[behind])
        sent = tuple(models[behind])
        if sent not in replays:
            replays[sent] = replay or make_replay(client, threat, rng, models=sent)
        targets = truth.targets if threat.knows_targets else None
        observation = observation_of(
            client,
            sent,
            update,
            threat,
            replays[sent],
            examples=len(truth.inputs),
            targets=targets,
            kept=kept,
            mending=mending,
        )
        uploads.append(Upload(observation, truth, Batch.joined(released.trained_on[behind])))
    return uploads


def observation_of(
    client: Client,
    models: Sequence[nn.Module],
    update: Update,
    threat: ThreatModel,
    replay: Replay,
    *,
    examples: int,
    targets: Tensor | None,
    kept: object = None,
    mending: Mending = AS_GIVEN,
) -> Observation:
    """Return what the adversary receives for one upload.

    Args:
        client: The template of the clients behind it.
        models: The model that each client received.
        update: What the server saw.
        threat: What the adversary knows.
        replay: The replay that `make_replay` made for these models.
        examples: Private examples behind the upload.
        targets: Their labels, if the adversary is told them.
        kept: What the server kept when it crafted the models.
        mending: The repairs of what adversaries know of the defense.
    """
    protocol = replace(client.protocol, clients=len(models))
    likelihood = partial(
        Alone(fresh(client.defense)).log_likelihood,  # a copy: the defense holds its secrets
        batch_size=examples if protocol.uploads_gradient else None,
    )
    return Observation(
        models=tuple(models),
        loss=client.loss,
        update=update,
        protocol=protocol,
        space=client.space,
        batch_size=examples,
        replay=replay,
        targets=targets,
        log_likelihood=likelihood if threat.knows_defense and not mending.no_likelihood else None,
        public=threat.public,
        candidates=threat.candidates,
        release=_another_round(client, models, threat, guarded=mending.guarded),
        kept=kept,
    )


def make_replay(
    client: Client,
    threat: ThreatModel,
    rng: Generator,
    *,
    models: Sequence[nn.Module] | None = None,
    mending: Mending = AS_GIVEN,
) -> Replay:
    """Return the function with which an adversary replays the clients on a guess.

    Args:
        client: The template of all clients.
        threat: What the adversary knows.
        rng: Source of the replay's draws. It never gives the clients' own noise.
        models: The model that each client received. Default: the template's model.
        mending: The repairs of the defense's own replay.
    """
    models = models or [client.model]
    copies = [SIMULATED.of(model) for model in models]
    believed = Defense() if mending.undefended else threat.believed(client.defense)
    replay_rng = fork(rng)
    fixed = [fork(replay_rng) for _ in range(AVERAGED)]

    def uploads(
        make: Callable[[], Defense], guess: Batch, rng: Generator, *, by_epoch: bool
    ) -> list[Update]:
        own = map(in_precision_of, copies, models)
        clients = [replace(client, model=model, defense=make()) for model in own]
        shares = _shares(*guess, len(models))
        return release(clients, shares, rng, in_order=True, by_epoch=by_epoch)

    def replay(
        inputs: Tensor,
        targets: Tensor,
        observed: Mapping[str, Tensor],
        /,
        *,
        by_epoch: bool = False,
    ) -> Update:
        if mending.one_by_one:
            refuse_stack(inputs)

        def known() -> Defense:
            defense = Alone(fresh(believed)).replay(observed)
            return Expected(defense) if mending.draws == "expected" else defense

        guess, rngs = Batch(inputs, targets), [replay_rng]
        if mending.draws == "averaged":
            rngs = [copied(one) for one in fixed]
        seen = Batch(inputs.detach(), targets) if mending.straight_through else guess
        replayed = mean([uploads(known, seen, one, by_epoch=by_epoch)[0] for one in rngs])
        if mending.straight_through:
            undefended = mean(uploads(Defense, guess, replay_rng, by_epoch=by_epoch))
            replayed = straight_through(replayed, undefended)
        return replayed

    return replay


def _another_round(
    client: Client, models: Sequence[nn.Module], threat: ThreatModel, *, guarded: bool
) -> Callable[[Tensor, Tensor, Generator], Update]:
    """Return the function with which an adversary runs clients on its own examples."""

    def known() -> Defense:
        believed = Alone(threat.believed(client.defense))
        return believed if guarded else believed.unguarded()

    def run(inputs: Tensor, targets: Tensor, rng: Generator) -> Update:
        clients = [replace(client, model=SIMULATED.of(model), defense=known()) for model in models]
        return release(clients, _shares(inputs, targets, len(models)), rng)[0]

    return run


def _shares(inputs: Tensor, targets: Tensor, clients: int) -> list[Batch]:
    parts = zip(inputs.tensor_split(clients), targets.tensor_split(clients), strict=True)
    return [Batch(*part) for part in parts]
