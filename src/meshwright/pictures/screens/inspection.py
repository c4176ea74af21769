"""The output of `meshwright inspect`: the summary, collectives, memory, flops, and each finding in full."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from meshwright.pictures.rows import add_up_equal, buffer_rows, costs, file_name, short_path, summary
from meshwright.pictures.tables import Lines, console, show, table
from meshwright.pictures.text import folded, prose_width, terms, wrap
from meshwright.units import show_bytes, show_degrees, show_flops, show_percent, show_seconds

if TYPE_CHECKING:
    from meshwright.proof.inspection.finding import Finding
    from meshwright.proof.inspection.inspection import Inspection
    from meshwright.proof.simulate.buffers import Buffer

_MOST_SCOPES = 12
_MOST_ROWS = 30


def screen_text(found: Inspection) -> str:
    """Return what `meshwright inspect` prints for an inspection, as plain text."""
    with redirect_stdout(io.StringIO()) as out:
        print_screen(found)
    return out.getvalue().rstrip()


def print_screen(found: Inspection, *, memory: bool = False) -> None:
    """Print the summary, tables of collectives, memory and flops, and each finding in full.

    memory: also print the buffers at the peak.
    """
    mesh = show_degrees(found.record.mesh)
    words = [found.name, mesh + (f" on {found.record.hardware}" if found.record.hardware else "")]
    if found.program:
        took = f"in {show_seconds(found.program.compile_seconds)}{' (cached)' if found.program.cached else ''}"
        words.append(f"compiled by {found.program.compiler} {took}")
    show(console(), " · ".join(words))
    print()
    show(console(), f"  {summary(found)}")
    print()
    show(console(), _collective_table(found))
    print()
    if by_term := found.memory:
        parts = {name: show_bytes(size) for name, size in by_term.items() if size and name != "peak"}
        fits = {True: ", which fits", False: ", which does not fit", None: ""}[found.record.fits]
        print(terms("memory", parts | {"peak": show_bytes(by_term["peak"]) + fits}))
    if memory or found.record.fits is False:
        print_buffers(found.buffers)
    scopes = list(found.flops_by_scope.items())
    print(terms("flops", {"": show_flops(found.flops)}))
    rows = [
        [f"  {scope or '(no scope)'}", show_flops(flops), show_percent(flops / found.flops)]
        for scope, flops in scopes[:_MOST_SCOPES]
    ]
    if len(scopes) > _MOST_SCOPES:
        rest = sum(flops for _, flops in scopes[_MOST_SCOPES:])
        rows.append([f"  {len(scopes) - _MOST_SCOPES} more", show_flops(rest), show_percent(rest / found.flops)])
    show(console(), table(["", "", ""], rows))
    for number, finding in enumerate(found.findings, start=1):
        print(f"\n{_finding_text(number, finding)}")
    if found.record.notes:
        print()
    for note in found.record.notes:
        print(folded(f"note: {note}"))


def _collective_table(found: Inspection) -> Lines:
    """Return the table of collectives, largest first. Equal collectives from one source line are added up."""
    is_timed = any(move.seconds is not None for move in found.collectives)
    has_schedule = found.schedule is not None
    times = (["seconds"] if is_timed else []) + (["exposed"] if has_schedule else [])
    columns = ["collective", "over", "phase", "bytes", "times", *times, "from"]
    moves = add_up_equal(found.collectives)
    rows = []
    for move in moves[:_MOST_ROWS]:
        seconds = [show_seconds(move.seconds) if move.seconds is not None else "–"] if is_timed else []
        seconds += [show_seconds(move.exposed_seconds or 0.0)] if has_schedule else []
        counts = [show_bytes(move.bytes), str(move.count), *seconds]
        place = file_name(move.source) + (f" [{note}]" if (note := move.remarks) else "")
        rows.append([move.kind, "*".join(move.axes) or "?", move.phase, *counts, place])
    if len(moves) > _MOST_ROWS:
        rest = moves[_MOST_ROWS:]
        size, count = sum(move.bytes for move in rest), sum(move.count for move in rest)
        rows.append([f"{len(rest)} more", "", "", show_bytes(size), str(count), *[""] * (len(times) + 1)])
    return table(columns, rows or [["none", *[""] * (len(columns) - 1)]], left=(0, 1, 2, len(columns) - 1), folds=-1)


def print_buffers(buffers: Sequence[Buffer]) -> None:
    """Print the largest buffers at the peak, equal ones in one row."""
    print()
    columns = ["at the peak", "bytes", "times", "is", "from"]
    show(console(), table(columns, buffer_rows(buffers), left=(0, 3, 4), folds=-1))
    print()


def _finding_text(number: int, finding: Finding) -> str:
    """Return a finding in full, as lines of text."""
    head, price, width = f" finding {number}  {finding.kind} [{finding.id}]", costs(finding), prose_width()
    is_beside = len(head) + 2 + len(price) <= width
    lines = [f"{head}{price:>{width - len(head)}}"] if is_beside else [head, f"{price:>{width}}"]
    for words in (
        finding.evidence,
        f"from {short_path(finding.source)}" if finding.source else "",
        f"fix: {finding.fix}",
    ):
        lines += wrap(words, first=" " * 12, then=" " * 12)
    return "\n".join(lines)
