"""A transformers model from the server's view: the input vectors of its linear layers.

This module knows no particular family of models. One traced run shows which linear layers of a
block read the same vectors: queries, keys and values. They may be fused or separate, `Linear` or
`Conv1D`, grouped or not, with or without adapters. In blocks that compute both at once, the
feed-forward layer reads the same vectors too. Vectors come from the model's own code, so norms,
positions and rotations are those of the client. The run stops when it reaches the layer in
question.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..base import Observation, in_evaluation
from ..spaces import NotApplicable, TokenSpace
from .prefixes import Extended, Prefixes
from .subspace import PRECISION, Subspace, row_space

_TOKENS_AT_ONCE = 4096
"""Number of tokens per run of a block."""


def half_spacing(value: Tensor) -> Tensor:
    """Return the largest rounding error of numbers that 16 bits hold exactly, or else 0."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(wide.to(dtype).to(wide.dtype), wide):
            kind = torch.finfo(dtype)
            size = wide.abs().clamp(min=kind.tiny)  # smaller numbers have the same spacing
            return kind.eps / 2 * 2.0 ** (torch.frexp(size).exponent - 1)
    return torch.zeros_like(wide)


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of the network.

    Attributes:
        name: Name of its weight in the observed model.
        module: The layer.
    """

    name: str
    module: nn.Module

    @property
    def transposed(self) -> bool:
        """Return whether the weight is (inputs, outputs), as in GPT-2."""
        return not isinstance(self.module, nn.Linear)

    @property
    def weight(self) -> Tensor:
        """Return the weight as (outputs, inputs)."""
        weight = cast(Tensor, self.module.weight).detach()
        return weight.T if self.transposed else weight

    def gradient(self, observation: Observation) -> Tensor:
        """Return its observed gradient, as (outputs, inputs)."""
        return self._as_gradient(observation, observation.update[self.name].detach())

    def rounding(self, observation: Observation) -> Tensor:
        """Return the standard deviations that rounding gives the gradient.

        Every local step rounds the weights. An upload in fewer bits is rounded once more.
        """
        steps = observation.protocol.rounding(self.weight, observation.batch_size)
        sent = half_spacing(observation.update[self.name].detach())
        return torch.hypot(steps, self._as_gradient(observation, sent).abs() / math.sqrt(3))

    def _as_gradient(self, observation: Observation, value: Tensor) -> Tensor:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        gradient = observation.protocol.as_gradient(wide, observation.batch_size)
        return gradient.T if self.transposed else gradient


@dataclass(frozen=True)
class Block:
    """The linear layers of one block.

    Attributes:
        projections: The layers that read the block's input after its norm, the queries' first.
        out: The output layer of attention, if it is found.
        up: The layers that feed the activations of the feed-forward layer.
        down: The block's last layer: the output layer of the feed-forward layer.
    """

    projections: tuple[LinearLayer, ...]
    out: LinearLayer | None
    up: tuple[LinearLayer, ...]
    down: LinearLayer

    @property
    def module(self) -> nn.Module:
        """Return a module whose input is the block's input after its norm."""
        return self.projections[0].module


class _Reached(Exception):
    """The network has reached all requested modules."""


