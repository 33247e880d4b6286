"""Flower apps: our defenses as client mods, and servers that capture updates.

    app = ClientApp(mods=[DefenseMod(TopK(ratio=0.1))])            # on the client
    strategy = Capturing(FedAvg(), "captures", about)              # on the server

A defense that acts on uploads works with any app. A defense that acts within training (`DPSGD`,
`ATS`) needs an app that trains with `train_locally`, which is the client of this harness. With any
other app, the mod raises an error because the client would be undefended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ContinuousSpace, InputSpace, Protocol
from leakfrontier.defenses import Batch, Chain, Defense, Loss, Plan, Refused, Update, trainable

from ..client.client import Client
from ..foundations.plugins import trust
from ..foundations.seeds import SystemGenerator, generator
from ..foundations.system_draws import SystemDraws
from ..users.contract import Checked
from .capture import CaptureError, Description, Truth, check_names, write_capture

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise ImportError(
        f"Flower is not installed ({error}): pip install 'leakfrontier[flower]'"
    ) from error

STATE = "leakfrontier"
"""The record in which a client keeps the state of a defense between rounds."""

GUARANTEE = "leakfrontier.guarantee"
"""The record of a reply that says to what its epsilon refers."""

_IN_TRAINING = ("on_batch", "gradient", "batches", "on_receive", "on_model")
_AGREED: WeakSet[nn.Module] = WeakSet()


@dataclass
class _Session:
    """One client's part in one round.

    Attributes:
        defense: The client's own copy of the defense, with its state after the last round.
        rng: The source of all its randomness.
        plan: How often the defense was applied, once that is known.
    """

    defense: Defense
    rng: Generator
    plan: Callable[[int, float], Plan] | None = None


_SESSION: ContextVar[_Session | None] = ContextVar("session", default=None)


class DefenseMod:
    """A defense as a Flower client mod.

    The client keeps the state of the defense between rounds (a tensor, a number or a dictionary of
    tensors). The reply's metrics contain the guarantee so far as `leakfrontier.epsilon` and
    `leakfrontier.delta`.

    Args:
        defense: The defense.
        delta: The delta at which epsilon is stated.
        seed: Makes the noise reproducible, for tests only: reproducible noise protects nothing.
            By default, noise comes from a cryptographic stream (`system_draws`).

    Raises:
        ValueError: If the defense is a protocol between several clients.
    """

    def __init__(self, defense: Defense, *, delta: float = 1e-5, seed: int | None = None) -> None:
        if defense.cohort > 1 or _acting(defense, ("on_round",)):
            raise ValueError(
                f"{defense} is a protocol between clients, but a mod sees only its own client: use "
                "Flower's secure aggregation instead (secaggplus_mod of flwr.client.mod with "
                "SecAggPlusWorkflow on the server)"
            )
        self.defense, self.delta, self.seed = defense, delta, seed

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        """Let the app train, and defend its reply."""
        if not str(message.metadata.message_type).startswith("train"):
            return call_next(message, context)
        defense, rounds = _restored(self.defense, context)
        session = _Session(defense, self._rng(context, rounds))
        token = _SESSION.set(session)
        try:
            reply = call_next(message, context)
        except Refused as reason:
            return Message(_refusal(reason), reply_to=message)
        finally:
            _SESSION.reset(token)
        if reply.has_error():
            return reply
        plan = session.plan
        if plan is None:
            if acting := _acting(self.defense, _IN_TRAINING):
                raise ValueError(
                    f"{self.defense} acts within training ({', '.join(acting)}), but this app did "
                    "not train with leakfrontier.evaluate.outside.flower.train_locally. It would "
                    "be undefended"
                )
            _defend(reply, message, session)
            plan = _one_step_per_round
        _keep(session.defense, context, rounds + 1)
        self._report(reply, plan(rounds + 1, self.delta))
        return reply

    def _rng(self, context: Context, rounds: int) -> Generator:
        if self.seed is None:
            return SystemGenerator()
        return generator("flower", self.seed, context.node_id, rounds)

    def _report(self, reply: Message, plan: Plan) -> None:
        claim = self.defense.guarantee(plan)
        if claim is None:
            return
        records = list(reply.content.metric_records.values())
        if not records:
            reply.content["metrics"] = MetricRecord()
            records = [reply.content["metrics"]]
        records[0][f"{STATE}.epsilon"] = float(claim.epsilon)
        records[0][f"{STATE}.delta"] = float(claim.delta)
        names = ("unit", "adjacency", "accountant")
        reply.content[GUARANTEE] = ConfigRecord({name: getattr(claim, name) for name in names})


def train_locally(
    model: nn.Module,
    examples: Truth,
    protocol: Protocol,
    *,
    loss: Loss = cross_entropy,
    space: InputSpace | None = None,
) -> None:
    """Train a model in place as a client, under the defense of the app's mod.

    Args:
        model: The model that the client received.
        examples: Its private examples as model inputs, and their labels.
        protocol: A `FedAvg` with epochs, batch size and learning rate.
        loss: The mean loss of a batch.
        space: The public facts about inputs, for defenses that transform them.
    """
    if protocol.uploads_gradient:
        raise ValueError(f"clients of Flower return weights: use FedAvg, got {protocol}")
    session = _SESSION.get() or _Session(Defense(), SystemGenerator())
    if model not in _AGREED and session.defense.on_model(model) is not model:
        raise ValueError(
            f"{session.defense} changes the architecture: build the model with "
            "leakfrontier.evaluate.outside.flower.agreed(defense, model) in client and server"
        )
    batch, defense = Batch(*examples), session.defense
    known = space or InputSpace(tuple(batch.inputs.shape[1:]), 1)
    if isinstance(known, ContinuousSpace):
        defense = defense.for_space(known.mean, known.std)
    checked = Checked(defense)
    received = checked.on_receive(model, model)
    client = Client(received, loss, checked, protocol, known)
    with SystemDraws():
        update = client.upload(batch, session.rng)
    with torch.no_grad():
        for name, value in trainable(model).items():
            value += update[name]
    session.defense = defense
    size = len(batch.inputs)
    rate = min(1.0, protocol.step_size(size) / size)
    steps = protocol.local_steps(size)
    per_client = _claims_clients(defense)
    session.plan = lambda rounds, delta: (
        Plan(rounds, 1.0, delta) if per_client else Plan(rounds * steps, rate, delta)
    )


def agreed(defense: Defense, model: nn.Module) -> nn.Module:
    """Return the architecture that client and server agree on under a defense."""
    changed = defense.on_model(model)
    _AGREED.add(changed)
    return changed


def _one_step_per_round(rounds: int, delta: float) -> Plan:
    return Plan(rounds, 1.0, delta)


def _claims_clients(defense: Defense) -> bool:
    """Return whether a guarantee is about whole clients. Then a round is one step."""
    claim = defense.guarantee(Plan(1, 1.0, 1e-5))
    return claim is not None and claim.unit == "client"


def _acting(defense: Defense, hooks: Iterable[str]) -> list[str]:
    """Return the hooks that a defense, or a link of a chain, overrides."""
    links = defense.links if isinstance(defense, Chain) else (defense,)
    return [
        hook
        for hook in hooks
        if any(getattr(type(link), hook) is not getattr(Defense, hook) for link in links)
    ]


def _refusal(reason: Refused) -> Error:
    return Error(ErrorCode.MOD_FAILED_PRECONDITION, f"refused by the client: {reason}")


def _defend(reply: Message, message: Message, session: _Session) -> None:
    """Put the defended change of weights into a reply."""
    sent, record = _weights(message), _only_arrays(reply)
    returned = record.to_torch_state_dict()
    if set(returned) != set(sent):
        raise ValueError("the app must return the arrays that it received, by the same names")
    floating = [name for name, value in returned.items() if value.is_floating_point()]
    for name, value in returned.items():
        if name not in floating and not torch.equal(value, sent[name]):
            raise ValueError(
                f"the app has changed {name!r} of type {value.dtype}. Defenses do not act on this "
                "type, so it would leave undefended. Return it as it was sent. (BatchNorm counts "
                "batches unless it has track_running_stats=False)"
            )
    update: Update = {name: returned[name] - sent[name] for name in floating}
    with SystemDraws():
        defended = Checked(session.defense).on_update(update, session.rng)
    weights = {**returned, **{name: sent[name] + defended[name] for name in floating}}
    (key,) = reply.content.array_records
    reply.content[key] = ArrayRecord(weights)


def _weights(message: Message) -> dict[str, Tensor]:
    return dict(_only_arrays(message).to_torch_state_dict())


def _only_arrays(message: Message) -> ArrayRecord:
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"a message must have one ArrayRecord, the model, got {len(records)}")
    return records[0]


def _restored(defense: Defense, context: Context) -> tuple[Defense, int]:
    """Return a client's copy of the defense with its state, and the number of its rounds."""
    copy = replace(defense)
    if STATE not in context.state:
        return copy, 0
    found = context.state[STATE].to_torch_state_dict()
    kept: dict[str, Any] = {}
    for path, value in found.items():
        place, _, name = path.partition("/")
        if name:
            kept.setdefault(place, {})[name] = value
        else:
            kept[place] = value if value.dim() or value.is_floating_point() else int(value)
    for number, link in enumerate(_links(copy)):
        for name in _memory(link):
            if f"{number}.{name}" in kept:
                setattr(link, name, kept[f"{number}.{name}"])
    return copy, int(kept["rounds"])


