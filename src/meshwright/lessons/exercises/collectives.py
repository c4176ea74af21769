"""Exercises on collectives written in shard_map, and on their transposes in gradients."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from meshwright.lessons.exercise import Choice, Exercise, Mistake, Several
from meshwright.lessons.program import Asked, Program

TRANSPOSES = {
    "all_gather": "reduce-scatter",
    "psum_scatter": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""The collective in the gradient of each function of `jax.lax`; `tests/lessons` compiles them."""

EXERCISES: Mapping[str, Exercise] = {
    "gather-by-permutes": Program(
        question=(
            "Write f(a) for A[I_X, J] -> C[N_X, I, J], N=8: every device has the whole of A, gathered by"
            " jax.lax.ppermute alone, with as few bytes as an all-gather."
        ),
        mesh={"X": 8},
        dims={"N": 8, "I": 32, "J": 16},
        operands=("A[I_X, J]",),
        result="C[N_X, I, J]",
        reference=lambda a: jnp.broadcast_to(a, (8, *a.shape)),
        collectives=(Asked("collective-permute", ("X",), "A[I_X, J]", count=7),),
        copies=("A[I, J]", "A[I, J]", "A[I, J]"),
        hints=(
            "In a ring each device hands the block that it got last to its neighbour, and keeps a copy.",
            "After seven hops every device has had all eight blocks, each device in another order: block number"
            " (own number - hop) % 8 arrives at each hop.",
            "block = jax.lax.ppermute(block, 'X', [(i, (i + 1) % 8) for i in range(8)]); put it at row"
            " ((jax.lax.axis_index('X') - hop) % 8) * rows with jax.lax.dynamic_update_slice_in_dim; return out[None],"
            " with out_specs=P('X', None, None).",
        ),
        because="n - 1 hops of one block each: that is an all-gather, and between hops there is time to compute.",
    ),
    "moments-with-one-sum": Program(
        question=(
            "Write f(a) for A[I_X, J] -> C[S], S=2: the mean of all elements, and the mean of their squares, with one"
            " all-reduce of two numbers."
        ),
        mesh={"X": 8},
        dims={"S": 2, "I": 64, "J": 16},
        operands=("A[I_X, J]",),
        result="C[S]",
        reference=lambda a: jnp.stack([jnp.mean(a), jnp.mean(a**2)]),
        collectives=(Asked("all-reduce", ("X",), "C[S]"),),
        copies=("A[I_X, J]",),
        hints=(
            "Sum what a device has first; then only sums have to travel.",
            "Two sums in one array are one collective.",
            "In jax.shard_map: jax.lax.psum(jnp.stack([a.sum(), (a**2).sum()]), 'X') over the number of elements of the"
            " whole array, out_specs=P(None).",
        ),
        because="Eight bytes travel, instead of the array: reduce on the device first.",
    ),
    "transposes": Several(
        question=(
            "Which collective is in the gradient of each of these: all-gather, reduce-scatter, all-reduce, all-to-all"
            " or collective-permute?"
        ),
        answer=lambda: TRANSPOSES,
        values=("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"),
        mistakes=(
            Mistake(
                lambda: {**TRANSPOSES, "all_gather": "all-gather", "psum_scatter": "reduce-scatter"},
                "Backward, the data goes the other way: what was copied is summed, and what was summed is copied.",
            ),
            Mistake(
                lambda: {**TRANSPOSES, "all_gather": "all-reduce"},
                "Gradients of all copies are summed, but each device needs those of its own block only.",
            ),
        ),
        hints=(
            "What does the gradient of a copy do? It adds up.",
            "all_gather copies each block to all devices, so its gradient sums over devices, and gives each its block.",
            "jax.grad of a function with the collective, in mw.inspect, lists what the compiler made of it.",
        ),
        because="Copies turn into sums and sums into copies; what only moves, moves back.",
    ),
    "sum-of-a-gradient": Choice(
        question=(
            "In shard_map, w is replicated (in_specs P()), the loss is the sum of a device's own part, and you take"
            " jax.grad by w inside. With check_vma=True, the default, what is the gradient on a device?"
        ),
        options={
            "a": "That of its own part; it needs a psum.",
            "b": "The sum over all devices already; a psum would make it eight times too large.",
            "c": "Zero on all devices but the first.",
        },
        answer="b",
        replies={
            "a": "That holds for a w that varies. Here w is equal on all devices, and JAX knows: see the cell above.",
            "c": "With check_vma=False results can be wrong without a word, but this is the default.",
        },
        hints=(
            "Using a replicated w with a varying x makes a varying copy of w. What is the transpose of copying?",
            "The transpose of a copy to all devices is a sum over all devices.",
            "The cell above prints the gradient on a device beside that of its own part.",
        ),
        because="The copy's transpose is the sum. Compare with one device before you add a psum, or leave one out.",
    ),
}
