"""The input of a step as arrays of numbers for its program; see `serving.engine.programs.Columns`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.serving.engine.programs import FROM_LAST, Columns, Shape
from meshwright.serving.engine.scheduler import EngineStep

ALL_TOKENS = np.uint32(0xFFFFFFFF)
"""A mask word that allows all of its 32 tokens."""


def numbers_of(
    step: EngineStep, shape: Shape, tables: Sequence[tuple[np.ndarray, np.ndarray]], num_rows: int
) -> np.ndarray:
    """Return the array [rows, width] of a step.

    Args:
        tables: for each window, the first page of each slice and the entries of its page table.
        num_rows: number of rows of the engine, also the row number of unused rows.
    """
    columns = shape.columns
    numbers = np.zeros((shape.rows, columns.width), np.int32)
    numbers[:, Columns.row] = num_rows
    for part in step.slices:
        tokens = part.tokens or [FROM_LAST]
        line, begin = numbers[part.at], columns.tokens.start
        request = part.sequence.request
        wanted = request.prompt_logprobs if step.is_scored else request.logprobs
        line[:begin] = (
            part.row, part.start, len(tokens), part.is_chosen, part.sequence.prefill_length, part.drawn,
            request.adapter.slot if request.adapter else 0, 0 if wanted is None else 1 + wanted,
        )  # fmt: skip
        line[begin : begin + len(tokens)] = tokens
    at = [part.at for part in step.slices]
    for (first, entries), (firsts, table) in zip(columns.tables, tables, strict=True):
        numbers[at, first] = firsts
        numbers[at, entries] = table
    return numbers


def targets_of(step: EngineStep, shape: Shape) -> np.ndarray:
    """Return the token after each of a step's tokens [rows, s]; 0 after the last."""
    targets = np.zeros((shape.rows, shape.length), np.int32)
    for part in step.slices:
        after = part.sequence.tokens[part.start + 1 : part.start + 1 + len(part.tokens)]
        targets[part.at, : len(after)] = after
    return targets


def mask_of(step: EngineStep, shape: Shape, words: int) -> np.ndarray | None:
    """Return a mask of the tokens that rows may choose, by constraints and min_tokens; None if all are allowed."""
    mask = None
    for part in step.slices:
        sequence = part.sequence
        num_short = min(shape.num_chosen, sequence.request.min_tokens - part.drawn)
        not_ends = sequence.not_ends if num_short > 0 else None
        if sequence.mask is None and not_ends is None:
            continue
        if mask is None:
            mask = np.full((shape.rows, shape.num_chosen, words), ALL_TOKENS, np.uint32)
        if sequence.mask is not None:
            mask[part.at] = sequence.mask
        if not_ends is not None:
            mask[part.at, :num_short] &= not_ends
    return mask
