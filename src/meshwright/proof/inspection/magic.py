"""`%load_ext meshwright` in a notebook: `%inspect step(state, batch)` inspects a call instead of running it."""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.proof.inspection.functions import inspect
from meshwright.proof.inspection.inspection import Inspection

_OPTION = re.compile(r"\s*--(on|mesh|effort)(?:=|\s+)(\S+)")
_NAME = "__inspect__"  # no name of the user's


def load_ipython_extension(shell: Any) -> None:
    """Register `%inspect` and `%%inspect` with an IPython shell."""

    def run(line: str, cell: str | None = None) -> Inspection | None:
        try:
            return inspect_call(line, cell, shell.user_ns)
        except MeshwrightError as error:
            print(f"error: {error}", file=sys.stderr)
            return None

    shell.register_magic_function(run, magic_kind="line_cell", magic_name="inspect")


def inspect_call(line: str, cell: str | None, names: dict[str, Any]) -> Inspection:
    """Inspect a call, or the last call of a cell after running its other lines.

    Args:
        line: options, `--on`, `--mesh` and `--effort`, then, without a cell, the call. In `state = step(state, batch)`
            the call is inspected and nothing is assigned.
        cell: the lines of the cell of `%%inspect`; None for `%inspect`.
        names: the namespace in which function and arguments are evaluated.

    Raises:
        MeshwrightError: the text does not parse, has an unknown option, or calls nothing.
    """
    options = {}
    while found := _OPTION.match(line):
        options[found[1]], line = found[2], line[found.end() :]
    line = line.strip()
    if line.startswith("-") or (cell is not None and line):
        raise MeshwrightError(f"%inspect has no option {line.split()[0]!r}; it has --on, --mesh and --effort")
    try:
        body = ast.parse(line if cell is None else cell).body
    except SyntaxError as error:
        raise MeshwrightError(f"{(error.text or '').strip()!r} does not parse: {error.msg}") from None
    call = getattr(body[-1], "value", None) if body else None
    if not isinstance(call, ast.Call):
        raise MeshwrightError("nothing is called; write `%inspect step(state, batch)`, or a cell that ends in a call")
    exec(compile(ast.Module(body[:-1], []), "<inspect>", "exec"), names)
    # Python itself evaluates the arguments, starred ones too, because the call becomes one of `inspect` with the same.
    call.args.insert(0, call.func)
    call.func = ast.Name(_NAME, ast.Load())
    code = compile(ast.fix_missing_locations(ast.Expression(call)), "<inspect>", "eval")
    return eval(code, {**names, _NAME: partial(inspect, **options)})
