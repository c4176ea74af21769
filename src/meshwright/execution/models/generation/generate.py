"""Generate tokens: prefill the prompts in one program, then decode one token of every row per step from a KV cache.

Prompts may differ in length: each row has its own position. Weights are stationary (never gathered), as in the plan of
a server (`step.serve_ops`). With ring attention or Ulysses, prompts are sharded as in training; so are prompts of many
tokens that fsdp splits by batch, if gathering weights moves fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from meshwright.description.step.blocks import layers
from meshwright.description.step.frequencies import LongRopeScaling
from meshwright.description.step.layer import Attention, Stack, alternating
from meshwright.description.step.model import LearnedPositions, ModelConfig
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import Parameter, parameters
from meshwright.description.step.serve import layers_by_window
from meshwright.description.step.serving import (
    SERVING_RULES,
    CacheSplit,
    check_linear_serving,
    generation_rules,
)
from meshwright.description.step.strategy import DEFAULT, SequenceMethod
from meshwright.execution.models.context import LayerContext, PositionInfo, positions_in_cache, positions_of
from meshwright.execution.models.ends import embed, logits, table_in_use
from meshwright.execution.models.generation.cache import (
    Cache,
    Caches,
    abstract_caches,
    empty_caches,
    split_axes,
    with_prompts,
)
from meshwright.execution.models.generation.delta_state import DeltaCache, DeltaState, abstract_states
from meshwright.execution.models.generation.sampling import (
    Samplers,
    Sampling,
    Written,
    choose,
    samplers_of,
    with_chosen,
    written_before,
)
from meshwright.execution.models.generation.stationary import WEIGHTS, attention_layout, head_rows
from meshwright.execution.models.layer import run_layer
from meshwright.execution.models.layer_inputs import layer_inputs
from meshwright.execution.models.quantised.scaled import ScaledWeight, as_declared
from meshwright.execution.models.quantised.weights import layer_weights
from meshwright.execution.models.streams import narrowed, widened
from meshwright.execution.runtime.arrays import fit
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape
from meshwright.planning.cost.serving_seconds import moves_fewer_weights

SHORTEST_PROMPT = 16
"""Prompts are padded to a power of two, at least this one, so that few programs are compiled."""

SLOTS = 64
"""A row's slots in a cache are a multiple of this number, so that few programs are compiled."""


def decode_layout(model: ModelConfig, mesh: MeshShape, split: CacheSplit = "heads") -> ShardingContext:
    """Return the sharding context of decoding. split: the dim of the cache that is split besides heads, if any."""
    return ShardingContext(mesh, generation_rules(model, mesh), cache_split=split)


def prompt_layout(
    model: ModelConfig,
    mesh: MeshShape,
    split: CacheSplit = "heads",
    sp_method: SequenceMethod = "gather",
    *,
    gathers_weights: bool = False,
) -> ShardingContext:
    """Return the sharding context of prefill: that of decoding, but the stream between blocks is split along tokens.

    With ring attention or Ulysses it is the sharding context of training, in which sp splits the sequence; also where
    weights are gathered over fsdp, which then splits the prompts (`ServingLayout.gathers_weights`).
    """
    if sp_method != "gather" or gathers_weights:
        return ShardingContext(mesh)
    rules = generation_rules(model, mesh)
    return ShardingContext(mesh, {**rules, "residual_sequence": rules["mlp"]}, cache_split=split)


def prompt_parts(layout: ShardingContext) -> int:
    """Return the number that the padded length of prompts must be a multiple of."""
    return math.lcm(layout.mesh.degree(layout.rules["residual_sequence"]), layout.mesh.degree(layout.rules["embed"]))


