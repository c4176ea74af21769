"""Build the input arrays of a step's program on the host: packed integers, targets for scoring, and token masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.serving.engine.programs import FROM_LAST, Columns, Shape
from meshwright.serving.engine.scheduler import EngineStep

ALL_TOKENS = np.uint32(0xFFFFFFFF)
"""A mask word that allows all of its 32 tokens."""


def packed_inputs(
    step: EngineStep, shape: Shape, tables: Sequence[tuple[np.ndarray, np.ndarray]], num_rows: int
) -> np.ndarray:
    """Return the packed input of a step: int32 [rows, width], with the columns of `Columns`.

    Args:
        tables: from `Scheduler.tables`: for each attention window and each of the n sequences in the step, the index of
            the first page [n] and the page numbers [n, entries] of its page table.
        num_rows: number of rows of the engine. Unused rows of the step have it as their row number.
    """
    columns = shape.columns
    packed = np.zeros((shape.rows, columns.width), np.int32)
    packed[:, Columns.row] = num_rows
    for part in step.slices:
        tokens = part.tokens or [FROM_LAST]
        line, begin = packed[part.at], columns.tokens.start
        request = part.sequence.request
        wanted = request.prompt_logprobs if step.is_scored else request.logprobs
        line[:begin] = (
            part.row, part.start, len(tokens), part.is_chosen, part.sequence.prefill_length, part.drawn,
            request.adapter.slot if request.adapter else 0, 0 if wanted is None else 1 + wanted,
        )  # fmt: skip
        line[begin : begin + len(tokens)] = tokens
    at = [part.at for part in step.slices]
    for (first, entries), (firsts, table) in zip(columns.tables, tables, strict=True):
        packed[at, first] = firsts
        packed[at, entries] = table
    return packed


def targets_of(step: EngineStep, shape: Shape) -> np.ndarray:
    """Return, for each token of a step, the token after it in its sequence [rows, s]; 0 where there is none."""
    targets = np.zeros((shape.rows, shape.length), np.int32)
    for part in step.slices:
        after = part.sequence.tokens[part.start + 1 : part.start + 1 + len(part.tokens)]
        targets[part.at, : len(after)] = after
    return targets


def mask_of(step: EngineStep, shape: Shape, words: int) -> np.ndarray | None:
    """Return bits of the tokens that each row may choose, by its constraint and `min_tokens`; None if all are allowed.

    Returns:
        uint32 [rows, num_chosen, words].
    """
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
