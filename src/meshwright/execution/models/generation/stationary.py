"""Weight-stationary matmuls of layers in generation (arXiv:2211.05102, section 3.2): weights are never gathered.

The residual stream [b, s, d] is split over fsdp along d. The first matmul of a block leaves partial sums over fsdp, and
its last matmul leaves partial sums over sp and tp. `step.serving.SERVING_RULES` has the layouts, and `step.serve_ops`
plans the same collectives.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.description.step.blocks import program
from meshwright.description.step.layer import Linear, Norm
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.parameter_tree import RANK, SLOT, Parameter, map_leaves, parameters
from meshwright.execution.models.quantised.scaled import ScaledWeight, in_int4
from meshwright.execution.models.quantised.scaled_products import scaled_product
from meshwright.execution.runtime.mesh import mesh_platform
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.runtime.shards import on_shards

WEIGHTS = "weights"
"""Named scope of matmuls with weights, and of slicing and dequantizing a layer's weights for them."""

LEAST_TPU_ROWS = 8
"""Rows that fill a TPU's vector registers; a matmul of 8 rows takes no longer than one of a single row."""


def for_server_products(params: Mapping[str, Any], model: ModelConfig) -> Any:
    """Return parameters, concrete or abstract, in a form that the compiler does not copy before each matmul.

    On GPUs and TPUs each layer has arrays of its own, on TPUs in another memory layout, and vectors that are used in
    float32 are stored so; on CPUs they are unchanged.
    """
    if mesh_platform() == "cpu":
        return params
    if mesh_platform() == "tpu":
        params = _in_tpu_layout(_vectors_in_float32(params, model), model)
    return _split_by_layer(params)


def _vectors_in_float32(params: Mapping[str, Any], model: ModelConfig) -> Any:
    """Return parameters, of which the scales of norms and the biases of routers are float32.

    They are used in float32. XLA:TPU would cast each of them in every step by an op of its own, which takes a
    microsecond (libtpu 0.0.42.1).
    """
    found, paths = program(model), set[str]()
    for prefix, ops in (("", found.logits), *((f"{stack.name}.", stack.ops) for stack in found.stacks)):
        paths |= {f"{prefix}{op.name}" for op in ops if isinstance(op, Norm) and op.has_scale}
        paths |= {
            f"{prefix}{op.name}_bias" for op in ops if isinstance(op, Linear) and op.is_on_residual and op.has_bias
        }

    def widen(path: str, stored: Any) -> Any:
        if path not in paths:
            return stored
        is_abstract = isinstance(stored, jax.ShapeDtypeStruct)
        return stored.update(dtype=jnp.float32) if is_abstract else stored.astype(jnp.float32)

    return map_leaves(widen, dict(params))


def _split_by_layer(params: Mapping[str, Any]) -> Any:
    """Return parameters with one mapping for each layer of a stack: {stack: ({name: array}, ...)}.

    With stacked arrays, XLA:GPU copies each layer's weights in every step before it multiplies them, so that it reads
    and writes three times their bytes (JAX 0.10.2 and 0.11.2; `benchmarks/gpu_decode.py`). XLA:TPU does so with those
    of experts, on TPU7x with all weights; on other TPUs it reads a layer's weights ahead, into fast memory, only if
    layers are not in a loop (libtpu 0.0.42.1; `benchmarks/decode_programs.py`). Layers keep the memory layout of their
    stack. Each stacked array is deleted once it is divided.
    """

    def cut(leaf: Any) -> tuple[Any, ...]:
        count, layout = leaf.shape[0], leaf.format.layout
        if layout is not None:
            layout = Layout(tuple(dim - 1 for dim in layout.major_to_minor if dim))
        own: Any = Format(layout, NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:])))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return (jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=own),) * count
        divide = jax.jit(lambda whole: tuple(whole[number] for number in range(count)), out_shardings=(own,) * count)
        parts = jax.block_until_ready(divide(leaf))
        leaf.delete()
        return parts

    def of_stack(stored: Mapping[str, Any]) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(dict(stored))
        return tuple(tree.unflatten(parts) for parts in zip(*map(cut, leaves), strict=True))

    return {name: of_stack(own) if isinstance(own, Mapping) else own for name, own in params.items()}