def generate_tokens(
    params: Mapping[str, Any],
    prompts: Sequence[np.ndarray],
    model: ModelConfig,
    mesh: MeshShape,
    *,
    num_tokens: int,
    sampling: Sequence[Sampling],
    dtype: Any,
    sp_method: SequenceMethod = "gather",
) -> Iterator[np.ndarray]:
    """Yield `num_tokens` arrays [prompts], each with the next token of every prompt. Call under `jax.set_mesh`.

    Args:
        prompts: the tokens of each prompt, at least one token each.
        sampling: how the tokens of each prompt are chosen.
        sp_method: how keys reach queries in prefill. Models with a softcap, sinks or linear attention always use
          "gather".
    """
    if model.attention.linear is not None:
        # The state of linear attention passes along the whole sequence, so sp cannot split it.
        sp_method = "gather"
    check_linear_serving(model, mesh)
    num_prompts, split = len(prompts), cache_split(model, mesh, len(prompts))
    layout, longest = decode_layout(model, mesh, split), max(map(len, prompts))
    gathers = split == "batch" and moves_fewer_weights(model, mesh, prompts=num_prompts, length=longest)
    of_prompts = prompt_layout(model, mesh, split, sp_method, gathers_weights=gathers)
    # Padding rows repeat the first prompt; they are not returned.
    rows = num_prompts + -num_prompts % mesh.degree(layout.rules["batch"])
    prompts = [*prompts, *[prompts[0]] * (rows - num_prompts)]
    sampling = [*sampling, *[sampling[0]] * (rows - num_prompts)]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    parts = prompt_parts(of_prompts)
    unit = SLOTS * math.lcm(parts, mesh.degree(split_axes(layout, model.attention.latent is not None)))
    length = -(-(int(lengths.max()) + num_tokens) // unit) * unit
    samplers = samplers_of(sampling)
    written = written_before(samplers, prompts, padded(model, mesh, SERVING_RULES).vocab)
    params = placed_params(params, model, layout)
    prefill, decode = programs(model, mesh, split, rows, length, jnp.dtype(dtype), sp_method, gathers_weights=gathers)

    def read(texts: Sequence[np.ndarray], written: Written, number: int) -> tuple[Array, Caches, Written]:
        lengths = np.array([len(text) for text in texts], np.int32)
        padded = max(SHORTEST_PROMPT, 1 << (int(lengths.max()) - 1).bit_length())
        tokens = np.zeros(
            (rows + -rows % mesh.degree(of_prompts.rules["batch"]), min(length, -(-padded // parts) * parts)), np.int32
        )
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        placed = jax.device_put(tokens, of_prompts.spec("batch", "sequence"))
        return prefill(params, placed, jnp.asarray(lengths), samplers, written, jnp.int32(number))

    switches, made = switching_length(model), list[np.ndarray]()
    chosen, caches, written = read(prompts, written, 0)
    for number in range(1, num_tokens):
        # The next step is dispatched before this token is read.
        positions, before = lengths + number - 1, chosen
        if np.any(positions == switches):
            texts = np.stack([*made, _on_host(before)], axis=1)
            chosen, caches, written = read(
                [np.append(*row) for row in zip(prompts, texts, strict=True)], written, number
            )
        else:
            chosen, caches, written = decode(
                params, chosen, caches, jnp.asarray(positions), samplers, written, jnp.int32(number)
            )
        made.append(_on_host(before))
        yield made[-1][:num_prompts]
    yield _on_host(chosen)[:num_prompts]


def switching_length(model: ModelConfig) -> int | None:
    """Return the text length above which LongRoPE changes all rotary frequencies; None for models without LongRoPE.

    Cached keys are rotated with the frequencies of shorter texts, so a text that passes this length is prefilled again,
    as in transformers for Phi-3.
    """
    return next((s.original_max_seq_len for s in model.rope_scalings if isinstance(s, LongRopeScaling)), None)


def cache_split(model: ModelConfig, mesh: MeshShape, num_rows: int) -> CacheSplit:
    """Return the split of a cache of `num_rows` rows besides heads.

    It is "batch" (by rows) if all devices get equally many rows, else "sequence" (by slots); "heads" if no mesh axis
    can split more than the heads.
    """
    layout = decode_layout(model, mesh)
    parts = mesh.degree(split_axes(layout, model.attention.latent is not None))
    is_even = num_rows % (parts * mesh.degree(layout.rules["batch"])) == 0
    return "heads" if parts == 1 else "batch" if is_even else "sequence"


def placed_params(params: Mapping[str, Any], model: ModelConfig, layout: ShardingContext) -> Any:
    """Return parameters padded and sharded as decoding reads them; arrays that already are so are not copied."""

    def place(parameter: Parameter, array: Any) -> Any:
        if isinstance(array, ScaledWeight):
            return array
        spec = layout.spec(*parameter.axes)
        if array.shape != parameter.shape:
            refit = jax.jit(lambda array: jax.reshard(fit(jax.reshard(array, P()), parameter.shape), spec))
            return refit(array)
        return jax.device_put(array, spec)

    return jax.tree.map(place, parameters(padded(model, layout.mesh, SERVING_RULES)), dict(params))


def _on_host(tokens: Array) -> np.ndarray:
    """Return the tokens of all rows as a NumPy array, including rows on devices of other processes."""
    return np.asarray(tokens if tokens.is_fully_addressable else jax.jit(lambda own: jax.reshard(own, P()))(tokens))


class Programs(NamedTuple):
    """The jitted programs of generation. Both return the chosen tokens [rows], the caches, and the updated `Written`.

    Arguments of prefill: params, tokens [at least rows, s], lengths [rows], samplers, written, number. Arguments of
    decode: params, tokens [rows], caches (donated), positions [rows], samplers, written, number. `number` is how many
    tokens of each row were generated before.
    """

    prefill: Any
    decode: Any


@lru_cache(maxsize=16)
def programs(
    model: ModelConfig,
    mesh: MeshShape,
    split: CacheSplit,
    rows: int,
    length: int,
    dtype: Any,
    sp_method: SequenceMethod = "gather",
    *,
    gathers_weights: bool = False,
) -> Programs:
    """Return the programs for `rows` rows of up to `length` tokens; prefill compiles for each padded prompt length."""
    layout = decode_layout(model, mesh, split)
    of_prompts = prompt_layout(model, mesh, split, sp_method, gathers_weights=gathers_weights)
    caches = abstract_caches(model, layout, rows, length, dtype)
    empty: Any = (*caches, *abstract_states(model, layout, rows, dtype))

    def choice(
        params: Any, x: Array, table: Array, samplers: Samplers, written: Written, number: Array
    ) -> tuple[Array, Written]:
        scores = logits(params, x, table, model, layout)[:, 0]
        chosen = jax.reshard(choose(scores, samplers, written, number), layout.spec("batch"))
        return chosen, with_chosen(written, jax.reshard(chosen, P()))

    @jax.jit
    def prefill(
        params: Any, tokens: Array, lengths: Array, samplers: Samplers, written: Written, number: Array
    ) -> tuple[Array, Caches, Written]:
        more = jnp.pad(lengths, (0, tokens.shape[0] - rows))
        x, caches = _prefill(params, tokens, more, empty_caches(empty), model, of_prompts, dtype, sp_method)
        own = jax.reshard(more, of_prompts.spec("batch"))[:, None]
        places = jax.reshard(jnp.arange(x.shape[1]), P(jax.typeof(x).sharding.spec[1]))
        # One term per row is nonzero, so the sum is exact in the dtype of the stream.
        x = lax.reduce_sum(jnp.where((places[None] == own - 1)[..., None], x, 0), axes=(1,))[:, None]
        x = jax.reshard(x, P())[:rows] if rows < x.shape[0] else x
        x = jax.reshard(x, layout.spec("batch", "sequence", "activation"))
        chosen, written = choice(params, x, table_in_use(params, layout, dtype), samplers, written, number)
        return chosen, caches, written

    @jax.jit(donate_argnums=2)
    def decode(
        params: Any,
        tokens: Array,
        caches: Caches,
        positions: Array,
        samplers: Samplers,
        written: Written,
        number: Array,
    ) -> tuple[Array, Caches, Written]:
        x, table, caches = through_cache(params, tokens[:, None], positions[:, None], caches, model, layout, dtype)
        chosen, written = choice(params, x, table, samplers, written, number)
        return chosen, caches, written

    return Programs(prefill, decode)


def _prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    caches: Caches,
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
    sp_method: SequenceMethod,
) -> tuple[Array, Caches]:
    """Return the residual stream [rows, s, d] after all layers, and the caches with the prompts written to them."""
    is_stationary, is_latent = layout.cache_split is not None, model.attention.latent is not None
    along = attention_layout(layout, is_latent).axes("sequence") if is_stationary else layout.axes("sequence")
    positions = positions_of({"tokens": tokens}, model, jax.reshard(lengths, layout.spec("batch")), along=along)
    if isinstance(model.positions, LearnedPositions):
        # Padding may have positions beyond the last row of the table.
        positions = positions._replace(numbers=jnp.minimum(positions.numbers, model.positions.rows - 1))
    strategy = DEFAULT if model.needs_scores else replace(DEFAULT, attention="flash", sp_method=sp_method)
    x, _ = embed(params, tokens, positions, model, layout, dtype)
    declared: Any = parameters(model)
    stored = decode_layout(model, layout.mesh)
    shared: dict[int | None, Cache] = {}

    def layer(
        stack: Stack,
        x: Array,
        weights: Any,
        cache: Cache | DeltaState,
        cache_layer: Array | int,
        own_input: Array | None,
    ) -> tuple[Array, Cache | DeltaState]:
        if not is_stationary:
            weights = jax.tree.map(
                lambda parameter, weight: jax.reshard(
                    as_declared(weight, stored, dtype), layout.spec(*parameter.axes[1:])
                ),
                declared[stack.name],
                weights,
            )
        context = LayerContext(positions=positions, layout=layout, strategy=strategy, own_input=own_input)
        if isinstance(cache, DeltaState):
            return _through_states(stack, x, weights, replace(context, cache=rows(cache), cache_layer=cache_layer))
        if stack.is_sharing:
            # The cache holds only the last keys of a window, and these layers attend to those of the whole prompt.
            return run_layer(stack, x, weights, replace(context, shared=shared[stack.window])).stream, cache
        result = run_layer(stack, x, weights, context)
        assert isinstance(result.cache, Cache), "a layer without attention"
        if stack.is_donor:
            shared[stack.window] = result.cache
        return result.stream, with_prompts(cache, result.cache, cache_layer, lengths)

    def rows(state: DeltaState) -> DeltaCache:
        return DeltaCache(state, jnp.arange(tokens.shape[0]), jnp.zeros_like(lengths), lengths)

    return _through_layers(layer, params, tokens, x, caches, model, layout)


def through_cache(
    params: Any,
    tokens: Array,
    positions: Array,
    caches: tuple[Any, ...],
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
    lengths: Array | None = None,
    slots: Array | None = None,
) -> tuple[Array, Array, Any]:
    """Run all layers on new tokens [rows, s] at positions [rows, s], over caches of earlier tokens.

    Args:
        caches: a `Cache` (s is 1) or a `PagedCache` for each window; then, if layers have linear attention, a
          `DeltaState` after `Cache`s or a `DeltaCache` after `PagedCache`s.
        lengths: see `positions_in_cache`.
        slots: see `LayerContext`.

    Returns:
        The residual stream [rows, s, d] after all layers, the embedding table, and the updated caches.
    """
    x, table = embed(params, tokens, PositionInfo(positions, {}), model, layout, dtype, slots)
    # A device may have fewer rows of queries, keys and values than of the residual stream.
    rows = head_rows(layout, model.attention.latent is not None) or None
    ends = None if lengths is None else jax.reshard(lengths, P(rows, None))
    info = positions_in_cache(jax.reshard(positions, P(rows, None)), model, ends)

    def layer(
        stack: Stack, x: Array, weights: Any, cache: Any, cache_layer: Array | int, own_input: Array | None
    ) -> tuple[Array, Any]:
        context = LayerContext(positions=info, layout=layout, cache=cache, cache_layer=cache_layer, slots=slots)
        context = replace(context, own_input=own_input)
        if isinstance(cache, DeltaState):
            own = positions[:, 0]
            one = DeltaCache(cache, jnp.arange(positions.shape[0]), own, jnp.ones_like(own))
            return _through_states(stack, x, weights, replace(context, cache=one))
        result = run_layer(stack, x, weights, context)
        assert result.cache is not None, "a layer without attention"
        return result.stream, result.cache

    x, caches = _through_layers(layer, params, tokens, x, caches, model, layout)
    return x, table, caches


def _through_states(stack: Stack, x: Array, weights: Any, context: LayerContext) -> tuple[Array, DeltaState]:
    """Run a layer with linear attention; return the residual stream and the updated states of all such layers."""
    result = run_layer(stack, x, weights, context)
    assert isinstance(result.cache, DeltaCache), "a layer without linear attention"
    return result.stream, result.cache.state


def _through_layers(
    layer: Callable[[Stack, Array, Any, Any, Array | int, Array | None], tuple[Array, Any]],
    params: Any,
    tokens: Array,
    x: Array,
    caches: tuple[Any, ...],
    model: ModelConfig,
    layout: ShardingContext,
) -> tuple[Array, Any]:
    """Run all layers; return the residual stream and the updated caches.

    Layers repeat in cycles (for example by window). Stacked weights run in a loop over cycles; weights in one array for
    each layer (`for_server_products`) run one layer after the other.

    Args:
        layer: runs one layer: (its `Stack`, stream, weights, cache of its window, index in that cache, own input) ->
          stream and cache. A layer that attends to keys and values of an earlier one has the index of that layer.
        tokens, x: [b, s], and the residual stream before the layers.
    """
    inputs = layer_inputs(params, tokens, x, model, layout)
    x = widened(params, x, model, layout)
    windows = list(layers_by_window(model))
    # For each cache, the number of its layers in earlier stacks.
    before = [0] * len(caches)
    for stacks in alternating(layers(model)):
        period, count = math.lcm(*(stack.period for stack in stacks)), stacks[0].num_layers
        members = [stack.layer(number) for number in range(min(period, count)) for stack in stacks]
        # States of linear attention are the last of the caches.
        caches_of = [windows.index(member.window) if _attends(member) else len(windows) for member in members]
        first = list(before)

        def cycle(
            carry: tuple[Array, tuple[Any, ...]],
            number: Array | int,
            count: int,
            stacks: tuple[Stack, ...] = stacks,
            members: list[Stack] = members,
            caches_of: list[int] = caches_of,
            first: list[int] = first,
        ) -> tuple[Array, tuple[Any, ...]]:
            """Run the first `count` layers of cycle `number`; return the updated (stream, caches)."""
            x, caches = carry
            for place, (member, own) in enumerate(zip(members[:count], caches_of, strict=False)):
                turn, own_stack = divmod(place, len(stacks))
                index = number * (len(members) // len(stacks)) + turn
                with jax.named_scope(WEIGHTS):
                    weights = layer_weights(params[stacks[own_stack].name], index, x.dtype)
                cache_layer = first[own] + number * caches_of.count(own) + caches_of[:place].count(own)
                if member.is_sharing:
                    cache_layer = first[own] - 1  # The last of those with this window.
                own_input = inputs.get(stacks[own_stack].name)
                if own_input is not None:
                    own_input = lax.dynamic_index_in_dim(own_input, index, 0, keepdims=False)
                x, cache = layer(member, x, weights, caches[own], cache_layer, own_input)
                caches = (*caches[:own], cache, *caches[own + 1 :])
            return x, caches

        cycles, rest = divmod(count, period)
        each, last = period * len(stacks), rest * len(stacks)
        # Keys and values for later layers do not leave a loop.
        if isinstance(params[stacks[0].name], tuple) or any(stack.is_donor for stack in stacks):
            for number in range(cycles):
                x, caches = cycle((x, caches), number, each)
        elif cycles:
            (x, caches), _ = jax.lax.scan(
                lambda carry, number, cycle=cycle, count=each: (cycle(carry, number, count), None),
                (x, caches),
                jnp.arange(cycles),
            )
        x, caches = cycle((x, caches), cycles, last)
        for place, own in enumerate(caches_of):
            before[own] += 0 if members[place].is_sharing else cycles + (place < last)
    return narrowed(params, x, model, layout), caches


def _attends(stack: Stack) -> bool:
    """Whether a one-layer stack has softmax attention, not linear attention."""
    return any(isinstance(op, Attention) for op in stack.ops)
