"""Generate tokens: prefill the prompts in one program, then decode one token of every row a step from a KV cache.

Prompts may differ in length: each row has a position of its own. Prefill is sharded as
training is; decoding shards rows as a batch, the cache's slots over sp, and heads over tp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.mesh import MeshShape
from meshwright.models.cache import Cache, empty_cache, with_prompts
from meshwright.models.context import LayerContext, positions_in_cache, positions_of
from meshwright.models.ends import embed, logits
from meshwright.models.layer import run_layer
from meshwright.models.sampling import Samplers, Sampling, choose, samplers_of
from meshwright.runtime import ShardingContext
from meshwright.step import DEFAULT, RULES, ModelConfig
from meshwright.step.blocks import layers
from meshwright.step.frequencies import LongRopeScaling
from meshwright.step.layer import Stack

SHORTEST_PROMPT = 16
"""Prompts are padded to a power of two from here on, so that few programs are compiled."""

SLOTS = 64
"""Slots of a cache are allotted in these many at a time, for the same reason."""


def layouts_of(mesh: MeshShape) -> tuple[ShardingContext, ShardingContext]:
    """The sharding contexts of prefill and of decoding, where the sequence is one token and is replicated."""
    return ShardingContext(mesh), ShardingContext(mesh, {**RULES, "sequence": (), "residual_sequence": ()})


def generate_tokens(
    params: Mapping[str, Any],
    prompts: Sequence[np.ndarray],
    model: ModelConfig,
    mesh: MeshShape,
    *,
    num_tokens: int,
    sampling: Sequence[Sampling],
    dtype: Any,
) -> Iterator[np.ndarray]:
    """The next token of every prompt, [rows] each, num_tokens times. To be called under `jax.set_mesh`.

    Args:
        prompts: of each row its tokens, at least one. sampling: of each row.
    """
    num_prompts = len(prompts)
    # Padding rows repeat the first prompt; they are not returned.
    prompts = [*prompts, *[prompts[0]] * (-num_prompts % mesh.degree(RULES["batch"]))]
    sampling = [*sampling, *[sampling[0]] * (len(prompts) - num_prompts)]
    rows, lengths = len(prompts), np.array([len(prompt) for prompt in prompts], np.int32)
    split = mesh.degree(("sp", "tp"))
    slots = -(-(_padded_length(lengths, split) + num_tokens) // (SLOTS * split)) * SLOTS * split
    samplers = samplers_of(sampling)
    seen = None
    if samplers.repetition_penalty is not None:
        seen = jnp.asarray(np.stack([np.isin(np.arange(model.vocab), prompt) for prompt in prompts]))
    prefill, decode = _programs(model, mesh, rows, slots, jnp.dtype(dtype))

    def read(texts: Sequence[np.ndarray], seen: Array | None, number: int) -> tuple[Array, Cache, Array | None]:
        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = np.zeros((rows, min(slots, _padded_length(lengths, split))), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        placed = jax.device_put(tokens, layouts_of(mesh)[0].spec("batch", "sequence"))
        return prefill(params, placed, jnp.asarray(lengths), samplers, seen, jnp.int32(number))

    switches, made = _switching_length(model), list[Array]()
    chosen, cache, seen = read(prompts, seen, 0)
    for number in range(1, num_tokens):
        # The next step is dispatched before this token is read.
        positions, before = lengths + number - 1, chosen
        made.append(chosen)
        if np.any(positions == switches):
            texts = np.stack(made, axis=1)
            chosen, cache, seen = read([np.append(*row) for row in zip(prompts, texts, strict=True)], seen, number)
        else:
            chosen, cache, seen = decode(
                params, chosen, cache, jnp.asarray(positions), samplers, seen, jnp.int32(number)
            )
        yield np.asarray(before)[:num_prompts]
    yield np.asarray(chosen)[:num_prompts]


def _padded_length(lengths: np.ndarray, split: int) -> int:
    """The tokens to which texts are padded on a mesh that splits them `split` ways."""
    padded = max(SHORTEST_PROMPT, 1 << (int(lengths.max()) - 1).bit_length())
    return -(-padded // split) * split


def _switching_length(model: ModelConfig) -> int | None:
    """The position whose token makes a text so long that all its rotary frequencies are others (LongRoPE).

    What a cache holds was computed with those of shorter texts: the text is read anew, as transformers does for Phi-3.
    """
    scaling = model.rope_scaling
    return scaling.original_max_seq_len if isinstance(scaling, LongRopeScaling) else None


@lru_cache(maxsize=16)
def _programs(model: ModelConfig, mesh: MeshShape, rows: int, slots: int, dtype: Any) -> tuple[Any, Any]:
    """The prefill and decode programs, which JAX compiles for each padded length of prompts.

    Both return the tokens chosen [rows], the cache, and which tokens each text has, where that matters.
    """
    prefill_layout, decode_layout = layouts_of(mesh)

    def choice(scores: Array, samplers: Samplers, seen: Array | None, number: Array) -> tuple[Array, Array | None]:
        chosen = choose(jax.reshard(scores[:, 0], P()), samplers, seen, number)
        return chosen, seen if seen is None else seen.at[jnp.arange(rows), chosen].set(True)

    @jax.jit
    def prefill(
        params: Any, tokens: Array, lengths: Array, samplers: Samplers, seen: Array | None, number: Array
    ) -> tuple[Array, Cache, Array | None]:
        cache = empty_cache(model, prefill_layout, rows, slots, dtype)
        x, table, cache = _prefill(params, tokens, lengths, cache, model, prefill_layout, dtype)
        x = jax.reshard(x, decode_layout.spec("batch", "sequence", "activation"))
        last = jnp.arange(x.shape[1])[None] == jax.reshard(lengths, decode_layout.spec("batch"))[:, None] - 1
        x = jnp.where(last[..., None], x, 0).sum(axis=1, keepdims=True)
        chosen, seen = choice(logits(params, x, table, model, decode_layout), samplers, seen, number)
        return chosen, cache, seen

    @jax.jit(donate_argnums=2)
    def decode(
        params: Any,
        tokens: Array,
        cache: Cache,
        positions: Array,
        samplers: Samplers,
        seen: Array | None,
        number: Array,
    ) -> tuple[Array, Cache, Array | None]:
        placed = jax.reshard(tokens[:, None], decode_layout.spec("batch", "sequence"))
        own = jax.reshard(positions[:, None], decode_layout.spec("batch", "sequence"))
        x, table, cache = _decode(params, placed, own, cache, model, decode_layout, dtype)
        chosen, seen = choice(logits(params, x, table, model, decode_layout), samplers, seen, number)
        return chosen, cache, seen

    return prefill, decode


def _prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    cache: Cache,
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
) -> tuple[Array, Array, Cache]:
    """The residual stream [rows, s, d] after all layers, the embedding table, and the cache with the prompts."""
    positions = positions_of({"tokens": tokens}, model, jax.reshard(lengths, layout.spec("batch")))
    if model.positions == "learned":
        # Padding may stand behind the last row of the table.
        positions = positions._replace(positions=jnp.minimum(positions.numbers, model.max_positions - 1))
    strategy = DEFAULT if model.attention_softcap else replace(DEFAULT, attention="flash")
    x, table = embed(params, tokens, positions, model, layout, dtype)

    def layer(
        stack: Stack, x: Array, weights: Any, number: Array, cache: Cache, cache_layer: Array
    ) -> tuple[Array, Cache]:
        context = LayerContext(positions=positions, layout=layout, strategy=strategy, layer=number)
        result = run_layer(stack, x, weights, context)
        assert result.cache is not None, "a layer without attention"
        return result.stream, with_prompts(cache, result.cache, cache_layer)

    x, cache = _through_layers(layer, params, x, cache, model)
    return x, table, cache


def _decode(
    params: Any, tokens: Array, positions: Array, cache: Cache, model: ModelConfig, layout: ShardingContext, dtype: Any
) -> tuple[Array, Array, Cache]:
    """The residual stream [rows, 1, d] of a token of each row at positions [rows, 1], the table, and the cache."""
    info = positions_in_cache(positions, model)
    x, table = embed(params, tokens, info, model, layout, dtype)

    def layer(
        stack: Stack, x: Array, weights: Any, number: Array, cache: Cache, cache_layer: Array
    ) -> tuple[Array, Cache]:
        context = LayerContext(positions=info, layout=layout, layer=number, cache=cache, cache_layer=cache_layer)
        result = run_layer(stack, x, weights, context)
        assert result.cache is not None, "a layer without attention"
        return result.stream, result.cache

    x, cache = _through_layers(layer, params, x, cache, model)
    return x, table, cache


def _through_layers(
    layer: Callable[[Stack, Array, Any, Array, Cache, Array], tuple[Array, Cache]],
    params: Any,
    x: Array,
    cache: Cache,
    model: ModelConfig,
) -> tuple[Array, Cache]:
    """The residual stream and the cache after all layers.

    layer: of a stack, the stream, weights, the layer's number in its stack, the cache, and its number in the cache.
    """
    first = 0
    for stack in layers(model):

        def body(
            carry: tuple[Array, Cache], own: tuple[Any, Array], stack: Stack = stack, first: int = first
        ) -> tuple[tuple[Array, Cache], None]:
            (x, cache), (weights, number) = carry, own
            return layer(stack, x, weights, number, cache, first + number), None

        (x, cache), _ = jax.lax.scan(body, (x, cache), (params[stack.name], jnp.arange(stack.num_layers)))
        first += stack.num_layers
    return x, cache
