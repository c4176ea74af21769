"""The screen of `meshwright inspect`: the answer, collectives, memory, flops, and each finding in full."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.tables import console, show, table
from meshwright.cli.text import folded, prose_width, terms, wrap
from meshwright.record import Collective, merge
from meshwright.units import show_bytes, show_flops, show_percent, show_seconds

if TYPE_CHECKING:
    from meshwright.inspection import Finding, Inspection
    from meshwright.simulate import Buffer

_MOST_SCOPES = 12
_MOST_ROWS = 30
_MOST_BUFFERS = 20
_SCREEN_PATH = 40


def screen_text(found: Inspection) -> str:
    """The screen as plain text."""
    with redirect_stdout(io.StringIO()) as out:
        print_screen(found)
    return out.getvalue().rstrip()


def print_screen(found: Inspection, *, memory: bool = False) -> None:
    """The answer, what it rests on, then each finding in full. memory: with the buffers at the peak."""
    show(console(), _headline(found))
    print()
    show(console(), _answer(found))
    print()
    show(console(), _collective_table(found))
    print()
    _print_memory(found)
    if memory or found.record.fits is False:
        print_buffers(found.buffers)
    _print_flops(found)
    for number, finding in enumerate(found.findings, start=1):
        print(_told(number, finding))
    for note in found.record.notes:
        print(folded(f"note: {note}"))


def _headline(found: Inspection) -> str:
    """What was inspected."""
    mesh = ",".join(f"{axis}={degree}" for axis, degree in found.record.mesh.items() if degree > 1) or "one device"
    words = [found.name, mesh + (f" on {found.record.hardware}" if found.record.hardware else "")]
    if found.program:
        took = f"in {show_seconds(found.program.compile_seconds)}{' (cached)' if found.program.cached else ''}"
        words.append(f"compiled by {found.program.compiler} {took}")
    return " · ".join(words)


def _answer(found: Inspection) -> str:
    """The findings in a line, and the step where it was simulated."""
    count = len(found.findings)
    cost = found.findings[0].seconds if found.findings else None
    says = "no finding" if not count else f"{count} finding{'s' if count > 1 else ''}"
    if cost:
        says += f", the first of {show_seconds(cost)} a step"
    if found.schedule is not None:
        exposed = sum(move.exposed_seconds or 0.0 for move in found.collectives)
        says += f"   step {show_seconds(found.schedule.step_seconds)}, of it exposed communication"
        says += f" {show_seconds(exposed)}"
    return f"  {says}"


def _collective_table(found: Inspection) -> Any:
    """The collectives, those alike from one line added up, the largest first."""
    from meshwright.viz.words import collective_note

    is_timed = any(move.seconds is not None for move in found.collectives)
    has_schedule = found.schedule is not None
    times = (["seconds"] if is_timed else []) + (["exposed"] if has_schedule else [])
    columns = ["collective", "over", "phase", "bytes", "times", *times, "from"]
    moves = sorted(_alike(found.collectives), key=lambda move: -move.bytes)
    rows = []
    for move in moves[:_MOST_ROWS]:
        seconds = [show_seconds(move.seconds) if move.seconds is not None else "–"] if is_timed else []
        seconds += [show_seconds(move.exposed_seconds or 0.0)] if has_schedule else []
        counts = [show_bytes(move.bytes), str(move.count), *seconds]
        place = _file_name(move.source) + (f" [{note}]" if (note := collective_note(move)) else "")
        rows.append([move.kind, "*".join(move.axes) or "?", move.phase, *counts, place])
    if len(moves) > _MOST_ROWS:
        rest = moves[_MOST_ROWS:]
        size, count = sum(move.bytes for move in rest), sum(move.count for move in rest)
        rows.append([f"{len(rest)} more", "", "", show_bytes(size), str(count), *[""] * (len(times) + 1)])
    return table(columns, rows or [["none", *[""] * (len(columns) - 1)]], left=(0, 1, 2, len(columns) - 1), folds=-1)


def _alike(moves: Sequence[Collective]) -> Iterator[Collective]:
    """The collectives with those of one kind, axes, phase, note and place in the source added up."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for move in moves:
        groups.setdefault((move.kind, move.axes, move.phase, move.note, move.lowerings, move.source), []).append(move)
    for (*_, source), alike in groups.items():
        (one,) = merge(alike)
        yield replace(one, source=source)


def _print_memory(found: Inspection) -> None:
    """The memory, where the program says it."""
    memory = found.memory
    if not memory:
        return
    parts = {name: show_bytes(size) for name, size in memory.items() if size and name != "peak"}
    fits = {True: ", which fits", False: ", which does not fit", None: ""}[found.record.fits]
    print(terms("memory", parts | {"peak": show_bytes(memory["peak"]) + fits}))


def print_buffers(buffers: Sequence[Buffer]) -> None:
    """The largest buffers at the peak, alike ones in a row."""
    alike: dict[tuple[str, str, str], list[Buffer]] = {}
    for buffer in buffers:
        name = buffer.scope.replace("\\'", "'")  # the compiler escapes quotes in the path of an argument
        place = name if buffer.kind == "argument" else f"{buffer.source} ({name})"
        alike.setdefault((str(replace(buffer.shape, layout="")), buffer.kind, place), []).append(buffer)
    found = sorted(alike.items(), key=lambda one: -sum(buffer.num_bytes for buffer in one[1]))
    rows = [
        [shape, show_bytes(sum(buffer.num_bytes for buffer in same)), str(len(same)), kind, _file_name(place)]
        for (shape, kind, place), same in found[:_MOST_BUFFERS]
    ]
    if rest := [buffer for _, same in found[_MOST_BUFFERS:] for buffer in same]:
        rows.append([f"{len(found) - _MOST_BUFFERS} more", show_bytes(sum(one.num_bytes for one in rest)), "", "", ""])
    print()
    show(console(), table(["at the peak", "bytes", "times", "is", "from"], rows, left=(0, 3, 4), folds=-1))
    print()


def _print_flops(found: Inspection) -> None:
    """The flops by scope, the largest first."""
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
    print()


def _told(number: int, finding: Finding) -> str:
    """A finding in full."""
    from meshwright.inspection.words import evidence, fix

    costs = [show_seconds(finding.seconds) + " a step"] if finding.seconds else []
    costs += [show_bytes(finding.bytes)] if finding.bytes else []
    head = f" finding {number}  {finding.kind}"
    price = f"costs {', '.join(costs)}" if costs else ""
    width = prose_width()
    is_beside = len(head) + 2 + len(price) <= width
    lines = [f"{head}{price:>{width - len(head)}}"] if is_beside else [head, f"{price:>{width}}"]
    for words in (
        evidence(finding),
        f"from {_short(finding.source)}" if finding.source else "",
        f"fix: {fix(finding)}",
    ):
        lines += wrap(words, first=" " * 12, then=" " * 12)
    return "\n".join(lines) + "\n"


def _file_name(source: str) -> str:
    """file:line (scopes) without the folders of the file."""
    path, space, scope = source.partition(" ")
    return f"{Path(path).name}{space}{scope}"


def _short(source: str) -> str:
    """file:line (scopes) with the path as short as it says where: relative to here, else its last parts."""
    path, space, scope = source.partition(" ")
    here = f"{Path.cwd()}{os.sep}"
    if path.startswith(here):
        path = path.removeprefix(here)
    if len(path) > _SCREEN_PATH:
        path = "…/" + "/".join(Path(path).parts[-2:])
    return f"{path}{space}{scope}"
