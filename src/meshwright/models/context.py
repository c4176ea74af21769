"""The context of a layer beside its weights and the residual stream: positions, dropout, and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.models.cache import Cache
from meshwright.models.dropout import DropoutRng
from meshwright.models.rotary import AllTables, rotary_tables
from meshwright.runtime import ShardingContext
from meshwright.runtime.attention.segments import Segments
from meshwright.step import DEFAULT, ModelConfig, Strategy

Weights = Mapping[str, Any]


class PositionInfo(NamedTuple):
    """Positions of tokens ([s] for tokens in order) and their rotary tables, the same in every layer."""

    positions: Array | Segments
    tables: AllTables

    @property
    def numbers(self) -> Array:
        """The positions [s], or [b, s] if rows differ."""
        return self.positions.positions if isinstance(self.positions, Segments) else self.positions


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The context of one layer.

    layer: its number in its stack, needed if layers of the stack differ. cache: past keys and values of all layers with
    its window, in generation; cache_layer: the layer's index in it.
    """

    positions: PositionInfo
    layout: ShardingContext
    strategy: Strategy = DEFAULT
    rng: DropoutRng | None = None
    layer: Array | int | None = None
    cache: Cache | None = None
    cache_layer: Array | int = 0


def positions_of(
    batch: Weights, model: ModelConfig, lengths: Array | int | None = None, along: tuple[str, ...] | None = None
) -> PositionInfo:
    """The positions of a batch's tokens; rotary tables are sharded like the tokens, or `along` these axes.

    lengths: of the rows [b] before padding; by default there is none.
    """
    tokens = jax.typeof(batch["tokens"])
    own: Array | int = tokens.shape[1] if lengths is None else lengths
    if "positions" in batch:
        segments = Segments(batch["positions"], batch.get("segments"))
        return PositionInfo(segments, rotary_tables(segments.positions, model, own))
    whole = jnp.arange(tokens.shape[1])
    split = tokens.sharding.spec[1] if along is None else along or None
    return PositionInfo(whole, rotary_tables(jax.reshard(whole, P(split)), model, own))


def positions_in_cache(positions: Array, model: ModelConfig) -> PositionInfo:
    """The positions [b, 1] of the tokens that follow a cache, which end their sequences."""
    return PositionInfo(Segments(positions), rotary_tables(positions, model, positions[:, 0] + 1))
