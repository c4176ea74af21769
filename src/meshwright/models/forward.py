"""Logits of whole texts, of any number and length."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.mesh import MeshShape
from meshwright.models.context import Weights, positions_of
from meshwright.models.decoder import layers
from meshwright.models.ends import embed, logits
from meshwright.runtime import ShardingContext
from meshwright.step import DEFAULT, RULES, ModelConfig
from meshwright.step.blocks import layers as stacks_of


def all_logits(
    params: Weights, tokens: np.ndarray, lengths: np.ndarray, model: ModelConfig, mesh: MeshShape, dtype: Any
) -> Array:
    """The float32 logits [b, s, v] of tokens [b, s], of which a row has `lengths` [b]. Call it under `jax.set_mesh`.

    Rows and tokens are padded to what the mesh divides, as padding behind a text changes none of its logits.
    """
    rows, length = tokens.shape
    more = -rows % mesh.degree(RULES["batch"]), -length % mesh.degree(RULES["residual_sequence"])
    padded = np.pad(tokens, ((0, more[0]), (0, more[1])))
    layout = ShardingContext(mesh)
    placed = jax.device_put(padded, layout.spec("batch", "sequence"))
    own = jax.device_put(np.pad(lengths.astype(np.int32), (0, more[0])), layout.spec("batch"))
    return _program(model, mesh, rows, length, dtype)(params, placed, own)


@lru_cache(maxsize=16)
def _program(model: ModelConfig, mesh: MeshShape, rows: int, length: int, dtype: Any) -> Any:
    layout = ShardingContext(mesh)

    @jax.jit
    def run(params: Weights, tokens: Array, lengths: Array) -> Array:
        positions = positions_of({"tokens": tokens}, model, lengths)
        x, table = embed(params, tokens, positions, model, layout, dtype)
        for stack in stacks_of(model):
            x, _ = layers(stack, params[stack.name], x, positions, layout, "none", DEFAULT)
        scores = logits(params, x, table, model, layout)
        return jax.reshard(scores, P(None, None, None))[:rows, :length]

    return run