def _in_tpu_layout(params: Mapping[str, Any], model: ModelConfig) -> Any:
    """Return parameters in the memory layout in which XLA:TPU reads them.

    In this layout, each head's matrix [inputs, head_dim] of a weight [layers, inputs, ..., head_dim] is contiguous.
    With the default layout, the compiler would rearrange each layer's weights in every step (libtpu 0.0.42.1), which
    takes 13% of a step of Llama 3 8B with 64 rows on v5e:4x4. `Layout.AUTO` chooses the same layout. Experts and the
    embedding table are in row-major order, which `ragged_dot` and lookups need: where their last dim is not a multiple
    of 128, the default layout is another one, and they would be copied in every step.
    """

    def in_layout(leaf: Any, order: tuple[int, ...]) -> Any:
        form: Any = Format(Layout(order), leaf.sharding)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=form)
        return jax.device_put(leaf, form)

    def in_read_order(parameter: Parameter, stored: Any) -> Any:
        first = 1 + ("expert" in parameter.axes)
        inputs = range(first, first + parameter.num_inputs)
        *heads, columns = range(first, len(parameter.axes))[parameter.num_inputs :] or (0,)
        if isinstance(stored, ScaledWeight):
            stored = in_int4(stored)
            return replace(stored, values=in_layout(stored.values, tuple(range(stored.values.ndim))))
        if parameter.axes[0] == "vocab":
            return in_layout(stored, tuple(range(stored.ndim)))
        if not parameter.is_stacked or not inputs or not (heads or "expert" in parameter.axes):
            return stored
        return in_layout(stored, (*range(first), *heads, *inputs, columns))

    return jax.tree.map(in_read_order, parameters(model), dict(params))


def pad_single_row(x: Array, layout: ShardingContext) -> Array:
    """Return x [b, s, ...], on TPUs padded along s with zeros to 8 rows if a device has a single row (b * s = 1).

    XLA:TPU multiplies a single row on the vector unit, which takes two to three times as long as eight rows on the
    matrix unit (libtpu 0.0.42.1, by the compiler's estimated cycles).
    """
    rows = x.shape[0] // layout.mesh.degree(layout.axes("batch")) * x.shape[1]
    if mesh_platform() != "tpu" or rows > 1:
        return x
    return jnp.pad(x, ((0, 0), (0, LEAST_TPU_ROWS - 1), *((0, 0),) * (x.ndim - 2)))


def multiply_stored(subscripts: str, x: Array, weight: Array, layout: ShardingContext, *, dtype: Any, out: P) -> Array:
    """Return the einsum of x [b, s, ...] and a weight that is not gathered, in `dtype` and with the spec `out`."""
    with jax.named_scope(WEIGHTS):
        rows = pad_single_row(x, layout)
        made = jnp.einsum(subscripts, rows, weight, preferred_element_type=dtype, out_sharding=out)
        return made[:, : x.shape[1]]


def stationary_product(
    x: Array, weight: Array | ScaledWeight, op: Linear, layout: ShardingContext, dtype: Any = None
) -> Array:
    """Multiply x [b, s, *inputs] by a stored weight [*inputs, *outputs].

    The result [b, s, *outputs] is unreduced over the mesh axes that split the inputs. dtype: its dtype; default: that
    of x.
    """
    names, outputs = [name for name, _ in op.inputs], [name for name, _ in op.outputs]
    tokens = "residual_sequence" if op.is_on_residual else "sequence"
    inner, columns = string.ascii_lowercase[: len(names)], string.ascii_uppercase[: len(outputs)]
    sums = tuple(axis for name in names for axis in layout.axes(name))
    spec = layout.spec("batch", tokens, *outputs, unreduced=sums)
    if isinstance(weight, ScaledWeight):
        with jax.named_scope(WEIGHTS):
            made = scaled_product(pad_single_row(x, layout), weight, layout, dtype=dtype or x.dtype, out=spec)
            return made[:, : x.shape[1]]
    used = jax.reshard(weight.astype(x.dtype), layout.spec(*names, *outputs))
    subscripts = f"yz{inner},{inner}{columns}->yz{columns}"
    return multiply_stored(subscripts, x, used, layout, dtype=dtype or x.dtype, out=spec)