def _keep(defense: Defense, context: Context, rounds: int) -> None:
    """Keep the state of a defense on the client."""
    kept: dict[str, Tensor] = {"rounds": torch.tensor(rounds)}
    for number, link in enumerate(_links(defense)):
        for name, value in _memory(link).items():
            place = f"{number}.{name}"
            if isinstance(value, Tensor):
                kept[place] = value
            elif isinstance(value, int):
                kept[place] = torch.tensor(value)
            elif isinstance(value, Mapping):
                kept |= {f"{place}/{key}": part for key, part in value.items()}
    context.state[STATE] = ArrayRecord({name: value.detach() for name, value in kept.items()})


def _links(defense: Defense) -> tuple[Defense, ...]:
    return defense.links if isinstance(defense, Chain) else (defense,)


def _memory(defense: Defense) -> dict[str, Any]:
    return {one.name: getattr(defense, one.name) for one in fields(defense) if not one.init}


@dataclass
class Capturing(Strategy):  # type: ignore[misc] # Flower is not typed here
    """A strategy that captures what a server sends and receives, by round and client.

    It delegates all decisions to an inner strategy. For every reply it writes a capture to
    `round-R/client-C` of the folder, where R is the number of earlier rounds.

    Attributes:
        strategy: The inner strategy.
        folder: The folder of the captures.
        about: The description that they share. The reply's metrics give the number of examples.
        truth: Maps a reply to its client's private examples, for audits in which they are known.
        examples_key: The name of the number of examples in the reply's metrics.
    """

    strategy: Strategy
    folder: Path | str
    about: Description
    truth: Callable[[Message], Truth | None] = lambda _: None
    examples_key: str = "num-examples"
    _sent: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        trust(self.about.code)
        if self.about.training.uploads_gradient:
            raise ValueError("clients of Flower return weights: describe the protocol as FedAvg")
        self._names = tuple(trainable(self.about.build()))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the weights that each client receives."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._sent = {one.metadata.dst_node_id: _weights(one) for one in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Capture the replies, and aggregate them."""
        replies = list(replies)
        for reply in replies:
            if not reply.has_error():
                self._capture(server_round - 1, reply)
        aggregated: tuple[ArrayRecord | None, MetricRecord | None]
        aggregated = self.strategy.aggregate_train(server_round, replies)
        return aggregated

    def _capture(self, rounds: int, reply: Message) -> None:
        client = reply.metadata.src_node_id
        sent, returned = self._sent[client], _weights(reply)
        metrics = [dict(record) for record in reply.content.metric_records.values()]
        examples = next((int(m[self.examples_key]) for m in metrics if self.examples_key in m), 0)
        about = self.about.model_copy(
            update={
                "round": rounds,
                "client": str(client),
                "batch_size": examples or self.about.batch_size,
            }
        )
        try:
            check_names(returned, sent, "the reply", "the weights that were sent")
            write_capture(
                Path(self.folder) / f"round-{rounds}" / f"client-{client}",
                about,
                weights=sent,
                update={name: returned[name] - sent[name] for name in self._names},
                truth=self.truth(reply),
            )
        except CaptureError as error:  # training continues
            warnings.warn(f"client {client} was not captured: {error}", stacklevel=2)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate to the inner strategy."""
        messages: Iterable[Message]
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate to the inner strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate to the inner strategy."""
        self.strategy.summary()
