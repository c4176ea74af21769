"""Sentences about facts: causes of differences, lowerings of collectives, rows of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.proof.verification.comparison import Row
from meshwright.proof.verification.differences import Cause, Difference
from meshwright.record import Collective, LoweredAs, Lowering
from meshwright.units import show_bytes, show_flops, show_percent, show_rate, show_seconds

DIFFERENCES: Mapping[Difference, str] = {
    Difference.NOT_PLANNED: "not planned",
    Difference.MISSING: "the compiled program has none",
    Difference.UNEXPLAINED: "otherwise than planned",
    Difference.ANOTHER_PROGRAM: "another program than planned",
    Difference.DROPLESS_PADDING: "padded for any routing, as experts without a capacity need; planned as in balance",
    Difference.UNTAKEN_BRANCHES: "counted in every tick, as in the text: in a branch that few ticks take",
    Difference.OPAQUE_KERNELS: "attention is in kernels that do not state their flops",
    Difference.KERNEL_ESTIMATES: "attention kernels state half of the scores, and two products more backward",
    Difference.SUMMED_ONCE: "the last norm's gradient is summed once, not for each microbatch",
    Difference.EXPERT_BUFFERS: "whole tokens in buffers for any routing; planned in parts, as in balance",
    Difference.INT8_SCALES: "scales beside int8; what is no product of a layer stays in the dtype of products",
    Difference.READ_THEN_MULTIPLIED: "as most are read first, and products begin after that",
    Difference.GATHERED_PAGES: "as pages are gathered first, and scores are ops of their own",
    Difference.PADDED_ROWS: "products of one row run as 8 rows, the others zeros",
    Difference.SINGLE_ROWS: "products of one row or column are done element by element, without flops of their own",
    Difference.MASKED_SCORES: "scores of later keys are made too, and left out; planned without them",
    Difference.SLICED_FURTHER: "a reduce-scatter and a slice after it, done as an all-reduce",
    Difference.OTHER_PHASE: "in another phase: all phases together are as planned",
    Difference.PADDED_SHARDS: "in shards padded to the compiler's tiles, which collective-permutes put in place",
    Difference.PADDED_SHARDS_PERMUTED: "puts the padded shards of the reduce-scatter in place",
    Difference.WITHIN_AND_BETWEEN_SLICES: (
        "sums over axes inside slices and between them, one after the other: over each axis as planned"
    ),
    Difference.REGISTER_ROWS: "a few numbers, in whole rows of the compiler's registers",
    Difference.RING_REMAINDER: "the rest in steps beside the products that use it, as collective-permutes",
    Difference.COMBINED_SUMS: "sums over several axes done together: over each axis all are as planned",
    Difference.COMBINED_SUMS_ACROSS_PHASES: (
        "sums over several axes, or of several phases, done together: over each axis all are as planned"
    ),
    Difference.PADDED_ARGUMENTS: "small arrays are padded",
    Difference.ESTIMATED: "an estimate",
    Difference.DUE_TO_TEMPORARIES: "by its temporaries",
}


def cause_text(cause: Cause) -> str:
    """Return why a figure differs, as a phrase."""
    if cause.difference == Difference.RING_STEPS:
        return f"steps of the {' and '.join(cause.collectives)}, beside the products that use it"
    if cause.difference == Difference.JOINED_AXES:
        return f"planned over {' and '.join('*'.join(axes) for axes in cause.axes)} in turn"
    if cause.difference == Difference.READ_AHEAD:
        return f"{show_bytes(cause.num_bytes or 0)} of weights read ahead into fast memory"
    if cause.seconds is not None:
        amount = f"{'+' if cause.seconds > 0 else '-'}{show_seconds(abs(cause.seconds))}"
        if cause.count:
            return f"{cause.count:,} ops, most of at least {show_seconds(cause.seconds / cause.count)}: {amount}"
        return f"{' '.join(filter(None, (cause.term, amount, DIFFERENCES.get(cause.difference))))}"
    if cause.lowering is not None:
        return lowering_text(cause.lowering)
    return DIFFERENCES[cause.difference]


def lowering_text(lowering: Lowering) -> str:
    """Return how a compiler lowered a collective, as a phrase."""
    scattered, reduced = " x ".join(lowering.scatter_axes), " x ".join(lowering.reduce_axes)
    form = {
        None: "",
        LoweredAs.SLICED_ALL_REDUCE: "all-reduce + slice",
        LoweredAs.PARTLY_SLICED_ALL_REDUCE: (
            f"reduce-scatter over {scattered} and all-reduce over {reduced}, done as one and sliced"
        ),
        LoweredAs.PADDED_ALL_REDUCE: "as all-reduce of shards in zeros",
        LoweredAs.UNREADABLE_SLICE: "sliced afterwards by offsets that the text leaves out",
    }[lowering.form]
    promoted = f"promoted from {lowering.promoted_from} by the CPU compiler" if lowering.promoted_from else ""
    return "; ".join(filter(None, (form, promoted)))


def collective_note(move: Collective) -> str:
    """Return remarks on a collective: how it was lowered, then its note."""
    return "; ".join(filter(None, (*map(lowering_text, move.lowerings), move.note)))


def reason(row: Row) -> str:
    """Return why the figures of a row differ, and how the compiler lowered the quantity."""
    return "; ".join(dict.fromkeys(filter(None, (*map(cause_text, row.causes), row.note))))


def row_tables(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[list[str]], list[bool]]]:
    """Return the rows as tables; rows with a measurement are a table of their own, since most rows have none.

    For each table: column names, rows as text, and which rows differ.
    """
    ran = [row for row in rows if row.measured is not None]
    for part in filter(None, ([row for row in rows if row.measured is None], ran)):
        columns = ["", "predicted", "compiled", "difference", *(["measured", "difference"] if part is ran else []), ""]
        cells = [row_cells(row, with_measured=part is ran) for row in part]
        yield columns, cells, [not row.is_equal for row in part]


def row_cells(row: Row, *, with_measured: bool) -> list[str]:
    """Return a row as text: quantity, predicted, compiled, difference, (measured, difference,) reason."""
    amounts = [_shown(row.predicted, row), _shown(row.compiled, row)]
    cells = [row.quantity, *amounts, _difference(row.compiled, row, row.relative)]
    if with_measured:
        cells += [_shown(row.measured, row), _difference(row.measured, row, row.measured_relative)]
    return [*cells, reason(row)]


def _shown(amount: float | None, row: Row) -> str:
    if amount is None:
        return "–"
    if row.unit == "tok/s":
        return show_rate(amount, row.unit)
    return {"B": show_bytes, "flop": show_flops, "s": show_seconds, "share": show_percent}[row.unit](amount)


def _difference(amount: float | None, row: Row, relative: float | None) -> str:
    if row.predicted == amount:
        return "0"
    return "–" if relative is None else f"{relative:+.1%}"
