"""Logits and per-token losses of whole texts, any number of texts of any length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.rules import RULES
from meshwright.description.step.sequence import least_length
from meshwright.execution.models.context import Weights, positions_of
from meshwright.execution.models.decoder import through_layers
from meshwright.execution.models.ends import embed, logits, token_losses
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape


def all_logits(
    params: Weights, tokens: np.ndarray, lengths: np.ndarray, model: ModelConfig, mesh: MeshShape, dtype: Any
) -> Array:
    """Return float32 logits [b, s, v] of tokens [b, s]; row i has `lengths[i]` tokens. Call it under `jax.set_mesh`.

    Both dims are padded to sizes that the mesh divides, and the result is cut to [b, s] again; padding after a text
    changes none of its logits.
    """
    rows, length = tokens.shape
    return _logits(model, mesh, rows, length, dtype)(params, *_placed(model, mesh, lengths, tokens))


def all_losses(
    params: Weights,
    tokens: np.ndarray,
    targets: np.ndarray,
    lengths: np.ndarray,
    model: ModelConfig,
    mesh: MeshShape,
    dtype: Any,
) -> np.ndarray:
    """Return the losses in nats [b, s] of targets [b, s], each predicted from its row's tokens up to the same position.

    Other arguments are as in `all_logits`. If the vocab is split, logits are never gathered.
    """
    rows, length = tokens.shape
    found = _losses(model, mesh, dtype)(params, *_placed(model, mesh, lengths, tokens, targets))
    return np.asarray(found)[:rows, :length]


def _placed(model: ModelConfig, mesh: MeshShape, lengths: np.ndarray, *tokens: np.ndarray) -> Iterator[Array]:
    """Yield lengths [b], then each array of tokens [b, s], all padded and sharded on the mesh."""
    rows, length = tokens[0].shape
    longest = max(length, least_length(model, mesh.sp))
    longest += -longest % mesh.degree(RULES["residual_sequence"])
    more = -rows % mesh.degree(RULES["batch"]), longest - length
    layout = ShardingContext(mesh)
    yield jax.device_put(np.pad(lengths.astype(np.int32), (0, more[0])), layout.spec("batch"))
    for array in tokens:
        yield jax.device_put(np.pad(array, ((0, more[0]), (0, more[1]))), layout.spec("batch", "sequence"))


@lru_cache(maxsize=16)
def _logits(model: ModelConfig, mesh: MeshShape, rows: int, length: int, dtype: Any) -> Any:
    layout = ShardingContext(mesh)

    @jax.jit
    def run(params: Weights, lengths: Array, tokens: Array) -> Array:
        scores = _scores(params, tokens, lengths, model, layout, dtype)
        return jax.reshard(scores, P(None, None, None))[:rows, :length, : model.vocab]

    return run


@lru_cache(maxsize=16)
def _losses(model: ModelConfig, mesh: MeshShape, dtype: Any) -> Any:
    layout = ShardingContext(mesh)

    @jax.jit
    def run(params: Weights, lengths: Array, tokens: Array, targets: Array) -> Array:
        losses = token_losses(_scores(params, tokens, lengths, model, layout, dtype), targets)
        return jax.reshard(losses, P(None, None))

    return run


def _scores(
    params: Weights, tokens: Array, lengths: Array, model: ModelConfig, layout: ShardingContext, dtype: Any
) -> Array:
    """Return the logits [b, s, v] of tokens [b, s], both sharded on the mesh."""
    positions = positions_of({"tokens": tokens}, model, lengths)
    x, table = embed(params, tokens, positions, model, layout, dtype)
    x, _ = through_layers(params, tokens, x, positions, model, layout, "none")
    return logits(params, x, table, model, layout)
