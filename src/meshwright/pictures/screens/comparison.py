"""The rows of a verification as text: predicted, compiled and measured figures, differences and their causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.units import show_bytes, show_flops, show_percent, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.verification.comparison import Row


def reason(row: Row) -> str:
    """Return the causes of a row's differences and its note, as text; '' if there are none."""
    return "; ".join(dict.fromkeys(filter(None, (*map(str, row.causes), row.note))))


def row_tables(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[list[str]], list[bool]]]:
    """Yield (column names, rows as text, whether each row differs) of one or two tables.

    Rows with a measurement have a table of their own, because most rows have none.
    """
    ran = [row for row in rows if row.measured is not None]
    for part in filter(None, ([row for row in rows if row.measured is None], ran)):
        columns = ["", "predicted", "compiled", "difference", *(["measured", "difference"] if part is ran else []), ""]
        cells = [row_cells(row, with_measured=part is ran) for row in part]
        yield columns, cells, [not row.is_equal for row in part]


def row_cells(row: Row, *, with_measured: bool) -> list[str]:
    """Return the cells of a row: quantity, predicted, compiled, difference, (measured, difference,) reason.

    with_measured: whether the cells in parentheses are included.
    """
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
