"""The inputs of a layer other than its weights and the residual stream: positions, dropout, and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.execution.models.dropout import DropoutRng
from meshwright.execution.models.generation.cache import Cache
from meshwright.execution.models.generation.delta_state import DeltaCache
from meshwright.execution.models.generation.paged_cache import PagedCache
from meshwright.execution.models.rotary import AllTables, rotary_tables
from meshwright.execution.runtime.attention.segments import Segments
from meshwright.execution.runtime.sharding_context import ShardingContext

Weights = Mapping[str, Any]

KEY_SEGMENTS = "key_segments"
"""Key of the batch entry with the document ids of all keys of a row, see `with_key_segments`."""


class PositionInfo(NamedTuple):
    """Positions of tokens and values computed from them, the same in every layer.

    Attributes:
        numbers: positions [s], or [b, s] if rows differ.
        tables: rotary tables of the positions.
        segments: positions and document ids of the tokens; None if each row is one document in order.
        key_ids: document ids of all keys of a row [b, t], if a device has more keys than queries.
    """

    numbers: Array
    tables: AllTables
    segments: Segments | None = None
    key_ids: Array | None = None


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The inputs of one layer besides weights and residual stream.

    layer: its number in its stack, needed if layers of the stack differ. cache: in generation, past keys and values of
    all layers with this layer's window, or states of all layers with linear attention; cache_layer: the layer's index
    in it. slots: in a server with adapter slots, the slot of each row [b], from 1; 0 for none.
    """

    positions: PositionInfo
    layout: ShardingContext
    strategy: Strategy = DEFAULT
    rng: DropoutRng | None = None
    layer: Array | int | None = None
    cache: Cache | PagedCache | DeltaCache | None = None
    cache_layer: Array | int = 0
    slots: Array | None = None


def positions_of(
    batch: Weights, model: ModelConfig, lengths: Array | int | None = None, along: tuple[str, ...] | None = None
) -> PositionInfo:
    """Return the positions of a batch's tokens; rotary tables are sharded like the tokens, or `along` these axes.

    lengths: lengths of the rows [b] without padding; default: no padding.
    """
    tokens = jax.typeof(batch["tokens"])
    own: Array | int = tokens.shape[1] if lengths is None else lengths
    if "positions" in batch:
        segments = Segments(batch["positions"], batch.get("segments"))
        tables = rotary_tables(segments.positions, model, own)
        return PositionInfo(segments.positions, tables, segments, batch.get(KEY_SEGMENTS))
    whole = jnp.arange(tokens.shape[1])
    split = tokens.sharding.spec[1] if along is None else along or None
    return PositionInfo(whole, rotary_tables(jax.reshard(whole, P(split)), model, own))


def with_key_segments(batch: Weights, layout: ShardingContext, strategy: Strategy) -> Weights:
    """Add the document ids of all keys [b, t] to a packed batch, if sp splits tokens but not keys.

    The ids are gathered here, once for all layers. In a ring they are sent with the keys.
    """
    if "segments" not in batch or not layout.axes("sequence") or strategy.sp_method == "ring":
        return batch
    return {**batch, KEY_SEGMENTS: layout.place(batch["segments"], "batch", "activation")}


def positions_in_cache(positions: Array, model: ModelConfig, lengths: Array | None = None) -> PositionInfo:
    """Return the positions [b, s] of the tokens that follow a cache.

    lengths: the sequence length up to which each token attends [b, s]; default: up to itself.
    """
    seen = positions + 1 if lengths is None else lengths
    return PositionInfo(positions, rotary_tables(positions, model, seen))
