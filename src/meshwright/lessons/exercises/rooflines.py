"""Exercises on rooflines and arithmetic intensity."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.description.hardware.system import parse_system
from meshwright.lessons.exercise import Choice, Exercise, Mistake, Number
from meshwright.planning.cost.roofline import hardware_intensity, intensity

I, J, K = 256, 4096, 4096  # noqa: E741
_FLOPS = 2 * I * J * K


def _of(elements: float, element_bytes: float = 2) -> float:
    """Return the matmul's arithmetic intensity, flops per byte, if it moves this number of elements."""
    return intensity(_FLOPS, element_bytes * elements)


_ALL = I * J + J * K + I * K


def _rows(weight_bytes: float) -> float:
    """Return the batch rows above which a matmul in bf16 on v5e is compute bound, if only weights are read.

    weight_bytes: bytes of a weight's element.
    """
    return hardware_intensity(parse_system("v5e:1x1")) * weight_bytes / 2


EXERCISES: Mapping[str, Exercise] = {
    "intensity-of-a-product": Number(
        question=(
            f"A[I, J] @ B[J, K] in bf16 with I={I}, J={J}, K={K}: how many flops for each byte that moves to or from"
            " memory, both operands and the result counted?"
        ),
        answer=lambda: _of(_ALL),
        mistakes=(
            Mistake(lambda: _of(_ALL) / 2, "A multiply and an add are two flops: 2·I·J·K in all."),
            Mistake(lambda: _of(_ALL, 1), "That is for each element. An element of bf16 has 2 bytes."),
            Mistake(lambda: _of(J * K), "B is the largest, but A is read and C is written too."),
            Mistake(lambda: _of(I * J + J * K), "The result has to be written: C has I·K elements."),
        ),
        hints=(
            "Count the flops, count the bytes of three arrays, divide.",
            "Flops are 2·I·J·K. Bytes are 2 for each element of A, B and C.",
            "2·I·J·K / (2·(I·J + J·K + I·K)); I is the smallest dim, so the quotient is a bit below I.",
        ),
        because="It is a bit below I: while I is small against J and K, the intensity of a product is its batch.",
    ),
    "critical-batch": Number(
        question=(
            "On v5e, weights are stored in int8 and multiplied in bf16. From how many rows of a batch on is the product"
            " compute bound, if only reading the weights counts?"
        ),
        answer=lambda: _rows(1),
        mistakes=(
            Mistake(lambda: _rows(2), "That is for weights of 2 bytes; int8 has 1."),
            Mistake(lambda: _rows(4), "That is for weights of 4 bytes; int8 has 1."),
            Mistake(lambda: _rows(0.5), "A flop for each weight and row is one too few or one too many: they are 2."),
        ),
        hints=(
            "Each weight is read once and used for every row.",
            "A weight costs its bytes, and gives 2 flops for each row.",
            "2·rows flops for 1 byte has to reach the hardware intensity that mw.chips and the cell above give.",
        ),
        because="Half of what bf16 weights need: int8 weights help small batches, and large ones not at all.",
    ),
    "what-helps-a-memory-bound-product": Choice(
        question="A product of 8 rows with a large weight is memory bound. What makes it faster?",
        options={
            "a": "A chip with twice the flops and the same memory.",
            "b": "Half of the rows.",
            "c": "Weights of half the bytes.",
            "d": "A faster algorithm with half the flops.",
        },
        answer="c",
        replies={
            "a": "The arithmetic is waiting already; it would wait longer.",
            "b": "The weight is read all the same, and that takes the time.",
            "d": "Flops do not decide here. What does the time go to?",
        },
        hints=(
            "What takes the time of a memory-bound product?",
            "The bytes: nearly all of them are the weight's.",
            "Only an answer that reads fewer bytes, or faster, helps.",
        ),
        because="Its time is the bytes of the weight over the memory's bandwidth.",
    ),
}
