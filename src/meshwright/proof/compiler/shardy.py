"""Shardy's propagation in this process: the shardings that matmuls get from a program's arguments and constraints.

Propagation is the first of the passes that partition a program, and takes a fraction of a second. XLA propagates in
another order of ops: if two arguments imply different shardings of a value, XLA may choose the other one. jaxlib has no
public name for these passes, so this is the only module that imports `jaxlib.mlir`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.stages import Lowered
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.proof.compiler.load import is_installed

_PASSES = "builtin.module(sdy-propagation-pipeline)"

_MATMULS = ("stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot")


class Matmul(NamedTuple):
    """A matmul or convolution: type and sharding of its result, and its `FILE:LINE` in the user's files.

    result: text such as `tensor<8x4xf32> [{"dp"}, {}]`.
    """

    result: str
    line: str


def matmul_shardings(lowered: Lowered, is_kept: Callable[[str], bool] = lambda scope: True) -> tuple[Matmul, ...]:
    """Return each matmul and convolution with the sharding that its result gets, in the order of the program.

    Args:
        lowered: a program lowered with Shardy, whose mesh may be abstract.
        is_kept: whether the sharding constraint with this name stack takes part in propagation; all others are removed.
            A name stack is text such as `jit(step)/jvp(scope)/sharding_constraint`.
    """
    stablehlo: Any = lowered.compiler_ir("stablehlo")
    module = stablehlo.operation.clone()
    constraints = list[Any]()
    _walk(module, lambda one: constraints.append(one) if one.name == "sdy.sharding_constraint" else None)
    for constraint in constraints:
        if not is_kept(str(constraint.location)):
            constraint.results[0].replace_all_uses_with(constraint.operands[0])
            constraint.erase()
    with module.context:
        PassManager.parse(_PASSES).run(module)
    functions = {ir.StringAttr(one.attributes["sym_name"]).value: one for one in module.regions[0].blocks[0]}

    def executed(name: str) -> Iterator[Matmul]:
        found = list[Any]()
        _walk(functions[name], lambda one: found.append(one) if one.name in (*_MATMULS, "func.call") else None)
        for one in found:
            if one.name == "func.call":
                yield from executed(ir.FlatSymbolRefAttr(one.attributes["callee"]).value)
            else:
                yield Matmul(_sharding(one), _line(str(one.location)))

    return tuple(executed("main"))


def _walk(operation: Any, visit: Callable[[Any], None]) -> None:
    """Call `visit` with an operation and with all operations inside it, in order."""

    def visited(one: Any) -> Any:
        visit(one.operation)
        return ir.WalkResult.ADVANCE

    operation.operation.walk(visited, ir.WalkOrder.PRE_ORDER)


def _sharding(matmul: Any) -> str:
    """Return the type and the sharding of a matmul's result as text; a replicated one has no axes."""
    attributes, result = matmul.attributes, matmul.results[0].type
    if "sdy.sharding" in attributes:
        split = re.search(r"\[\{.*\}\]", str(attributes["sdy.sharding"]))
        dims = split[0] if split else "[]"
    else:
        dims = f"[{', '.join(['{}'] * ir.ShapedType(result).rank)}]"
    return f"{result} {dims}"


def _line(location: str) -> str:
    """Return the innermost line of an op's location outside installed packages, as `FILE:LINE`; '' if there is none."""
    frames = re.finditer(r'"([^"]+\.py)":(\d+)', location)
    return next((f"{one[1]}:{one[2]}" for one in frames if not is_installed(Path(one[1]))), "")
