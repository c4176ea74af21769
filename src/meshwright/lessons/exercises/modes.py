"""Exercises on auto, explicit and manual mode, and on shardings that get lost."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from meshwright.lessons.exercise import Choice, Exercise, Mistake, Several
from meshwright.lessons.program import Asked, Program

WHOLE, COMPILER = "whole", "the compiler decides"

NONES = {
    "P(None, 'X'), the first dim": WHOLE,
    "P('X') of a matrix, the second dim": WHOLE,
    "jit(f, out_shardings=None)": COMPILER,
    "P(P.UNCONSTRAINED, 'X') in a constraint, the first dim": COMPILER,
}
"""The meaning of None, an empty place or an unconstrained dim in each position of a spec."""

EXERCISES: Mapping[str, Exercise] = {
    "device-put-in-jit": Choice(
        question="Auto mode, inside jit: an array split by rows goes to jax.device_put(a, P(None, 'X')). And then?",
        options={
            "a": "It is split by columns; an all-to-all moves it.",
            "b": "It may still be split by rows: the compiler is not bound by it.",
            "c": "An error: device_put does not work inside jit.",
        },
        answer="b",
        replies={
            "a": "That is what with_sharding_constraint does. Look at the two specs that the cell above prints.",
            "c": "It runs. Look at the specs that the cell above prints.",
        },
        hints=(
            "The cell above does it, beside a constraint.",
            "Compare the spec that was asked for with the spec that came out.",
            "device_put left P('X', None), and the constraint gave P(None, 'X').",
        ),
        because="Inside jit, use with_sharding_constraint, or jax.reshard in explicit mode.",
    ),
    "fft-of-rows": Program(
        question="Mend f(a) = jnp.fft.fft(a, axis=1).real for A[I_X, J] -> C[I_X, J], so that nothing moves.",
        mesh={"X": 8},
        dims={"I": 64, "J": 32},
        operands=("A[I_X, J]",),
        result="C[I_X, J]",
        reference=lambda a: jnp.fft.fft(a, axis=1).real,
        collectives=(),
        copies=("A[I_X, J]",) * 10,
        hints=(
            "Each row has its own transform, and a device has whole rows.",
            "The compiler does not split an fft. Who else can say that each device transforms its own rows?",
            "jax.shard_map of the same function, with in_specs and out_specs P('X', None).",
        ),
        because="In shard_map each device does its own rows. The compiler alone gathers the array for an fft.",
    ),
    "sums-so-far": Program(
        question=(
            "Write f(a) = jnp.cumsum(a, axis=0) for A[I_X, J] -> C[I_X, J] with one all-gather of the sums of blocks,"
            " S[N, J], N=8, and nothing else."
        ),
        mesh={"X": 8},
        dims={"I": 256, "J": 16, "N": 8},
        operands=("A[I_X, J]",),
        result="C[I_X, J]",
        reference=lambda a: jnp.cumsum(a, axis=0),
        collectives=(Asked("all-gather", ("X",), "S[N, J]"),),
        copies=("A[I_X, J]",) * 6,
        hints=(
            "What does a device have to know of the blocks before its own?",
            "Their sums: one row for each block. Sum the blocks, gather the sums, add up those before.",
            "In jax.shard_map: sums = jax.lax.all_gather(a.sum(0), 'X'); mask rows of sums whose number is not below"
            " jax.lax.axis_index('X'), sum them over the first dim, and add that to jnp.cumsum(a, axis=0).",
        ),
        because="A row for each device travels, and not the array: 8 rows instead of 256.",
    ),
    "what-nothing-means": Several(
        question=f"What does nothing mean in each place: {WHOLE!r} or {COMPILER!r}?",
        answer=lambda: NONES,
        values=(WHOLE, COMPILER),
        mistakes=(
            Mistake(
                lambda: {**dict.fromkeys(NONES, COMPILER)},
                "A spec has no place for not knowing: None in it is a demand, that the dim be whole.",
            ),
            Mistake(
                lambda: {**dict.fromkeys(NONES, WHOLE)},
                "Where no spec is given at all, nothing is demanded. And UNCONSTRAINED has its name for a reason.",
            ),
        ),
        hints=(
            "In which of these places is there a spec?",
            "In a spec, None and what is left out at the end are demands.",
            "out_shardings=None gives no spec; UNCONSTRAINED leaves one dim of a spec open.",
        ),
        because="None in a spec is a demand for a whole dim; no spec is no demand.",
    ),
}
