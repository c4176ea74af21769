"""Sample tokens from a model one at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.mesh import MeshShape
from meshwright.models.context import Cache, LayerContext, position_info
from meshwright.models.ends import embed, logits
from meshwright.models.layer import run_layer
from meshwright.runtime import ShardingContext
from meshwright.step import RULES, ModelConfig
from meshwright.step.blocks import layers
from meshwright.step.layer import Stack

CACHED = ("layers", "batch", "sequence", "kv_heads", "head_dim")


def sampling_layout(mesh: MeshShape, num_samples: int) -> ShardingContext:
    """The layout of decoding: weights and cache sharded as in training, the sequence of one token replicated.

    Samples are sharded over dp and fsdp if these divide them, else replicated.
    """
    is_divisible = num_samples % mesh.degree(RULES["batch"]) == 0
    replicated = {"sequence": (), "residual_sequence": ()} | ({} if is_divisible else {"batch": ()})
    return ShardingContext(mesh, {**RULES, **replicated})


def sample(
    params: Mapping[str, Any],
    prompts: np.ndarray,
    model: ModelConfig,
    layout: ShardingContext,
    *,
    num_tokens: int,
    temperature: float,
    dtype: Any,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Yield `num_tokens` arrays [samples]: the next token of each prompt [samples, length].

    temperature: 0 for the most likely token. Called under `jax.set_mesh`.
    """
    samples, length = prompts.shape
    shape = (model.num_layers, samples, length + num_tokens, model.num_kv_heads, model.head_dim)
    cache = Cache(*(jnp.zeros(shape, dtype, out_sharding=layout.spec(*CACHED)) for _ in Cache._fields))

    @jax.jit(donate_argnums=2)
    def step(params: Any, tokens: Array, cache: Cache, start: Array, key: Array) -> tuple[Array, Cache]:
        """The next token after `tokens` [samples, length] from position `start`, and the extended cache."""
        scores, cache = _forward(params, tokens, cache, start, model, layout, dtype)
        scores = jax.reshard(scores[:, -1], layout.spec("batch", "activation"))
        if temperature == 0:
            return jnp.argmax(scores, axis=-1), cache
        return jax.random.categorical(key, scores / temperature), cache

    tokens, start = jax.device_put(prompts, layout.spec("batch", "sequence")), 0
    for key in jax.random.split(jax.random.key(seed), num_tokens):
        chosen, cache = step(params, tokens, cache, jnp.int32(start), key)
        start += tokens.shape[1]
        tokens = chosen[:, None]
        yield np.asarray(chosen)


def _forward(
    params: Mapping[str, Any],
    tokens: Array,
    cache: Cache,
    start: Array,
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
) -> tuple[Array, Cache]:
    """The logits [samples, 1, vocab] after `tokens` from position `start`, and the extended cache."""
    positions = position_info(start + jnp.arange(tokens.shape[1]), model)
    x, table = embed(params, tokens, positions, model, layout, dtype)
    first, parts = 0, []
    for stack in layers(model):

        def layer(x: Array, own: tuple[Any, Cache, Array], stack: Stack = stack) -> tuple[Array, Cache]:
            weights, layer_cache, number = own
            context = LayerContext(positions=positions, layout=layout, layer=number, cache=layer_cache)
            result = run_layer(stack, x, weights, context)
            assert result.cache is not None, "a layer without attention"
            return result.stream, result.cache

        last = first + stack.num_layers
        own = (params[stack.name], Cache(*(array[first:last] for array in cache)), jnp.arange(stack.num_layers))
        x, part = jax.lax.scan(layer, x, own)
        first, parts = last, [*parts, part]
    whole = Cache(*(jnp.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return logits(params, x[:, -1:], table, model, layout), whole
