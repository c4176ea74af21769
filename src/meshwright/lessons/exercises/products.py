"""Exercises on the four cases of a sharded matmul."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from meshwright.description.notation.inference import infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.lessons.exercise import Exercise, Mistake, Number, Several
from meshwright.lessons.program import Asked, Program
from meshwright.record import wire_bytes

PRODUCTS = (
    "A[I_X, J] @ B[J, K]",
    "A[I, J_X] @ B[J, K]",
    "A[I, J_X] @ B[J_X, K]",
    "A[I_X, J] @ B[J, K_X]",
    "A[I_X, J] @ B[J, K_Y]",
    "A[I, J] @ B[J_Y, K]",
    "A[I_X, J_Y] @ B[J_Y, K]",
    "A[I_X, J] @ B[J_X, K_Y]",
)
"""Sharded matmuls of every case, on a mesh with axes X and Y."""

_SIZES = Sizes(degrees={"X": 4, "Y": 2}, dims={"I": 64, "J": 64, "K": 64})


def cases() -> dict[str, int]:
    """Return the case (1 to 4) of each matmul of `PRODUCTS`, by its text."""
    return {product: infer(parse(product, axes=("X", "Y")), _SIZES).case or 1 for product in PRODUCTS}


def _confused(mistake: Mapping[int, int]) -> dict[str, int]:
    """Return the case of each matmul as a reader answers who mistakes one case for another.

    mistake: the wrong case, by the right one.
    """
    return {product: mistake.get(case, case) for product, case in cases().items()}


FOUR_CASES = Several(
    question="Which case, 1 to 4, is each product?",
    answer=cases,
    values=(1, 2, 3, 4),
    mistakes=(
        Mistake(
            lambda: _confused({2: 3}),
            "With J split in one operand and whole in the other, blocks do not match yet. What happens before devices"
            " multiply?",
        ),
        Mistake(
            lambda: _confused({3: 2}),
            "With J split in both operands each device can multiply what it holds. What is its product then?",
        ),
        Mistake(
            lambda: _confused({4: 1}),
            "One axis cannot split two dims of the result, nor J of one operand and another dim of the other one. Where"
            " is it the same axis, and where are they two?",
        ),
    ),
    hints=(
        "Look at the contracted dim J first, and at the other dims after it.",
        "J whole: case 1, or 4 where both operands give one axis to the result. J split in one operand: 2. In both: 3.",
        "An axis that splits J of one operand and another dim of the other one is a conflict as well; the highest case"
        ' of all axes counts. mw.matmul("A[I_X, J] @ B[J_X, K_Y]", mesh="X=4,Y=2") gives the reason for each axis.',
    ),
    because="The contracted dim decides between 1, 2 and 3; one axis in two places makes it 4.",
)

DEGREE, ROWS, COLUMNS, INNER = 4, 8192, 8192, 1024
_SUM_BYTES = 2 * ROWS * COLUMNS  # of C[I, K] in bf16

BYTES_OF_A_SUM = Number(
    question=(
        f"A[I, J_X] @ B[J_X, K] over X={DEGREE} in bf16, I={ROWS}, J={INNER}, K={COLUMNS}: every device is to have"
        " C[I, K]. How many bytes does each device send in a ring all-reduce?"
    ),
    unit="B",
    answer=lambda: wire_bytes("all-reduce", _SUM_BYTES, DEGREE),
    mistakes=(
        Mistake(
            lambda: wire_bytes("reduce-scatter", _SUM_BYTES, DEGREE),
            "That is a reduce-scatter: each device has a part of the sum. The question asks for the whole sum on each.",
        ),
        Mistake(lambda: 2 * _SUM_BYTES, "A device does not send all n parts in each half of the ring: n - 1 travel."),
        Mistake(
            lambda: _SUM_BYTES,
            "That is the array itself. An all-reduce is two collectives, and each sends a share of the array.",
        ),
        Mistake(
            lambda: wire_bytes("all-reduce", _SUM_BYTES / DEGREE, DEGREE),
            "Partial sums are not split: each has all of I and K, not a part of it.",
        ),
        Mistake(lambda: wire_bytes("all-reduce", 2 * _SUM_BYTES, DEGREE), "An element of bf16 has 2 bytes, not 4."),
        Mistake(
            lambda: wire_bytes("all-reduce", 2 * ROWS * INNER, DEGREE),
            "What is summed is the product, not an operand: J is gone.",
        ),
    ),
    hints=(
        "How large is the partial sum that each device has after its product?",
        "An all-reduce is a reduce-scatter and an all-gather of the same array.",
        "Each of the two sends (n - 1) / n of the bytes of C[I, K].",
    ),
    because="Twice (n - 1) / n of C. If C may stay split, a reduce-scatter does, for half of it.",
)

ONE_REDUCE_SCATTER = Program(
    question="Write f(a, b) for A[I, J_X] @ B[J_X, K] -> C[I_X, K], with one reduce-scatter of C[I, K] only.",
    mesh={"X": 8},
    dims={"I": 64, "J": 128, "K": 32},
    operands=("A[I, J_X]", "B[J_X, K]"),
    result="C[I_X, K]",
    reference=jnp.matmul,
    collectives=(Asked("reduce-scatter", ("X",), "C[I, K]"),),
    flops=lambda: 2 * 64 * 128 * 32 / 8,
    hints=(
        "Every device can multiply the block of A and the block of B that it holds. What does it have then?",
        "Inside jax.shard_map the product of two blocks is a partial sum [I, K]. jax.lax.psum would leave the whole"
        " sum on every device; another function sums, and leaves each device its part.",
        "jax.shard_map(body, in_specs=(P(None, 'X'), P('X', None)), out_specs=P('X', None)), where body multiplies"
        " and calls jax.lax.psum_scatter over 'X' with scatter_dimension=0 and tiled=True.",
    ),
    because="One reduce-scatter of the partial sums; an all-reduce would send twice as much.",
)

GATHER_THE_SMALLER = Program(
    question="Write f(a, b) for A[I_X, J] @ B[J, K_X] -> C[I_X, K], which gathers B, the smaller of the two.",
    mesh={"X": 8},
    dims={"I": 256, "J": 64, "K": 16},
    operands=("A[I_X, J]", "B[J, K_X]"),
    result="C[I_X, K]",
    reference=jnp.matmul,
    collectives=(Asked("all-gather", ("X",), "B[J, K]"),),
    flops=lambda: 2 * 256 * 64 * 16 / 8,
    hints=(
        "One axis cannot split both dims of the result. Which of the two operands gives it up?",
        "The result keeps I_X, so A stays as it is, and B has to be whole on every device.",
        "In jax.shard_map: jax.lax.all_gather(b, 'X', axis=1, tiled=True), then a product, out_specs=P('X', None).",
    ),
    because="With B whole it is case 1: each device multiplies its rows of A, and nothing is left to sum.",
)

EXERCISES: Mapping[str, Exercise] = {
    "four-cases": FOUR_CASES,
    "bytes-of-a-sum": BYTES_OF_A_SUM,
    "one-reduce-scatter": ONE_REDUCE_SCATTER,
    "gather-the-smaller": GATHER_THE_SMALLER,
}
