"""The embeddings before the layers, and the logits and the loss after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import CrossEntropy, Linear, Lookup, LowRank, Norm
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import RANK
from meshwright.execution.models.adapters import factors
from meshwright.execution.models.context import PositionInfo, Weights
from meshwright.execution.models.dropout import DropoutRng
from meshwright.execution.models.generation.stationary import low_rank_of_rows, multiply_stored, zero_other_slots
from meshwright.execution.models.linear import GATHERED, RESIDUAL, gathered, low_rank_columns
from meshwright.execution.models.norm import norm
from meshwright.execution.models.product import product
from meshwright.execution.runtime.experts.routing import ExpertLoad
from meshwright.execution.runtime.sharding_context import ShardingContext


def embed(
    params: Weights,
    tokens: Array,
    positions: PositionInfo,
    model: ModelConfig,
    layout: ShardingContext,
    dtype: Any,
    slots: Array | None = None,
) -> tuple[Array, Array]:
    """Return the residual stream [b, s, d] of `tokens` [b, s] before the layers, and the gathered embedding table.

    slots: in a server with adapter slots, the slot of each row's adapter (see `LayerContext`).
    """
    table, x = table_in_use(params, layout, dtype), None
    for op in program(model).embedding:
        match op:
            case Lookup(is_positional=False):
                x = _lookup(table, tokens, layout)
                if op.low_rank and slots is not None:
                    x = x + _lookup_of_slots(params, tokens, op.name, layout, dtype, slots)
                elif op.low_rank and not op.low_rank.slots:
                    x = x + _low_rank_lookup(params, tokens, op.name, op.low_rank, layout, dtype)
                if op.multiplier != 1.0:
                    x = x * jnp.asarray(op.multiplier, dtype)
            case Lookup():
                assert x is not None, "positions are added to embedded tokens"
                x = x + _positions(params[op.name], tokens, positions.numbers, layout, dtype)
            case Norm():
                assert x is not None, "there is nothing to norm before the lookup"
                x = norm(x, op, params[op.name], params.get(f"{op.name}_bias"))
    assert x is not None, "a model starts with a lookup"
    return x, table


def table_in_use(params: Weights, layout: ShardingContext, dtype: Any) -> Array:
    """Return the embedding table as lookups and tied logits use it, gathered and in `dtype`."""
    return layout.weight(params["embedding"], "vocab", "embed", dtype=dtype)


def _lookup(table: Array, tokens: Array, layout: ShardingContext, columns: str = "activation") -> Array:
    """Return the rows of `table` for tokens [b, s], sharded like the residual stream between blocks.

    If the vocab is sharded, each device looks up the tokens of all devices in its own rows, and the results are summed.

    columns: logical axis of the table's second dim.
    """
    axes = layout.axes("vocab")
    dims = {
        dim: tuple(axis for axis in axes if axis in layout.axes(name))
        for dim, name in ((1, "residual_sequence"), (0, "batch"))
    }
    copied = tuple(axis for axis in axes if not any(axis in split for split in dims.values()))
    if not axes:
        rows = table.at[tokens].get(out_sharding=layout.spec(*GATHERED[:2], columns))
        return layout.place(rows, *RESIDUAL[:2], columns)

    def lookup(table: Array, tokens: Array) -> Array:
        local = tokens - jax.lax.axis_index(axes) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
        for dim, split in dims.items():
            rows = jax.lax.psum_scatter(rows, split, scatter_dimension=dim, tiled=True) if split else rows
        return jax.lax.psum(rows, copied) if copied else rows

    specs = (jax.typeof(table).sharding.spec, jax.typeof(tokens).sharding.spec)
    return jax.shard_map(lookup, in_specs=specs, out_specs=layout.spec(*RESIDUAL[:2], columns))(table, tokens)


def _low_rank_lookup(
    params: Weights, tokens: Array, name: str, branch: LowRank, layout: ShardingContext, dtype: Any
) -> Array:
    """Return the low-rank branch [b, s, d] of a lookup of tokens [b, s], sharded like the residual stream.

    The rows of A [b, s, rank] are summed over the devices that split the vocabulary, instead of the larger result.
    """
    a, b = factors(params, name)
    rows = layout.weight(a, "vocab", "rank", dtype=dtype)
    low = _lookup(rows, tokens, layout, RANK) * jnp.asarray(branch.scale, dtype)
    out = layout.weight(b, "rank", "embed", dtype=dtype, along="residual_sequence")
    return product("bsr,rd->bsd", low, out)


def _lookup_of_slots(
    params: Weights, tokens: Array, name: str, layout: ShardingContext, dtype: Any, slots: Array
) -> Array:
    """Return the low-rank branch [b, s, d] of a lookup, with the adapter of each row's slot.

    The lookup reads the rows of A of all slots; those of other slots are set to zero before the matmul with B.
    """
    a, b = (each.astype(dtype) for each in factors(params, name))
    vocab, count, rank = a.shape
    rows = jax.lax.reshape(a, (vocab, count * rank), out_sharding=layout.spec("vocab", RANK))
    low = _lookup(rows, tokens, layout, RANK).reshape(*tokens.shape, count, rank)
    return jnp.einsum("bsnr,nrd->bsd", zero_other_slots(low, slots), b, out_sharding=layout.spec(*RESIDUAL))


def _positions(stored: Array, tokens: Array, numbers: Array, layout: ShardingContext, dtype: Any) -> Array:
    """Return the rows of a table of learned positions [p, d] for tokens [b, s]; each device looks up its own tokens.

    numbers: positions of the tokens, [s] or [b, s].
    """
    table = layout.weight(stored, "positions", "embed", dtype=dtype, along="residual_sequence")
    rows = layout.place(jnp.broadcast_to(numbers, tokens.shape), "batch", "residual_sequence")
    return table.at[rows].get(out_sharding=layout.spec(*RESIDUAL))


def logits(
    params: Weights,
    x: Array,
    table: Array,
    model: ModelConfig,
    layout: ShardingContext,
    rng: DropoutRng | None = None,
    slots: Array | None = None,
) -> Array:
    """Return the float32 logits [b, s, v] of the residual stream x [b, s, d], sharded over vocab.

    Logits of rows that pad the vocabulary (`step.padding`) are minus infinity.

    Args:
        table: the gathered embedding table, as `embed` returns it.
        rng: dropout of the input of the output head's adapter.
        slots: in a server with adapter slots, the slot of each row's adapter (see `LayerContext`).
    """
    final, unembedding, loss = program(model).logits
    assert isinstance(final, Norm)
    assert isinstance(unembedding, Linear)
    assert isinstance(loss, CrossEntropy)
    residual = norm(x, final, params[final.name], params.get(f"{final.name}_bias"))
    h = gathered(residual, layout, "vocab")
    if layout.cache_split is not None:
        # In generation weights are not gathered; logits are partial sums over the axes that split the stream.
        stored = table if unembedding.is_tied else params[unembedding.name].astype(h.dtype).T
        weight = jax.reshard(stored, layout.spec("vocab", "embed"))
        sums = layout.spec("batch", "sequence", "vocab", unreduced=layout.axes("activation"))
        scores = multiply_stored("bsd,vd->bsv", h, weight, layout, dtype=jnp.float32, out=sums)
        if unembedding.low_rank and slots is not None:
            a, b = (each.astype(h.dtype) for each in factors(params, unembedding.branch))
            scores += low_rank_of_rows(h, a, b, unembedding, layout, slots).astype(jnp.float32)
        scores = layout.place(scores, "batch", "sequence", "vocab")
    elif unembedding.is_tied:
        scores = product("bsd,vd->bsv", h, table, dtype=jnp.float32)
    else:
        weight = layout.weight(params[unembedding.name], "embed", "vocab", dtype=h.dtype)
        scores = product("bsd,dv->bsv", h, weight, dtype=jnp.float32)
    if unembedding.low_rank and not unembedding.low_rank.slots:
        branch = factors(params, unembedding.branch)
        scores = scores + low_rank_columns(residual, *branch, unembedding, layout, rng, dtype=jnp.float32)
    if unembedding.has_bias:
        scores = scores + jax.lax.broadcast_to_rank(params[f"{unembedding.name}_bias"].astype(jnp.float32), 3)
    if loss.scale != 1.0:
        scores = loss.scale * scores
    if loss.softcap:
        scores = loss.softcap * jnp.tanh(scores / loss.softcap)
    if scores.shape[-1] == model.vocab:
        return scores
    # A sum, not a choice: its gradient passes unchanged, and the TPU compiler need not write the logits' gradient.
    return scores + jnp.where(jnp.arange(scores.shape[-1]) < model.vocab, 0.0, -jnp.inf)[None, None]


class LossParts(NamedTuple):
    """The parts of a loss, without gradients.

    means: [1 or 2], the mean cross-entropy in nats, then the z-loss times its coefficient, if the z-loss is used.
    load: load of each layer's experts; None without experts.
    """

    means: Array
    load: ExpertLoad | None = None

    @property
    def metrics(self) -> dict[str, Array]:
        """The metrics of a step, {name: scalar}."""
        found = {"loss": self.means[0]}
        if self.means.shape[0] > 1:
            found["z_loss"] = self.means[1]
        return found if self.load is None else found | self.load.metrics


def mean_losses(scores: Array, batch: Weights, z_loss: float = 0.0) -> Array:
    """Return `LossParts.means` of logits [b, s, v] for a batch; the sum of this array is the loss.

    batch: `targets` [b, s], and optionally `weights` [b, s], which multiply their losses. Weights have a mean of 1 over
    the whole batch, so that the mean over microbatches is the loss of the whole batch.
    """
    losses, normalizers = _losses_and_normalizers(scores, batch["targets"])
    parts = [losses] if z_loss == 0 else [losses, z_loss * normalizers**2]
    if "weights" in batch:
        parts = [part * batch["weights"] for part in parts]
    # Stacked, so that all parts are summed over devices in one all-reduce.
    return jnp.mean(jnp.stack(parts), axis=(1, 2))


def token_losses(scores: Array, targets: Array) -> Array:
    """Return the loss in nats [b, s] of logits [b, s, v] for `targets` [b, s]; a sharded vocab is never gathered."""
    return _losses_and_normalizers(scores, targets)[0]


def _losses_and_normalizers(scores: Array, targets: Array) -> tuple[Array, Array]:
    """Return the losses in nats, and the logarithms of the softmax's normalizers, both [b, s]; see `token_losses`."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    normalizers = jnp.log(jnp.sum(jnp.exp(scores - top), axis=-1))
    chosen = jnp.arange(scores.shape[-1])[None, None, :] == targets[..., None]
    picked = jnp.sum(jnp.where(chosen, scores - top, 0.0), axis=-1)
    return normalizers - picked, normalizers + top[..., 0]
