"""Answers to the exercises of the lessons: right ones, and wrong functions with what is said to each."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.lessons.exercises import holdings, modes, products


def scattered_product(a, b):
    def body(a, b):
        return lax.psum_scatter(a @ b, "X", scatter_dimension=0, tiled=True)

    return jax.shard_map(body, in_specs=(P(None, "X"), P("X", None)), out_specs=P("X", None))(a, b)


def whole_sum(a, b):
    return jax.shard_map(
        lambda a, b: lax.psum(a @ b, "X"), in_specs=(P(None, "X"), P("X", None)), out_specs=P(None, None)
    )(a, b)


def whole_operands(a, b):
    a, b = (lax.with_sharding_constraint(array, P(None, None)) for array in (a, b))
    return lax.with_sharding_constraint(a @ b, P("X", None))


def whole_product(a, b):
    a, b = (lax.with_sharding_constraint(array, P(None, None)) for array in (a, b))
    return lax.with_sharding_constraint(a @ b, P(None, None))


def local_products(a, b):
    return jax.shard_map(lambda a, b: (a @ b)[:8], in_specs=(P(None, "X"), P("X", None)), out_specs=P("X", None))(a, b)


def gathered_b(a, b):
    def body(a, b):
        return a @ lax.all_gather(b, "X", axis=1, tiled=True)

    return jax.shard_map(body, in_specs=(P("X", None), P(None, "X")), out_specs=P("X", None))(a, b)


def gathered_a(a, b):
    def body(a, b):
        return lax.all_gather(a, "X", axis=0, tiled=True) @ b

    return jax.shard_map(body, in_specs=(P("X", None), P(None, "X")), out_specs=P(None, "X"))(a, b)


def gathered_by_permutes(a):
    def body(block):
        rows, place = block.shape[0], lax.axis_index("X")
        out = jnp.zeros((8 * rows, block.shape[1]), block.dtype)
        out = lax.pcast(out, ("X",), to="varying")
        for hop in range(8):
            if hop:
                block = lax.ppermute(block, "X", [(i, (i + 1) % 8) for i in range(8)])
            out = lax.dynamic_update_slice_in_dim(out, block, (place - hop) % 8 * rows, 0)
        return out[None]

    return jax.shard_map(body, in_specs=P("X", None), out_specs=P("X", None, None))(a)


def gathered_at_once(a):
    def body(block):
        return lax.all_gather(block, "X", axis=0, tiled=True)[None]

    return jax.shard_map(body, in_specs=P("X", None), out_specs=P("X", None, None))(a)


def gathered_everywhere(a):
    return lax.with_sharding_constraint(jnp.broadcast_to(a, (8, *a.shape)), P(None, None, None))


def moments(a):
    def body(block):
        return lax.psum(jnp.stack([block.sum(), (block**2).sum()]), "X") / a.size

    return jax.shard_map(body, in_specs=P("X", None), out_specs=P(None))(a)


def moments_of_the_gathered(a):
    a = lax.with_sharding_constraint(a, P(None, None))
    return jnp.stack([jnp.mean(a), jnp.mean(a**2)])


def transformed_rows(a):
    return jax.shard_map(lambda a: jnp.fft.fft(a, axis=1).real, in_specs=P("X", None), out_specs=P("X", None))(a)


def sums_so_far(a):
    def body(a):
        sums = lax.all_gather(a.sum(0), "X")
        before = jnp.arange(8)[:, None] < lax.axis_index("X")
        return jnp.cumsum(a, axis=0) + jnp.where(before, sums, jnp.zeros_like(sums)).sum(0, keepdims=True)

    return jax.shard_map(body, in_specs=P("X", None), out_specs=P("X", None))(a)


def whole_result(function):
    def call(*arrays):
        arrays = [lax.with_sharding_constraint(array, P(*[None] * array.ndim)) for array in arrays]
        result = function(*arrays)
        return lax.with_sharding_constraint(result, P(*[None] * result.ndim))

    return call


def computed_whole(function, spec):
    def call(*arrays):
        return lax.with_sharding_constraint(whole_result(function)(*arrays), spec)

    return call


def fsdp_layer(x, w):
    def body(x, w):
        return x @ lax.all_gather(w, "X", axis=0, tiled=True)

    return jax.shard_map(body, in_specs=(P("X", None), P("X", None)), out_specs=P("X", None))(x, w)


def column_then_row(x, up, down):
    def body(x, up, down):
        return lax.psum(jax.nn.relu(x @ up) @ down, "X")

    return jax.shard_map(body, in_specs=(P(), P(None, "X"), P("X", None)), out_specs=P())(x, up, down)


def relu_after_the_sum(x, up, down):
    return jax.nn.relu(x @ up @ down)


def mlp_of_whole_weights(x, up, down):
    return whole_result(lambda x, up, down: jax.nn.relu(x @ up) @ down)(x, up, down)


def softmax_in_parts(q, k, v):
    def body(q, k, v):
        scores = q @ k.T
        largest = lax.pmax(lax.stop_gradient(scores.max(1)), "X")
        weights = jnp.exp(scores - largest[:, None])
        return lax.psum(weights @ v, "X") / lax.psum(weights.sum(1), "X")[:, None]

    return jax.shard_map(body, in_specs=(P(), P("X", None), P("X", None)), out_specs=P())(q, k, v)


def mean_of_softmaxes(q, k, v):
    def body(q, k, v):
        return lax.pmean(jax.nn.softmax(q @ k.T) @ v, "X")

    return jax.shard_map(body, in_specs=(P(), P("X", None), P("X", None)), out_specs=P())(q, k, v)


RIGHT = {
    "simulated-speed": "b",
    "what-a-timer-measures": "c",
    "bytes-a-device": 512 * 512 * 4,
    "intensity-of-a-product": 2 * 256 * 4096**2 / (2 * (2 * 256 * 4096 + 4096**2)),
    "critical-batch": 197e12 / 820e9 / 2,
    "what-helps-a-memory-bound-product": "c",
    "time-of-an-all-gather": 256e6 * 7 / 8 / 45e9,
    "more-devices": "c",
    "floor-by-hops": 7e-6 * 45e9 * 8 / 7,
    "bytes-held": 4096 * 8192 * 2,
    "copies-of-a-block": 32,
    "shapes-of-shards": dict(zip(holdings.SPECS, [(4, 2), (2, 4), (1, 8), (8, 4), (2, 8), (8, 8)], strict=True)),
    "a-dim-that-does-not-divide": "d",
    "gather-by-permutes": gathered_by_permutes,
    "moments-with-one-sum": moments,
    "transposes": {
        "all_gather": "reduce-scatter",
        "psum_scatter": "all-gather",
        "all_to_all": "all-to-all",
        "ppermute": "collective-permute",
    },
    "sum-of-a-gradient": "b",
    "four-cases": products.cases(),
    "device-put-in-jit": "b",
    "fft-of-rows": transformed_rows,
    "sums-so-far": sums_so_far,
    "what-nothing-means": dict(
        zip(modes.NONES, ["whole", "whole", "the compiler decides", "the compiler decides"], strict=True)
    ),
    "parameters-of-gpt3": 175e9,
    "bytes-of-adam": 1.5577e9 * 16,
    "seconds-of-a-step": 6 * 8.03e9 * 512 * 8192 / (64 * 459e12 * 0.5),
    "moments-under-zero-1": 8.03e9,
    "fsdp-layer": fsdp_layer,
    "column-then-row": column_then_row,
    "what-fsdp-is": "b",
    "softmax-in-parts": softmax_in_parts,
    "microbatches-for-a-bubble": 27,
    "what-shrinks-a-bubble": "b",
    "bytes-to-experts": 4096 * 2 * 4096 * 2 * 7 / 8,
    "smallest-slice": 16,
    "what-a-checkpoint-has": "b",
    "bytes-of-a-cache": 2 * 32 * 8 * 128 * 2 * 16 * 8192,
    "bytes-of-a-sum": 2 * 3 / 4 * 8192 * 8192 * 2,
    "one-reduce-scatter": scattered_product,
    "gather-the-smaller": gathered_b,
}
"""A right answer to every exercise, written without looking it up where it is a number."""

REPLICATED = {
    "softmax-in-parts": whole_result(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v),
    "fft-of-rows": whole_result(lambda a: jnp.fft.fft(a, axis=1).real),
    "sums-so-far": whole_result(lambda a: jnp.cumsum(a, axis=0)),
    "fsdp-layer": whole_result(jnp.matmul),
    "column-then-row": mlp_of_whole_weights,
    "gather-by-permutes": gathered_everywhere,
    "one-reduce-scatter": whole_sum,
    "gather-the-smaller": whole_product,
}
"""For every program a function with right values whose result every device holds, or computes, whole."""

WRONG_PROGRAMS = [
    ("softmax-in-parts", mean_of_softmaxes, "The values differ"),
    ("fft-of-rows", lambda a: jnp.fft.fft(a, axis=1).real, "the all-gather is not needed"),
    ("sums-so-far", lambda a: jnp.cumsum(a, axis=0), "moves 32 times the bytes"),
    ("column-then-row", relu_after_the_sum, "The values differ"),
    ("fsdp-layer", lambda x, w: x @ w + 1.0, "The values differ"),
    ("gather-by-permutes", gathered_at_once, "collective-permute is missing"),
    ("moments-with-one-sum", moments_of_the_gathered, "all-gather"),
    ("one-reduce-scatter", whole_operands, "all-gather"),
    ("one-reduce-scatter", local_products, "The values differ from those on one device"),
    ("one-reduce-scatter", lambda a, b: a + b, "raised TypeError"),
    ("one-reduce-scatter", lambda a, b: a, "another shape"),
    ("gather-the-smaller", gathered_a, "split in another way"),
]
"""Wrong functions, each with words of the reply."""
