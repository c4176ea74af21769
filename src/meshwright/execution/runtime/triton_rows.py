"""Rows of Triton's matmuls in kernels for few rows, which reading the other operand bounds."""

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of Triton's smallest matmul, and the most for which reading the other operand still takes all of the time."""


def padded_rows(count: int) -> int:
    """Return the rows to which `count` rows are padded: a power of 2, as all sizes of Triton's arrays."""
    return max(LEAST_ROWS, 1 << (count - 1).bit_length())