@dataclass(frozen=True)
class Transformer:
    """A transformers model behind an observation.

    Attributes:
        network: The model without its head.
        whole: The model with its head.
        blocks: Its first two blocks and its last.
        norm: The module whose output the first block's projections read, if there is one.
        final_norm: The module that returns the last hidden states, if there is one.
        absolute: Whether the first block's inputs depend on the position.
        start: The number of the first position; RoBERTa counts from 2.
        space: Public facts about the tokens.
    """

    network: nn.Module
    whole: nn.Module
    blocks: tuple[Block, Block, Block]
    norm: nn.Module | None
    final_norm: nn.Module | None
    absolute: bool
    start: int
    space: TokenSpace

    @property
    def first(self) -> Block:
        """Return the first block."""
        return self.blocks[0]

    @property
    def second(self) -> Block:
        """Return the second block."""
        return self.blocks[1]

    @property
    def last(self) -> Block:
        """Return the last block."""
        return self.blocks[2]

    @property
    def positions(self) -> int:
        """Return how many places have gradients; under a next-token loss, the last is a label."""
        return self.space.shape[0] - (self.space.task == "next-token")

    @property
    def heads(self) -> int:
        """Return the number of attention heads."""
        return int(cast(Any, self.network).config.num_attention_heads)

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """Return the input embeddings, (vocabulary, width)."""
        weight = cast(Any, self.network).get_input_embeddings().weight
        return cast(Tensor, weight)[: self.space.vocabulary].detach()

    @torch.no_grad()
    def read(self, modules: Sequence[nn.Module], **inputs: object) -> list[Tensor]:
        """Return the inputs of modules. The network stops once all of them are reached."""
        seen: dict[int, Tensor] = {}

        def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen.setdefault(id(module), given[0])
            if len(seen) == len({id(module) for module in modules}):
                raise _Reached

        hooks = [module.register_forward_pre_hook(note) for module in modules]
        try:
            with in_evaluation(self.network):
                self.network(**inputs)
        except _Reached:
            return [seen[id(module)] for module in modules]
        finally:
            for hook in hooks:
                hook.remove()
        raise NotApplicable("the network's layers do not run in the order of its blocks")

    def at_position(self, tokens: Tensor, position: int, module: nn.Module) -> Tensor:
        """Return a module's inputs for single tokens at a position, before any attention."""
        place = torch.full((1, 1), self.start + position, device=tokens.device)
        parts = [
            self.read([module], input_ids=part[:, None], position_ids=place)[0][:, 0]
            for part in tokens.split(_TOKENS_AT_ONCE)
        ]
        return torch.cat(parts)

    def sequences(self, tokens: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
        """Return the inputs of modules for whole sequences of one length."""
        if not len(tokens):
            return [self.embedding.new_zeros(0) for _ in modules]
        parts = [
            self.read(modules, input_ids=part)
            for part in tokens.split(max(1, _TOKENS_AT_ONCE // tokens.shape[1]))
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def padded(self, sentences: Sequence[Sequence[int]]) -> Tensor:
        """Return sentences as model inputs, cut or padded to the length of examples."""
        length, filling = self.space.shape[0], self.space.padding or 0
        rows = [[*tokens[:length]] + [filling] * (length - len(tokens)) for tokens in sentences]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).view(-1, length)

    def no_prefix(self) -> Prefixes:
        """Return one prefix without tokens."""
        return Prefixes(torch.zeros(1, 0, dtype=torch.int64, device=self.device))

    def extend(
        self, prefixes: Prefixes, candidates: Tensor, modules: Sequence[nn.Module]
    ) -> Extended:
        """Return the inputs of modules at each candidate after each prefix.

        A candidate sees itself and the prefix, whose keys and values are cached.

        Args:
            prefixes: The prefixes.
            candidates: Tokens.
            modules: Modules before the second block's attention.
        """
        step = max(1, _TOKENS_AT_ONCE // max(1, len(candidates)))
        parts = [
            self._extend(prefixes.rows(slice(start, start + step)), candidates, modules)
            for start in range(0, len(prefixes.tokens), step)
        ]
        vectors, keys, values = zip(*parts, strict=True)
        return Extended(
            [torch.cat(column) for column in zip(*vectors, strict=True)],
            prefixes,
            candidates,
            torch.cat(keys),
            torch.cat(values),
        )

    def _extend(
        self, prefixes: Prefixes, candidates: Tensor, modules: Sequence[nn.Module]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        from transformers import DynamicCache  # slow to import

        (count, length), size = prefixes.tokens.shape, len(candidates)
        memory = DynamicCache()
        if prefixes.keys is not None:
            memory.update(prefixes.keys, prefixes.values, 0)
        dtype = self.embedding.dtype
        hidden = torch.full((size, length + size), torch.finfo(dtype).min, dtype=dtype)
        hidden[:, :length] = 0
        hidden[:, length:].fill_diagonal_(0)
        vectors = self.read(
            modules,
            input_ids=candidates.expand(count, -1),
            position_ids=torch.full((1, size), self.start + length, device=candidates.device),
            attention_mask=hidden.to(self.device).expand(count, 1, -1, -1),
            past_key_values=memory,
            use_cache=True,
        )
        layer = memory.layers[0]
        return vectors, layer.keys, layer.values


def is_causal(view: Transformer) -> bool:
    """Return whether a token's vectors do not depend on later tokens."""
    vocabulary = view.space.vocabulary
    tokens = torch.tensor([[0, 0, 0], [0, 0, 1 % vocabulary]], device=view.device)
    (vectors,) = view.sequences(tokens, [view.second.module])
    return torch.allclose(vectors[0, :2], vectors[1, :2], rtol=1e-4, atol=1e-5)


def find_transformer(observation: Observation) -> Transformer:
    """Return the transformers model behind an observation.

    Raises:
        NotApplicable: If there is none, or if its first two blocks cannot be read.
    """
    space = observation.space
    if not isinstance(space, TokenSpace):
        raise NotApplicable("the inputs are not tokens")
    transformers = sys.modules.get("transformers")  # if not imported, no model comes from it
    found = [
        module
        for module in observation.model.modules()
        if transformers is not None and isinstance(module, transformers.PreTrainedModel)
    ]
    if not found:
        raise NotApplicable("the model is not a transformers model, so its embeddings are unknown")
    whole = found[0]
    network = cast(nn.Module, whole.base_model)
    depth = int(cast(Any, network).config.num_hidden_layers)
    blocks = [
        module
        for module in network.modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not blocks or len(blocks[0]) < 2:
        raise NotApplicable("the model has fewer than two blocks of attention")
    names = {id(module): name for name, module in observation.model.named_modules()}
    return _trace(network, whole, blocks[0], names, space)


class _Call(NamedTuple):
    module: nn.Module
    given: Tensor
    output: Tensor


def _trace(
    network: nn.Module,
    whole: nn.Module,
    blocks: nn.ModuleList,
    names: Mapping[int, str],
    space: TokenSpace,
) -> Transformer:
    """Run the network on a few tokens, and record which layer reads what."""
    calls: list[_Call] = []

    def note(module: nn.Module, given: tuple[Any, ...], output: object) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(output, Tensor):
            calls.append(_Call(module, given[0], output))

    leaves = [module for module in network.modules() if not [*module.children()]]
    hooks = [module.register_forward_hook(note) for module in leaves]
    device = next(network.parameters()).device
    tokens = torch.arange(2, device=device)[None] % space.vocabulary
    try:
        with torch.no_grad(), in_evaluation(network):
            hidden = network(input_ids=tokens).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    picked = [_block(blocks[place], calls, names) for place in (0, 1, -1)]
    inputs = next(call.given for call in calls if call.module is picked[0].module)
    padding = cast(Any, network).config.pad_token_id
    repeated = torch.full((1, 2), int(padding == 0), device=device)  # padding has no position
    draft = Transformer(
        network, whole, (picked[0], picked[1], picked[2]), None, None, False, 0, space
    )
    both = draft.read([picked[0].module], input_ids=repeated)[0][0]
    absolute = not torch.equal(both[0], both[1])
    return replace(
        draft,
        norm=_maker(calls, lambda call: call.output is inputs and call.given is not inputs),
        final_norm=_maker(calls, lambda call: torch.equal(call.output, hidden)),
        absolute=absolute,
        start=_start(draft, repeated[0, :1], both[0]) if absolute else 0,
    )


def _start(view: Transformer, token: Tensor, vector: Tensor) -> int:
    """Return the position number at which a token gives the same vector as in first place."""
    for position in range(4):
        if torch.equal(view.at_position(token, position, view.first.module)[0], vector):
            return position
    raise NotApplicable("the number of the model's first position is not known")


def _maker(calls: Sequence[_Call], matches: Callable[[_Call], bool]) -> nn.Module | None:
    return next((call.module for call in calls if matches(call)), None)


def _block(block: nn.Module, calls: Sequence[_Call], names: Mapping[int, str]) -> Block:
    inside = {id(module) for module in block.modules()}
    linear = [
        call
        for call in calls
        if id(call.module) in inside
        and getattr(call.module, "weight", None) is not None
        and cast(Tensor, call.module.weight).ndim == 2
        and call.given.is_floating_point()
    ]
    if not linear:
        raise NotApplicable("a block of the model has no linear layers")

    def layers(chosen: Sequence[_Call]) -> tuple[LinearLayer, ...]:
        return tuple(
            LinearLayer(f"{names[id(call.module)]}.weight", call.module) for call in chosen
        )

    given, down = linear[0].given, linear[-1]
    outs = [
        call for call in linear[:-1] if call.given is not given and call.output.shape == given.shape
    ]
    out = max(outs, key=lambda call: call.given.shape[-1], default=None)  # adapters are narrow
    up = [call for call in linear if call.output.shape == down.given.shape and call is not down]
    return Block(
        layers([call for call in linear if call.given is given]),
        None if out is None else layers([out])[0],
        layers(up),
        layers([down])[0],
    )


def block_gradient(observation: Observation, layers: Sequence[LinearLayer]) -> Tensor:
    """Return the gradients of layers that read the same vectors, stacked as (outputs, inputs).

    Together they span more than each alone: no query reaches a sequence's first token, keys without
    rotation span only differences, and grouped keys and values have few rows.

    Raises:
        NotApplicable: If the update contains none of them.
    """
    seen = [layer for layer in layers if layer.name in observation.update]
    if not seen:
        missing = ", ".join(layer.name for layer in layers)
        kept = "adapters of other layers" if any("lora" in n for n in observation.update) else ""
        raise NotApplicable(
            f"attention is frozen, so the update does not contain {missing}"
            + (f", only {kept}" if kept else "")
        )
    stacked = torch.cat([layer.gradient(observation) for layer in seen])
    if not stacked.isfinite().all():
        raise NotApplicable(f"the gradient of {seen[0].name} is not finite")
    return stacked


def block_space(
    observation: Observation,
    layers: Sequence[LinearLayer],
    *,
    tolerance: float = PRECISION,
    least: int = 0,
) -> Subspace:
    """Return the space above rounding that the gradients of layers with the same inputs span.

    Raises:
        NotApplicable: If the update contains none of them.
    """
    seen = [layer for layer in layers if layer.name in observation.update]
    gradient = block_gradient(observation, layers)
    rounding = torch.cat([layer.rounding(observation) for layer in seen])
    most = most_inputs(observation)
    return row_space(gradient, tolerance=tolerance, noise=rounding, least=least, most=most)


def block_spaces(
    view: Transformer, observation: Observation, *, tolerance: float = PRECISION
) -> tuple[Subspace, Subspace]:
    """Return the spaces of the first two blocks.

    The second block has at least as many different inputs as the first: one for every prefix or
    sentence that a token is in.
    """
    first = block_space(observation, view.first.projections, tolerance=tolerance)
    least = 0 if first.noise > 0 or first.saturated else first.rank
    second = block_space(observation, view.second.projections, tolerance=tolerance, least=least)
    return first, second


def most_inputs(observation: Observation) -> int:
    """Return the largest number of input vectors of a block; the gradient is a sum over them.

    Every token counts once per pass over the examples. Under a next-token loss, the last token is a
    label and does not count.
    """
    space = cast(TokenSpace, observation.space)
    tokens = space.shape[0] - (space.task == "next-token")
    return observation.batch_size * tokens * observation.protocol.passes
