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
from meshwright.description.step.sequence import reads_key_segments
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
"""Name of the batch entry with the document ids of all keys of a row, see `with_key_segments`."""


class PositionInfo(NamedTuple):
    """Positions of tokens and values computed from them, the same in every layer.

    Attributes:
        numbers: positions [s], or [b, s] if rows differ.
        tables: rotary tables of the positions.
        segments: positions and document ids of the tokens; None if each row is one document in order.
        key_ids: document ids of all keys of a row [b, t], if a device has more keys than queries; else None.
    """

    numbers: Array
    tables: AllTables
    segments: Segments | None = None
    key_ids: Array | None = None


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The inputs of one layer besides weights and residual stream.

    rng: dropout; None for no dropout. layer: the layer's number in its stack, needed if layers of the stack differ.
    cache: in generation, past keys and values of all layers with this layer's window, or states of all layers with
    linear attention. cache_layer: the layer's index in the cache. slots: in a server with adapter slots, the slot of
    each row's adapter [b], from 1; 0 for a row without an adapter. own_input: the layer's own input [b, s, p]. shared:
    keys and values of an earlier layer, for a layer without any; in generation only while prompts are read whole.
    """

    positions: PositionInfo
    layout: ShardingContext
    strategy: Strategy = DEFAULT
    rng: DropoutRng | None = None
    layer: Array | int | None = None
    cache: Cache | PagedCache | DeltaCache | None = None
    cache_layer: Array | int = 0
    slots: Array | None = None
    own_input: Array | None = None
    shared: Cache | None = None


def positions_of(
    batch: Weights, model: ModelConfig, lengths: Array | int | None = None, along: tuple[str, ...] | None = None
) -> PositionInfo:
    """Return the positions of a batch's tokens, and the rotary tables of these positions.

    Args:
        batch: `tokens` [b, s]; `positions` and `segments` [b, s] if rows hold several documents (see `loss_and_load`).
        lengths: lengths of the rows [b] without padding; default: no padding.
        along: mesh axes that split the rotary tables along the sequence; default: those that split the tokens.
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


def with_key_segments(batch: Weights, model: ModelConfig, layout: ShardingContext, strategy: Strategy) -> Weights:
    """Return a packed batch with the document ids of all keys of a row [b, t] added, if sp splits the row's tokens.

    The ids are gathered here, once for all layers. If no layer reads them, as in a ring, which sends ids with the keys,
    the batch is unchanged.
    """
    if "segments" not in batch or not layout.axes("sequence") or not reads_key_segments(model, strategy.sp_method):
        return batch
    return {**batch, KEY_SEGMENTS: layout.place(batch["segments"], "batch", "activation")}


def positions_in_cache(positions: Array, model: ModelConfig, lengths: Array | None = None) -> PositionInfo:
    """Return the `PositionInfo` of new tokens at `positions` [b, s], whose earlier tokens are in a cache.

    lengths: the sequence length at each token [b, s], on which some rotary frequencies depend; default: position + 1.
    """
    seen = positions + 1 if lengths is None else lengths
    return PositionInfo(positions, rotary_tables(positions, model, seen))
