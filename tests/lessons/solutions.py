"""Answers to the exercises of the lessons: right ones, and wrong functions with what is said to each."""

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.lessons.exercises import products


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


RIGHT = {
    "four-cases": products.cases(),
    "bytes-of-a-sum": 2 * 3 / 4 * 8192 * 8192 * 2,
    "one-reduce-scatter": scattered_product,
    "gather-the-smaller": gathered_b,
}
"""A right answer to every exercise, written without looking it up where it is a number."""

REPLICATED = {"one-reduce-scatter": whole_sum, "gather-the-smaller": whole_product}
"""For every program a function with right values whose result every device holds, or computes, whole."""

WRONG_PROGRAMS = [
    ("one-reduce-scatter", whole_operands, "all-gather"),
    ("one-reduce-scatter", local_products, "The values differ from those on one device"),
    ("one-reduce-scatter", lambda a, b: a + b, "raised TypeError"),
    ("one-reduce-scatter", lambda a, b: a, "another shape"),
    ("gather-the-smaller", gathered_a, "split in another way"),
]
"""Wrong functions, each with words of the reply."""
