"""Goodput: how the time of a run was used, over all its restarts.

Each second from the start of the first process to the last row (the measurements of one step) counts in one of
the accounts (categories of time, `ACCOUNTS`), e.g. `steps`, `saving` or `down`.
The events are those of AXLearn (https://github.com/apple/axlearn, `axlearn/cloud/gcp/measurement.py`); the accounts of
lost time are the badput categories of Google's ml-goodput-measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.execution.training.run_directory.run import Row, read_json_lines
from meshwright.support.files import append_line

ACCOUNTS = {
    "steps": "steps that count, without what they waited for input: the time that was not lost",
    "input": "devices waited for the next batch",
    "compiling": "the step was compiled",
    "saving": "steps waited for a checkpoint",
    "evaluation": "the run was evaluated",
    "starting": "the data was opened and the state drawn or read, before the first step",
    "lost steps": "steps that were taken again, because the run ended before a checkpoint had them",
    "down": "no process trained: from the last row of one to the start of the next",
    "other": "anything else between steps",
}
"""Names of the accounts of time, and what counts in each."""

_OF_ROWS = {
    "compiling": "compile_seconds",
    "saving": "save_seconds",
    "evaluation": "eval_seconds",
    "starting": "startup_seconds",
}
"""{account: field of a row whose seconds count in it}."""


def goodput(rows: Sequence[Row], restarts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return {account of `ACCOUNTS`: seconds of a run}. The sum is the time from its first start to its last row.

    Args:
        rows: the rows of `metrics.jsonl`. Rows without times, from early versions, are ignored.
        restarts: the result of `read_restarts`.
    """
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    before = None
    for row in (row for row in rows if "time" in row):
        seconds["steps"] += row["step_seconds"] - row.get("input_seconds", 0.0)
        seconds["input"] += row.get("input_seconds", 0.0)
        for account, name in _OF_ROWS.items():
            seconds[account] += row.get(name, 0.0)
        if before is not None and not _is_first(row):
            seconds["other"] += max(0.0, _began(row) - _ended(before))
        before = row
    for restart in restarts:
        seconds["lost steps"] += restart["lost_seconds"]
        seconds["down"] += restart["down_seconds"]
    return seconds


def note_restart(directory: Path, rows: Sequence[Row], start: int, first: Row) -> None:
    """Record the cost of a restart in `restarts.jsonl`: repeated steps, and the time without a process.

    Args:
        rows: all rows of the run before the restart.
        start: the number of the first repeated step.
        first: the first row of the new process.
    """
    timed = [row for row in rows if "time" in row]
    if not timed:
        return
    lost, kept = [row for row in timed if row["step"] >= start], [row for row in timed if row["step"] < start]
    lost_seconds = 0.0
    if lost:
        since = _ended(kept[-1]) if kept and not _is_first(lost[0]) else _began(lost[0])
        lost_seconds = _ended(lost[-1]) - since
    restart = {
        "time": _began(first),
        "start": start,
        "lost_steps": len(lost),
        "lost_seconds": lost_seconds,
        "down_seconds": max(0.0, _began(first) - _ended(timed[-1])),
    }
    append_line(directory / "restarts.jsonl", json.dumps(restart))


def read_restarts(directory: Path) -> list[dict[str, Any]]:
    """Return the restarts of a run, each with `time`, `start`, `lost_steps`, `lost_seconds` and `down_seconds`."""
    return [data for _, data in read_json_lines(directory / "restarts.jsonl", {"lost_seconds", "down_seconds"})]


def _is_first(row: Row) -> bool:
    """Whether a row is of the first step of a process."""
    return "startup_seconds" in row


def _began(row: Row) -> float:
    """Return when the step of a row began, in seconds since 1970; for the first row of a process, when that began."""
    before = ("step_seconds", "compile_seconds", "startup_seconds")
    return row["time"] - sum(row.get(name, 0.0) for name in before)


def _ended(row: Row) -> float:
    """Return when the step of a row ended, with its checkpoint and evaluation, in seconds since 1970."""
    return row["time"] + row.get("save_seconds", 0.0) + row.get("eval_seconds", 0.0)
