"""Sizes of Triton matmuls of few rows, whose time is that of reading the other operand."""

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of Triton's smallest matmul, and the largest number of rows at which the other operand's read takes all time."""


def padded_rows(count: int) -> int:
    """Return the number of rows to which `count` rows are padded, a power of 2 like all sizes of Triton's arrays."""
    return max(LEAST_ROWS, 1 << (count - 1).bit_length())