def low_rank_of_rows(x: Array, a: Array, b: Array, op: Linear, layout: ShardingContext, slots: Array) -> Array:
    """Return the low-rank branch of a matmul with each row's adapter, with the spec of `stationary_product`'s result.

    x is multiplied by the A of all slots as one matrix, and the products of other slots are set to zero. So a step
    reads each adapter once, however many rows use it, and adds no collective; gathering A and B for each row would read
    them once for each row.

    Args:
        x: the matmul's input [b, s, *inputs].
        a: A of all slots [*inputs, slots, rank].
        b: B of all slots [slots, rank, *outputs].
        slots: the slot of each row's adapter [b], from 1; 0 for a row without an adapter.
    """
    names, outputs = [name for name, _ in op.inputs], [name for name, _ in op.outputs]
    inner, columns = string.ascii_lowercase[: len(names)], string.ascii_uppercase[: len(outputs)]
    sums = layout.spec(unreduced=tuple(axis for name in names for axis in layout.axes(name))).unreduced

    def local(x: Array, a: Array, b: Array, slots: Array) -> Array:
        low = jnp.einsum(f"yz{inner},{inner}nr->yznr", x, a)
        low = zero_other_slots(low, slots)
        made = jnp.einsum(f"yznr,nr{columns}->yz{columns}", low, b)
        return jax.lax.pcast(made, tuple(sums), to="unreduced") if sums else made

    specs = (
        layout.spec("batch", "sequence", *names), layout.spec(*names, SLOT, RANK), layout.spec(SLOT, RANK, *outputs),
        layout.spec("batch"),
    )  # fmt: skip
    out = layout.spec("batch", "sequence", *outputs, unreduced=tuple(sums))
    with jax.named_scope(WEIGHTS):
        own = jax.reshard(slots, specs[3])
        return on_shards(local, layout, in_specs=specs, out_specs=out)(jax.reshard(x, specs[0]), a, b, own)


def zero_other_slots(low: Array, slots: Array) -> Array:
    """Return `low` [b, s, slots, rank] with zeros for all slots but each row's own; `slots` [b] counts from 1."""
    is_own = slots[:, None] == 1 + jnp.arange(low.shape[-2])[None]
    return jnp.where(is_own[:, None, :, None], low, 0)


def sum_of_heads(x: Array, op: Linear, layout: ShardingContext, *, is_latent: bool, is_prompt: bool) -> Array:
    """Return queries, keys or values [b, s, *heads] summed over fsdp.

    In prefill the sums are reduce-scattered along tokens; in decoding, along rows if the cache splits rows.

    is_latent: whether keys and values come from a latent; then sums are all-reduced instead.
    """
    heads = [name for name, _ in op.outputs]
    if is_prompt:
        return attention_layout(layout, is_latent).place(x, "batch", "sequence", *heads)
    spec: Any = layout.spec("batch", "sequence", *heads)
    return jax.reshard(x, P(head_rows(layout, is_latent) or None, *spec[1:]))


def attention_layout(layout: ShardingContext, is_latent: bool) -> ShardingContext:
    """Return the layout of attention in prefill, where fsdp splits the queries along the tokens.

    With latent attention, fsdp does not split the queries.
    """
    return replace(
        layout,
        rules={**layout.rules, "sequence": () if is_latent else layout.rules["embed"], "activation": ()}
        | ({"group": ()} if is_latent else {}),
    )


def head_rows(layout: ShardingContext, is_latent: bool) -> tuple[str, ...]:
    """Return the mesh axes that split the rows of queries, keys and values in attention over a cache."""
    is_split = layout.cache_split == "batch" and not is_latent
    return layout.axes("batch") + (layout.axes("embed") if is_split else ())


def scatter_hidden(x: Array, layout: ShardingContext) -> Array:
    """Sum an MLP's first matmul result [b, s, f] over fsdp.

    This is a reduce-scatter along f if the axes divide f, else an all-reduce.
    """
    along, width = layout.axes("embed"), layout.axes("mlp")
    if x.shape[-1] % layout.mesh.degree((*along, *width)):
        return layout.place(x, "batch", "sequence", "mlp")
    spec: Any = layout.spec("batch", "sequence", "mlp")
    return jax.reshard(x, P(*spec[:2], (*width, *along) or None))


def gather_hidden(x: Array, layout: ShardingContext) -> Array:
    """Gather the activated hidden values x [b, s, f] over fsdp for the last matmul of an MLP."""
    return layout.place(x, "batch", "sequence", "mlp")
