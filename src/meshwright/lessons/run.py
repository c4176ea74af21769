"""Run the code cells of a lesson as a notebook would, and count its exercises: python -m meshwright.lessons.run FILE.

It runs in its own process, because a lesson sets the number of simulated devices before JAX starts. Exit code 0 if all
exercises are right, 1 if some are not, 2 if the code raises.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.lessons.exercise import VERDICTS, Verdict
from meshwright.lessons.lesson import exercises_in, read_code


def run_cells(cells: Sequence[str]) -> None:
    """Execute code cells in one namespace; print the value of a cell's last expression, as a notebook shows it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for place, text in enumerate(cells, start=1):
        name = f"<cell {place}>"
        # So that inspect.getsource and tracebacks find the lines.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        body = ast.parse(text, name).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(value)


def summary(asked: Sequence[str], verdicts: Sequence[Verdict]) -> tuple[int, str]:
    """Return the exit code and a summary line. If an exercise was checked several times, the last check counts."""
    last = {verdict.name: verdict for verdict in verdicts}
    right = [name for name in asked if name in last and last[name].is_right]
    blanks = [name for name in asked if name not in last or last[name].is_blank]
    wrong = [name for name in asked if name not in (*right, *blanks)]
    parts = [f"{len(right)} of {len(asked)} exercises right"]
    parts += [f"not yet right: {', '.join(wrong)}"] if wrong else []
    parts += [f"not answered: {', '.join(blanks)}"] if blanks else []
    return int(len(right) < len(asked)), "; ".join(parts)


def main(file: Path) -> int:
    """Run a file; print the reply of each check, then a summary. Returns the exit code."""
    cells = read_code(file)
    try:
        run_cells(cells)
    except Exception as error:  # A reader's code may raise anything.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell ")]
        place = f"{frames[-1].filename[1:-1]}, line {frames[-1].lineno}: " if frames else ""
        print(f"error: {place}{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    code, line = summary(exercises_in("\n".join(cells)), VERDICTS)
    print(f"\n{line}")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
